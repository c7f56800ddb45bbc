"""CMU AN4 ("Census"): 948 + 130 utterances as mel cepstra, in CMU Sphinx's files.

etc/an4_{train,test}.fileids          a path on each line
etc/an4_{train,test}.transcription    what was said, and (the name) at the end of each line
feat/PATH.mfc                         a number of floats, and the floats: 13 for each frame, 100 frames a second
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import torch
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.speech.archive import Files
from recipes.speech.corpus import Fixed, collected, fixed, some
from recipes.speech.features import normalised

LISTED = "etc/an4_train.fileids"
_CEPSTRA = 13
_LINE = re.compile(r"(?:<s>)?(.*?)(?:</s>)?\s*\(([^()]+)\)\s*")


def load(files: Files, *, utterances: int | None = None, tests: int | None = None) -> Fixed:
    """The corpus of some files.

    Args:
        utterances, tests: at most so many of either part, drawn once and for all.
    """
    root = next(name for name in files.names if name.endswith(LISTED)).removesuffix(LISTED)
    left_out: list[str] = []
    parts = [
        collected(str(files.where), some(_listed(files, root, part, left_out), count), left_out)
        for part, count in (("train", utterances), ("test", tests))
    ]
    return fixed("AN4", parts[0], parts[1], left_out, 20)


def _listed(files: Files, root: str, part: str, left_out: list[str]) -> list[tuple[str, str, Callable[[], Tensor]]]:
    said = {}
    for line in files.lines(f"{root}etc/an4_{part}.transcription"):
        found = _LINE.fullmatch(line)
        if found is None:
            raise UserError(
                f"{files.shown(f'{root}etc/an4_{part}.transcription')}: expected a text and (a name), got {line!r}."
            )
        said[found[2]] = found[1]
    listed: list[tuple[str, str, Callable[[], Tensor]]] = []
    for path in files.lines(f"{root}etc/an4_{part}.fileids"):
        name = PurePosixPath(path.strip()).name
        if name not in said:
            left_out.append(f"{files.where}: there is no transcript of {name}.")
            continue
        listed.append((name, said[name], partial(_cepstra, files, f"{root}feat/{path.strip()}.mfc")))
    return listed


def _cepstra(files: Files, name: str) -> Tensor:
    """(frames, 13); either order of bytes."""
    if name not in files.names:
        raise UserError(f"there is no {files.shown(name)}.")
    data = files.read(name)
    for order in (">", "<"):
        if len(data) > 4 and int(np.frombuffer(data[:4], f"{order}i4")[0]) * 4 == len(data) - 4:
            floats = np.frombuffer(data[4:], f"{order}f4").astype(np.float32)
            if len(floats) % _CEPSTRA == 0 and np.isfinite(floats).all():
                return normalised(torch.from_numpy(floats).view(-1, _CEPSTRA))
    raise UserError(f"{files.shown(name)} is damaged: expected a count and as many floats, {_CEPSTRA} for each frame.")
