"""Random-access documents, and the stable hash that decides which of them are held out."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from linattn_jax.types import UserError

if TYPE_CHECKING:
    from linattn_jax.data.tokenizers import Tokenizer

Document = bytes | np.ndarray


class Corpus:
    """Documents that can be read in any order.

    `corpus[i]` is the document's text as valid UTF-8 bytes or, in a token folder, its token ids as int32 [n].
    `sizes` is int64 [len(corpus)]: bytes of text per document. Where `exact_sizes` is False they are estimates (JSON
    lines count their quotes and escapes), and where `ranked_sizes` is False not even their order can be trusted (large
    parquet files and TFDS record only sums).
    """

    sizes: np.ndarray
    exact_sizes: bool = True
    ranked_sizes: bool = True

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Document:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The document's path relative to the root it was found under, with `#i` where a file holds several."""
        raise NotImplementedError

    def key(self, index: int) -> int:
        """A 64-bit hash of the document's name: the same on every machine and in every process."""
        return stable_hash(self.name(index))

    def text(self, index: int) -> bytes:
        """The document's text, decoded when the corpus holds tokens."""
        document = self[index]
        assert isinstance(document, bytes)
        return document

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises UserError if the corpus already holds tokens of another tokenizer."""

    @property
    def total_bytes(self) -> int:
        """Bytes of text in all documents; an estimate unless `exact_sizes`."""
        return int(self.sizes.sum())

    @property
    def longest_bytes(self) -> int:
        """Bytes of text in the longest document; an estimate unless `exact_sizes`."""
        return int(self.sizes.max(initial=0))


def stable_hash(name: str) -> int:
    """A 64-bit hash of a string that does not depend on the process (Python's own hash does)."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def clean_utf8(data: bytes) -> bytes:
    """The bytes themselves if they are valid UTF-8, otherwise with U+FFFD in place of every invalid sequence."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode(errors="replace").encode()
    return data


def text_to_bytes(text: str) -> bytes:
    """UTF-8 of a string, with U+FFFD in place of lone surrogates (JSON escapes can spell them)."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


class Concatenation(Corpus):
    """Several corpora, one after the other."""

    def __init__(self, parts: Sequence[Corpus]):
        self.parts = list(parts)
        self.sizes = np.concatenate([part.sizes for part in self.parts])
        self.exact_sizes = all(part.exact_sizes for part in self.parts)
        self.ranked_sizes = all(part.ranked_sizes for part in self.parts)
        self._ends = np.cumsum([len(part) for part in self.parts]).tolist()

    def _locate(self, index: int) -> tuple[Corpus, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        part = bisect.bisect_right(self._ends, index)
        return self.parts[part], index - (self._ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> Document:
        part, i = self._locate(index)
        return part[i]

    def name(self, index: int) -> str:
        part, i = self._locate(index)
        return part.name(i)

    def key(self, index: int) -> int:
        part, i = self._locate(index)
        return part.key(i)

    def text(self, index: int) -> bytes:
        part, i = self._locate(index)
        return part.text(i)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        for part in self.parts:
            part.check_tokenizer(tokenizer)


class Subset(Corpus):
    """Some documents of another corpus, by index."""

    def __init__(self, parent: Corpus, indices: np.ndarray, keys: np.ndarray):
        self.parent = parent
        self.indices = indices
        self.sizes = parent.sizes[indices]
        self.exact_sizes = parent.exact_sizes
        self.ranked_sizes = parent.ranked_sizes
        self._keys = keys[indices]

    def __getitem__(self, index: int) -> Document:
        return self.parent[int(self.indices[index])]

    def name(self, index: int) -> str:
        return self.parent.name(int(self.indices[index]))

    def key(self, index: int) -> int:
        return int(self._keys[index])

    def text(self, index: int) -> bytes:
        return self.parent.text(int(self.indices[index]))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.parent.check_tokenizer(tokenizer)


def split_by_hash(corpus: Corpus, heldout_percent: float, source: str) -> tuple[Corpus, Corpus]:
    """Splits documents into (train, heldout) by the hash of their names.

    A document is held out when its hash falls in the lowest `heldout_percent` of the range, so adding files moves no
    other file across. When the hash would leave either side empty, the document with the lowest (highest) hash is
    moved there, so that two documents are enough.

    Raises:
        UserError: the percentage is outside [0, 100) or there is only one document to share.
    """
    if not 0 <= heldout_percent < 100:
        raise UserError(f"data.heldout_percent must be at least 0 and below 100, but it is {heldout_percent}")
    keys = np.fromiter((corpus.key(i) for i in range(len(corpus))), dtype=np.uint64, count=len(corpus))
    heldout = keys < np.uint64(int(heldout_percent / 100 * 2**64))
    if heldout_percent > 0:
        if len(corpus) < 2:
            raise UserError(
                f"{source} holds only one document, which cannot be both trained on and held out: name another file "
                "in data.heldout, add documents, or set data.heldout_percent to 0 and evaluate on nothing"
            )
        if not heldout.any():
            heldout[np.argmin(keys)] = True
        elif heldout.all():
            heldout[np.argmax(keys)] = False
    return Subset(corpus, np.flatnonzero(~heldout), keys), Subset(corpus, np.flatnonzero(heldout), keys)
