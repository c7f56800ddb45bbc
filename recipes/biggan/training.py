"""Training of generator and discriminator: one step, and what must be stored for the next."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import coterie
from coterie.cli.inputs import UserError
from recipes.biggan.attention import attend_by
from recipes.biggan.config import Config
from recipes.biggan.discriminator import Discriminator, d_loss, g_loss
from recipes.biggan.draws import Order
from recipes.biggan.generator import Generator
from recipes.biggan.images import Images
from recipes.biggan.processes import average_gradients, average_statistics, same_mechanisms
from recipes.biggan.rates import BETAS, EPS, TTUR, Rates
from recipes.common.draws import begin_step
from recipes.common.precision import autocast
from recipes.common.processes import processes


@dataclass(frozen=True)
class Settings:
    """How they are trained; the defaults are SMYRF's for CelebA-HQ.

    Args:
        batch: images that a step of either network sees, over all processes.
        accumulate: parts of a batch that are in memory one after the other.
        d_steps: steps of the discriminator to each of the generator.
        rate_factor: what both rates are multiplied by; small networks that train for little learn faster with more.
        ema: decay of the generator's moving average, which is then what is looked at; 0 is none.
        mechanism: of every attention block, in training.
        max_error: adapt SMYRF's rounds to this bound (supplement §16.1); None leaves them as they are.
        look: steps between two looks at that error.
        max_rounds: the most that it takes.
    """

    steps: int = 120_000
    batch: int = 32
    accumulate: int = 1
    d_steps: int = 2
    ttur: str = "supplement"
    rate_factor: float = 1.0
    ema: float = 0.0
    bf16: bool = False
    recompute: bool = False
    mechanism: str = "dense"
    max_error: float | None = None
    look: int = 50
    max_rounds: int = 8

    @property
    def rates(self) -> Rates:
        """Of Adam."""
        return Rates(*(self.rate_factor * rate for rate in TTUR[self.ttur]))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Losses(NamedTuple):
    """Of a step: hinge losses, and the mean score of real and generated images."""

    d: float
    g: float
    real: float
    fake: float


class Training:
    """Two networks, their optimisers, and how far they are.

    Args:
        seed: of the weights and all that is drawn.
    """

    def __init__(self, config: Config, settings: Settings, images: Images, seed: int) -> None:
        self.config, self.settings, self.images, self.seed = config, settings, images, seed
        all_of_us = processes()
        self.device = all_of_us.device
        self.processes, self.process = all_of_us.num_processes, all_of_us.process_index
        self.part = part_size(settings, self.processes)
        begin_step(seed, -1)
        # Convolutions are a quarter faster on channels that lie side by side, on CPUs and on GPUs.
        laid_out: Any = {"device": self.device, "memory_format": torch.channels_last}
        self.g = attend_by(Generator(config), settings.mechanism).to(**laid_out)
        self.d = attend_by(Discriminator(config), settings.mechanism).to(**laid_out)
        self.g.recompute = self.d.recompute = settings.recompute
        self.ema: Generator | None = copy.deepcopy(self.g).requires_grad_(False) if settings.ema else None
        self.g_optim, self.d_optim = (
            torch.optim.Adam(network.parameters(), rate, BETAS, EPS)
            for network, rate in ((self.g, settings.rates.g), (self.d, settings.rates.d))
        )
        self.rounds: coterie.RoundsSchedule | None = None
        if settings.max_error is not None:
            both = nn.ModuleDict({"g": self.g, "d": self.d})
            self.rounds = coterie.RoundsSchedule(
                both, max_error=settings.max_error, every=settings.look, max_rounds=settings.max_rounds
            )
        self.step = 0
        self.losses: list[Losses] = []
        self._order = Order(len(images), seed)

    @property
    def shown(self) -> Generator:
        """The generator that is looked at and kept."""
        return self.g if self.ema is None else self.ema

    def advance(self) -> Losses:
        """One step: some of the discriminator, and one of the generator."""
        begin_step(self.seed, self.step, self.process)
        self.g.train()
        self.d.train()
        found = [self._d_step(turn) for turn in range(self.settings.d_steps)][-1]
        losses = Losses(found[0], self._g_step(), *found[1:])
        self.step += 1
        if self.rounds is not None:
            self.rounds.step()
            same_mechanisms(self.g)
            same_mechanisms(self.d)
        if self.ema is not None:
            self._move_average(self.ema)
        if not all(map(math.isfinite, losses)):
            raise UserError(
                f"training broke down at step {self.step}: its losses are no numbers. "
                "Other rates (--ttur), a larger --batch or --no-bf16 may help."
            )
        self.losses.append(losses)
        return losses

    def _d_step(self, turn: int) -> tuple[float, float, float]:
        """The discriminator's loss, and its mean scores."""
        self.d_optim.zero_grad()
        sums = torch.zeros(3)
        for part in range(self.settings.accumulate):
            real, real_y = self._real(turn, part)
            with torch.no_grad(), autocast(self.g, self.settings.bf16):
                fake, fake_y = self._fake()
            with autocast(self.d, self.settings.bf16):
                scores = self.d(torch.cat([fake, real]), torch.cat([fake_y, real_y]))
            on_fake, on_real = scores.split([len(fake), len(real)])
            loss = d_loss(on_real, on_fake)
            (loss / self.settings.accumulate).backward()
            with torch.no_grad():
                sums += torch.stack([loss, on_real.mean(), on_fake.mean()]).cpu() / self.settings.accumulate
        average_gradients(self.d)
        self.d_optim.step()
        loss_d, real_score, fake_score = sums.tolist()
        return loss_d, real_score, fake_score

    def _g_step(self) -> float:
        self.g_optim.zero_grad()
        self.d.requires_grad_(False)
        total = 0.0
        for _ in range(self.settings.accumulate):
            with autocast(self.g, self.settings.bf16):
                loss = g_loss(self.d(*self._fake()))
            (loss / self.settings.accumulate).backward()
            total += float(loss.detach()) / self.settings.accumulate
        self.d.requires_grad_(True)
        average_gradients(self.g)
        average_statistics(self.g)
        self.g_optim.step()
        return total

    def _fake(self) -> tuple[Tensor, Tensor]:
        """Images of random z and classes."""
        z = torch.randn(self.part, self.config.dim_z).to(self.device)
        y = torch.randint(self.config.classes, (self.part,)).to(self.device)
        return self.g(z, y), y

    def _real(self, turn: int, part: int) -> tuple[Tensor, Tensor]:
        """This process's share of the next real images."""
        batches = self.step * self.settings.d_steps + turn
        before = part * self.processes + self.process
        x, y = self.images.at(self._order.take(batches * self.settings.batch + before * self.part, self.part))
        return x.to(self.device), y.to(self.device)

    @torch.no_grad()
    def _move_average(self, ema: Generator) -> None:
        """Towards the generator: faster at first, when there is little to average. Power iterations are copied."""
        decay = min(self.settings.ema, self.step / (self.step + 10))
        new = self.g.state_dict()
        for name, old in ema.state_dict().items():
            if name.endswith((".u0", ".sv0")):
                old.copy_(new[name])
            else:
                old.lerp_(new[name], 1 - decay)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; no random state, which each step makes anew."""
        return {
            "step": self.step,
            "g": self.g.state_dict(),
            "d": self.d.state_dict(),
            "g_optim": self.g_optim.state_dict(),
            "d_optim": self.d_optim.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "rounds": None if self.rounds is None else self.rounds.state_dict(),
            "losses": [list(losses) for losses in self.losses],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.step = state["step"]
        self.g.load_state_dict(state["g"])
        self.d.load_state_dict(state["d"])
        self.g_optim.load_state_dict(state["g_optim"])
        self.d_optim.load_state_dict(state["d_optim"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        if self.rounds is not None:
            self.rounds.load_state_dict(state["rounds"])
        self.losses = [Losses(*losses) for losses in state["losses"]]


def part_size(settings: Settings, processes: int = 1) -> int:
    """Images of a batch that are in the memory of a process at once."""
    parts = settings.accumulate * processes
    if settings.batch % parts:
        raise UserError(f"--batch {settings.batch} cannot be cut into {parts} equal parts: give a multiple of {parts}.")
    if settings.batch // parts < 2:
        raise UserError(f"--batch {settings.batch} leaves fewer than 2 images a part, which batch norms need.")
    return settings.batch // parts
