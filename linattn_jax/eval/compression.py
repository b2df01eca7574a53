"""What general compressors make of the same held-out text: the yardstick beside a model's bits per byte."""

from __future__ import annotations

import gzip
import lzma


def bits_per_byte(data: bytes) -> dict[str, float]:
    """Bits per byte of `data` as one stream under gzip (level 9) and xz (preset 9, extreme).

    One stream is the compressors' best case: a later document can refer to an earlier one.

    >>> sorted(bits_per_byte(b"abracadabra" * 100))
    ['gzip -9', 'xz -9e']
    """
    if not data:
        raise ValueError("data is empty, wanted at least one byte.")
    sizes = {
        "gzip -9": len(gzip.compress(data, 9, mtime=0)),
        "xz -9e": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}
