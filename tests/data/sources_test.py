"""What the user names becomes the documents they meant, and every mistake becomes one sentence."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from linattn_jax.data import open_corpus, open_splits, readers
from linattn_jax.data.corpus import clean_utf8, stable_hash, text_to_bytes
from linattn_jax.data.sources import open_source
from linattn_jax.types import UserError


def documents(corpus):
    return [corpus[i] for i in range(len(corpus))]


def names(corpus):
    return [corpus.name(i) for i in range(len(corpus))]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def json_lines(*texts, field="text"):
    return "".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts))


def test_folder_is_searched_for_text_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.py", "a/c.md", ".git/x.txt", "a/__pycache__/y.py", ".hidden.txt", "photo.jpg", "A.TXT"):
        write(tmp_path / name, name)
    corpus = open_source(str(tmp_path))
    assert names(corpus) == ["A.TXT", "a/c.md", "a/z.py", "b.txt"]
    assert documents(corpus) == [name.encode() for name in names(corpus)]
    assert corpus.total_bytes == 22
    assert corpus.longest_bytes == 6


def test_files_globs_and_lists(tmp_path):
    for name in ("x/1.txt", "x/2.txt", "x/y/3.txt", "LICENSE"):
        write(tmp_path / name, name)
    assert names(open_source(f"{tmp_path}/x/*.txt")) == ["1.txt", "2.txt"]
    assert names(open_source(f"{tmp_path}/x/**/*.txt")) == ["1.txt", "2.txt", "y/3.txt"]
    assert names(open_source(f"{tmp_path}/*/1.txt")) == ["x/1.txt"]
    both = open_source(f"{tmp_path}/LICENSE, {tmp_path}/x")
    assert names(both) == ["LICENSE", "1.txt", "2.txt", "y/3.txt"]
    assert documents(both) == [b"LICENSE", b"x/1.txt", b"x/2.txt", b"x/y/3.txt"]
    assert [both.text(i) for i in range(4)] == documents(both)
    with pytest.raises(IndexError):
        both[4]
    assert documents(open_source(str(write(tmp_path / "one, two.txt", "comma")))) == [b"comma"]


def test_large_text_is_cut_at_line_ends(tmp_path):
    rng = np.random.default_rng(0)
    lines = [b"x" * int(n) + b"\n" for n in rng.integers(0, 200, 30_000)]
    lines[500] = "é".encode() * 50_000 + b"\n"  # longer than a part
    content = b"".join(lines)
    path = write(tmp_path / "long.txt", content)
    assert len(content) > 2**21
    corpus = open_source(str(path))
    parts = documents(corpus)
    assert b"".join(parts) == content
    assert len(parts) >= 32
    assert corpus.longest_bytes <= readers.MAX_PART
    assert names(corpus)[:2] == ["long.txt#0", "long.txt#1"]
    ends = [part.endswith(b"\n") for part in parts]
    assert ends.count(False) == 1, "the line of é is cut once, between two characters"
    assert corpus.sizes.tolist() == [len(part) for part in parts]
    assert len(open_source(str(write(tmp_path / "short.txt", content[: 2**20])))) == 1


def test_long_lines_are_cut_between_characters(tmp_path):
    for lead in range(4):
        content = b"a" * lead + "😀".encode() * 300_000
        corpus = open_source(str(write(tmp_path / f"{lead}.txt", content)))
        assert len(corpus) > 10
        assert b"".join(documents(corpus)) == content, "no character became U+FFFD"


def test_bytes_that_are_not_utf8(tmp_path):
    write(tmp_path / "bom.txt", b"\xef\xbb\xbfabc")
    write(tmp_path / "latin.txt", "caf\xe9!".encode("latin-1"))
    write(tmp_path / "nul.txt", b"a\0b")
    assert documents(open_source(str(tmp_path))) == [b"abc", "caf\ufffd!".encode(), b"a\0b"]
    assert clean_utf8(b"\xff") == b"\xef\xbf\xbd"
    assert text_to_bytes("a\ud800b") == "a\ufffdb".encode()


def test_unknown_extension_is_read_if_it_is_text(tmp_path):
    assert documents(open_source(str(write(tmp_path / "NOTES.weird", "plain")))) == [b"plain"]
    odd = b"a" + "é".encode() * 40_000  # the end of what is looked at falls inside a character
    assert documents(open_source(str(write(tmp_path / "long.weird", odd)))) == [odd]
    for name, content in {"photo.jpg": b"\xff\xd8", "a.bin": b"ab\0c", "a.weird": b"a\xe9b", "cut": b"caf\xc3"}.items():
        with pytest.raises(UserError, match=f"{name} is not text in UTF-8, and its extension"):
            open_source(str(write(tmp_path / name, content)))


def test_standard_library(monkeypatch, tmp_path):
    corpus = open_source("stdlib")
    listed = names(corpus)
    assert 5e6 < corpus.total_bytes < 30e6
    assert listed == sorted(listed)
    assert {"json/decoder.py", "this.py"} <= set(listed)
    assert not [name for name in listed if "site-packages" in name or "__pycache__" in name or not name.endswith(".py")]
    assert corpus[listed.index("this.py")] == Path(sysconfig.get_path("stdlib"), "this.py").read_bytes()
    write(tmp_path / "good.py", "x")
    write(tmp_path / "bad.py", b"\xe9")
    write(tmp_path / "site-packages/other.py", "x")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert names(open_source("stdlib")) == ["good.py"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_json_lines(tmp_path, end):
    content = json_lines("one", None, "dreißig", "") + '\n\r\n   \n{"text": "\\ud800 last"}' + end
    corpus = open_source(str(write(tmp_path / "a.jsonl", content)))
    wanted = [b"one", b"", "dreißig".encode(), b"", "\ufffd last".encode()]
    assert [text for text in documents(corpus) if text] == [text for text in wanted if text]
    assert names(corpus)[0] == "a.jsonl#0"
    for suffix, data in (("gz", gzip.compress(content.encode())), ("zst", zstandard.compress(content.encode()))):
        packed = open_source(str(write(tmp_path / f"a.jsonl.{suffix}", data)))
        assert documents(packed) == wanted
        assert packed.sizes.tolist() == [3, 0, 8, 0, 8]


def test_json_lines_across_read_blocks_and_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_BLOCK", 7)
    texts = [f"text {i}" * (i % 5) for i in range(50)]
    content = json_lines(*texts).encode()
    frames = zstandard.compress(content[:300]) + zstandard.compress(content[300:])
    for name, data in (("a.jsonl", content), ("b.jsonl.gz", gzip.compress(content)), ("c.jsonl.zst", frames)):
        assert documents(open_source(str(write(tmp_path / name, data)))) == [text.encode() for text in texts]


def test_json_mistakes_name_file_line_and_fields(tmp_path):
    path = write(tmp_path / "a.jsonl", json_lines("x", field="body"))
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: no field 'text' .* its fields are: body, id \(set data.text_field"
    ):
        open_source(str(path))
    assert documents(open_source(str(path), text_field="body")) == [b"x"]
    bad = json_lines("x") + "\n" + '{"text": \n'
    corpus = open_source(str(write(tmp_path / "b.jsonl", bad)))
    with pytest.raises(UserError, match=r"b\.jsonl:3: not valid JSON"):
        documents(corpus)
    with pytest.raises(UserError, match=r"b\.jsonl\.gz:3: not valid JSON"):
        open_source(str(write(tmp_path / "b.jsonl.gz", gzip.compress(bad.encode()))))
    with pytest.raises(UserError, match=r"c\.jsonl:1: expected a JSON object with the field 'text', found list"):
        open_source(str(write(tmp_path / "c.jsonl", "[1]\n")))
    with pytest.raises(UserError, match=r"d\.jsonl:1: the field 'text' holds int, not text"):
        open_source(str(write(tmp_path / "d.jsonl", '{"text": 1}\n')))


@pytest.mark.parametrize("cut", [0.0, 0.5])
def test_damaged_compressed_files(tmp_path, cut):
    content = json_lines(*(os.urandom(20).hex() for _ in range(500))).encode()
    for suffix, data in (("gz", gzip.compress(content)), ("zst", zstandard.compress(content))):
        damaged = data[: int(len(data) * cut)] if cut else b"this is no archive" * 4
        path = write(tmp_path / f"a.jsonl.{suffix}", damaged)
        with pytest.raises(UserError, match=rf"a\.jsonl\.{suffix} cannot be decompressed: \w"):
            open_source(str(path))


@pytest.mark.parametrize("cache_bytes", [2**28, 1])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path, kind, cache_bytes):
    texts = [None if i % 7 == 3 else f"é {i}" * (i % 4) for i in range(100)]
    column = pa.array(texts).cast(pa.string()).cast(kind) if kind != pa.dictionary(pa.int32(), pa.string()) else (
        pa.array(texts).dictionary_encode())  # fmt: skip
    pq.write_table(pa.table({"text": column, "id": list(range(100))}), tmp_path / "a.parquet", row_group_size=13)
    corpus = readers.Parquet(tmp_path / "a.parquet", "a.parquet", "text", cache_bytes=cache_bytes)
    wanted = [(text or "").encode() for text in texts]
    order = np.random.default_rng(0).permutation(100).tolist()
    assert [corpus[i] for i in order] == [wanted[i] for i in order]
    assert names(corpus)[99] == "a.parquet#99"
    if cache_bytes > 1:
        assert corpus.sizes.tolist() == [len(text) for text in wanted]
    else:
        assert len(corpus._cache) == 1
        assert not corpus.ranked_sizes


def test_parquet_mistakes(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text' .* its columns are: body, id"):
        open_source(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match=r"a\.parquet: the column 'id' holds int64, not text"):
        open_source(str(tmp_path / "a.parquet"), text_field="id")
    assert documents(open_source(str(tmp_path / "a.parquet"), text_field="body")) == [b"x"]
    with pytest.raises(UserError, match=r"b\.parquet cannot be read as parquet: \w"):
        open_source(str(write(tmp_path / "b.parquet", b"PAR1 this is not parquet PAR1")))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{}/missing.txt", FileNotFoundError, r"there is no file or folder .*/missing\.txt"),
        ("{}/*.rst", FileNotFoundError, r"no file matches .*/\*\.rst"),
        ("{}/empty_folder", UserError, r"the folder .*/empty_folder holds no file that can be read"),
        ("{}/empty.txt", UserError, r"/empty\.txt holds no text: every document in it is empty"),
        ("{}/empty.jsonl", UserError, r"/empty\.jsonl holds no text"),
        (" , ", UserError, "no data was named: set data.train"),
    ],
)
def test_mistakes_in_sources(tmp_path, source, error, message):
    (tmp_path / "empty_folder").mkdir()
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "empty.jsonl", "")
    with pytest.raises(error, match=message) as caught:
        open_source(source.format(tmp_path))
    assert "\n" not in str(caught.value)


def test_heldout_documents_are_chosen_by_name(folder, config):
    train, heldout = open_splits(config(train=str(folder), heldout_percent=30))
    assert sorted(names(train) + names(heldout)) == [f"{i:02d}.txt" for i in range(30)]
    threshold = 0.3 * 2**64
    assert names(heldout) == [f"{i:02d}.txt" for i in range(30) if stable_hash(f"{i:02d}.txt") < threshold]
    assert 3 <= len(heldout) <= 15
    assert documents(heldout) == [(folder / name).read_bytes() for name in names(heldout)]
    write(folder / "more.txt", "x")
    again = names(open_corpus(config(train=str(folder), heldout_percent=30), "heldout"))
    assert set(again) - {"more.txt"} == set(names(heldout)), "adding a file moves no other"
    # The hash is part of what a published number means: it must not change.
    assert stable_hash("a.txt") == 14487794477240457685


def test_heldout_source_overrides_the_hash(folder, config, tmp_path):
    path = write(tmp_path / "other.txt", "held out")
    train, heldout = open_splits(config(train=str(folder), heldout=str(path), heldout_percent=50))
    assert len(train) == 30
    assert documents(heldout) == [b"held out"]


def test_two_documents_are_enough_to_hold_one_out(tmp_path, config):
    for percent in (0.001, 99.99):
        write(tmp_path / "a.txt", "a")
        write(tmp_path / "b.txt", "b")
        train, heldout = open_splits(config(train=str(tmp_path), heldout_percent=percent))
        assert sorted(documents(train) + documents(heldout)) == [b"a", b"b"]
        assert len(train) == len(heldout) == 1
    one = config(train=str(tmp_path / "a.txt"), heldout_percent=5)
    with pytest.raises(UserError, match=r"a\.txt holds only one document.*data\.heldout"):
        open_splits(one)
    train, heldout = open_splits(config(train=str(tmp_path / "a.txt"), heldout_percent=0))
    assert (len(train), len(heldout)) == (1, 0)


@pytest.mark.parametrize("percent", [-1, 100])
def test_percent_is_checked(folder, config, percent):
    with pytest.raises(UserError, match=r"data\.heldout_percent must be at least 0 and below 100"):
        open_splits(config(train=str(folder), heldout_percent=percent))


def test_split_name_is_checked(folder, config):
    with pytest.raises(ValueError, match="'validation'"):
        open_corpus(config(train=str(folder)), "validation")


TFDS_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import tiny_text
tiny_text.TinyText(data_dir=sys.argv[2], file_format="array_record").download_and_prepare()
"""
TFDS_READ = """
import json, sys
from linattn_jax.data.sources import open_source
corpus = open_source("tfds:tiny_text:1.0.0", data_dir=sys.argv[1])
test = open_source("tfds:tiny_text#test", data_dir=sys.argv[1])
assert not [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tiny_text")]
errors = []
for spec, field in (("tfds:tiny_text", "body"), ("tfds:tiny_text#validation", "text"), ("tfds:no_such_data", "text")):
    try:
        open_source(spec, text_field=field, data_dir=sys.argv[1])
    except ValueError as error:
        errors.append(type(error).__name__ + ": " + str(error))
print(json.dumps([sorted(corpus[i].decode() for i in range(len(corpus))), corpus.name(1), len(test), errors]))
"""


def test_tfds_without_tensorflow(tmp_path):
    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", TFDS_SCRIPT, here, str(tmp_path)], env=env, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", TFDS_READ, str(tmp_path)], env=env, check=True, capture_output=True, text=True
    )
    texts, name, tests, errors = json.loads(done.stdout.splitlines()[-1])
    assert texts == sorted(f"example {i} é" for i in range(20))
    assert name == "tfds:tiny_text:1.0.0#1"
    assert tests == 3
    assert errors[0].startswith("UserError: tfds:tiny_text, example 0: no field 'body'")
    assert "its fields are: label, text" in errors[0] or "its fields are: text, label" in errors[0]
    assert errors[1].startswith("UserError: tfds:tiny_text#validation cannot be opened through TFDS")
    assert errors[2].startswith("UserError: tfds:no_such_data cannot be opened through TFDS: DatasetNotFoundError: ")
    assert not [error for error in errors if "\n" in error or len(error) > 200]
