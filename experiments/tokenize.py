"""Tokenizes a corpus once into a token folder that loads quickly in any order.

python -m experiments.tokenize --data=/path/*.jsonl --tokenizer=/path/tokenizer.json --out=/path/tokens
then train with --config.data.train=/path/tokens --config.data.tokenizer=/path/tokens/tokenizer.json
"""

if __name__ == "tokenize":
    # Running a program by its file name puts this folder first on the path, where it hides the standard module.
    raise SystemExit("error: run the programs as python -m experiments.NAME, not by file name")

from absl import flags

from linattn_jax.data.sources import open_source
from linattn_jax.data.tokenizers import load_tokenizer
from linattn_jax.data.tokens import write_tokens

_DATA = flags.DEFINE_string("data", None, "Source, as data.train of a configuration.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", '"bytes" or a Hugging Face tokenizers JSON file.')
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field or column of text in JSON lines, parquet and TFDS.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Where TFDS keeps its datasets.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a token folder that is there already.")


def main(_):
    """Writes the folder and says what is in it."""
    corpus = open_source(_DATA.value, text_field=_TEXT_FIELD.value, data_dir=_DATA_DIR.value)
    tokenizer = load_tokenizer(_TOKENIZER.value)
    meta = write_tokens(
        corpus, tokenizer, _OUT.value, source=_DATA.value, overwrite=_OVERWRITE.value, progress=True
    )  # fmt: skip
    print(
        f"{_OUT.value}: {meta['documents']:,} documents, {meta['tokens']:,} tokens of {meta['dtype']}, "
        f"{meta['bytes'] / meta['tokens']:.2f} bytes per token"
    )


if __name__ == "__main__":
    from experiments._main import run

    run(main)
