"""Needles: where they lie, what is asked, how much fits, and that an example depends on seed and index alone."""

from __future__ import annotations

import functools
import re
import uuid

import numpy as np
import pytest

from linattn_jax.data import load_tokenizer, train_bpe
from linattn_jax.data.needles import (
    ADJECTIVES,
    KINDS,
    NOISE,
    NOUNS,
    Needle,
    answers,
    draw,
    needle_batch,
    retrievals,
    sentences_of,
)
from linattn_jax.data.sources import open_source
from linattn_jax.types import UserError

BYTES = load_tokenizer("bytes")
FACT = re.compile(r"The secret (?:number|code) of ([a-z]+-[a-z]+) is ([0-9a-f-]+)\.")
SENTENCE = re.compile(r"Witness \d+ said that nothing had been seen at \d+ o'clock\.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty documents of 1 to 40 sentences, all of one form; a line of each is wrapped."""
    root = tmp_path_factory.mktemp("essays")
    for i in range(40):
        text = "".join(f"Witness {100 * i + j} said that nothing had been seen at {j} o'clock. " for j in range(i))
        (root / f"{i:02d}.txt").write_text(f"{text}Witness {i} said that nothing had been\nseen at 0 o'clock.\n")
    return root


@pytest.fixture(scope="module")
def essays(folder):
    return open_source(str(folder))


@pytest.fixture(scope="module")
def tokenizers(folder, tmp_path_factory):
    """Bytes; a byte-level BPE; one that joins words, so that a prompt's last token may not be that of the whole text;
    and one that puts a blank before every text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    root = tmp_path_factory.mktemp("tokenizers")
    made = {"bytes": BYTES}
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    texts += [f"The secret number of calm-otter is {i}." for i in range(10**6, 10**7, 9001)]
    made["bpe"] = train_bpe(texts, 600, root / "bpe.json")
    joined = Tokenizer(models.BPE())
    joined.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    joined.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    joined.save(str(root / "joined.json"))
    made["joined"] = load_tokenizer(str(root / "joined.json"))
    meta = Tokenizer(models.BPE())
    meta.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    meta.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    meta.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    meta.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, initial_alphabet=[*map(chr, range(32, 127))]))
    meta.save(str(root / "meta.json"))
    made["meta"] = load_tokenizer(str(root / "meta.json"))
    return made


@pytest.mark.parametrize("name", ["bytes", "bpe", "joined", "meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_hold_the_fact_once_where_they_say_and_leave_room(kind, name, essays, tokenizers):
    tokenizer = tokenizers[name]
    noun = "code" if kind == "uuid" else "number"
    for length in (300, 513, 1500):
        needle = Needle(kind, length, tokenizer, essays)
        for index in range(8):
            prompt, answer, depth, key, value = draw(needle, index)
            assert prompt.dtype == answer.dtype == np.int32
            assert prompt[0] == tokenizer.eot
            assert 1 <= len(answer) <= needle.room
            assert len(prompt) + needle.room <= length
            # Nothing but a sentence of at most 70 bytes is missing.
            assert len(prompt) + needle.room >= length - 72
            text = tokenizer.decode(prompt)
            (found,) = FACT.findall(text)
            assert found == (key, value)
            assert text.count(value) == 1
            assert text.count(key) == 3
            assert text.endswith(f"of {key}? The secret {noun} of {key} is")
            assert answers(value, tokenizer.decode(answer))
            body = text[text.index("\n") + 1 : text.rindex("\nWhat")]
            start, stop = FACT.search(body).span()
            assert depth == pytest.approx(start / (len(body) - (stop - start)), abs=0.08)


def test_the_answer_goes_on_from_the_prompt(tokenizers):
    """Where the tokenizer lets it, prompt and answer are the tokens of the text that a model was trained on."""
    for name, tokenizer in tokenizers.items():
        for index in range(8):
            prompt, answer, *_, value = draw(Needle("passkey", 400, tokenizer), index)
            whole = tokenizer.encode(f"{tokenizer.decode(prompt)} {value}")
            assert tokenizer.decode(np.concatenate([prompt, answer])) == tokenizer.decode(whole)
            if name != "joined":
                np.testing.assert_array_equal(np.concatenate([prompt[1:], answer]), whole)


@pytest.mark.parametrize("kind", ["passkey", "number"])
def test_depths_are_those_of_the_grid(kind, essays):
    needle = Needle(kind, 2000, BYTES, essays, grid=5)
    depths = [draw(needle, index).depth for index in range(10)]
    # Half of the longest sentence out of 1700 bytes of haystack.
    np.testing.assert_allclose(depths, np.tile(np.linspace(0, 1, 5), 2), atol=35 / 1700)
    assert depths[0] == 0.0
    assert depths[4] == 1.0


def test_depths_are_uniform_without_a_grid():
    depths = [draw(Needle("passkey", 600, BYTES), index).depth for index in range(400)]
    counts, _ = np.histogram(depths, bins=4, range=(0, 1))
    np.testing.assert_allclose(counts, 100, atol=35)


@pytest.mark.parametrize("length", [1000, 3000])
def test_sentences_are_whole(essays, length):
    for index in range(20):
        for kind in KINDS:
            text = BYTES.decode(draw(Needle(kind, length, BYTES, essays), index).prompt)
            body = text[text.index("\n") + 1 : text.rindex("\nWhat")]
            rest = FACT.sub("", body)
            if kind == "passkey":
                for sentence in NOISE:
                    rest = rest.replace(sentence.strip(), "")
            else:
                rest = SENTENCE.sub("", re.sub(r"been\nseen", "been seen", rest))
            assert rest.strip() == ""
            assert FACT.search(body)


def test_a_long_line_is_cut_between_words_to_fill_the_text(tmp_path):
    (tmp_path / "line.txt").write_text(" ".join(f"word{i}" for i in range(5000)))
    for index in range(10):
        needle = Needle("number", 700, BYTES, open_source(str(tmp_path)))
        prompt = draw(needle, index).prompt
        assert 700 - 20 <= len(prompt) + needle.room <= 700
        text = FACT.sub("", BYTES.decode(prompt))
        words = text[text.index("\n") : text.rindex("\nWhat")].split()
        assert all(re.fullmatch(r"word\d+", word) for word in words[1:])


def test_short_documents_are_joined(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "Line {i} ends"}}\n' for i in range(50)))
    needle = Needle("uuid", 20_000, BYTES, open_source(str(tmp_path)))
    text = BYTES.decode(draw(needle, 0).prompt)
    assert len(re.findall(r"Line \d+ ends\n", text)) > 1200


def test_an_example_is_decided_by_seed_and_index(essays):
    for kind in KINDS:
        first = [draw(Needle(kind, 500, BYTES, essays, seed=1), index) for index in (3, 0, 7)]
        for index in (7, 0, 3):
            again = draw(Needle(kind, 500, BYTES, essays, seed=1), index)
            before = first[(3, 0, 7).index(index)]
            np.testing.assert_array_equal(again.prompt, before.prompt)
            assert again[2:] == before[2:]
        other = [draw(Needle(kind, 500, BYTES, essays, seed=2), index) for index in (3, 0, 7)]
        assert len({example.value for example in first + other}) == 6
        stream = retrievals(Needle(kind, 500, BYTES, essays, seed=1), 3)
        assert next(stream).value == first[0].value
        assert next(stream).value == draw(Needle(kind, 500, BYTES, essays, seed=1), 4).value
        longer = draw(Needle(kind, 1000, BYTES, essays, seed=1), 3)
        assert longer[3:] == first[0][3:]


def test_values_are_numbers_of_seven_digits_and_uuids_of_version_four(essays):
    values = [draw(Needle("uuid", 400, BYTES, essays), index).value for index in range(50)]
    assert all(str(uuid.UUID(value)) == value and uuid.UUID(value).version == 4 for value in values)
    assert {value[19] for value in values} == set("89ab")
    numbers = [draw(Needle("passkey", 400, BYTES), index).value for index in range(50)]
    assert all(re.fullmatch(r"[1-9]\d{6}", number) for number in numbers)
    assert len(set(values)) == len(set(numbers)) == 50


def test_words_differ():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) >= 64
    assert len(set(NOUNS)) == len(NOUNS) >= 64


def test_essays_that_hold_the_key_are_not_read(tmp_path):
    key = draw(Needle("passkey", 400, BYTES), 0).key
    (tmp_path / "essay.txt").write_text(f"I have seen {key} twice. You were not there. " * 40)
    text = BYTES.decode(draw(Needle("number", 900, BYTES, open_source(str(tmp_path))), 0).prompt)
    assert text.count(key) == 3
    assert text.count("You were not there.") > 10


def test_training_rows_weigh_the_answer_alone(essays, tokenizers):
    for tokenizer in tokenizers.values():
        needle = Needle("uuid", 500, tokenizer, essays, seed=3)
        tokens, positions, targets, weights = needle_batch(needle, 2, 3)
        assert (tokens.shape, positions.shape, targets.shape) == ((3, 500), (3, 38), (3, 38))
        assert (tokens.dtype, positions.dtype, targets.dtype) == (np.int32,) * 3
        for row in range(3):
            example = draw(needle, 6 + row)
            n, m = len(example.prompt), len(example.answer)
            np.testing.assert_array_equal(tokens[row, :n], example.prompt)
            np.testing.assert_array_equal(targets[row, :m], example.answer)
            np.testing.assert_array_equal(tokens[row, positions[row, :m] + 1], example.answer)
            assert positions[row, 0] == n - 1
            np.testing.assert_array_equal(weights[row], np.arange(38) < m)
            assert np.all(tokens[row, n + m :] == tokenizer.eot)


def test_sentences_keep_the_text():
    text = (
        'He said "No!" and left. Then, i.e. later, it rained.\n\nThis line is long enough to have been wrapped,\n'
        "which it was. x = 1\n    return x\n日本。語\nend"
    )
    parts = sentences_of(text)
    assert "".join(parts) == text
    assert parts == [
        'He said "No!" and left. ',
        "Then, i.e. later, it rained.\n\n",
        "This line is long enough to have been wrapped,\nwhich it was. x = 1\n",
        "    return x\n",
        "日本。",
        "語\n",
        "end",
    ]


def unspelled(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "The": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    return load_tokenizer(str(tmp_path / "words.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "word"}, "unknown kind 'word'; known: passkey, number, uuid"),
        ({"kind": "number"}, "kind 'number' hides its needle in essays: give a source"),
        ({"grid": 1}, "grid must be 0 or at least 2 depths, got 1"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"length": 100}, r"length 100 is too short for a passkey, which takes at least 204 tokens of bytes"),
        ({"tokenizer": unspelled}, "the tokenizer words.json cannot spell the value"),
    ],
)
def test_mistakes_are_named(tmp_path, change, message):
    change = {name: value(tmp_path) if callable(value) else value for name, value in change.items()}
    make = functools.partial(Needle, **({"kind": "passkey", "length": 512, "tokenizer": BYTES} | change))
    with pytest.raises(UserError, match=message):
        draw(make(), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_length_that_is_named_serves_every_key(kind, essays, tokenizers):
    for tokenizer in tokenizers.values():
        with pytest.raises(UserError) as caught:
            Needle(kind, 50, tokenizer, essays)
        least = int(re.search(r"at least (\d+)", str(caught.value))[1])
        with pytest.raises(UserError, match=f"at least {least} "):
            Needle(kind, least - 1, tokenizer, essays)
        needle = Needle(kind, least, tokenizer, essays)
        for index in range(100):
            assert len(draw(needle, index).prompt) + needle.room <= least
