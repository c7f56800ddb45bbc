"""Exact cover: choose sets so that each element is in exactly one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def exact_cover(covered: NDArray[np.bool_], seconds: float = 60.0) -> list[int] | None:
    """Columns of (elements, sets) that cover each element exactly once, or None if there are none.

    >>> exact_cover(np.array([[1, 0, 1], [0, 1, 1]], dtype=bool)) in ([0, 1], [2])
    True
    """
    if not covered.any(axis=1).all():
        return None
    found = milp(
        np.zeros(covered.shape[1]),
        integrality=np.ones(covered.shape[1]),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(csr_array(covered.astype(float)), 1, 1)],
        options={"time_limit": seconds},
    )
    if found.status == 2:  # infeasible
        return None
    if found.status != 0:
        raise ValueError(f"covered: expected a cover that HiGHS decides in {seconds:g} s, got: {found.message}")
    return [int(at) for at in np.flatnonzero(found.x > 0.5)]
