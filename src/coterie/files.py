"""Files that are there in full or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder if need be; if the process is killed on the way, what was there before stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
