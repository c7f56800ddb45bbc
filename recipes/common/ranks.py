"""How many singular values attention maps have that matter (supplement §11, Figure 5), in one line for many heads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from coterie.analysis import HeadSpectrum
from recipes.common.scores import shown
from recipes.common.study import Result

COLUMNS = ["heads", "effective rank", "largest", "values for 90 %", "for 99 %", "R²", "slow"]


def ranks(heads: Sequence[HeadSpectrum]) -> Result:
    """Medians over the heads; NaN if some map is so large that only its largest values were found."""
    return {
        "heads": len(heads),
        "effective rank": statistics.median(each.effective_rank for each in heads),
        "largest rank": max(each.effective_rank for each in heads),
        "90 %": _median([each.rank_90 for each in heads]),
        "99 %": _median([each.rank_99 for each in heads]),
        "R²": statistics.median(each.r2 for each in heads),
        "slow": sum(each.slow for each in heads),
    }


def _median(ranks: list[int | None]) -> float:
    known = [rank for rank in ranks if rank is not None]
    return statistics.median(known) if len(known) == len(ranks) else math.nan


def cells(images: Sequence[Result]) -> list[str]:
    """Of a table with these `COLUMNS`: mean and standard error over images, each of which has its `ranks`."""
    return [
        str(images[0]["heads"]),
        *(shown([each[name] for each in images], 1, 2) for name in ("effective rank", "largest rank")),
        *(shown([each[name] for each in images], 1, 1) for name in ("90 %", "99 %")),
        shown([each["R²"] for each in images], 1, 3),
        shown([each["slow"] for each in images], 1, 1),
    ]
