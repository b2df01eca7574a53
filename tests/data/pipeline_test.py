"""Batches: every token with its target, segments, exact resumption, shards, epochs, evaluation."""

from __future__ import annotations

import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linattn_jax.data import eval_batches, heldout_bytes, load_tokenizer, open_corpus, train_iterator
from linattn_jax.types import UserError

TOKENIZER = load_tokenizer("bytes")
LAYOUTS = ("packed", "contiguous")


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_same(batches, wanted):
    assert len(batches) == len(wanted)
    for a, b in zip(batches, wanted, strict=True):
        for name in ("inputs", "targets", "segment_ids"):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def positions(batches):
    """(input, target) pairs of non-negative segments."""
    pairs = collections.Counter()
    for batch in batches:
        real = batch["segment_ids"] >= 0
        pairs.update(zip(batch["inputs"][real].tolist(), batch["targets"][real].tolist(), strict=True))
    return pairs


def wanted_positions(corpus):
    pairs = collections.Counter()
    for i in range(len(corpus)):
        ids = [256, *corpus[i], 256]
        pairs.update(itertools.pairwise(ids))
    return pairs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_hold_documents_from_eot_to_eot(folder, config, layout):
    corpus = open_corpus(config(train=str(folder)), "train")
    batches = take(train_iterator(corpus, TOKENIZER, batch_size=3, seq_len=50, layout=layout), 40)
    lengths = {corpus[i][0]: len(corpus[i]) for i in range(len(corpus))}
    for batch in batches:
        assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
        assert {array.shape for array in batch.values()} == {(3, 50)}
        assert batch["segment_ids"].min() >= 0
        for inputs, targets, segments in zip(*batch.values(), strict=True):
            for segment in set(segments.tolist()):
                at = np.flatnonzero(segments == segment)
                assert (np.diff(at) == 1).all()
                ids = {*inputs[at].tolist(), *targets[at].tolist()} - {256}
                assert len(ids) == 1, "a segment holds one document"
                assert len(at) <= lengths[ids.pop()] + 1
                np.testing.assert_array_equal(inputs[at][1:], targets[at][:-1])
            changes = np.flatnonzero(np.diff(segments)) + 1
            assert (inputs[changes] == 256).all()
            assert (targets[changes - 1] == 256).all()


def test_contiguous_rows_continue(folder, config):
    corpus = open_corpus(config(train=str(folder)), "train")
    batches = take(train_iterator(corpus, TOKENIZER, batch_size=3, seq_len=50, layout="contiguous"), 60)
    for row in range(3):
        inputs, targets, segments = (
            np.concatenate([batch[name][row] for batch in batches]) for name in ("inputs", "targets", "segment_ids")
        )
        same = segments[1:] == segments[:-1]
        np.testing.assert_array_equal(inputs[1:][same], targets[:-1][same])
        assert (inputs[1:][~same] == 256).all()
        assert (targets[:-1][~same] == 256).all()
        assert (inputs[1:] == 256).sum() == (~same).sum(), "an id continues exactly when the document does"
        stretches = [segment for segment, _ in itertools.groupby(segments.tolist())]
        assert len(stretches) == len(set(stretches))


def test_packed_rows_of_successive_batches_read_other_documents(tmp_path, config):
    for i in range(64):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 500)
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    first, second = take(train_iterator(corpus, TOKENIZER, batch_size=4, seq_len=20), 2)
    assert len(set(first["segment_ids"].flat)) == 4
    assert not set(first["segment_ids"].flat) & set(second["segment_ids"].flat)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epoch_uses_every_document_once_in_a_new_order(folder, config, layout):
    corpus = open_corpus(config(train=str(folder)), "train")
    batches = take(train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=64, layout=layout, seed=3), 400)
    document = {}
    for batch in batches:
        starts = batch["inputs"] == 256
        document.update(zip(batch["segment_ids"][starts].tolist(), batch["targets"][starts].tolist(), strict=True))
    orders = [[document[epoch * 30 + i] for i in range(30)] for epoch in range(3)]
    assert all(sorted(order) == list(range(65, 95)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_seed_decides_the_order(folder, config):
    corpus = open_corpus(config(train=str(folder)), "train")
    kwargs = {"batch_size": 2, "seq_len": 64}
    first = take(train_iterator(corpus, TOKENIZER, seed=1, **kwargs), 5)
    assert_same(take(train_iterator(corpus, TOKENIZER, seed=1, **kwargs), 5), first)
    other = take(train_iterator(corpus, TOKENIZER, seed=2, **kwargs), 5)
    assert any((a["inputs"] != b["inputs"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_resumes_exactly_at_every_batch_through_json(folder, config, layout, workers):
    # An epoch is about 6000 positions, so 68 batches of 2 x 64 cross its end.
    corpus = open_corpus(config(train=str(folder)), "train")
    make = lambda: train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=64, layout=layout, workers=workers)
    iterator = make()
    batches, states = [], [json.dumps(iterator.get_state())]
    for _ in range(68):
        batches.append(next(iterator))
        states.append(json.dumps(iterator.get_state()))
    iterator.close()
    assert max(batch["segment_ids"].max() for batch in batches) > 30, "the run crosses an epoch"
    restored = make()
    for i in range(0, 66, 1 if workers == 0 else 13):
        restored.set_state(json.loads(states[i]))
        assert json.loads(json.dumps(restored.get_state())) == json.loads(states[i])
        assert_same(take(restored, 2), batches[i : i + 2])
    restored.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_do_not_change_the_batches(folder, config, layout):
    corpus = open_corpus(config(train=str(folder)), "train")
    kwargs = {"batch_size": 2, "seq_len": 64, "layout": layout}
    threaded = train_iterator(corpus, TOKENIZER, workers=3, **kwargs)
    assert_same(take(threaded, 70), take(train_iterator(corpus, TOKENIZER, **kwargs), 70))
    threaded.close()


SCRIPT = """
import json, sys, types
import numpy as np
from linattn_jax.data import load_tokenizer, open_corpus, train_iterator
folder, layout, state, out = sys.argv[1:]
corpus = open_corpus(types.SimpleNamespace(train=folder, heldout_percent=20), "train")
iterator = train_iterator(corpus, load_tokenizer("bytes"), batch_size=2, seq_len=64, layout=layout)
iterator.set_state(json.loads(state))
np.save(out, np.stack([np.stack(list(next(iterator).values())) for _ in range(40)]))
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fresh_process_resumes_exactly(folder, config, tmp_path, layout):
    corpus = open_corpus(config(train=str(folder), heldout_percent=20), "train")
    iterator = train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=64, layout=layout)
    take(iterator, 29)
    state = json.dumps(iterator.get_state())
    out = tmp_path / "batches.npy"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), layout, state, str(out)], env=env, check=True)
    np.testing.assert_array_equal(np.load(out), [np.stack(list(next(iterator).values())) for _ in range(40)])


def test_state_of_another_run_is_refused(folder, config):
    corpus = open_corpus(config(train=str(folder)), "train")
    state = train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=64).get_state()
    other = train_iterator(corpus, TOKENIZER, batch_size=4, seq_len=64, seed=1)
    with pytest.raises(UserError, match=r"does not fit this run: batch_size was 2 and is 4, seed was 0 and is 1$"):
        other.set_state(state)
    (folder / "more.txt").write_text("12345")
    corpus = open_corpus(config(train=str(folder)), "train")
    with pytest.raises(UserError, match="documents was 30 and is 31, bytes was "):
        train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=64).set_state(state)


def test_processes_share_the_documents(folder, config):
    corpus = open_corpus(config(train=str(folder)), "train")
    seen = []
    for p in range(3):
        kwargs = {"process_index": p, "process_count": 3, "batch_size": 2, "seq_len": 64}
        batches = take(train_iterator(corpus, TOKENIZER, **kwargs), 60)
        seen.append({int(i) for batch in batches for i in np.unique(batch["inputs"])} - {256})
    assert [len(ids) for ids in seen] == [10, 10, 10]
    assert len(set().union(*seen)) == 30


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_documents_are_cut_so_that_rows_differ(tmp_path, config, layout):
    text = np.random.default_rng(0).integers(32, 127, 20_000).astype(np.uint8).tobytes()
    (tmp_path / "only.txt").write_bytes(text)
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    batches = take(train_iterator(corpus, TOKENIZER, batch_size=8, seq_len=25, layout=layout), 100)
    assert len(np.unique(batches[0]["inputs"], axis=0)) == 8
    pieces = train_iterator(corpus, TOKENIZER, batch_size=1, seq_len=20_001, layout=layout)
    assert positions(take(pieces, 1)) == wanted_positions(corpus)


def test_empty_documents_are_skipped_and_spaces_are_not(tmp_path, config):
    for name, content in {"a": b"", "b": b" \n\t", "c": b"", "d": b"xyz"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    batches = take(train_iterator(corpus, TOKENIZER, batch_size=1, seq_len=8), 5)
    wanted = [*itertools.pairwise([256, *b" \n\t", 256]), *itertools.pairwise([256, *b"xyz", 256])]
    assert positions(batches) == collections.Counter(5 * wanted)


def test_too_few_tokens_or_documents(tmp_path, config):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("0123456789")
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    next(train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=11))
    with pytest.raises(UserError, match="22 tokens, fewer than one batch of 2 rows x 12"):
        train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=12)
    with pytest.raises(UserError, match="11 tokens, fewer"):
        train_iterator(corpus, TOKENIZER, batch_size=2, seq_len=11, process_count=2)
    with pytest.raises(UserError, match="2 documents, too few to share among 3 processes"):
        train_iterator(corpus, TOKENIZER, batch_size=1, seq_len=1, process_count=3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seq_len": 0}, "seq_len must be at least 1"),
        ({"layout": "loose"}, "layout must be .* 'loose'"),
        ({"process_index": 2}, "process_index must be in"),
    ],
)
def test_arguments_are_checked(folder, config, kwargs, message):
    corpus = open_corpus(config(train=str(folder)), "train")
    with pytest.raises(ValueError, match=message):
        train_iterator(corpus, TOKENIZER, **{"batch_size": 2, "seq_len": 8, **kwargs})


def test_warns_when_rows_are_longer_than_any_document(tmp_path, config, caplog):
    for i in range(20):
        (tmp_path / f"{i:02d}.txt").write_text("a" * (i + 1))
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    with caplog.at_level("WARNING", "absl"):
        train_iterator(corpus, TOKENIZER, batch_size=1, seq_len=21)
        assert not caplog.records
        train_iterator(corpus, TOKENIZER, batch_size=1, seq_len=22)
    assert "19.txt, has 20 tokens" in caplog.text


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_sees_every_token_once(folder, config, batch_size, processes):
    corpus = open_corpus(config(train=str(folder), heldout_percent=50), "heldout")
    batches = []
    for p in range(processes):
        part = eval_batches(
            corpus, TOKENIZER, batch_size=batch_size, seq_len=32, process_index=p, process_count=processes
        )
        batches.append(list(part))
        assert len(batches[-1]) == len(part)
        for row in range(batch_size):
            inputs, targets, segments = (
                np.concatenate([batch[name][row] for batch in part]) for name in ("inputs", "targets", "segment_ids")
            )
            same = (segments[1:] == segments[:-1]) & (segments[1:] >= 0)
            np.testing.assert_array_equal(inputs[1:][same], targets[:-1][same])
            assert (inputs[segments < 0] == 0).all()
    everything = [batch for part in batches for batch in part]
    assert len({len(part) for part in batches}) == 1
    assert positions(everything) == wanted_positions(corpus)
    assert part.total_tokens == sum(wanted_positions(corpus).values())
    assert part.total_bytes == corpus.total_bytes == len(heldout_bytes(corpus))


def test_evaluation_is_not_held_up_by_one_long_document(tmp_path, config):
    (tmp_path / "long.txt").write_text("a" * 40_000)
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("b" * 50)
    corpus = open_corpus(config(train=str(tmp_path)), "train")
    batches = eval_batches(corpus, TOKENIZER, batch_size=4, seq_len=100)
    assert len(batches) <= 1.1 * 40_500 / 400 + 1
    assert positions(batches) == wanted_positions(corpus)


def test_evaluation_covers_the_same_documents_as_heldout_bytes(folder, config):
    corpus = open_corpus(config(train=str(folder)), "train")
    batches = eval_batches(corpus, TOKENIZER, batch_size=2, seq_len=32, max_bytes=1000)
    text = heldout_bytes(corpus, 1000)
    assert 600 < batches.total_bytes == len(text) <= 1000
    evaluated = np.concatenate([batch["targets"][batch["segment_ids"] >= 0] for batch in batches])
    assert sorted(evaluated[evaluated != 256].tolist()) == sorted(text)
    one = eval_batches(corpus, TOKENIZER, batch_size=2, seq_len=32, max_bytes=1)
    assert one.total_bytes == len(heldout_bytes(corpus, 1)) > 0, "at least one document"


def test_no_heldout_documents(folder, config):
    corpus = open_corpus(config(train=str(folder)), "heldout")
    for call in (lambda: eval_batches(corpus, TOKENIZER, batch_size=1, seq_len=8), lambda: heldout_bytes(corpus)):
        with pytest.raises(UserError, match=r"set data\.heldout_percent above 0 or name a file in data\.heldout"):
            call()
