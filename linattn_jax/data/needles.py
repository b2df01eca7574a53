"""One fact hidden in a long text and asked for at its end: single-needle retrieval in the manner of RULER.

RULER (Hsieh et al. 2024, arXiv 2404.06654; its `synthetic.yaml`) has three such tasks. Keys are pairs of an adjective
and a noun in all of them:

    kind       RULER's name              haystack                                value
    passkey    niah_single_1, S-NIAH-1   a few short sentences over and over     a number of 7 digits
    number     niah_single_2, S-NIAH-2   essays                                  a number of 7 digits
    uuid       niah_single_3, S-NIAH-3   essays                                  a UUID of version 4

As there, the length counts everything, room for the answer included; the question follows the text, and the prompt ends
with the beginning of the answer, so that a model that was never taught to answer can go on from it. In RULER the needle
of an essay stands at one of 40 depths evenly from 0 to 100 %, that of a passkey between any two lines.

Ours: the wording, the words of keys and noise, and the essays, which are any text of the user's; a needle may stand
between any two sentences; the room for the answer is a little more than the answer (RULER: 128 tokens). Results compare
models with each other under this wording. They are not comparable with published numbers of RULER.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from linattn_jax.data.corpus import Corpus
from linattn_jax.data.task import Example
from linattn_jax.data.tokenizers import Tokenizer
from linattn_jax.types import UserError

KINDS = ("passkey", "number", "uuid")

NOISE = ("The river is wide. ", "The wind is cold. ", "The road is long. ", "We walk on. ", "We come home late. ")

_ADJECTIVES = """
    amber ample brave brisk broad calm clever coarse crisp damp dear deep dim dry eager early fair faint firm fond frank
    gentle glad grand green grim happy hasty hollow honest humble idle jolly keen kind late lazy light lively lonely
    loose loud lucky mellow merry mild narrow neat noble odd pale plain polite proud quick quiet rapid ripe rough round
    rural rusty shy silent sleek slim smooth sober solid stern stiff sunny swift tame tidy tiny vast vivid warm wild
    wise young
"""
_NOUNS = """
    acorn anchor apple arrow badger barrel basket beacon beetle bell bridge bucket button cabin camel candle canyon
    carpet castle cedar cherry cliff clock cloud cobbler comet copper cradle crane crow daisy desert drum eagle ember
    falcon feather fern fiddle fisher garden goose hammer harbor harvest heron island ivory jacket kettle ladder lantern
    lemon lily locket maple meadow mirror mountain needle nettle oak orchard otter oyster paddle parrot pebble pencil
    pepper pigeon pillow plum pocket quilt rabbit raven ribbon rocket saddle sailor shovel sparrow spider temple thistle
    tiger timber tower trumpet tulip turnip valley violin wagon walnut whistle willow window zebra
"""

ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()

# A sentence ends after a full stop and blanks, unless a small letter follows as after an abbreviation, or with a line.
_END = re.compile(r"[.!?][\"')\]]*(?:[^\S\n]*\n+|[^\S\n]+(?![a-z]))|[。！？]|\n+")
# A line at least this long that ends in a word goes on in the next: text is wrapped, code seldom.
_WRAPPED = 40
# A haystack of fewer tokens hides nothing.
_LEAST = 16


@dataclass(frozen=True)
class Needle:
    """What is hidden, where, and in how long a text.

    kind: "passkey", "number" or "uuid", as the module says.
    length: tokens of a prompt and the room for its answer, at most; the haystack is whole sentences, so that a prompt
        is usually shorter by part of one.
    tokenizer: as `load_tokenizer` gives it.
    essays: the haystack of number and uuid, as `open_source` or `open_splits` gives it; each example begins somewhere
        in a document of its own and goes on in others where that is too short. Not read for a passkey.
    grid: 0 draws each depth uniformly; n >= 2 takes example i to depth (i mod n) / (n - 1).
    seed: example i of a seed is the same whatever was drawn before. Key and value do not depend on length.

    Raises UserError where a field is out of range; the length must leave room for a haystack whatever the key.
    """

    kind: str
    length: int
    tokenizer: Tokenizer
    essays: Corpus | None = None
    grid: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        if self.kind != "passkey" and (self.essays is None or not len(self.essays)):
            raise UserError(f"kind {self.kind!r} hides its needle in essays: give a source that holds text")
        if self.grid < 0 or self.grid == 1:
            raise UserError(f"grid must be 0 or at least 2 depths, got {self.grid}")
        if self.seed < 0:
            raise UserError(f"seed must not be negative, got {self.seed}")
        count = lambda word: len(self.tokenizer.encode(word))
        begin, fact, end = self.sentences(f"{max(ADJECTIVES, key=count)}-{max(NOUNS, key=count)}")
        least = len(self.tokenizer.encode(f"{begin} {fact} .{end}")) + 1 + 2 * self.room + _LEAST
        if self.length < least:
            raise UserError(
                f"length {self.length} is too short for a {self.kind}, "
                f"which takes at least {least} tokens of {self.tokenizer.name}"
            )

    @property
    def room(self) -> int:
        """Tokens kept free for the answer: one a character, its blank, and one more that some tokenizers begin with."""
        return (36 if self.kind == "uuid" else 7) + 2

    def sentences(self, key: str) -> tuple[str, str, str]:
        """What precedes the text, what precedes the value in it, and what follows the text."""
        noun = "code" if self.kind == "uuid" else "number"
        fact = f"The secret {noun} of {key} is"
        return f"Remember the secret {noun} in this text.\n", fact, f"\nWhat is the secret {noun} of {key}? {fact}"


class Retrieval(NamedTuple):
    """A question and its answer."""

    prompt: np.ndarray  # int32 [n], n <= length - room, beginning with the end of text
    answer: np.ndarray  # int32 [m], 1 <= m <= room: the value and what stands between it and the prompt
    depth: float  # share of the haystack's tokens that stand before the needle
    key: str
    value: str


def draw(needle: Needle, index: int) -> Retrieval:
    """Example `index` of `needle`.

    Raises:
        UserError: the essays have too little text, or the tokenizer cannot spell the value.

    >>> from linattn_jax.data import load_tokenizer
    >>> tokenizer = load_tokenizer("bytes")
    >>> example = draw(Needle("passkey", 256, tokenizer, grid=2), 1)
    >>> print(tokenizer.decode(example.prompt))
    Remember the secret number in this text.
    The river is wide. The wind is cold. The road is long. We walk on. The secret number of lucky-tower is 9936534.
    What is the secret number of lucky-tower? The secret number of lucky-tower is
    >>> tokenizer.decode(example.answer), example.depth
    (' 9936534', 1.0)
    """
    rng = np.random.default_rng((needle.seed, index))
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    digits, code = str(rng.integers(10**6, 10**7)), str(uuid.UUID(bytes=rng.bytes(16), version=4))
    value = code if needle.kind == "uuid" else digits
    wanted = float(rng.random())
    if needle.grid:
        wanted = index % needle.grid / (needle.grid - 1)
    begin, fact, end = needle.sentences(key)

    def encode(text: str) -> np.ndarray:
        return np.concatenate([[needle.tokenizer.eot], needle.tokenizer.encode(text)]).astype(np.int32)

    free = needle.length - needle.room
    fixed = len(encode(f"{begin} {fact} {value}.{end}"))
    sentences, sizes = _haystack(needle, rng, free - fixed, key)
    while sentences:
        edges = np.concatenate([[0], np.cumsum(sizes)])
        place = int(np.argmin(np.abs(edges - wanted * edges[-1])))
        before, after = "".join(sentences[:place]), "".join(sentences[place:])
        before += "" if not before or before[-1].isspace() else " "
        text = f"{before}{fact} {value}.{'\n' if before.endswith('\n') else ' '}{after}"
        prompt = encode(begin + text.rstrip() + end)
        if len(prompt) <= free:
            answer = _answer(needle.tokenizer, encode, prompt, begin + text.rstrip() + end, value)
            return Retrieval(prompt, answer, float(edges[place] / edges[-1]), key, value)
        # The tokens of sentences were estimates.
        sentences, sizes = sentences[:-1], sizes[:-1]
    raise UserError(f"no sentence of the haystack fits into length {needle.length} with {needle.tokenizer.name}")


def retrievals(needle: Needle, start: int = 0) -> Iterator[Retrieval]:
    """The examples from `start` on, without end."""
    while True:
        yield draw(needle, start)
        start += 1


def needle_batch(needle: Needle, index: int, rows: int) -> Example:
    """Batch `index` of `rows` examples to train on: tokens [rows, length], the others [rows, room], always.

    Batches of one seed share no example; evaluate with another seed and other essays. What follows a row's answer is
    the end of text and has no weight, so that a model is not taught where to stop: `answers` does not ask it to.

    >>> from linattn_jax.data import load_tokenizer
    >>> batch = needle_batch(Needle("passkey", 256, load_tokenizer("bytes")), index=0, rows=4)
    >>> batch.tokens.shape, batch.targets.shape, batch.weights.sum(axis=1).tolist()
    ((4, 256), (4, 9), [8.0, 8.0, 8.0, 8.0])
    """
    tokens = np.full((rows, needle.length), needle.tokenizer.eot, np.int32)
    positions, targets = np.zeros((2, rows, needle.room), np.int32)
    weights = np.zeros((rows, needle.room), np.float32)
    for row in range(rows):
        prompt, answer, *_ = draw(needle, index * rows + row)
        n, m = len(prompt), len(answer)
        tokens[row, : n + m] = np.concatenate([prompt, answer])
        positions[row, :m] = np.arange(n - 1, n + m - 1)
        targets[row, :m] = answer
        weights[row, :m] = 1
    return Example(*map(jnp.asarray, (tokens, positions, targets, weights)))


def answers(value: str, text: str) -> bool:
    """Whether `text` begins with the value, blanks before it and around its hyphens aside; what follows is not judged.

    RULER asks only that the value stands somewhere in what is generated.

    >>> answers("4821907", " 4821907."), answers("4821907", " 482190"), answers("ab-12", "ab - 12 or so")
    (True, False, True)
    """
    return re.match(r"\s*" + r"\s*-\s*".join(map(re.escape, value.split("-"))), text) is not None


def sentences_of(text: str) -> list[str]:
    """A text cut after each sentence, with the blanks that follow it; a line ends one too unless it seems wrapped.

    >>> sentences_of("It rained (e.g. here). He left!\\nimport os\\n    x = 1")
    ['It rained (e.g. here). ', 'He left!\\n', 'import os\\n', '    x = 1']
    """
    parts, start = [], 0
    for match in _END.finditer(text):
        at, stop = match.span()
        if match[0] == "\n" and at - (text.rfind("\n", 0, at) + 1) >= _WRAPPED:
            following = text[stop : stop + 80].lstrip(" \t")
            if following[:1].isalpha() and (text[at - 1].isalnum() or text[at - 1] in ",;-"):
                continue
        parts.append(text[start:stop])
        start = stop
    if start < len(text):
        parts.append(text[start:])
    return parts


def _answer(
    tokenizer: Tokenizer, encode: Callable[[str], np.ndarray], prompt: np.ndarray, text: str, value: str
) -> np.ndarray:
    """The tokens that follow the prompt where the value does."""
    whole = encode(f"{text} {value}")
    if np.array_equal(whole[: len(prompt)], prompt):
        answer = whole[len(prompt) :]
    else:  # The prompt's last token would be another one.
        answer = encode(f" {value}")[1:]
    if not answers(value, tokenizer.decode(answer)):
        raise UserError(f"the tokenizer {tokenizer.name} cannot spell the value {value}")
    return answer


def _haystack(needle: Needle, rng: np.random.Generator, room: int, key: str) -> tuple[list[str], list[float]]:
    """Sentences of at most `room` tokens in all, and the tokens of each; none of them holds the key."""
    kept: list[str] = []
    sizes: list[float] = []
    fruitless = 0
    while fruitless < 1000:
        left = room - sum(sizes)
        found = list(NOISE) * (1 + int(left) // 64) if needle.kind == "passkey" else _essay(needle.essays, rng, left)
        found = [sentence for sentence in found if key not in sentence]
        totals = np.cumsum(_counts(needle.tokenizer, found))
        fitting = int(np.searchsorted(totals, left, side="right"))
        kept += found[:fitting]
        sizes += np.diff(totals[:fitting], prepend=0).tolist()
        if fitting < len(found):
            left = room - sum(sizes)
            if left > room // 4:  # So long a sentence would leave the text too short: a part of it fills it up.
                words = re.findall(r"\s*\S+", found[fitting][: 16 * int(left)])
                totals = np.cumsum(_counts(needle.tokenizer, words))
                fitting = int(np.searchsorted(totals, left, side="right"))
                if fitting:
                    kept.append("".join(words[:fitting]))
                    sizes.append(float(totals[fitting - 1]))
            if kept:
                return kept, sizes
        fruitless = 0 if fitting else fruitless + 1
    raise UserError(f"the essays hold too little text for {needle.length} tokens")


def _counts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Tokens of each text, made to add up to the tokens of all end to end, as they may share some."""
    if not texts:
        return np.zeros(0)
    *counts, whole = (len(ids) for ids in tokenizer.encode_batch([*texts, "".join(texts)]))
    return np.array(counts) * (whole / max(sum(counts), 1))


def _essay(essays: Corpus | None, rng: np.random.Generator, tokens: float) -> list[str]:
    """Sentences of some document from somewhere on, at least so many tokens unless the document ends."""
    assert essays is not None
    text = essays.text(int(rng.integers(len(essays))))
    size = 8 * int(tokens) + 256
    start = int(rng.integers(max(len(text) - size, 0) + 1))
    found = sentences_of(text[start : start + size].decode(errors="ignore"))
    if len(found) > 2:  # The first and the last may be cut.
        found = found[start > 0 : len(found) - (start + size < len(text))]
    if found and not found[-1][-1].isspace():
        found[-1] += "\n"
    return found
