"""One model learns to copy, until it can, from batches that are made on the fly."""

from __future__ import annotations

import io
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from coterie.cli.inputs import UserError
from coterie.files import write_whole
from recipes.common.processes import processes
from recipes.common.progress import Bar
from recipes.common.study import Result
from recipes.copy.cells import Cell
from recipes.copy.network import Copier, Shape
from recipes.copy.sequences import batch

SOLVED = 0.99  # of the symbols of fresh sequences
_CLIP = 1.0


class Schedule(NamedTuple):
    """How a model learns.

    Attributes:
        steps: at most.
        rate: of AdamW; it rises over the first `warmup` steps and stays.
        tokens: in a batch, so that a step of long sequences costs about as much as one of short ones.
        tests: fresh sequences after every `every` steps.
    """

    steps: int
    rate: float
    warmup: int
    tokens: int
    tests: int
    every: int

    def sequences(self, length: int) -> int:
        """In a batch."""
        return max(1, self.tokens // length)


def loss_of(model: nn.Module, task: str, count: int, length: int, seed: int, step: int) -> torch.Tensor:
    """The cross-entropy of the symbols that count, in the batch of a step."""
    examples = batch(task, count, length, seed, step)
    return F.cross_entropy(model(examples.seen)[examples.scored], examples.wanted[examples.scored])


@torch.no_grad()
def accuracy(model: nn.Module, task: str, schedule: Schedule, length: int, seed: int, step: int) -> float:
    """The share of symbols that a model gets right in fresh sequences."""
    model.eval()
    examples = batch(task, schedule.tests, length, seed, step, fresh=True)
    right = total = 0
    for part in torch.arange(schedule.tests).split(schedule.sequences(length)):
        said = model(examples.seen[part]).argmax(-1)
        scored = examples.scored[part]
        right += int((said == examples.wanted[part])[scored].sum())
        total += int(scored.sum())
    model.train()
    return right / total


class Learner:
    """A model under way, stored after every test."""

    def __init__(self, cell: Cell, task: str, shape: Shape, schedule: Schedule, seed: int, folder: Path) -> None:
        self.cell, self.task, self.schedule, self.seed = cell, task, schedule, seed
        self.file = folder / "checkpoint.pt"
        torch.manual_seed(seed)
        self.model = Copier(cell.mechanism, cell.length, shape, causal=task == "causal")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=schedule.rate)
        self.step = 0
        self.seconds: list[float] = []
        self.tests: list[list[float]] = []  # step, accuracy
        if self.file.exists():
            self._go_on(torch.load(self.file, weights_only=True))

    @property
    def solved(self) -> bool:
        """Whether the last test was passed."""
        return bool(self.tests) and self.tests[-1][1] > SOLVED

    def learn(self, bar: Bar) -> Result:
        """Step by step, until it is solved or there are no more steps."""
        bar.tick(self.step)
        while self.step < self.schedule.steps and not self.solved:
            start = time.perf_counter()
            self._step()
            self.seconds.append(time.perf_counter() - start)
            bar.tick()
            if self.step % self.schedule.every == 0 or self.step == self.schedule.steps:
                self._test()
        return {
            **self.cell._asdict(),
            "seed": self.seed,
            "solved": self.solved,
            "steps": self.step,
            "accuracy": self.tests[-1][1],
            "tests": self.tests,
            "seconds": sum(self.seconds),
            "seconds a step": statistics.median(self.seconds),
        }

    def _step(self) -> None:
        rate = self.schedule.rate * min(1.0, (self.step + 1) / max(1, self.schedule.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        length = self.cell.length
        loss = loss_of(self.model, self.task, self.schedule.sequences(length), length, self.seed, self.step)
        if not math.isfinite(float(loss.detach())):
            raise UserError(
                f"{self.cell.mechanism} diverged at length {length} (the loss of step {self.step} is not finite): "
                f"try a --rate below {self.schedule.rate:g}."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        self.step += 1

    def _test(self) -> None:
        found = accuracy(self.model, self.task, self.schedule, self.cell.length, self.seed, self.step)
        self.tests.append([self.step, found])
        held = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "draws": torch.get_rng_state(),  # of mechanisms with resample=True
                "step": self.step,
                "seconds": self.seconds,
                "tests": self.tests,
            },
            held,
        )
        if processes().is_main_process:
            write_whole(self.file, held.getvalue())

    def _go_on(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        torch.set_rng_state(stored["draws"])
        self.step, self.seconds, self.tests = stored["step"], stored["seconds"], stored["tests"]
