"""`coterie.fit`: the cheapest attention that keeps a model's answers, with a promise that was certified."""

from coterie.fitting.fit import fit, to_search, trade_off
from coterie.fitting.profile import Tried
from coterie.fitting.result import Fit

__all__ = ["Fit", "Tried", "fit", "to_search", "trade_off"]
