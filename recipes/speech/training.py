"""Training with CTC: one step, an epoch, and what must be stored for the next."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common import weights
from recipes.common.draws import begin_step
from recipes.common.precision import autocast
from recipes.common.processes import processes
from recipes.common.progress import Bar
from recipes.common.study import Result
from recipes.speech.augment import spec_augment
from recipes.speech.batches import Batch, batch_of, by_frames
from recipes.speech.corpus import Corpus, Utterance
from recipes.speech.decoding import BLANK, tokens_needed
from recipes.speech.network import Config, Heard, Recogniser, attend_by

SAVE_EVERY = 30.0  # seconds between two checkpoints
_CLIP = 1.0  # the largest norm of a gradient


@dataclass(frozen=True)
class Settings:
    """How a recogniser is trained.

    Attributes:
        frames: of a batch, padding included.
        rate: the highest rate of AdamW; it rises over the first part of the training and falls to 0 as a cosine.
        warmup: that part, as a share of all epochs.
        augment: whether SpecAugment hides parts of what is heard.
    """

    epochs: int
    frames: int = 2000
    rate: float = 1e-3
    warmup: float = 0.05
    decay: float = 0.01
    augment: bool = True
    bf16: bool = False

    def rate_at(self, progress: float) -> float:
        """The rate after a share of the training.

        >>> settings = Settings(10, rate=1.0)
        >>> [round(settings.rate_at(share), 3) for share in (0.025, 0.05, 0.525, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
        """
        if progress < self.warmup:
            return self.rate * progress / self.warmup
        return self.rate * 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ctc_loss(heard: Heard, batch: Batch) -> Tensor:
    """−log of the probability of what was said, for each symbol of the batch."""
    losses = F.ctc_loss(
        heard.log_probabilities.transpose(0, 1),
        batch.labels,
        heard.lengths,
        batch.label_lengths,
        blank=BLANK,
        reduction="sum",
    )
    return losses / batch.label_lengths.sum()


def with_a_path(utterances: list[Utterance], corpus: Corpus, config: Config) -> list[Utterance]:
    """Those that have tokens enough for their labels: CTC has no path for others, whose loss is infinite."""
    return [each for each in utterances if tokens_needed(corpus.labels(each.text)) <= config.tokens(len(each.features))]


class Training:
    """A recogniser, its optimiser, and how far they are.

    Args:
        mechanism: of every layer.
        seed: of the weights and all that is drawn.
    """

    def __init__(self, config: Config, settings: Settings, corpus: Corpus, mechanism: str, seed: int) -> None:
        self.config, self.settings, self.corpus, self.seed = config, settings, corpus, seed
        self.device = processes().device
        begin_step(seed, -1)
        self.model = attend_by(Recogniser(config), mechanism).to(self.device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), settings.rate, (0.9, 0.98), weight_decay=settings.decay
        )
        self.step = self.epoch = self.batches_done = 0
        self.losses: list[float] = []  # the mean of each epoch
        self.pathless = 0  # utterances of all epochs that had more labels than tokens
        self._sums = [0.0, 0.0]  # of this epoch: loss, seconds
        self.seconds: list[float] = []  # of each epoch

    def run_epoch(self, after_step: Callable[[], None] = lambda: None) -> None:
        """What is left of this epoch."""
        found = self.corpus.train(self.seed, self.epoch, self.settings.epochs)
        usable = with_a_path(found, self.corpus, self.config)
        if not usable:
            raise UserError(
                f"{self.corpus.name}: every transcript has more symbols than its speech has tokens: try a smaller "
                "--stride."
            )
        order = by_frames([len(each.features) for each in usable], self.settings.frames, self.seed, self.epoch)
        while self.batches_done < len(order):
            start = time.perf_counter()
            progress = (self.epoch + self.batches_done / len(order)) / self.settings.epochs
            rows = [usable[i] for i in order[self.batches_done]]
            self._sums[0] += self.advance(batch_of(rows, self.corpus), progress) / len(order)
            self._sums[1] += time.perf_counter() - start
            self.batches_done += 1
            if self.batches_done == len(order):
                self._end_epoch(len(found) - len(usable))
                after_step()
                return
            after_step()

    def advance(self, batch: Batch, progress: float) -> float:
        """One step; the loss."""
        begin_step(self.seed, self.step)
        self.model.train()
        batch = Batch(*(part.to(self.device) for part in batch))
        features = spec_augment(batch.features, batch.lengths) if self.settings.augment else batch.features
        with autocast(self.model, self.settings.bf16):
            heard = self.model(features, batch.lengths)
        loss = ctc_loss(heard, batch)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate_at(progress)
        self.optimiser.step()
        self.step += 1
        found = float(loss.detach())
        if not math.isfinite(found):
            raise UserError(
                f"the training diverged at step {self.step} (its loss is not finite): try a rate below "
                f"{self.settings.rate:g}, or --no-bf16."
            )
        return found

    def _end_epoch(self, pathless: int) -> None:
        self.losses.append(self._sums[0])
        self.seconds.append(self._sums[1])
        self.pathless += pathless
        self.epoch, self.batches_done, self._sums = self.epoch + 1, 0, [0.0, 0.0]

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; no random state, which each step makes anew."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            **{name: getattr(self, name) for name in _COUNTED},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        for name in _COUNTED:
            setattr(self, name, state[name])


_COUNTED = ("step", "epoch", "batches_done", "losses", "pathless", "_sums", "seconds")


def train(training: Training, work: Path, bar: Bar, look: Callable[[Recogniser], float], looks: int = 8) -> Result:
    """Train to the end from the last checkpoint in `work`, if there is one; what came of it, for the study.

    Args:
        look: the error of a model; asked a few times on the way.
    """
    file, epochs = work / "training.pt", training.settings.epochs
    seen: list[list[float]] = []  # epoch, error
    if file.exists():
        stored = weights.read(file)
        training.restore(stored["training"])
        seen = stored["looks"]
    every, saved = max(1, epochs // looks), time.perf_counter()

    def save() -> None:
        nonlocal saved
        if time.perf_counter() - saved >= SAVE_EVERY or training.epoch == epochs:
            weights.write(file, {"training": training.state(), "looks": seen})
            saved = time.perf_counter()

    bar.tick(training.epoch)
    while True:
        if training.epoch and training.epoch % every == 0 and (not seen or seen[-1][0] < training.epoch):
            seen.append([training.epoch, look(training.model)])
        if training.epoch == epochs:
            break
        training.run_epoch(save)
        bar.tick()
    return {
        "losses": training.losses,
        "looks": seen,
        "steps": training.step,
        "pathless": training.pathless,
        "seconds_per_epoch": statistics.median(training.seconds),
    }
