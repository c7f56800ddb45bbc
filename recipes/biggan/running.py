"""One run of a study: train, look at it as it goes, and go on where it was if it was killed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from coterie.cli.console import err
from coterie.files import write_json
from recipes.biggan import collapse, sheets
from recipes.biggan.images import Images
from recipes.biggan.sampling import draw_y, draw_z, generate
from recipes.biggan.training import Training
from recipes.common import weights
from recipes.common.processes import processes
from recipes.common.progress import Bar
from recipes.common.results import plot
from recipes.common.study import Result

_COLUMNS, _ROWS = 8, 8
_LOOKS = 16  # at a run, the one before it starts not counted


class Looking:
    """A sheet of the same z at several times, losses, and whether images begin to resemble each other."""

    def __init__(self, training: Training, folder: Path, board: Any = None) -> None:
        self.training, self.folder, self.board = training, folder, board
        model = training.shown
        self.z = draw_z(model, _COLUMNS * _ROWS, None, training.seed)
        self.y = draw_y(model, len(self.z), training.seed)
        self.real = collapse.spread(training.images.at(torch.arange(min(256, len(training.images))))[0])
        self.variety: list[list[float]] = []
        self.warnings: list[str] = []

    def look(self) -> None:
        """Write what there is to see; the first process of several does."""
        training = self.training
        images = generate(training.shown, self.z, self.y)
        variety = collapse.spread(images) / max(self.real, 1e-12)
        self.variety.append([training.step, variety])
        warned = collapse.warning(training.step, variety) if training.step else None
        if warned is not None:
            self.warnings.append(warned)
        if not processes().is_main_process:
            return
        if warned is not None and len(self.warnings) == 1:
            err.print(f"[yellow]warning:[/] {warned}", highlight=False)
        sheets.write(self.folder / f"step-{training.step:06d}.png", images, _COLUMNS)
        if training.losses:
            write_json(self.folder / "losses.json", [list(each) for each in training.losses])
            plot(self.folder / "losses.png", self._draw, 2)
        if self.board is not None and training.losses:
            for name, value in training.losses[-1]._asdict().items():
                self.board.add_scalar(name, value, training.step)
            self.board.add_scalar("variety", variety, training.step)

    def film(self) -> None:
        """The first row of each sheet, one below the other."""
        if processes().is_main_process:
            sheets.strip(self.folder / "film.png", sorted(self.folder.glob("step-*.png")), _COLUMNS)

    def _draw(self, losses: Any, scores: Any) -> None:
        found = self.training.losses
        for name in ("d", "g"):
            losses.plot([getattr(each, name) for each in found], label=f"{name.upper()}'s loss", linewidth=0.8)
        for name in ("real", "fake"):
            scores.plot([getattr(each, name) for each in found], label=f"D on {name} images", linewidth=0.8)
        for axes in (losses, scores):
            axes.set(xlabel="step")
            axes.legend()


def train(training: Training, work: Path, pictures: Path, bar: Bar) -> Result:
    """Train to the end from the last checkpoint in `work`, if there is one; what came of it, for the study.

    Args:
        pictures: where sheets go.
    """
    file, steps = work / "training.pt", training.settings.steps
    looking = Looking(training, pictures, _tensorboard(pictures))
    every = max(1, steps // _LOOKS)
    if file.exists():
        stored = weights.read(file)
        training.restore(stored["training"])
        looking.variety, looking.warnings = stored["variety"], stored["warnings"]
    else:
        looking.look()
    bar.tick(training.step)
    seconds = []
    while training.step < steps:
        start = time.perf_counter()
        training.advance()
        seconds.append(time.perf_counter() - start)
        bar.tick()
        if training.step % every == 0 or training.step == steps:
            looking.look()
            if processes().is_main_process:
                stored = {"training": training.state(), "variety": looking.variety, "warnings": looking.warnings}
                weights.write(file, stored)
    looking.film()
    return {
        "seconds_per_step": statistics.median(seconds) if seconds else float("nan"),
        "losses": [list(losses) for losses in training.losses],
        "variety": looking.variety,
        "warnings": looking.warnings,
        "rounds": [] if training.rounds is None else [list(chosen) for chosen in training.rounds.log],
    }


def _tensorboard(folder: Path) -> Any:
    """A writer, if TensorBoard is installed."""
    if not processes().is_main_process:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def sets(images: Images, tests: int) -> tuple[Images, Images]:
    """Images to train on, and images to judge by, which are the last ones of a shuffled whole."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    shuffled = Images(images.pixels[order], images.labels[order], images.names)
    cut = len(images) - tests
    return shuffled.only(slice(None, cut)), shuffled.only(slice(cut, None))
