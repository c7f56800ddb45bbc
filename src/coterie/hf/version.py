"""Which versions of transformers fit."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

OLDEST = (5, 1)


def check(found: str | None = None) -> None:
    """Raise ImportError unless transformers is there and new enough."""
    try:
        found = installed("transformers") if found is None else found
    except PackageNotFoundError as error:
        raise ImportError("coterie.hf needs transformers ≥ 5.1: pip install 'coterie[hf]'.") from error
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ImportError(f"coterie.hf needs transformers ≥ 5.1, and {found} is installed.")
