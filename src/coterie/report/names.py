"""Names that fit beside a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the parts that all of them share, but for the one before the first difference.

    Example:
        >>> from coterie.report.names import short_names
        >>> short_names(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"])
        ['layer.0', 'layer.1']
        >>> short_names(["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"])
        ['encoder.0.attn', 'decoder.0.attn', 'decoder.0.cross']
        >>> short_names(["attention"])
        ['attention']
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    first = max(0, _shared(parts) - 1)
    last = _shared([part[::-1] for part in parts])
    return [".".join(part[first : max(first + 1, len(part) - last)]) for part in parts]


def clipped(name: str, most: int) -> str:
    """The end of a name that is too long, where paths and modules differ.

    >>> clipped("fits/2026/november/a.json", 12), clipped("a.json", 12)
    ('…mber/a.json', 'a.json')
    """
    return name if len(name) <= most else f"…{name[-(most - 1) :]}"


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """How many parts all of them start with."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))))
