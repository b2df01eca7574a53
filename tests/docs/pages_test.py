"""The pages made from the code name all that the registry holds, and the README's table is the registry's."""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from linattn_jax.layers import GROWING, LAYERS
from linattn_jax.mixers.dispatch import MIXERS, Mixer
from linattn_jax.types import QKV, UserError

ROOT = Path(__file__).parents[2]


def load(path):
    """A module from a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load(ROOT / "docs" / "pages.py")


@pytest.fixture(scope="module")
def made():
    return pages.pages()


def rows(page):
    """Cells of the tables of a page, by their first."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("|")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells] for cells in lines}


def test_the_readme_has_the_registrys_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert pages.with_table(text) == text, "the README's table is not the registry's: make docs writes it"
    assert set(MIXERS) <= set(rows(text))
    with pytest.raises(UserError, match=r"README.md: wanted the lines"):
        pages.with_table("no table")


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_page_names_all_arguments_options_and_state(made, name):
    mixer = MIXERS[name]
    found = rows(made[f"mixers/{name}.md"])
    parameters = pages.inspect.signature(mixer.call).parameters
    assert set(parameters) <= set(found)
    for key, argument in mixer.arguments.items():
        assert found[key][1:3] == [f"`[{', '.join(argument.axes.split())}]`", argument.kind]
    for key in set(parameters) - set(mixer.arguments):
        assert found[key][2] == f"`{parameters[key].default!r}`"
    state = mixer.empty(pages.SIZES, jnp.float32)
    for path, array in jax.tree.leaves_with_path(state):
        assert found[jax.tree_util.keystr(path, simple=True, separator=".")][3] == f"{array.nbytes:,}"
    for form in (*mixer.implementations, *mixer.kernels):
        assert form in made[f"mixers/{name}.md"]
    assert name in made["mixers/index.md"]


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_docstrings_of_mixers_say_what_the_pages_need(name):
    mixer = MIXERS[name]
    assert all(pages.summary(mixer))
    assert pages.ours(mixer)
    for key in pages.inspect.signature(mixer.call).parameters:
        assert pages.described(mixer, key)


def test_docstrings_that_say_less_are_refused():
    def bare(q, k, v):
        """Mixes."""

    mixer = Mixer("bare", bare, bare, lambda sizes, dtype: (), QKV, ("recurrent",))
    with pytest.raises(UserError, match=r"bare: docstring begins 'Mixes.', wanted 'Name \(source"):
        pages.summary(mixer)
    with pytest.raises(UserError, match=r"bare: the docstring has no paragraph that begins 'Ours:'"):
        pages.ours(mixer)
    with pytest.raises(UserError, match=r"bare: nothing in the docstring, or in those that it names, says what k is"):
        pages.described(mixer, "k")


class Inner(NamedTuple):
    count: jax.Array
    x: jax.Array


class Outer(NamedTuple):
    query: Inner
    S: jax.Array


def test_axes_of_a_state_are_found():
    def empty(sizes, dtype):
        B, H, K, V, N = (sizes[axis] for axis in "BHKVN")
        x = jnp.zeros((B, H, N, K + V), jnp.complex64)
        return Outer(Inner(jnp.zeros((B, sizes["Hk"]), dtype), x), jnp.zeros((B, H, K, 3), dtype))

    mixer = Mixer("nested", None, None, empty, QKV, ())
    assert pages.state_fields(mixer) == [
        ("query.count", "[B, Hk]", "float32", 16 * 4),
        ("query.x", "[B, H, N, K + V]", "complex64", 16 * 32 * 256 * 8),
        ("S", "[B, H, K, 3]", "float32", 16 * 128 * 3 * 4),
    ]


def test_operations_of_a_token():
    """Linear attention: an outer product, its addition and a read, and O(K) for the scale and the sum of keys."""
    H, K, V = (pages.SIZES[axis] for axis in "HKV")
    assert pages.token_operations(MIXERS["linear_attention"]) == H * (4 * K * V + 2 * K)


def test_the_mixer_of_a_layer_is_found():
    found = pages.layer_mixers()
    assert found["kla"] == ("kaczmarz",)
    assert found["gdn"] == ("gated_delta_rule",)
    assert {layer for layer in LAYERS if not found[layer]} == GROWING


def test_docstring_text_becomes_markdown():
    text = "Writes a_b *x* <y> with `gla`:\n    S <- S_0 * 2\n\n    o = S q\nand so `on`."
    assert pages.prose(text, "up/").splitlines() == [
        r"Writes a\_b \*x\* \<y\> with [`gla`](up/gla.md):",
        "",
        "```text",
        "S <- S_0 * 2",
        "",
        "o = S q",
        "```",
        "",
        "and so `on`.",
    ]
