"""Token folders: a corpus tokenized once, as array_record shards beside a description of what wrote them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linattn_jax.data.corpus import Corpus
from linattn_jax.data.tokenizers import Tokenizer, check_ids, load_tokenizer
from linattn_jax.types import UserError

FORMAT = "linattn_jax tokens 1"
SHARD_BYTES = 2**28
_BATCH_BYTES = 2**22


def is_token_folder(path: str | os.PathLike[str]) -> bool:
    """Whether the folder was written by `write_tokens`."""
    try:
        return json.loads((Path(path) / "meta.json").read_text("utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


class TokenFolder(Corpus):
    """Documents as token ids: `corpus[i]` is int32 [n]. Sizes are the exact bytes of text each was made from."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises UserError if a file of the folder is missing or does not fit the others."""
        import grain.sources

        self._path = Path(path)
        self.meta = json.loads((self._path / "meta.json").read_text("utf-8"))
        shards = [str(self._path / shard) for shard in self.meta["shards"]]
        try:
            table = np.load(self._path / "documents.npy")
            self._source = grain.sources.ArrayRecordDataSource(shards)
            count = len(self._source)
        except Exception as error:  # array_record raises bare RuntimeError and worse.
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise UserError(f"the token folder {path} is damaged: {reason}") from error
        if not len(table) == count == self.meta["documents"]:
            raise UserError(
                f"the token folder {path} is damaged: meta.json counts {self.meta['documents']} documents, "
                f"documents.npy {len(table)} and the shards {count}"
            )
        self.token_counts = table["tokens"].astype(np.int64)
        self.sizes = table["bytes"].astype(np.int64)
        self._keys = table["key"]
        self._dtype = np.dtype(self.meta["dtype"])

    def __getitem__(self, index: int) -> np.ndarray:
        return np.frombuffer(self._source[int(index)], dtype=self._dtype).astype(np.int32)

    def name(self, index: int) -> str:
        return f"{self._path.name}#{index}"

    def key(self, index: int) -> int:
        """The hash of the document in the source it was made from, so the same documents are held out."""
        return int(self._keys[index])

    def text(self, index: int) -> bytes:
        return self.tokenizer().decode_bytes(self[index])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the folder was written with, which is kept in it."""
        return load_tokenizer(str(self._path / "tokenizer.json"))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if tokenizer.fingerprint != self.meta["tokenizer_hash"]:
            raise UserError(
                f"the token folder {self._path} was written with the tokenizer {self.meta['tokenizer']!r} "
                f"(hash {self.meta['tokenizer_hash'][:12]}), not with {tokenizer.name!r} "
                f"(hash {tokenizer.fingerprint[:12]}): set data.tokenizer to {self._path / 'tokenizer.json'}"
            )


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    source: str,
    overwrite: bool = False,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Tokenizes every document that is not empty into a new token folder and returns its description.

    The folder is written under a temporary name beside `path` and renamed when complete: an interrupted run leaves
    nothing under `path` and what stood there before. It holds array_record shards with one record of uint16 (uint32
    for vocabularies above 65536) ids per document, `documents.npy` (tokens, bytes of text and hash of each),
    `tokenizer.json` and `meta.json`.

    Raises:
        UserError: `path` exists and `overwrite` is False, or it exists and is not a token folder, or the corpus holds
            no text.
    """
    path = Path(path)
    if path.exists():
        if not overwrite:
            raise UserError(f"{path} exists already; pass --overwrite to replace it")
        if not is_token_folder(path):
            raise UserError(f"{path} exists and is not a token folder, so it is not replaced; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        meta = _write(corpus, tokenizer, temporary, source, progress, shard_bytes)
        if path.exists():
            aside = path.with_name(f"{path.name}.old-{os.getpid()}")
            path.rename(aside)
            temporary.rename(path)
            shutil.rmtree(aside)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def _write(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, source: str, progress: bool, shard_bytes: int
) -> dict[str, Any]:
    from array_record.python.array_record_module import ArrayRecordWriter
    from tqdm import tqdm

    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    rows: list[tuple[int, int, int]] = []
    shards: list[str] = []
    writer, written = None, 0
    with tqdm(total=len(corpus), unit="doc", disable=not progress, smoothing=0) as bar:
        for batch in _batches(corpus):
            for (index, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                if writer is None or written > shard_bytes:
                    if writer is not None:
                        writer.close()
                    shards.append(f"tokens-{len(shards):05d}.array_record")
                    writer, written = ArrayRecordWriter(str(folder / shards[-1]), "group_size:1"), 0
                record = check_ids(ids, tokenizer, corpus.name(index)).astype(dtype).tobytes()
                writer.write(record)
                written += len(record)
                rows.append((len(ids), len(text), corpus.key(index)))
            bar.update(batch[-1][0] + 1 - bar.n)
        bar.update(len(corpus) - bar.n)
    if writer is None:
        raise UserError(f"{source} holds no text: every document in it is empty")
    writer.close()
    table = np.asarray(rows, dtype=[("tokens", np.uint64), ("bytes", np.uint64), ("key", np.uint64)])
    np.save(folder / "documents.npy", table)
    tokenizer.save(folder / "tokenizer.json")
    meta = {
        "format": FORMAT,
        "source": source,
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "dtype": dtype.name,
        "documents": len(rows),
        "tokens": int(table["tokens"].sum()),
        "bytes": int(table["bytes"].sum()),
        "shards": shards,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def _batches(corpus: Corpus) -> Iterator[list[tuple[int, bytes]]]:
    batch: list[tuple[int, bytes]] = []
    total = 0
    for index in range(len(corpus)):
        if text := corpus.text(index):
            batch.append((index, text))
            total += len(text)
        if total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
