"""Tokenizers, token folders and the two programs that write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from linattn_jax.data import heldout_bytes, load_tokenizer, open_splits, train_bpe, train_iterator
from linattn_jax.data.sources import open_source
from linattn_jax.data.tokenizers import check_ids, sample_texts
from linattn_jax.data.tokens import TokenFolder, write_tokens
from linattn_jax.types import UserError

TEXTS = ["the cat sat on the mat\n" * 30, "naïve café 😀 \0 tab\t end", b"bytes are text too " * 20]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def word_level(path, words, **fields):
    """A tokenizer file with whole words as its vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    content = json.loads(tokenizer.to_str()) | fields
    path.write_text(json.dumps(content))
    return str(path)


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("bytes", 257, 256)
    ids = tokenizer.encode("né\0")
    assert ids.dtype == np.int32
    assert ids.tolist() == [110, 195, 169, 0] == tokenizer.encode("né\0".encode()).tolist()
    assert tokenizer.decode_bytes([256, *ids, 256]) == "né\0".encode()
    assert tokenizer.decode([110, 195]) == "n\ufffd"
    with pytest.raises(
        UserError, match=r"token id 257 is outside the vocabulary of the tokenizer 'bytes' \(0 to 256\)"
    ):
        tokenizer.decode([1, 257])
    with pytest.raises(UserError, match="token id -1"):
        tokenizer.decode([-1])


def test_bytes_saved_and_loaded(tmp_path):
    load_tokenizer("bytes").save(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).name == "bytes"


def test_bpe_is_lossless_and_shorter_than_bytes(bpe):
    for text in TEXTS:
        raw = text.encode() if isinstance(text, str) else text
        ids = bpe.encode(text)
        assert ids.dtype == np.int32
        assert bpe.decode_bytes(ids) == raw
        assert bpe.decode(ids) == raw.decode()
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert bpe.vocab_size == 300
    for alone, together in zip(TEXTS, bpe.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(bpe.encode(alone), together)


def test_a_text_cannot_spell_the_end_of_text(bpe):
    ids = bpe.encode("a<|endoftext|>b")
    assert bpe.eot not in ids
    assert bpe.decode(ids) == "a<|endoftext|>b"
    assert bpe.decode([bpe.eot, *bpe.encode("x"), bpe.eot]) == "x"


def test_bpe_saved_and_loaded_has_the_same_fingerprint(bpe, tmp_path):
    bpe.save(tmp_path / "again.json")
    again = load_tokenizer(str(tmp_path / "again.json"))
    assert (again.fingerprint, again.eot, again.vocab_size) == (bpe.fingerprint, bpe.eot, bpe.vocab_size)
    other = train_bpe(TEXTS, 290, tmp_path / "other.json")
    assert other.fingerprint != bpe.fingerprint


def test_training_a_bpe_twice_gives_the_same_file(bpe, tmp_path):
    assert train_bpe(iter(TEXTS), 300, tmp_path / "twice.json").fingerprint == bpe.fingerprint


@pytest.mark.parametrize("eot", ["<|endoftext|>", "</s>", "<eos>"])
def test_end_of_text_is_found(tmp_path, eot):
    tokenizer = load_tokenizer(word_level(tmp_path / "t.json", ["[UNK]", eot, "b", "c"]))
    assert (tokenizer.eot, tokenizer.vocab_size) == (1, 4)


def test_end_of_text_is_added_and_said(tmp_path, caplog):
    with caplog.at_level("INFO", "absl"):
        tokenizer = load_tokenizer(word_level(tmp_path / "t.json", ["[UNK]", "b"]))
    assert (tokenizer.eot, tokenizer.vocab_size) == (2, 3)
    assert "t.json has no end-of-text token; <|endoftext|> was added" in caplog.text
    tokenizer.save(tmp_path / "saved.json")
    assert load_tokenizer(str(tmp_path / "saved.json")).fingerprint == tokenizer.fingerprint


def test_what_a_file_says_about_length_and_special_tokens_is_not_followed(tmp_path):
    words = ["[UNK]", "[CLS]", "[SEP]", "b"]
    processor = {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = word_level(tmp_path / "t.json", words, post_processor=processor, truncation=truncation)
    assert load_tokenizer(path).encode("b b b b b").tolist() == [3] * 5


def test_unreadable_tokenizers(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer file .*missing\.json"):
        load_tokenizer(str(tmp_path / "missing.json"))
    for content in (b"{}", b"not json", b"\xff\xfe", b'{"text": "bytes"}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.json is not a Hugging Face tokenizers JSON file: .") as caught:
            load_tokenizer(str(tmp_path / "bad.json"))
        assert "\n" not in str(caught.value)


def test_training_mistakes(tmp_path):
    with pytest.raises(UserError, match="at least 257 ids, but 256"):
        train_bpe(TEXTS, 256, tmp_path / "t.json")
    with pytest.raises(UserError, match="no text to train a tokenizer on"):
        train_bpe(["", b""], 300, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_sampled_texts(folder):
    corpus = open_source(str(folder))
    assert list(sample_texts(corpus)) == [corpus[i] for i in range(30)]
    some = list(sample_texts(corpus, 1000))
    assert 1000 <= sum(map(len, some)) < 1400
    assert list(sample_texts(corpus, 1000)) == some


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_token_folder_holds_the_corpus(folder, tmp_path, config, bpe, kind):
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else bpe
    (folder / "empty.txt").write_bytes(b"")
    (folder / "zz.txt").write_text("naïve 😀")
    corpus = open_source(str(folder))
    meta = write_tokens(corpus, tokenizer, tmp_path / "tokens", source=str(folder), shard_bytes=1000)
    assert meta["dtype"] == "uint16"
    assert (meta["documents"], meta["bytes"]) == (31, corpus.total_bytes)
    assert meta["tokenizer_hash"] == tokenizer.fingerprint
    assert len(meta["shards"]) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokens"], "nothing temporary is left"
    tokens = open_source(str(tmp_path / "tokens"))
    texts = [corpus[i] for i in range(len(corpus)) if corpus[i]]
    assert [tokens.text(i) for i in range(len(tokens))] == texts
    for i, text in enumerate(texts):
        np.testing.assert_array_equal(tokens[i], tokenizer.encode(text))
        assert tokens[i].dtype == np.int32
    assert tokens.sizes.tolist() == [len(text) for text in texts]
    assert tokens.token_counts.sum() == meta["tokens"]
    # The same documents are held out before and after.
    _, before = open_splits(config(train=str(folder), heldout_percent=30))
    _, after = open_splits(config(train=str(tmp_path / "tokens"), heldout_percent=30))
    assert heldout_bytes(after) == heldout_bytes(before)
    kwargs = {"batch_size": 2, "seq_len": 16}
    batch = next(train_iterator(tokens, tokenizer, **kwargs))
    assert batch["inputs"].shape == (2, 16)


def test_wide_vocabularies_take_four_bytes(tmp_path, folder):
    class Wide(type(load_tokenizer("bytes"))):
        vocab_size = 2**16 + 1

        def encode(self, text):
            return super().encode(text) + 2**16 - 255

    corpus = open_source(str(folder))
    meta = write_tokens(corpus, Wide(), tmp_path / "tokens", source="x")
    assert meta["dtype"] == "uint32"
    np.testing.assert_array_equal(TokenFolder(tmp_path / "tokens")[3], Wide().encode(corpus[3]))


def test_token_folder_of_another_tokenizer(tmp_path, folder, bpe):
    write_tokens(open_source(str(folder)), bpe, tmp_path / "tokens", source="x")
    tokens = open_source(str(tmp_path / "tokens"))
    message = (
        r"tokens was written with the tokenizer 'tokenizer.json' \(hash \w+\), not with 'bytes' .*: set data.tokeniz"
    )
    with pytest.raises(UserError, match=message):
        train_iterator(tokens, load_tokenizer("bytes"), batch_size=1, seq_len=8)
    mixed = open_source(f"{folder}, {tmp_path / 'tokens'}")
    with pytest.raises(UserError, match=message):
        train_iterator(mixed, load_tokenizer("bytes"), batch_size=1, seq_len=8)
    next(train_iterator(mixed, load_tokenizer(str(tmp_path / "tokens" / "tokenizer.json")), batch_size=1, seq_len=8))


def test_ids_outside_the_vocabulary_name_the_document(tmp_path, folder):
    tokenizer = load_tokenizer("bytes")
    write_tokens(open_source(str(folder)), tokenizer, tmp_path / "tokens", source="x")
    tokens = open_source(str(tmp_path / "tokens"))
    tokenizer.vocab_size = 66
    with pytest.raises(UserError, match=r"tokens#\d+: token id \d+ is outside the vocabulary of the tokenizer 'bytes'"):
        next(train_iterator(tokens, tokenizer, batch_size=2, seq_len=500))
    assert check_ids([], tokenizer).size == 0


def test_damaged_token_folders(tmp_path, folder):
    path = tmp_path / "tokens"
    write_tokens(open_source(str(folder)), load_tokenizer("bytes"), path, source="x", shard_bytes=1000)
    shards = sorted(path.glob("*.array_record"))
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(UserError, match=r"the token folder .*tokens is damaged: \w"):
        open_source(str(path))
    shards[1].write_bytes(content)
    np.save(path / "documents.npy", np.load(path / "documents.npy")[:-1])
    with pytest.raises(UserError, match=r"damaged: meta.json counts 30 documents, documents.npy 29 and the shards 30"):
        open_source(str(path))
    (path / "documents.npy").unlink()
    with pytest.raises(UserError, match=r"damaged: .*documents\.npy"):
        open_source(str(path))


def test_overwriting(tmp_path, folder, monkeypatch):
    corpus, tokenizer = open_source(str(folder)), load_tokenizer("bytes")
    path = tmp_path / "tokens"
    write_tokens(corpus, tokenizer, path, source="first")
    with pytest.raises(UserError, match=r"tokens exists already; pass --overwrite"):
        write_tokens(corpus, tokenizer, path, source="second")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_batch", lambda texts: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            write_tokens(corpus, tokenizer, path, source="second", overwrite=True)
    assert TokenFolder(path).meta["source"] == "first", "a run that fails replaces nothing"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts", "tokens"]
    write_tokens(corpus, tokenizer, path, source="second", overwrite=True)
    assert TokenFolder(path).meta["source"] == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts", "tokens"]
    with pytest.raises(UserError, match=r"texts exists and is not a token folder, so it is not replaced"):
        write_tokens(corpus, tokenizer, folder, source="third", overwrite=True)
    assert len(list(folder.iterdir())) == 30


PROGRAM = "import sys; from absl import app; from experiments import {0}; app.run({0}.main)"


def run_program(name, *flags):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM.format(name), *flags]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True)


def test_programs(tmp_path, folder):
    (folder / "prose.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 50)
    path = tmp_path / "tokenizer.json"
    said = run_program("train_tokenizer", f"--data={folder}", "--vocab_size=270", f"--out={path}").stdout
    assert "270 ids" in said
    said = run_program("tokenize", f"--data={folder}", f"--tokenizer={path}", f"--out={tmp_path / 'tokens'}").stdout
    tokens = TokenFolder(tmp_path / "tokens")
    assert f"31 documents, {tokens.meta['tokens']:,} tokens of uint16" in said
    assert tokens.meta["source"] == str(folder)
    tokens.check_tokenizer(load_tokenizer(str(path)))


def test_tokenize_does_not_pose_as_the_standard_module():
    program = Path(__file__).parents[2] / "experiments" / "tokenize.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("run the programs as python -m experiments.NAME, not by file name")
