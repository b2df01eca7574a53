"""Readers of files: text cut into documents, JSON lines, compressed JSON lines and parquet columns."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from linattn_jax.data.corpus import Corpus, clean_utf8, text_to_bytes
from linattn_jax.types import UserError

MAX_PART = 2**20
MIN_PART = 2**16
_BOM = b"\xef\xbb\xbf"
_BLOCK = 2**24


class TextFiles(Corpus):
    """Each text file is a document; files larger than 1 MiB are cut at line ends into several.

    A part holds a 32nd of its file, but at least 64 KiB and at most 1 MiB: a single file of 2 MB still gives some
    documents to hold out. A line longer than a part is cut between two UTF-8 characters. A byte order mark at the
    start is dropped, invalid UTF-8 becomes U+FFFD, NUL characters are kept.
    """

    def __init__(self, files: Sequence[tuple[Path, str]]):
        """files: (path, name relative to its root)."""
        self._files = list(files)
        starts: list[tuple[int, int, int, int]] = []  # file, start, stop, part (-1 for a whole file)
        for f, (path, _) in enumerate(self._files):
            size = path.stat().st_size
            if size <= MAX_PART:
                starts.append((f, 0, size, -1))
            else:
                cuts = _cuts(path, size)
                starts.extend((f, a, b, part) for part, (a, b) in enumerate(itertools.pairwise(cuts)))
        self._parts = np.asarray(starts, dtype=np.int64).reshape(-1, 4)
        self.sizes = self._parts[:, 2] - self._parts[:, 1]

    def __getitem__(self, index: int) -> bytes:
        f, start, stop, _ = self._parts[index].tolist()
        with open(self._files[f][0], "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        return clean_utf8(data.removeprefix(_BOM) if start == 0 else data)

    def name(self, index: int) -> str:
        f, _, _, part = self._parts[index].tolist()
        return self._files[f][1] if part < 0 else f"{self._files[f][1]}#{part}"


def _cuts(path: Path, size: int) -> list[int]:
    limit = min(MAX_PART, max(MIN_PART, size // 32))
    cuts = [0]
    with open(path, "rb") as file:
        while size - cuts[-1] > limit:
            file.seek(cuts[-1])
            block = file.read(limit)
            end = block.rfind(b"\n") + 1
            if end == 0:
                end = len(block)
                # Step back over the continuation bytes of a character that the next byte would go on with.
                file.seek(cuts[-1] + end)
                following = file.read(1)
                while following and following[0] & 0xC0 == 0x80 and len(block) - end < 3:
                    end -= 1
                    following = block[end : end + 1]
            cuts.append(cuts[-1] + end)
    return [*cuts, size]


class JsonLines(Corpus):
    """One JSON object per line, found through an index of line offsets (24 bytes of memory a line)."""

    exact_sizes = False

    def __init__(self, path: Path, name: str, field: str):
        self._path, self._name, self._field = path, name, field
        starts, stops = _line_index(path)
        self._lines = np.flatnonzero(stops > starts)
        self._starts = starts[self._lines]
        self.sizes = stops[self._lines] - self._starts
        if len(self):
            self[0]  # A wrong field name should stop the run at its start.

    def __getitem__(self, index: int) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(int(self._starts[index]))
            line = file.read(int(self.sizes[index]))
        if not line.strip():
            return b""
        return _json_text(line, f"{self._path}:{int(self._lines[index]) + 1}", self._field)

    def name(self, index: int) -> str:
        return f"{self._name}#{index}"


def _line_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop offset of each line, without its newline."""
    ends = []
    offset = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + offset)
            offset += len(block)
    stops = np.concatenate([*ends, np.asarray([offset])]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    return np.minimum(starts, stops), stops


def _json_text(line: bytes, where: str, field: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8", "replace").lstrip("\ufeff"))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object with the field {field!r}, found {type(record).__name__}")
    return field_text(record, where, field)


def field_text(record: dict[str, Any], where: str, field: str) -> bytes:
    """The text in one field of a record, empty for null. Raises UserError if there is no such field or no text."""
    if field not in record:
        seen = ", ".join(map(str, record)) or "none"
        raise UserError(f"{where}: no field {field!r} to read text from; its fields are: {seen} (set data.text_field)")
    value = record[field]
    if value is None:
        return b""
    if isinstance(value, str):
        return text_to_bytes(value)
    if isinstance(value, bytes):
        return clean_utf8(value)
    raise UserError(f"{where}: the field {field!r} holds {type(value).__name__}, not text")


class CompressedJsonLines(Corpus):
    """JSON lines in .gz or .zst: cannot be read from the middle, so all texts are held in memory."""

    def __init__(self, path: Path, name: str, field: str):
        self._name = name
        if path.stat().st_size > 10**8:
            logging.info("reading %s (%.1f GB compressed) into memory", path, path.stat().st_size / 1e9)
        self._texts: list[bytes] = []
        total, said = 0, 0
        for number, line in enumerate(_lines(_decompress(path)), 1):
            if line.strip():
                self._texts.append(_json_text(line, f"{path}:{number}", field))
                total += len(self._texts[-1])
                if total - said > 10**8:
                    said = total
                    logging.info("%s: %.1f GB of text, %d documents", path, total / 1e9, len(self._texts))
        self.sizes = np.asarray([len(text) for text in self._texts], dtype=np.int64)

    def __getitem__(self, index: int) -> bytes:
        return self._texts[index]

    def name(self, index: int) -> str:
        return f"{self._name}#{index}"


def _decompress(path: Path) -> Iterator[bytes]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                while block := file.read(_BLOCK):
                    yield block
        else:
            yield from _decompress_zstd(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be decompressed: {str(error).rstrip('.')}") from error


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    import zstandard

    decoder = None
    with open(path, "rb") as file:
        while block := file.read(2**20):
            while block:
                decoder = decoder or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                try:
                    yield decoder.decompress(block)
                except zstandard.ZstdError as error:
                    raise UserError(f"{path} cannot be decompressed: {error}") from error
                block = decoder.unused_data if decoder.eof else b""
                if decoder.eof:
                    decoder = None
    if decoder is not None:
        raise UserError(f"{path} cannot be decompressed: the file ends inside a frame")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


class Parquet(Corpus):
    """One text column of a parquet file, read by row group through a small cache.

    Random access decodes a whole row group; `cache_bytes` of them are kept. A file whose column is larger than that
    is read again and again: tokenize it once with experiments/tokenize.py instead.
    """

    exact_sizes = False

    def __init__(self, path: Path, name: str, field: str, cache_bytes: int = 2**28):
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self._path, self._name, self._field = path, name, field
        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
                groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read as parquet: {_one_line(error)}") from error
        if field not in schema.names:
            raise UserError(f"{path}: no column {field!r} to read text from; its columns are: "
                            f"{', '.join(schema.names)} (set data.text_field)")  # fmt: skip
        kind = schema.field(field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(is_(kind) for is_ in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
                                         pa.types.is_binary, pa.types.is_large_binary)):  # fmt: skip
            raise UserError(f"{path}: the column {field!r} holds {kind}, not text")
        rows = np.asarray([group.num_rows for group in groups], dtype=np.int64)
        self._ends = np.cumsum(rows)
        sizes = [_column_bytes(group, field) // max(group.num_rows, 1) for group in groups]
        self.sizes = np.repeat(np.asarray(sizes, dtype=np.int64), rows)
        self._cache_bytes = cache_bytes
        self._cache: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.ranked_sizes = self.total_bytes <= cache_bytes
        if self.ranked_sizes:
            columns = [self._group(g) for g in range(len(groups))]
            lengths = [pc.fill_null(pc.binary_length(column), 0).to_numpy() for column in columns]
            self.sizes = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        else:
            logging.warning("%s: the column %r is larger than the %d MB cache; experiments/tokenize.py makes a token "
                            "folder that is quick to read in any order", path, field, cache_bytes >> 20)  # fmt: skip

    def _group(self, group: int) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self._lock:
            if group not in self._cache:
                try:
                    with pq.ParquetFile(self._path) as file:
                        column = file.read_row_group(group, columns=[self._field]).column(0)
                    if pa.types.is_dictionary(column.type):
                        column = column.cast(column.type.value_type)
                except (pa.ArrowException, OSError) as error:
                    raise UserError(f"{self._path}: row group {group} cannot be read: {_one_line(error)}") from error
                self._cache[group] = column
                while len(self._cache) > 1 and sum(c.nbytes for c in self._cache.values()) > self._cache_bytes:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(group)
            return self._cache[group]

    def __getitem__(self, index: int) -> bytes:
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[group - 1]) if group else 0)
        value = self._group(group)[row].as_py()
        return field_text({self._field: value}, f"{self._path}, row {index}", self._field)

    def name(self, index: int) -> str:
        return f"{self._name}#{index}"


def _column_bytes(group: Any, field: str) -> int:
    columns = (group.column(c) for c in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def looks_like_text(path: str | os.PathLike[str]) -> bool:
    """Whether the first 64 KiB hold no NUL byte and are UTF-8."""
    with open(path, "rb") as file:
        head = file.read(2**16)
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # The last character may have been cut in the middle.
        return error.start >= len(head) - 3 and len(head) == 2**16
    return True
