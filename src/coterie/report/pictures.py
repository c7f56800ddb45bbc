"""What the report draws: the error of every head, and who meets whom in the hardest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.fitting.fit import Fit
from coterie.fitting.hosts import DENSE, host_of
from coterie.mechanisms import Full, Mechanism, NearFar, as_mechanism
from coterie.observe import Seen, observing
from coterie.tiles import count_pairs

_ROWS = 64  # queries whose entropy is looked at
_GRID = 160  # cells of the picture of a plan


@dataclass(frozen=True)
class Pictures:
    """The error of every head by module, and the picture of one plan."""

    errors: dict[str, list[float]]
    mechanisms: dict[str, str]
    module: str
    head: int
    meetings: list[list[float]]  # share of pairs that meet in each cell

    @staticmethod
    def of(model: Any, found: Fit, batch: Any, tell: Callable[[str, int, int], None]) -> Pictures:
        """Run one batch densely, and the chosen mechanisms on the way; near-far where dense attention was chosen."""
        errors: dict[str, list[float]] = {}
        used: dict[str, str] = {}
        hardest: dict[str, Any] = {"error": -1.0}

        def look(name: str, seen: Seen) -> None:
            spec = found.choices.get(name, DENSE)
            mechanism = NearFar() if spec == DENSE else as_mechanism(spec)
            exact = seen.attend(Full())
            try:
                each = _relative(seen.attend(mechanism), exact)
            except ValueError:  # what near-far cannot do stays dense: nothing is lost there
                each = torch.zeros(exact.shape[1])
            errors[name], used[name] = each.tolist(), str(mechanism)
            tell("pictures", len(errors), len(found.choices))
            if float(each.max()) > hardest["error"]:
                head = int(each.argmax())
                plan = mechanism.plan(seen.q[:1], seen.k[:1], **_planning(seen))
                hardest.update(error=float(each.max()), module=name, head=head, meetings=_shrink(plan, head))

        _watch(model, batch, look)
        return Pictures(errors, used, hardest.get("module", ""), hardest.get("head", 0), hardest.get("meetings", []))


@torch.no_grad()
def head_errors(model: Any, batch: Any, mechanism: Mechanism) -> dict[str, list[tuple[float, float]]]:
    """For every attention module and head: the relative error of a mechanism, and the mean entropy of attention."""
    found: dict[str, list[tuple[float, float]]] = {}

    def look(name: str, seen: Seen) -> None:
        error = _relative(seen.attend(mechanism), seen.attend(Full()))
        found[name] = list(zip(error.tolist(), _entropy(seen).tolist(), strict=True))

    _watch(model, batch, look)
    return found


@torch.no_grad()
def _watch(model: Any, batch: Any, look: Callable[[str, Seen], None]) -> None:
    """Call `look` for every attention module, dense, once."""
    host, done = host_of(model), set()

    def observer(seen: Seen) -> None:
        full = isinstance(seen.mechanism, Full) or seen.mechanism == "full"
        if full and host.current not in done:  # a shared layer runs more than once
            done.add(host.current)
            look(host.current, seen)

    host.put_everywhere("full")
    try:
        with host.watching(), observing(observer):
            host.hidden(batch)
    finally:
        host.restore()


def _relative(out: Tensor, exact: Tensor) -> Tensor:
    """(heads,)"""
    size = exact.double().square().sum((0, 2, 3)).clamp(min=1e-300)
    return ((out.double() - exact.double()).square().sum((0, 2, 3)) / size).sqrt()


def _entropy(seen: Seen) -> Tensor:
    """The mean entropy of the attention of some queries, (heads,)."""
    queries = seen.q.shape[2]
    rows = torch.linspace(0, queries - 1, min(_ROWS, queries)).long()
    keys = seen.k.repeat_interleave(seen.q.shape[1] // seen.k.shape[1], 1)
    scale = seen.settings["scale"] or seen.q.shape[-1] ** -0.5
    scores = scale * seen.q[:, :, rows].double() @ keys.double().transpose(-1, -2)
    if seen.settings["is_causal"]:
        hidden = torch.arange(keys.shape[2]) > (rows + keys.shape[2] - queries)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    p = F.softmax(scores, -1)
    return -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2))


def _planning(seen: Seen) -> dict[str, Any]:
    settings = seen.settings
    found = {name: settings[name] for name in ("is_causal", "scale", "layer")}
    for name in ("key_mask", "query_mask"):
        found[name] = None if settings[name] is None else settings[name][:1]
    offset = settings["causal_offset"]
    found["causal_offset"] = offset[:1] if isinstance(offset, Tensor) else offset
    return found


def _shrink(plan: Any, head: int) -> list[list[float]]:
    """Who meets whom in one head, directly and not through a mean, averaged over cells."""
    met = (count_pairs(plan)[0, head, : plan.num_queries, : plan.num_keys] > 0).float()
    grid = min(_GRID, *met.shape)
    return [[round(x, 3) for x in row] for row in F.adaptive_avg_pool2d(met[None, None], grid)[0, 0].tolist()]
