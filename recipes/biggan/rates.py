"""Learning rates of the two networks (TTUR, Heusel et al. 2017): two sets, which contradict each other."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Adam's rates."""

    g: float
    d: float


# The supplement's text (§15.2), and what the published code does, which is BigGAN's own way round.
TTUR = {"supplement": Rates(g=2e-4, d=5e-5), "code": Rates(g=5e-5, d=2e-4)}
BETAS, EPS = (0.0, 0.999), 1e-6
