"""Trains a byte-level BPE on a corpus, as a Hugging Face tokenizers JSON file.

python -m experiments.train_tokenizer --data=/path/texts --vocab_size=8192 --out=/path/tokenizer.json
"""

from absl import flags

from linattn_jax.data.sources import open_source
from linattn_jax.data.tokenizers import sample_texts, train_bpe

_DATA = flags.DEFINE_string("data", None, "Source, as data.train of a configuration.", required=True)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", required=True)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 8192, "Ids in all: 256 bytes, <|endoftext|> and the merges.")
_MAX_BYTES = flags.DEFINE_integer("max_bytes", 10**9, "Train on documents drawn at random up to this size; 0 for all.")
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field or column of text in JSON lines, parquet and TFDS.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS keeps its datasets.")


def main(_):
    """Writes the file and says how well it compresses."""
    corpus = open_source(_DATA.value, text_field=_TEXT_FIELD.value, data_dir=_DATA_DIR.value)
    tokenizer = train_bpe(sample_texts(corpus, _MAX_BYTES.value), _VOCAB_SIZE.value, _OUT.value, progress=True)
    text = b"".join(sample_texts(corpus, 10**6))
    print(
        f"{_OUT.value}: {tokenizer.vocab_size:,} ids, {len(text) / len(tokenizer.encode(text)):.2f} bytes per token on "
        f"{len(text) / 1e6:.1f} MB of the corpus"
    )


if __name__ == "__main__":
    from experiments._main import run

    run(main)
