"""Every head of a model: the error of a mechanism in it, and the entropy of its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.call import Call
from coterie.exact import ExactRows
from coterie.hosts import watch_dense
from coterie.mechanisms import Full, Mechanism
from coterie.observe import Seen

_ROWS = 64  # queries of a sample whose entropy is looked at


@torch.no_grad()
def head_errors(model: Any, batch: Any, mechanism: Mechanism) -> dict[str, list[tuple[float, float]]]:
    """For every attention module and head: the relative error of a mechanism, and the mean entropy of attention."""
    found: dict[str, list[tuple[float, float]]] = {}

    def look(name: str, seen: Seen) -> None:
        error = relative_errors(seen.attend(mechanism), seen.attend(Full()))
        found[name] = list(zip(error.tolist(), entropies(seen.call).tolist(), strict=True))

    watch_dense(model, batch, look)
    return found


def relative_errors(out: Tensor, exact: Tensor) -> Tensor:
    """‖out − exact‖ / ‖exact‖ of each head, (H,)."""
    size = exact.double().square().sum((0, 2, 3)).clamp(min=1e-300)
    return ((out.double() - exact.double()).square().sum((0, 2, 3)) / size).sqrt()


def entropies(call: Call) -> Tensor:
    """The mean entropy of the attention of each head, (H,), over some queries that see somebody; 0 if none does."""
    exact = ExactRows(call, _spread_rows(call.real_queries))
    total = torch.zeros(exact.shape, dtype=torch.float64, device=call.q.device)
    for columns in exact.blocks():
        total += torch.special.entr(exact.weights(columns)).sum(-1)
    seeing = (exact.lse > float("-inf")).sum((0, 2))
    return total.sum((0, 2)) / seeing.clamp(min=1)


def _spread_rows(mask: Tensor) -> Tensor:
    """Real queries of a (B, N) mask at equal distances, (B, R) ascending; −1 where a sample has fewer."""
    rows = torch.full((mask.shape[0], min(_ROWS, mask.shape[1])), -1, device=mask.device)
    for b, each in enumerate(mask):
        real = each.nonzero()[:, 0]
        some = torch.linspace(0, len(real) - 1, min(_ROWS, len(real)), device=mask.device).long()
        rows[b, : len(some)] = real[some]
    return rows
