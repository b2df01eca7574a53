"""The typed argument string of a config: `key=value,key=value`, with a sentence for each mistake."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from linattn_jax.types import UserError

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_arg(arg: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the keys of `defaults`, each of its default's type; a type stands for "not given", read as None.

    A value that holds commas goes in double or single quotes: `data="/a/*.txt,/b/*.txt"`. Everything after the first
    `=` is the value. Whole numbers may be written 1000, 1_000 or 1e6.

    >>> parse_arg("steps=1e3,data='a,b'", {"steps": 10, "data": "", "lr": float})
    {'steps': 1000, 'data': 'a,b', 'lr': None}

    Raises:
        UserError: an unknown or repeated key, a value of the wrong type, or an open quote.
    """
    values = {key: None if isinstance(default, type) else default for key, default in defaults.items()}
    seen = set()
    for item in split_items(arg or ""):
        key, equals, text = item.partition("=")
        key = key.strip()
        if key not in defaults:
            meant = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean {meant[0]}? Known" if meant else "known"
            raise UserError(f"unknown key {key!r} in the config's argument; {hint}: {', '.join(defaults)}")
        if not equals:
            raise UserError(f"{key} in the config's argument needs a value: {key}=…")
        if key in seen:
            raise UserError(f"{key} is given twice in the config's argument")
        seen.add(key)
        default = defaults[key]
        values[key] = _read(key, text.strip(), default if isinstance(default, type) else type(default))
    return values


def split_items(arg: str) -> list[str]:
    """Splits at commas outside quotes, and takes the quotes away."""
    items, current, quote = [], "", ""
    for char in arg:
        if quote:
            if char == quote:
                quote = ""
            else:
                current += char
        elif char in "\"'":
            quote = char
        elif char == ",":
            items.append(current)
            current = ""
        else:
            current += char
    if quote:
        raise UserError(f"the config's argument has an open {quote} in {arg!r}")
    return [item for item in (*items, current) if item.strip()]


def _read(key: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return _TRUTH[text.lower()]
        if kind is int:
            number = int(text) if text.lstrip("+-").replace("_", "").isdigit() else float(text)
            if number != int(number):
                raise ValueError
            return int(number)
        return kind(text)
    except (KeyError, ValueError, OverflowError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise UserError(f"{key} in the config's argument must be {wanted}, got {text!r}") from None
