"""`coterie.fit`: the cheapest attention that keeps a model's answers, with the proof."""

from coterie.fitting.fit import Fit, fit
from coterie.fitting.profile import Tried

__all__ = ["Fit", "Tried", "fit"]
