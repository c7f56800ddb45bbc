"""What kernels take: tuples of tensors and numbers. A field that is None is a feature that a kernel leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

Number = int | float


class Rows(NamedTuple):
    """Rows of (B, heads, N, D): where they lie. Numbers of a row lie side by side."""

    data: Tensor
    batch: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> Rows:
        """Strides of a tensor whose last axis is contiguous."""
        return Rows(x, x.stride(0), x.stride(1), x.stride(2))


class Call(NamedTuple):
    """What holds for the whole call. Masks are bytes, contiguous; the strides of a broadcast axis are 0."""

    heads: int
    key_heads: int
    num_queries: int
    num_keys: int
    query_rows: int
    key_rows: int
    dim: int
    value_dim: int
    offset: Tensor  # (B,)
    causal: int | None
    query_places: Tensor | None  # (B, H, S): positions of mean queries
    key_places: Tensor | None  # (B, Hk, S)
    key_mask: Tensor | None  # (B, Nk)
    query_mask: Tensor | None  # (B, Nq)
    mask: Tensor | None  # (B | 1, H | 1, Nq | 1, Nk | 1)
    mask_strides: tuple[int, int, int, int]
    added: int | None  # the mask is a float one
    seed: int | None
    limit: int  # words below it are dropped
    kept: float  # what dropout multiplies the others with


class Round(NamedTuple):
    """A round, contiguous; groups with the same keys may have been merged into the first of them."""

    query_order: Tensor  # (B, H, Mq)
    first: Tensor  # (B, H, G): query slots of each group
    last: Tensor
    key_order: Tensor  # (B, H, Mk)
    key_start: Tensor  # (B, H, G)
    key_stop: Tensor
    query_slots: int
    key_slots: int
    groups: int
    bias: Tensor | None  # (B, H, Mk)
    skip: Tensor | None  # (B, H, Mq, skips)
    skips: int
    counts: Tensor | None  # (B, H, G, width)
    width: int
    group_of: Tensor | None  # (B, H, Mq): the group that a query slot belonged to before the merge
    low: int | None  # of the window
    high: int


class Met(NamedTuple):
    """A round as `multiplicity` looks things up in it: where a row sits, and where a key is listed."""

    slot_of: Tensor  # (B, H, query rows): −1 is nowhere
    group_of: Tensor  # (B, H, query rows)
    key_start: Tensor  # (B, H, G)
    key_stop: Tensor
    groups: int
    listed: Tensor  # (B, H, Mk): slots by key
    first: Tensor  # (B, H, key rows + 1): where a key's slots begin in `listed`
    key_slots: int
    query_slots: int
    skip: Tensor | None
    skips: int
    counts: Tensor | None
    width: int
    low: int | None
    high: int


class Tiles(NamedTuple):
    """Blocks of the slots of each head; a group of −1 is no block."""

    group: Tensor  # (B·H, number)
    slot: Tensor  # (B·H, number): the first
    number: int


Others = tuple[Met, ...] | None
Settings = dict[str, Any]
