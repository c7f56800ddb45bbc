"""`coterie.fit`: the cheapest attention that keeps a model's answers, with the proof."""

from coterie.fitting.fit import fit
from coterie.fitting.profile import Tried
from coterie.fitting.result import Fit

__all__ = ["Fit", "Tried", "fit"]
