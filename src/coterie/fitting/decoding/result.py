"""What was found for decoding: kept in a `Fit` beside the prefill's choices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coterie.fitting.profile import Tried
from coterie.fitting.search import Choices
from coterie.hosts import DENSE, HfHost, Host


@dataclass(frozen=True)
class AtContext:
    """What the certifying documents of one length said of decoding.

    Attributes:
        tokens: of a document; the last of them were decoded.
        fidelity: the mean over documents of the dense loss over the fitted one.
        documents: how many they were.
        bound, method: what is sure of all documents like them, as in `AtLength`.
        own_rate, dense_rate, fitted_rate: tokens a second at the end of one of them: with the model's own attention and
            transformers' dynamic cache, with dense attention over Coterie's cache, and as fitted.
    """

    tokens: int
    fidelity: float
    documents: int = 0
    bound: float = math.nan
    method: str = ""
    own_rate: float = math.nan
    dense_rate: float = math.nan
    fitted_rate: float = math.nan


@dataclass(frozen=True)
class Decoding:
    """What answers new tokens over a cache, behind the prefill of the same fit.

    Attributes:
        choices: the mechanism of each attention module that can decode, or "dense".
        calibrated, held_out: the mean fidelity on the documents of the search and on those that certified, the worst
            of all lengths: dense loss of the decoded tokens over the fitted one.
        certified: whether the fit's fidelity is promised of decoded tokens, too.
        table: everything that was tried in every module; seconds are those of a token.
        lengths: fidelity and tokens a second on held-out documents of each length.
    """

    choices: Choices
    calibrated: float
    held_out: float
    certified: bool
    table: list[Tried] = field(default_factory=list)
    lengths: list[AtContext] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def untouched(host: Host) -> Decoding:
        """Of a model that stays as it is."""
        names = host.decoders() if isinstance(host, HfHost) else []
        return Decoding(dict.fromkeys(names, DENSE), 1.0, 1.0, True)

    @property
    def all_dense(self) -> bool:
        """Whether every new token meets all others."""
        return set(self.choices.values()) <= {DENSE}

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens a second at the longest length that was timed, before (own attention, dynamic cache) and after."""
        timed = [at for at in self.lengths if math.isfinite(at.own_rate) and math.isfinite(at.fitted_rate)]
        longest = max(timed, key=lambda at: at.tokens, default=None)
        return (math.nan, math.nan) if longest is None else (longest.own_rate, longest.fitted_rate)

    @property
    def speed(self) -> str:
        """How much faster it is, in words.

        >>> at = AtContext(8192, 0.995, own_rate=10.0, dense_rate=15.0, fitted_rate=25.0)
        >>> Decoding({"a": "near-far"}, 1.0, 1.0, True, lengths=[at]).speed
        'decoding 25.0 tokens a second instead of 10.0 (2.50×)'
        """
        before, after = self.rates
        if not math.isfinite(before):
            return "decoding was not timed"
        return f"decoding {after:.1f} tokens a second instead of {before:.1f} ({after / before:.2f}×)"
