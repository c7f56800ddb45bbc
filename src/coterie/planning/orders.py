"""From scores and labels to orders and offsets: the small steps that plans are made of.

Planning arithmetic is done in float64 and rounded to float32 before anything is compared. Products of float32 numbers
are exact in float64, so the rounded result does not depend on the order of summation (on batch size, padding or
backend), and equal rows get equal scores; what still ties is decided by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of a sequence: part p of sample b holds the rows order[b, start[b, p] : stop[b, p]]."""

    order: Tensor  # (B, M) int32
    start: Tensor  # (B, P) int32
    stop: Tensor
    most: int | None = None  # rows of a part, if shapes say so

    @staticmethod
    def whole(mask: Tensor) -> Parts:
        """All real rows of a (B, N) mask as one part."""
        order, count = compact(mask)
        zero = torch.zeros_like(count)[:, None]
        return Parts(order, zero.to(torch.int32), count[:, None].to(torch.int32))

    @property
    def sizes(self) -> Tensor:
        """(B, P) int64: how many rows each part has."""
        return (self.stop - self.start).long()

    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows of each part, (B, P, longest) int64, and which of these slots are used."""
        longest = int(self.sizes.max()) if self.start.numel() else 0
        slot = self.start[..., None].long() + torch.arange(longest, device=self.order.device)
        used = slot < self.stop[..., None]
        slot = torch.where(used, slot, 0)
        rows = self.order[:, None, :].expand(-1, slot.shape[1], -1).gather(-1, slot) if self.order.shape[-1] else slot
        return rows.long(), used


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ without floats, which a size that is a symbol keeps simple."""
    return -(-a // b)


def rounded(scores: Tensor) -> Tensor:
    """Scores as finite float32 numbers, ready to be compared."""
    limit = torch.finfo(torch.float32).max
    return scores.to(torch.float32).nan_to_num(nan=limit, posinf=limit, neginf=-limit)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the True entries first, in order: (…, N) int32, and how many there are: (…) int64."""
    upto = mask.cumsum(-1)
    count = upto[..., -1] if mask.shape[-1] else mask.sum(-1)
    place = torch.arange(mask.shape[-1], device=mask.device)
    rank = torch.where(mask, upto - 1, place - upto + count[..., None])
    order = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    return order.scatter(-1, rank, place.to(torch.int32).expand(mask.shape)), count


def order_by(scores: Tensor, mask: Tensor) -> Tensor:
    """Positions by ascending score, ties by position, masked ones last: int32 of the scores' shape."""
    keyed = rounded(scores).masked_fill(~mask, float("inf"))
    return torch.argsort(keyed, dim=-1, stable=True).to(torch.int32)


def group_by(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Members of each label in order of position: order (…, N) and offsets (…, groups + 1), both int32."""
    labels = torch.where(mask, labels, groups).long()
    order = torch.argsort(labels, dim=-1, stable=True).to(torch.int32)
    counts = torch.zeros(*labels.shape[:-1], groups + 1, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(-1, labels, torch.ones_like(labels))
    stops = counts[..., :-1].cumsum(-1)
    return order, torch.nn.functional.pad(stops, (1, 0)).to(torch.int32)


def balanced_offsets(count: Tensor, groups: Tensor, capacity: int) -> Tensor:
    """Cut `count` things into `groups` parts whose sizes differ by at most one: (…, capacity + 1) int32.

    Parts beyond `groups` are empty.
    """
    steps = torch.arange(capacity + 1, device=count.device)
    steps = torch.minimum(steps, groups[..., None])
    return (steps * count[..., None] // groups[..., None].clamp(min=1)).to(torch.int32)


def top_indices(scores: Tensor, mask: Tensor, count: int) -> Tensor:
    """The positions of the `count` highest scores along the last axis, ties by position: int64, best first.

    Masked positions come after all others, however low those score.
    """
    bits = rounded(scores).contiguous().view(torch.int32).long()
    # Float bits as an integer that grows with the float: negative numbers count down. −0 and 0 are one number.
    bits = torch.where(bits == -(2**31), 0, bits)
    rank = torch.where(bits >= 0, bits, -(2**31) - bits)
    length = scores.shape[-1]
    keyed = rank * 2**32 + torch.arange(length - 1, -1, -1, device=scores.device)
    return keyed.masked_fill(~mask, -(2**63)).topk(count, dim=-1).indices
