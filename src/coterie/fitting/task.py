"""What a fit is asked for: every step gets it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.hosts import DENSE, Host
from coterie.mechanisms import Mechanism
from coterie.progress import Progress


@dataclass(frozen=True)
class Task:
    """A model, batches to search on and others to certify on, what is to be promised, what to try, and until when."""

    host: Host
    fitted: list[Any]
    checked: list[Any]
    target: float
    confidence: float
    share: float | None  # of documents that must have the target; None: their mean must
    candidates: list[Mechanism]
    budget: float | None  # in seconds, all of it
    start: float  # of the steps that share what is left of it, on time.monotonic()
    end: float  # of it, on time.monotonic()
    tell: Progress

    def out_of_time(self, share: float = 1.0, ahead: float = 0.0) -> bool:
        """Whether so much of what was left is used up, or will be in so many seconds."""
        if self.budget is None:
            return False
        return time.monotonic() + ahead > self.start + share * (self.end - self.start)

    def whole(self, plan: Mapping[str, str]) -> dict[str, str]:
        """A choice for every module; those that were never asked stay dense."""
        return {name: plan.get(name, DENSE) for name in self.host.names}
