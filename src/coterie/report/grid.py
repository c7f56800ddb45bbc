"""A grid of shares as a small PNG: one colour, as solid as the share, so that it suits light pages and dark ones."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

LEVELS = 20  # steps of 5 %: they compress well, and nobody sees finer ones
_COLOUR = (0x4C, 0x8B, 0xF5)


def picture(shares: Sequence[Sequence[float]]) -> str:
    """Shares from 0 to 1, row by row, as the address of an image that holds itself; what is no number is 0.

    Example:
        >>> from coterie.report.grid import picture
        >>> picture([[0.0, 1.0], [0.5, 0.25]])[:30]
        'data:image/png;base64,iVBORw0K'
    """
    rows = [bytes(_level(share) for share in row) for row in shares]
    size = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)  # 8 bits, by a palette
    palette = bytes(_COLOUR) * (LEVELS + 1)
    solid = bytes(round(255 * level / LEVELS) for level in range(LEVELS + 1))
    cells = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    parts = ((b"IHDR", size), (b"PLTE", palette), (b"tRNS", solid), (b"IDAT", cells), (b"IEND", b""))
    found = b"\x89PNG\r\n\x1a\n" + b"".join(_part(name, data) for name, data in parts)
    return f"data:image/png;base64,{base64.b64encode(found).decode()}"


def _level(share: float) -> int:
    return round(LEVELS * min(1.0, max(0.0, share))) if math.isfinite(share) else 0


def _part(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
