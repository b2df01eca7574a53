"""Seeded, checkpointable grain pipelines from text, TFDS datasets and token files to batches."""

from linattn_jax.data.pipeline import (
    eval_batches,
    heldout_bytes,
    open_corpus,
    open_splits,
    train_iterator,
)
from linattn_jax.data.tokenizers import load_tokenizer, train_bpe

__all__ = [
    "eval_batches",
    "heldout_bytes",
    "load_tokenizer",
    "open_corpus",
    "open_splits",
    "train_bpe",
    "train_iterator",
]
