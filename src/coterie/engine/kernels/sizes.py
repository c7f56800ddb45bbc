"""How large tiles are, and how many warps work on one: by head dim, group size and dtype."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """Query rows and keys of a tile, warps, and stages of the pipeline that fetches keys while others are computed."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded(dim: int) -> int:
    """The power of two that a row is padded to, at least the 16 that a tensor core multiplies.

    >>> padded(5), padded(64), padded(96)
    (16, 64, 128)
    """
    return max(16, 1 << (dim - 1).bit_length())


def rows_for(size: int) -> int:
    """Query rows of a tile for groups of about this size.

    >>> [rows_for(size) for size in (4, 12, 30, 64, 500)]
    [16, 16, 32, 64, 64]
    """
    return 16 if size <= 16 else 32 if size <= 40 else 64


def _narrow_rows(width: int, size: int, heavy: bool) -> int:
    """In 16 bits: as many as the group has, and as registers allow."""
    wide = width > 64
    return min(rows_for(size), 16 if wide and heavy else 32 if heavy or wide else 64)


def _single(width: int, size: int, heavy: bool) -> Size:
    """In float32: no tensor cores, so that whatever is multiplied at a time is held in registers."""
    rows = 16 if width > 64 or (heavy and width <= 32) else 32
    return Size(min(rows_for(size), rows), 32 if width == 64 else 16, 4, 1)


def query_tile(width: int, size: int, *, narrow: bool, heavy: bool) -> Size:
    """For forward. `width`: the wider of keys and values, padded; `narrow`: numbers of 16 bits.

    `heavy`: each pair needs registers of its own, for a mask, dropout, a count, keys to skip or how often it meets.

    >>> query_tile(64, 200, narrow=True, heavy=False), query_tile(64, 200, narrow=True, heavy=True)
    (Size(rows=64, keys=32, warps=4, stages=2), Size(rows=32, keys=32, warps=4, stages=2))
    """
    if not narrow:
        return _single(width, size, heavy)
    rows = _narrow_rows(width, size, heavy)
    if width <= 64:
        return Size(rows, 32 if heavy or rows == 64 else 64, 4, 2)
    return Size(rows, 32, 4, 2) if width <= 128 else Size(rows, 32, 8, 1)


def gradient_tile(width: int, size: int, *, narrow: bool, heavy: bool) -> Size:
    """For the gradient of queries."""
    if not narrow:
        return _single(width, size, heavy)
    rows = _narrow_rows(width, size, heavy)
    if width <= 64:
        return Size(rows, 32, 4, 2)
    return Size(rows, 32, 4, 1) if width <= 128 else Size(rows, 16, 8, 1)


def key_tile(width: int, size: int, *, narrow: bool, heavy: bool) -> Size:
    """For the gradients of keys and values, whose sums stay in registers."""
    if not narrow:
        return _single(width, size, heavy)
    rows = min(_narrow_rows(width, size, heavy), 32)
    return Size(rows, 32, 4, 1) if width <= 128 else Size(16, 32, 8, 1)
