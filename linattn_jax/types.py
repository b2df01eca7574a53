"""The axis legend, array aliases and argument checks that every room shares.

Axes, in the order in which they appear in a shape:
    B batch, T time, H value heads, K key size, V value size, D model width,
    Hk key heads (H is a multiple of Hk; value head h reads key head h // (H // Hk)),
    G value heads per key head (H // Hk), C rows of a chunk, N chunks.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user asked for; the message is one sentence that names it."""
