"""Which versions of transformers fit."""

from __future__ import annotations

OLDEST = (5, 1)


def check(found: str | None = None) -> None:
    """Raise ImportError unless transformers is there and new enough."""
    if found is None:
        try:
            import transformers
        except ImportError as error:
            raise ImportError("coterie.hf needs transformers ≥ 5.1: pip install 'coterie[hf]'.") from error
        found = transformers.__version__
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ImportError(f"coterie.hf needs transformers ≥ 5.1, and {found} is installed.")
