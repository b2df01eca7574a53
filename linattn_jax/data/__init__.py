"""Seeded, checkpointable grain pipelines from text, TFDS datasets and token files to batches; synthetic tasks."""

from linattn_jax.data.pipeline import (
    eval_batches,
    heldout_bytes,
    open_corpus,
    open_splits,
    train_iterator,
)
from linattn_jax.data.recall import TASKS, Example, Task, make_task
from linattn_jax.data.tokenizers import load_tokenizer, train_bpe

__all__ = [
    "TASKS",
    "Example",
    "Task",
    "eval_batches",
    "heldout_bytes",
    "load_tokenizer",
    "make_task",
    "open_corpus",
    "open_splits",
    "train_bpe",
    "train_iterator",
]
