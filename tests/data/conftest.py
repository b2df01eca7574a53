"""Small corpora on disk for the tests of this room."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty text files of 1 to 400 bytes; file i is made of the i-th letter, so tokens tell their document."""
    root = tmp_path / "texts"
    root.mkdir()
    rng = np.random.default_rng(0)
    for i in range(30):
        (root / f"{i:02d}.txt").write_bytes(bytes([65 + i]) * int(rng.integers(1, 400)))
    return root


@pytest.fixture
def config():
    """Makes what the loader needs of config.data."""
    return lambda **fields: types.SimpleNamespace(**{"heldout_percent": 0, **fields})
