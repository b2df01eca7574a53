"""From what the user names (files, folders, globs, "stdlib", TFDS, token folders) to a corpus of documents."""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from linattn_jax.data import readers
from linattn_jax.data.corpus import Concatenation, Corpus, split_by_hash
from linattn_jax.data.tokens import TokenFolder, is_token_folder
from linattn_jax.types import UserError

JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED_JSON_LINES = (".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst", ".json.gz", ".json.zst")
PARQUET = (".parquet",)
# What a folder is searched for; a file named by itself is read as text whatever its extension, if it is text.
_TEXT_EXTENSIONS = """
    txt text md markdown rst tex bib org adoc html htm xml svg json yaml yml toml ini cfg conf csv tsv sql py pyi
    pyx ipynb c h cc cpp cxx hh hpp cu cuh m mm java kt kts scala groovy clj js jsx mjs ts tsx css scss go rs rb php
    pl pm lua r jl swift dart zig nim hs ml mli fs ex exs erl lisp el scm f f90 f95 asm s sh bash zsh fish ps1 bat
    cmake mk proto v lean tcl vim diff patch log srt vtt
"""
TEXT = tuple(f".{extension}" for extension in _TEXT_EXTENSIONS.split())
KNOWN = ".txt, .md, .py and other text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet"


def open_corpus(data: Any, split: Literal["train", "heldout"]) -> Corpus:
    """The documents to train on, or those held out.

    See `open_splits`, which reads the sources once when both are wanted.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', but it is {split!r}")
    return open_splits(data)[split == "heldout"]


def open_splits(data: Any) -> tuple[Corpus, Corpus]:
    """The documents to train on and those held out.

    Args:
        data: has the attributes `train` and optionally `heldout` (""), `heldout_percent` (5), `text_field` ("text")
            and `data_dir` ("" means TFDS's own default). `train` and `heldout` are comma-separated sources:
            a file, folder (searched recursively, hidden entries left out) or glob; "stdlib", the standard library
            of the running interpreter; "tfds:name[/config][:version][#split]", split "train" unless given;
            or a folder written by experiments/tokenize.py.

    Returns:
        (train, heldout). Without `data.heldout` the documents are split by a hash of their names
        (`corpus.split_by_hash`); `heldout_percent` 0 leaves the second one empty.

    Raises:
        UserError, FileNotFoundError: one sentence that names the file or field at fault.
    """
    field, data_dir = getattr(data, "text_field", "text"), getattr(data, "data_dir", "")
    train = open_source(data.train, text_field=field, data_dir=data_dir)
    named = getattr(data, "heldout", "")
    if named:
        return train, open_source(named, text_field=field, data_dir=data_dir)
    return split_by_hash(train, getattr(data, "heldout_percent", 5.0), data.train)


def open_source(spec: str, *, text_field: str = "text", data_dir: str = "") -> Corpus:
    """All documents of one or several comma-separated sources, in an order that does not change between runs."""
    parts: list[Corpus] = []
    names = [spec] if os.path.exists(spec) else spec.split(",")  # a name may hold a comma itself
    for name in filter(None, (name.strip() for name in names)):
        if name == "stdlib":
            parts.append(readers.TextFiles(sorted(_standard_library(), key=lambda file: file[1])))
        elif name.startswith("tfds:"):
            parts.append(TfdsSource(name, text_field, data_dir))
        else:
            parts.extend(_open_path(os.path.expanduser(name), text_field))
    if not parts:
        raise UserError("no data was named: set data.train to a file, folder, glob, 'stdlib' or 'tfds:name'")
    corpus = parts[0] if len(parts) == 1 else Concatenation(parts)
    if corpus.total_bytes == 0:
        raise UserError(f"{spec} holds no text: every document in it is empty")
    return corpus


def _open_path(spec: str, field: str) -> Iterator[Corpus]:
    path = Path(spec)
    if path.is_dir():
        if is_token_folder(path):
            yield TokenFolder(path)
            return
        files = [(file, file.relative_to(path).as_posix()) for file in _walk(path) if _kind(file)]
        if not files:
            raise UserError(f"the folder {spec} holds no file that can be read (wanted {KNOWN})")
    elif path.is_file():
        files = [(path, path.name)]
    elif glob.has_magic(spec):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        matches = [match for match in map(Path, glob.glob(spec, recursive=True)) if match.is_file()]
        files = [(match, match.relative_to(root).as_posix()) for match in matches]
        if not files:
            raise FileNotFoundError(f"no file matches {spec}")
    else:
        raise FileNotFoundError(f"there is no file or folder {spec}")
    files.sort(key=lambda file: file[1])
    for kind, group in itertools.groupby(files, key=lambda file: _kind(file[0])):
        if kind == "jsonl":
            yield from (readers.JsonLines(*file, field) for file in group)
        elif kind == "compressed":
            yield from (readers.CompressedJsonLines(*file, field) for file in group)
        elif kind == "parquet":
            yield from (readers.Parquet(*file, field) for file in group)
        else:
            texts = list(group)
            for file, _ in texts if kind is None else ():
                if not readers.looks_like_text(file):
                    raise UserError(f"{file} is not text in UTF-8, and its extension is not one of those read: {KNOWN}")
            yield readers.TextFiles(texts)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for kind, extensions in (
        ("compressed", COMPRESSED_JSON_LINES),
        ("jsonl", JSON_LINES),
        ("parquet", PARQUET),
        ("text", TEXT),
    ):
        if name.endswith(extensions):
            return kind
    return None


def _walk(root: Path, skip: tuple[str, ...] = ()) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__" and name not in skip)
        yield from (Path(folder, name) for name in sorted(files) if name[0] != ".")


def _standard_library() -> Iterator[tuple[Path, str]]:
    """The .py files of the interpreter's standard library that are UTF-8.

    Its own tests are left out: some systems do not install them, and where they are they outweigh the rest two to one.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root, skip=("site-packages", "dist-packages", "test", "tests", "idle_test")):
        if path.suffix == ".py":
            try:
                path.read_bytes().decode()
            except (UnicodeDecodeError, OSError):
                continue
            yield path, path.relative_to(root).as_posix()


class TfdsSource(Corpus):
    """A TensorFlow dataset in array_record files, read without TensorFlow; each example is a document."""

    exact_sizes = ranked_sizes = False

    def __init__(self, spec: str, field: str, data_dir: str = ""):
        """spec: "tfds:name[/config][:version][#split]"; a dataset not yet prepared is downloaded by TFDS.

        Raises:
            UserError: TFDS does not know the dataset, cannot prepare it, or it has no such split or text field.
        """
        import tensorflow_datasets as tfds

        self._spec, self._field = spec, field
        name, _, split = spec.removeprefix("tfds:").partition("#")
        try:
            builder_kwargs = {"file_format": "array_record"}
            self._source = tfds.data_source(
                name, split=split or "train", data_dir=data_dir or None, builder_kwargs=builder_kwargs
            )
        except Exception as error:  # TFDS and what it calls raise errors of many classes, some of them many lines long.
            # The first sentence: lists of all datasets or of installation steps follow.
            reason = re.split(r"[.:!](?= |$)", " ".join(str(error).split()), maxsplit=1)[0][:300]
            raise UserError(f"{spec} cannot be opened through TFDS: {type(error).__name__}: {reason}") from error
        info = self._source.dataset_info
        count = len(self._source)
        total = sum(part.num_bytes for part in info.splits.values())
        examples = sum(part.num_examples for part in info.splits.values())
        self.sizes = np.full(count, max(1, total // max(examples, 1)), dtype=np.int64)
        if count:
            self[0]

    def __getitem__(self, index: int) -> bytes:
        return readers.field_text(self._source[index], f"{self._spec}, example {index}", self._field)

    def name(self, index: int) -> str:
        return f"{self._spec}#{index}"
