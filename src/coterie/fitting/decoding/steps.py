"""The steps of a fit for decoding: dense answers, candidates, search, certificate, timing, as for the prefill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.fitting.certify import Certified, certify
from coterie.fitting.decoding.measure import Continued
from coterie.fitting.decoding.profile import profile
from coterie.fitting.decoding.result import AtContext, Decoding
from coterie.fitting.decoding.speed import Rates, time_tokens
from coterie.fitting.measures import Remembered, least
from coterie.fitting.profile import Profiled
from coterie.fitting.search import Searched, search
from coterie.fitting.task import Task
from coterie.hosts import DENSE
from coterie.mechanisms import Mechanism

_ANSWERS = 0.4  # of a budget may go to dense answers


@dataclass
class Decoder:
    """Fits decoding for one prefill after another; dense answers and what candidates cost are shared.

    Attributes:
        interrupted: by the user, who gets what there is.
    """

    scale: Continued
    candidates: list[Mechanism]
    fitted: list[int]
    checked: list[int]
    profiled: Profiled | None = None
    interrupted: bool = False

    def fit(self, task: Task, prefill: Mapping[str, str]) -> Decoding:
        """The cheapest decoding behind a prefill that keeps the task's fidelity.

        Args:
            task: as for the prefill, with what is left of the time.
            prefill: the mechanism of each module while a text is read.
        """
        scale = self.scale.after(prefill)
        whole = task.tell

        def tell(what: str, done: int, total: int) -> None:
            whole(f"decoding: {what}", done, total)

        task = replace(task, host=scale.writer, candidates=self.candidates, tell=tell)
        try:
            if self.interrupted:
                raise KeyboardInterrupt
            if not self._answers(task):
                return self._nothing(task, scale, "The time budget was over before decoding was looked at.")
            if self.profiled is None:
                self.profiled = profile(task, self.scale)
            return self._fit(task, scale, self.profiled)
        except KeyboardInterrupt:
            self.interrupted = True
            return self._nothing(task, scale, "Interrupted before decoding was fitted.")

    def _answers(self, task: Task) -> bool:
        """Whether there was time for the dense answers to all documents."""
        everyone = [*self.checked, *self.fitted]
        for done, index in enumerate(everyone):
            if task.out_of_time(_ANSWERS) and index not in self.scale.seconds:
                return False
            self.scale.remember(index)
            task.tell("dense answers", done + 1, len(everyone))
        return True

    def _fit(self, task: Task, scale: Continued, profiled: Profiled) -> Decoding:
        remembered = Remembered(task, scale, self.fitted, self.checked)
        searched = search(task, remembered, profiled)
        certified = certify(task, remembered, searched)
        rates = {} if remembered.interrupted else time_tokens(task, remembered, scale, task.whole(certified.plan))
        notes, ratio = [*profiled.notes, *searched.notes], _faster(rates)
        if ratio < 1:
            notes.append(
                f"The decoding that held is {ratio:.2f}× as fast as dense over the same cache: it is not taken."
            )
            dense = Searched([{}], 0, {0: least(remembered.on_fitted({}))}, [])
            certified = certify(replace(task, budget=None), remembered, dense)  # which was run: it takes no time
            rates = {tokens: each._replace(fitted=each.dense) for tokens, each in rates.items()}
        self.interrupted = remembered.interrupted
        choices = task.whole(certified.plan)
        return Decoding(
            choices=choices,
            calibrated=certified.calibrated,
            held_out=least({tokens: each.fidelity for tokens, each in certified.judged.items()}),
            certified=certified.sure,
            table=profiled.table,
            lengths=_lengths(certified, remembered, rates),
            notes=[*notes, *certified.notes, *_remarks(choices, searched, certified)],
        )

    def _nothing(self, task: Task, scale: Continued, why: str) -> Decoding:
        """Dense, of which nothing is to be shown where the prefill is dense, too."""
        exact = all(scale.exact({}, scale.length(index)) for index in self.checked)
        known = 1.0 if exact else math.nan
        table = [] if self.profiled is None else self.profiled.table
        return Decoding(task.whole({}), known, known, exact, table, notes=[f"{why} New tokens stay dense."])


def _faster(rates: Mapping[int, Rates]) -> float:
    """How many times as fast as dense attention over the same cache, over all lengths; NaN where nothing was timed."""
    dense, fitted = (sum(1 / getattr(each, name) for each in rates.values()) for name in ("dense", "fitted"))
    return dense / fitted if fitted else math.nan


def _lengths(certified: Certified, remembered: Remembered, rates: Mapping[int, Rates]) -> list[AtContext]:
    found = []
    for tokens, documents in remembered.documents().items():
        seen, rate = certified.judged.get(tokens), rates.get(tokens, Rates())
        known = (math.nan, 0, math.nan, "") if seen is None else (seen.fidelity, documents, *seen.bound)
        found.append(AtContext(tokens, *known, *rate))
    return found


def _remarks(choices: Mapping[str, str], searched: Searched, certified: Certified) -> list[str]:
    """What the choices themselves give rise to."""
    if set(choices.values()) != {DENSE}:
        return []
    if not all(each.held for each in certified.judged.values()):
        return ["New tokens stay dense, and even so they lose more than was allowed to what the prefill has cached."]
    pays = len(searched.plans) > 1 or searched.scores[0] < 1
    return [f"{'N' if pays else 'Nothing decodes faster: n'}ew tokens stay dense."]
