"""A few letters that stand for a data set: a study does not go on with other data under the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest(*parts: Iterable[Any]) -> str:
    """Of rows of texts and numbers, in their order.

    >>> digest([("a text", 1)], []), digest([("a text", 0)], [])
    ('27b575351ccf', 'bd7dcb3cf036')
    """
    found = hashlib.sha256()
    for part in parts:
        found.update(json.dumps(list(part), ensure_ascii=True).encode())
    return found.hexdigest()[:12]


def of_file(file: Path) -> str:
    """Of whatever a file holds.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     Path(folder, "weights").write_bytes(b"1, 2, 3")
    ...     of_file(Path(folder, "weights"))
    7
    'a386b3c9b4b4'
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]
