"""What a mask of SDPA says: which keys are padding, whether the future is hidden, and what else about pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.call import HIDDEN, readable


class Said(NamedTuple):
    """A mask taken apart."""

    keys: Tensor | None  # (B | 1, Nk) bool, True for keys that somebody may look at
    pairs: Tensor | None  # (B | 1, H | 1, Nq | 1, Nk), bool or float: what is left to say
    offset: int | None  # query i sees keys ≤ i + offset; None: the future is not hidden


def said(mask: Tensor, queries: int, keys: int) -> Said:
    """Take a mask (B | 1, H | 1, Nq | 1, Nk | 1) apart.

    A mask that says the same of every query is a mask of keys; one that also hides the future, as a triangle does, is
    causal. Both are what mechanisms plan by. Everything else is looked up at the pairs that meet.

    >>> import torch
    >>> from coterie.sdpa.masks import said
    >>> real = torch.tensor([True, True, False])
    >>> found = said((torch.ones(3, 3).tril().bool() & real)[None, None], 3, 3)
    >>> found.keys.tolist(), found.pairs, found.offset
    ([[True, True, False]], None, 0)
    """
    mask = _narrowed(mask.expand(-1, -1, -1, keys))
    if mask.dtype != torch.bool:
        mask = mask.masked_fill(mask <= HIDDEN, float("-inf"))
    seen = mask if mask.dtype == torch.bool else mask > float("-inf")  # NaN is left to the scores
    if mask.dtype != torch.bool:
        seen = seen | mask.isnan()
    plain = mask.dtype == torch.bool or not _biased(mask, seen)
    if mask.shape[1:3] == (1, 1):
        return Said(seen[:, 0, 0], None if plain else mask, None)
    if plain and mask.shape[1] == 1 and mask.shape[2] == queries and readable(mask):
        real, offset = seen[:, 0, -1], keys - queries
        if torch.equal(seen[:, 0], real[:, None] & _past(queries, keys, offset, mask.device)):
            return Said(real, None, offset)
    return Said(seen.any(1).any(1), mask, None)


def _biased(mask: Tensor, seen: Tensor) -> bool:
    """Whether a float mask says more than who is seen."""
    return mask.requires_grad or not readable(mask) or bool((seen & (mask != 0)).any())


def _past(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    places = torch.arange(keys, device=device)
    return places <= torch.arange(queries, device=device)[:, None] + offset


def _narrowed(mask: Tensor) -> Tensor:
    """The same without what is merely repeated, over heads and over queries."""
    for dim in (1, 2):
        size = mask.shape[dim]
        if size == 1:
            continue
        first = mask.narrow(dim, 0, 1)
        if mask.stride(dim) == 0 or (readable(mask) and not mask.requires_grad and _repeats(mask, first, dim)):
            mask = first
    return mask


def _repeats(mask: Tensor, first: Tensor, dim: int) -> bool:
    """Whether all slices equal the first one; most that do not already differ in the last."""
    last = mask.narrow(dim, mask.shape[dim] - 1, 1)
    return torch.equal(first, last) and bool((mask == first).all())
