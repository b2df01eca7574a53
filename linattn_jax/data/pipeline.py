"""From documents to batches: seeded, endless, sharded by process, and resumable to the token.

A document of tokens x_1..x_n is held as [EOT, x_1..x_n, EOT] (n + 2 ids): inputs are all but the last, targets all but
the first, so every position of it has a target and none is lost where rows meet.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import grain
import grain.experimental
import numpy as np
from absl import logging

from linattn_jax.data.corpus import Corpus, Document
from linattn_jax.data.sources import open_corpus, open_splits
from linattn_jax.data.tokenizers import Tokenizer, check_ids
from linattn_jax.types import UserError

__all__ = ["Batch", "EvalBatches", "eval_batches", "heldout_bytes", "open_corpus", "open_splits", "train_iterator"]

Batch = dict[str, np.ndarray]
Layout = Literal["packed", "contiguous"]

# In the packed layout this many documents are open for each row of a batch and take turns, so that a row's neighbours
# in time come from other documents.
_PACKED_TURNS = 8
_OPEN_BYTES = 2**28
_SEGMENTS = 2**31 - 1


def train_iterator(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    layout: Layout = "packed",
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
) -> grain.DatasetIterator[Batch]:
    """Endless batches of this process's share of the corpus, in an order that `seed` decides for each epoch.

    Documents are dealt in shuffled order to streams; a stream that reaches the end of its document takes the next one.
    Every document is used exactly once an epoch. There is no padding. If the corpus has fewer documents than there are
    streams, each is cut into several so that the rows of a batch differ.

    Args:
        corpus: documents, as `open_corpus` gives them.
        tokenizer: turns them into ids; of a token folder it must be the one that the folder was written with.
        batch_size: rows B of this process.
        seq_len: positions T of a row.
        layout: "contiguous": row b of a batch continues row b of the one before, and a segment id continues exactly
            when the document does, so that a recurrent state can be carried. "packed": successive batches read other
            documents, which decorrelates them; a document longer than a row goes on in a later batch.
        seed: decides the order of documents; processes of one run pass the same.
        process_index, process_count: process p of n reads documents p, p + n, p + 2n, …
        workers: threads that read and tokenize ahead; 0 does all work in `next`. The batches are the same. Bytes and
            token folders need none; a BPE of text on the fly may. With workers, `close()` the iterator when done.

    Returns:
        An iterator of dicts of int32 [B, T]: `inputs`, `targets` and `segment_ids` (>= 0). `get_state()` is a dict that
        JSON can hold; `set_state(state)` on an iterator made with the same arguments continues after the batch that
        `next` returned last before `get_state()`, in this process or another; with other arguments or a corpus of
        another size it raises UserError and says what differs.

    Raises:
        ValueError: an argument is out of range.
        UserError: the corpus has fewer documents than processes or fewer tokens than one batch; the tokenizer is not
            that of the token folder; while iterating, a document cannot be read.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("process_count", process_count)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but it is {value}")
    if layout not in ("packed", "contiguous"):
        raise ValueError(f"layout must be 'packed' or 'contiguous', but it is {layout!r}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, {process_count}), but it is {process_index}")
    corpus.check_tokenizer(tokenizer)
    share = len(range(process_index, len(corpus), process_count))
    if len(corpus) < process_count:
        raise UserError(f"the corpus has {len(corpus)} documents, too few to share among {process_count} processes")
    turns = 1
    if layout == "packed":
        turns = max(1, min(_PACKED_TURNS, share // batch_size, _OPEN_BYTES // (4 * batch_size * _usual_bytes(corpus))))
    pieces = math.ceil(2 * batch_size / share) if share < 2 * batch_size else 1
    source = _EncodedPieces(corpus, tokenizer, range(process_index, len(corpus), process_count), pieces)
    _check_enough(source, batch_size, seq_len)
    _warn_if_short(corpus, tokenizer, seq_len)

    # grain adds the epoch to the seed, so neighbouring seeds would share orders if they were passed as they are.
    digest = hashlib.blake2b(f"{seed} {process_index}".encode(), digest_size=4).digest()
    made_for = {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "layout": layout,
        "seed": seed,
        "process": f"{process_index} of {process_count}",
        "documents": len(corpus),
        "bytes": corpus.total_bytes,
        "tokenizer": tokenizer.fingerprint,
    }
    documents = grain.MapDataset.source(source).shuffle(seed=int.from_bytes(digest, "big")).repeat()
    dataset: grain.IterDataset[Batch] = _Streams(
        documents.map_with_index(lambda index, ids: (index, ids)), made_for, turns, workers
    )
    if workers:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
    return iter(dataset)


def _usual_bytes(corpus: Corpus) -> int:
    return max(1, corpus.total_bytes // len(corpus))


class _EncodedPieces:
    """Random access to [EOT, x_1..x_n, EOT] of some documents, or to `pieces` cuts of each; None if empty."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, indices: range, pieces: int):
        self._corpus, self._tokenizer, self.indices, self._pieces = corpus, tokenizer, indices, pieces
        # Each piece needs its whole document tokenized; without pieces a document is not asked for twice.
        self._encode = functools.lru_cache(maxsize=64)(self.encode) if pieces > 1 else self.encode

    def __len__(self) -> int:
        return len(self.indices) * self._pieces

    def encode(self, index: int) -> np.ndarray | None:
        return encode_document(self._corpus[index], self._tokenizer, self._corpus, index)

    def __getitem__(self, index: int) -> np.ndarray | None:
        piece, document = divmod(int(index), len(self.indices))
        ids = self._encode(self.indices[document])
        if ids is None or self._pieces == 1:
            return ids
        positions = len(ids) - 1
        start, stop = positions * piece // self._pieces, positions * (piece + 1) // self._pieces
        return ids[start : stop + 1] if stop > start else None


def encode_document(document: Document, tokenizer: Tokenizer, corpus: Corpus, index: int) -> np.ndarray | None:
    """[EOT, x_1..x_n, EOT] as int32 [n + 2], or None if the document is empty.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    ids = document if isinstance(document, np.ndarray) else tokenizer.encode(document)
    if not len(ids):
        return None
    check_ids(ids, tokenizer, corpus.name(index))
    framed = np.empty(len(ids) + 2, dtype=np.int32)
    framed[0] = framed[-1] = tokenizer.eot
    framed[1:-1] = ids
    return framed


def _check_enough(source: _EncodedPieces, batch_size: int, seq_len: int) -> None:
    """An endless loader over too few tokens would fill a batch with repeats, and over none would never return."""
    found = 0
    for index in source.indices:
        ids = source.encode(index)
        found += 0 if ids is None else len(ids) - 1
        if found >= batch_size * seq_len:
            return
    raise UserError(
        f"the corpus gives this process {found} tokens, fewer than one batch of {batch_size} rows x {seq_len} "
        "positions: add text, or lower batch_size or data.seq_len"
    )


def _warn_if_short(corpus: Corpus, tokenizer: Tokenizer, seq_len: int) -> None:
    longest = int(np.argmax(corpus.sizes))
    if corpus.longest_bytes >= 16 * seq_len or not corpus.ranked_sizes:
        return
    ids = encode_document(corpus[longest], tokenizer, corpus, longest)
    if ids is not None and len(ids) - 1 < seq_len:
        logging.warning(
            "data.seq_len is %d, longer than any document: the longest, %s, has %d tokens; rows hold several documents",
            seq_len, corpus.name(longest), len(ids) - 2,
        )  # fmt: skip


class _Streams(grain.IterDataset):
    """Cuts an endless sequence of (index, ids) into batches of parallel streams.

    grain's own ConcatThenSplit numbers segments anew in each row and, when its state has been through JSON at a point
    where a document ends with a row, drops the document that follows (0.2.18): hence this one.
    """

    def __init__(self, documents: grain.MapDataset, made_for: dict[str, Any], turns: int, workers: int):
        super().__init__(documents)
        self.documents, self.made_for, self.turns = documents, made_for, turns
        self.batch_size, self.seq_len = made_for["batch_size"], made_for["seq_len"]
        self.read_options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=16 * workers)

    def __iter__(self) -> _StreamsIterator:
        return _StreamsIterator(self)


class _StreamsIterator(grain.DatasetIterator):
    """Stream s holds document `_indices[s]` and has used `_offsets[s]` positions of it; -1 means no document yet."""

    def __init__(self, dataset: _Streams):
        self._dataset = dataset
        self._ahead = iter(dataset.documents.to_iter_dataset(dataset.read_options))
        super().__init__(self._ahead)
        streams = dataset.batch_size * dataset.turns
        self._turn = 0
        self._indices = [-1] * streams
        self._offsets = [0] * streams
        self._ids: list[np.ndarray | None] = [None] * streams

    def __next__(self) -> Batch:
        shape = (self._dataset.batch_size, self._dataset.seq_len)
        batch = {name: np.empty(shape, np.int32) for name in ("inputs", "targets", "segment_ids")}
        for row in range(shape[0]):
            self._fill(self._turn * shape[0] + row, *(array[row] for array in batch.values()))
        self._turn = (self._turn + 1) % self._dataset.turns
        return batch

    def _fill(self, stream: int, inputs: np.ndarray, targets: np.ndarray, segment_ids: np.ndarray) -> None:
        filled, length = 0, len(inputs)
        while filled < length:
            ids = self._ids[stream]
            offset = self._offsets[stream]
            if ids is None and self._indices[stream] >= 0:
                ids = self._ids[stream] = self._dataset.documents[self._indices[stream]][1]
            if ids is None or offset == len(ids) - 1:
                self._indices[stream], ids = next(self._ahead)
                self._ids[stream], offset = ids, 0
            assert ids is not None
            count = min(length - filled, len(ids) - 1 - offset)
            inputs[filled : filled + count] = ids[offset : offset + count]
            targets[filled : filled + count] = ids[offset + 1 : offset + count + 1]
            segment_ids[filled : filled + count] = self._indices[stream] % _SEGMENTS
            self._offsets[stream] = offset + count
            filled += count

    def get_state(self) -> dict[str, Any]:
        return {
            "made_for": dict(self._dataset.made_for),
            "turn": self._turn,
            "indices": list(map(int, self._indices)),
            "offsets": list(self._offsets),
            "ahead": self._ahead.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        now, then = self._dataset.made_for, state["made_for"]
        changed = [f"{key} was {then.get(key)} and is {now[key]}" for key in now if then.get(key) != now[key]]
        if changed:
            raise UserError(f"the saved position in the data does not fit this run: {', '.join(changed)}")
        self._turn = int(state["turn"])
        self._indices = list(state["indices"])
        self._offsets = list(state["offsets"])
        self._ids = [None] * len(self._indices)
        self._ahead.set_state(state["ahead"])


class EvalBatches:
    """Batches that hold every token of some documents exactly once; can be iterated over again.

    Attributes:
        total_bytes: bytes of text in the documents, of all processes.
        total_tokens: positions with segment_ids >= 0, of all processes: one per token and one end of text per document.
    """

    def __init__(self, rows: list[list[np.ndarray]], batch_size: int, seq_len: int, steps: int, total: tuple[int, int]):
        self._rows, self._steps = rows, steps
        self._shape = (batch_size, seq_len)
        self.total_bytes, self.total_tokens = total

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        length = self._shape[1]
        joined = [_join(row) for row in self._rows]
        for start in range(0, self._steps * length, length):
            batch = {
                "inputs": np.zeros(self._shape, np.int32),
                "targets": np.zeros(self._shape, np.int32),
                "segment_ids": np.full(self._shape, -1, np.int32),
            }
            for array, column in zip(batch.values(), range(3), strict=True):
                for b, row in enumerate(joined):
                    part = row[column, start : start + length]
                    array[b, : len(part)] = part
            yield batch


def _join(documents: list[np.ndarray]) -> np.ndarray:
    """Inputs, targets and segment ids of documents laid end to end, int32 [3, positions]."""
    parts = [np.stack([ids[:-1], ids[1:], np.full(len(ids) - 1, i, np.int32)]) for i, ids in enumerate(documents)]
    return np.concatenate([np.zeros((3, 0), np.int32), *parts], axis=1)


def eval_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    max_bytes: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Batches in the contiguous layout, so that a carried state gives each document all its context.

    Each document lies in one row; rows are balanced by putting the longest documents first on the emptiest row. A
    document longer than an even share of the rows (and than 8 x seq_len) is cut into such shares, which lose the
    context before them: otherwise one long document would leave the other rows empty for most of the evaluation.
    Rows that end early are padded with segment id -1.

    Args:
        corpus: the held-out documents.
        tokenizer: as for `train_iterator`.
        batch_size: rows of this process.
        seq_len: positions of a row.
        max_bytes: stops before the document that would exceed it, taking documents in the order of their hashes, but
            takes at least one; 0 takes all. The tokens are held in memory.
        process_index, process_count: all processes get as many batches.

    Raises:
        UserError: the corpus is empty, or its tokens are those of another tokenizer.
    """
    corpus.check_tokenizer(tokenizer)
    encoded, total_bytes = [], 0
    for index in _covered(corpus, max_bytes):
        document = corpus[index]
        ids = encode_document(document, tokenizer, corpus, index)
        if ids is not None:
            encoded.append(ids)
            total_bytes += len(document) if isinstance(document, bytes) else int(corpus.sizes[index])
    rows: list[list[np.ndarray]] = [[] for _ in range(batch_size * process_count)]
    lengths = np.zeros(len(rows), np.int64)
    positions = sum(len(ids) - 1 for ids in encoded)
    share = max(-(-positions // len(rows)), 8 * seq_len)
    shares = [ids[start : start + share + 1] for ids in encoded for start in range(0, len(ids) - 1, share)]
    for ids in sorted(shares, key=len, reverse=True):
        row = int(np.argmin(lengths))
        rows[row].append(ids)
        lengths[row] += len(ids) - 1
    steps = -(-int(lengths.max()) // seq_len)
    mine = rows[process_index * batch_size : (process_index + 1) * batch_size]
    return EvalBatches(mine, batch_size, seq_len, steps, (total_bytes, positions))


def heldout_bytes(corpus: Corpus, max_bytes: int = 0) -> bytes:
    """The text of the documents that `eval_batches` covers, end to end, for other compressors.

    Raises:
        UserError: the corpus is empty.
    """
    return b"".join(corpus.text(index) for index in _covered(corpus, max_bytes))


def _covered(corpus: Corpus, max_bytes: int) -> Iterator[int]:
    """Documents in the order of their hashes, which is the same on every machine and does not follow the alphabet."""
    if not len(corpus):
        raise UserError(
            "there are no held-out documents: set data.heldout_percent above 0 or name a file in data.heldout"
        )
    total = 0
    for index in sorted(range(len(corpus)), key=lambda i: (corpus.key(i), i)):
        size = int(corpus.sizes[index]) if corpus.exact_sizes else len(corpus.text(index))
        if max_bytes and total and total + size > max_bytes:
            return
        total += size
        if size:
            yield index
