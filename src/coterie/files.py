"""Files that are there in full or not at all, and what goes into JSON."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any


def finite(found: Any) -> Any:
    """What JSON can hold: numbers that are not finite become None."""
    if isinstance(found, dict):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder if need be; if the process is killed on the way, what was there before stays.

    A link is followed, and what is no plain file (a pipe, /dev/stdout) is written to as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
