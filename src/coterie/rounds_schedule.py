"""RoundsSchedule: as many hashing rounds as each step of a training needs (supplement §16.1)."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from coterie import observe
from coterie.checks import expect, expect_int, expect_type
from coterie.mechanisms import Mechanism, Smyrf
from coterie.observe import Seen
from coterie.plan import Plan
from coterie.planning.round_errors import RoundErrors, rounds_needed
from coterie.planning.tokens import Tokens


class Chosen(NamedTuple):
    """What the schedule chose: from this step on, the module takes so many rounds, whose error was estimated."""

    step: int
    module: str
    rounds: int
    error: float


class RoundsSchedule:
    """Sets the rounds of every `Smyrf` in a model while it trains: more where maps are diffuse, as they are at first,
    fewer as they get sparse.

    In the first forward pass after every `every` steps, each module's attention is estimated as it runs, on 64 queries
    of each sample: ‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F over all its heads and samples after 1, 2, … `max_rounds` rounds. The
    next `step()` gives the module the fewest rounds whose error is within `max_error`, or `max_rounds` if none is;
    `log` holds every choice with its error, so one above the bound is seen. Masks of pairs (`attn_mask`) are not part
    of the estimate, and a warning says so. Only passes in training mode count, and none of a compiled model; a module
    of which none was seen when the next look is due is named by a warning.

    Args:
        model: with modules inside that have a `mechanism` and call `coterie.attention` by it, as
            `coterie.nn.MultiheadAttention` does; those with a `Smyrf` of a fixed number of rounds are scheduled, and
            start with what they have.
        max_error: the bound.
        every: steps between two looks.
        max_rounds: the most that a module takes.

    Attributes:
        log: the choices so far, `Chosen(step, module, rounds, error)`.

    Example:
        >>> import coterie, torch
        >>> from coterie.rounds_schedule import RoundsSchedule
        >>> model = coterie.nn.TransformerEncoderLayer(32, 4, batch_first=True, mechanism="smyrf:cluster_size=16")
        >>> schedule = RoundsSchedule(model, max_error=0.5, every=10, max_rounds=6)
        >>> for _ in range(11):
        ...     out = model(torch.randn(2, 100, 32))  # the loss, its gradient and optimizer.step() belong here
        ...     schedule.step()
        >>> [(chosen.step, chosen.module, chosen.rounds) for chosen in schedule.log]
        [(1, 'self_attn', 6), (11, 'self_attn', 6)]
        >>> str(model.self_attn.mechanism)
        'smyrf:rounds=6,cluster_size=16'
        >>> schedule.close()
    """

    def __init__(self, model: nn.Module, *, max_error: float, every: int = 50, max_rounds: int = 8) -> None:
        expect_type(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
        number = isinstance(max_error, int | float) and not isinstance(max_error, bool)
        expect_type(number, "max_error", "a number", type(max_error).__name__)
        expect(0 < max_error < math.inf, "max_error", "a finite number > 0", max_error)
        expect_int("every", every, at_least=1)
        expect_int("max_rounds", max_rounds, at_least=1, at_most=2**14)
        self.max_error, self.every, self.max_rounds = float(max_error), every, max_rounds
        self.log: list[Chosen] = []
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "mechanism", None), Smyrf)
        }
        wanted = "a model with modules whose mechanism is a Smyrf of a fixed number of rounds"
        expect(bool(self._modules), "model", wanted, type(model).__name__)
        for module in self._modules.values():
            expect(_smyrf(module).rounds != "auto", "model", wanted, str(module.mechanism))
        self._step = 0
        self._due = set(self._modules)
        self._found: dict[str, RoundErrors] = {}
        self._hooks: list[Any] = []
        for name, module in self._modules.items():
            self._watch(name, module)

    def step(self) -> None:
        """Call once after every step of the optimizer: new rounds take effect here."""
        self._step += 1
        for name, found in self._found.items():
            errors = found.pooled()
            needed = rounds_needed(errors, self.max_error)
            rounds = int(needed.rounds)
            module = self._modules[name]
            _give(module, rounds)
            self.log.append(Chosen(self._step, name, rounds, float(errors[rounds - 1])))
        self._found.clear()
        if self._step % self.every == 0:
            if self._due:
                missing = ", ".join(sorted(self._due))
                warnings.warn(f"RoundsSchedule: no pass of {missing} in training mode was seen", stacklevel=2)
            self._due = set(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """What a training that goes on needs, as plain numbers; take it after `step()`."""
        return {
            "step": self._step,
            "due": sorted(self._due),
            "rounds": {name: _smyrf(module).rounds for name, module in self._modules.items()},
            "log": [list(chosen) for chosen in self.log],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another schedule of the same model was; its modules get the rounds they had."""
        there, here = sorted(state["rounds"]), sorted(self._modules)
        expect(there == here, "state", f"the rounds of {', '.join(here)}", ", ".join(there))
        self._step, self._due = state["step"], set(state["due"])
        self.log = [Chosen(*chosen) for chosen in state["log"]]
        for name, rounds in state["rounds"].items():
            _give(self._modules[name], rounds)

    def close(self) -> None:
        """Stop looking; modules keep the rounds that they have."""
        while self._hooks:
            self._hooks.pop().remove()

    def _watch(self, name: str, module: nn.Module) -> None:
        """While the module runs and is due, its call of `coterie.attention` is looked at, beside any other observer."""
        looking: list[AbstractContextManager[None]] = []

        def enter(*_: Any) -> None:
            if module.training and name in self._due:
                looking.append(observe.observing(self._observer(name, module, observe.current())))
                looking[-1].__enter__()

        def leave(*_: Any) -> None:
            while looking:
                looking.pop().__exit__(None, None, None)

        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _observer(self, name: str, module: nn.Module, other: observe.Observer | None) -> observe.Observer:
        def look(seen: Seen) -> Tensor | None:
            known = None if other is None else other(seen)
            if name in self._due:
                self._due.discard(name)
                self._found[name] = self._estimate(name, _smyrf(module), seen)
            return known

        return look

    def _estimate(self, name: str, smyrf: Smyrf, seen: Seen) -> RoundErrors:
        if seen.call.pair_mask is not None:
            warnings.warn(f"RoundsSchedule: the estimate for {name!r} leaves its attn_mask out", stacklevel=2)
        # Its own seed rather than PyTorch's generator: looking must not change what is drawn next.
        probe = _Probe(replace(smyrf, resample=False), self.max_rounds, [])
        probe.plan(seen.q, seen.k, **seen.planning())
        return probe.found[0]


def _give(module: nn.Module, rounds: int) -> None:
    module.mechanism = replace(_smyrf(module), rounds=rounds)  # type: ignore[assignment]


def _smyrf(module: nn.Module) -> Smyrf:
    mechanism = module.mechanism
    expect_type(isinstance(mechanism, Smyrf), "mechanism", "the Smyrf that is scheduled", type(mechanism).__name__)
    assert isinstance(mechanism, Smyrf)
    return mechanism


@dataclass(frozen=True)
class _Probe(Mechanism):
    """Sees the tokens that Smyrf would plan for, and remembers what its rounds would miss."""

    smyrf: Smyrf
    rounds: int
    found: list[RoundErrors]

    def build(self, tokens: Tokens) -> Plan:
        self.found.append(self.smyrf.round_errors(tokens, self.rounds))
        return replace(self.smyrf, rounds=1).build(tokens)
