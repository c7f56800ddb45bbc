"""The mechanism under test, and the inputs that it is run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.functional import attention
from coterie.mechanisms import AtLeast, Mechanism
from coterie.mechanisms.base import Causality
from coterie.plan import Plan

LENGTH = 150  # enough for several groups of most settings
LENGTHS = ((0, 0), (0, 5), (5, 0), (1, 1), (2, 2), (3, 3), (17, 17), (63, 63), (111, 111), (1, 63), (63, 1), (17, 111))
REAL = (LENGTH, 97, 40, 3, 1, 0)  # tokens of each sample in a padded batch


class RaisedError(Exception):
    """A call that should have worked raised the error that is this one's cause."""


class Subject:
    """The mechanism under test, and what is known of it."""

    def __init__(self, mechanism: Mechanism, positional: bool | None) -> None:
        self.whole = mechanism
        self.mechanism = mechanism.inner if isinstance(mechanism, AtLeast) else mechanism  # the inputs here are short
        self._positional = positional
        self.skipped: dict[str, str] = {}

    @property
    def level(self) -> str:
        """The declared causality of these settings."""
        return self.mechanism.causality

    @property
    def ways(self) -> tuple[dict[str, Any], ...]:
        """Without and with causality, if there is any."""
        return ({},) if self.level == Causality.NONE else ({}, {"is_causal": True})

    @property
    def resample(self) -> bool:
        return bool(getattr(self.mechanism, "resample", False))

    def positional(self) -> bool:
        if self._positional is None:
            plans = [self.plan(*draw(1, 2, LENGTH, seed=seed)[:2]) for seed in (1, 2)]
            windowed = any(each.window is not None for plan in plans for each in plan.rounds)
            self._positional = windowed or torch.equal(*(plan.to_dense() for plan in plans))
        return self._positional

    def plan(self, q: Tensor, k: Tensor, *, mechanism: Mechanism | None = None, **settings: Any) -> Plan:
        if self.resample:
            torch.manual_seed(0)  # it draws from torch's generator by design
        settings = {"backend": "reference", **settings}
        return working(case_of(q, k, settings), (mechanism or self.mechanism).plan, q, k, **settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        if self.resample:
            torch.manual_seed(0)
        settings = {"backend": "reference", "enable_gqa": q.shape[1] != k.shape[1], **settings}
        if "plan" in settings:
            settings["is_causal"] = settings["plan"].causal  # if that is not what was asked for, `causality` says so
        run = settings.pop("run", attention)
        out: Tensor = working(case_of(q, k, settings), run, q, k, v, self.mechanism, **settings)
        return out


def working(case: str, run: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """What a call gives; whatever it raises is a finding, not ours to handle."""
    try:
        return run(*args, **settings)
    except Exception as error:
        raise RaisedError(f"{case} raised {type(error).__name__}: {error}") from error


def case_of(q: Tensor, k: Tensor, settings: dict[str, Any]) -> str:
    words = [f"{q.shape[2]} queries and {k.shape[2]} keys"]
    words += ["with padding"] if settings.get("key_mask") is not None else []
    words += ["causal"] if settings.get("is_causal") else []
    words += [f"layer {settings['layer']}"] if "layer" in settings else []
    words += [f"{q.shape[1]} heads on {k.shape[1]}"] if q.shape[1] != k.shape[1] else []
    return ", ".join(words)


def draw(
    batch: int, heads: int, queries: int, keys: int | None = None, *, key_heads: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = ((heads, queries), (key_heads or heads, keys), (key_heads or heads, keys))
    q, k, v = (torch.randn(batch, *shape, 8, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def padded(real: tuple[int, ...], length: int, side: str) -> Tensor:
    """(B, length) masks with so many real tokens, the padding on one side or in their midst."""
    place = torch.arange(length).expand(len(real), -1)
    counts = torch.tensor(real)[:, None]
    if side == "left":
        return place >= length - counts
    if side == "right":
        return place < counts
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(length, generator=generator) < count for count in real])


def close(found: Tensor, want: Tensor, tolerance: float = 1e-8) -> bool:
    return torch.allclose(found, want, rtol=tolerance, atol=tolerance)


def equal(one: Plan, other: Plan) -> bool:
    a, b = one.to_dict(), other.to_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
