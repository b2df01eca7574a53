"""The examples in docstrings and documents run and print what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import linattn_jax

MODULES = sorted(m.name for m in pkgutil.walk_packages(linattn_jax.__path__, "linattn_jax."))
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("name", [n for n in linattn_jax.__all__ if not n.endswith(("_step", "_init"))])
def test_every_mixer_has_an_example(name):
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(linattn_jax, name), name)
    assert found.examples


@pytest.mark.parametrize("document", ["README.md", "docs/notes.md"])
def test_documents(document):
    result = doctest.testfile(str(ROOT / document), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
