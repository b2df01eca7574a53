"""Tokenizers: bytes, any Hugging Face `tokenizers` JSON file, and training a byte-level BPE."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from absl import logging

from linattn_jax.data.corpus import Corpus
from linattn_jax.types import UserError

EOT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end▁of▁sentence|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[SEP]",
)


class Tokenizer(Protocol):
    """What the loader and the generator need of a tokenizer; ids are in [0, vocab_size)."""

    name: str
    vocab_size: int
    eot: int
    fingerprint: str
    """A hash of everything that decides the ids, for comparing two tokenizers."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of a text (bytes are UTF-8), int32 [n]; no special token is added or recognised."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of several texts, on all cores where the tokenizer can."""

    def decode(self, ids: Any) -> str:
        """The text of token ids; special tokens are left out, invalid UTF-8 becomes U+FFFD."""

    def decode_bytes(self, ids: Any) -> bytes:
        """The UTF-8 bytes of token ids; special tokens are left out."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `load_tokenizer` reads."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the end of text."""

    name = "bytes"
    vocab_size = 257
    eot = 256
    fingerprint = "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Any) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Any) -> bytes:
        ids = check_ids(ids, self)
        return ids[ids < 256].astype(np.uint8).tobytes()

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps({"linattn_tokenizer": self.name}) + "\n")


class JsonTokenizer:
    """A Hugging Face `tokenizers` JSON file.

    The end of text is the first of EOT_NAMES that the vocabulary holds; if it holds none, `<|endoftext|>` is added
    after its last id and the log says so. Text that spells a special token is encoded as text.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Raises FileNotFoundError if there is no file, UserError if it is not such a file."""
        import tokenizers

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer file {path}")
        try:
            content = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # The library raises bare Exception.
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise UserError(f"{path} is not a Hugging Face tokenizers JSON file: {reason}") from error
        # A file may ask for truncation to the length of some other model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.name = path.name
        eot = next((name for name in EOT_NAMES if self._tokenizer.token_to_id(name) is not None), None)
        if eot is None:
            eot = EOT_NAMES[0]
            self._tokenizer.add_special_tokens([eot])
            logging.info("%s has no end-of-text token; %s was added to its vocabulary", path, eot)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eot = vocabulary[eot]
        # Ids may have holes, so the count of entries is not enough.
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        strings = [text if isinstance(text, str) else text.decode(errors="replace") for text in texts]
        if len(strings) == 1:
            encodings = [self._tokenizer.encode(strings[0], add_special_tokens=False)]
        else:
            encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode(check_ids(ids, self).tolist(), skip_special_tokens=True)

    def decode_bytes(self, ids: Any) -> bytes:
        return self.decode(ids).encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        _write_atomically(path, self._tokenizer.to_str(pretty=True))


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer "bytes", or the one in a Hugging Face `tokenizers` JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not such a file.

    Example:
        >>> tokenizer = load_tokenizer("bytes")
        >>> tokenizer.encode("né").tolist(), tokenizer.vocab_size, tokenizer.eot
        ([110, 195, 169], 257, 256)
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_file() and path.stat().st_size < 1000 and b'"linattn_tokenizer": "bytes"' in path.read_bytes():
        return ByteTokenizer()
    return JsonTokenizer(path)


def train_bpe(
    texts: Iterable[str | bytes], vocab_size: int, path: str | os.PathLike[str], *, progress: bool = False
) -> JsonTokenizer:
    """Trains a byte-level BPE on texts and writes it to `path` (through a temporary name).

    Args:
        texts: documents; bytes are UTF-8.
        vocab_size: ids in all, at least 257: 256 bytes, `<|endoftext|>` and the merges. A small corpus may give fewer.
        path: the JSON file to write.

    Raises:
        UserError: `vocab_size` is too small or there is no text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"a byte-level BPE needs a vocabulary of at least 257 ids, but {vocab_size} were asked for")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    count = 0

    def strings() -> Iterable[str]:
        nonlocal count
        for text in texts:
            count += len(text)
            yield text if isinstance(text, str) else text.decode(errors="replace")

    tokenizer.train_from_iterator(strings(), trainer=trainer)
    if not count:
        raise UserError("there is no text to train a tokenizer on")
    if tokenizer.get_vocab_size() < vocab_size:
        logging.warning("the corpus gave only %d of %d ids", tokenizer.get_vocab_size(), vocab_size)
    _write_atomically(path, tokenizer.to_str(pretty=True))
    return JsonTokenizer(path)


def sample_texts(corpus: Corpus, max_bytes: int = 0) -> Iterator[bytes]:
    """Texts of a corpus in the order of their hashes until `max_bytes` are reached; 0 gives all, in their own order."""
    order = range(len(corpus)) if not max_bytes else sorted(range(len(corpus)), key=corpus.key)
    total = 0
    for index in order:
        text = corpus.text(index)
        yield text
        total += len(text)
        if max_bytes and total >= max_bytes:
            return


def check_ids(ids: Any, tokenizer: Tokenizer, where: str = "") -> np.ndarray:
    """The ids as an int array. Raises UserError if one is outside the tokenizer's vocabulary."""
    ids = np.asarray(ids).astype(np.int64, copy=False) if not isinstance(ids, np.ndarray) else ids
    if ids.size and (ids.max() >= tokenizer.vocab_size or ids.min() < 0):
        bad = ids[(ids >= tokenizer.vocab_size) | (ids < 0)].flat[0]
        raise UserError(
            f"{where + ': ' if where else ''}token id {bad} is outside the vocabulary of the tokenizer "
            f"{tokenizer.name!r} (0 to {tokenizer.vocab_size - 1})"
        )
    return ids


def _write_atomically(path: str | os.PathLike[str], content: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
