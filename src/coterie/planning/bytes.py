"""Rows in 8 bits, and their products: whole numbers, so that they are the same in any order and on every machine.

A query becomes round(63·x / max|x|), a key round(127·x / max|x|). For ranking keys this is as good as float32: of the
softmax mass that a query's true best keys hold, the best by bytes hold all but a few hundred-thousandths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.planning.orders import rounded

_QUERY, _KEY = 63, 127  # the sum of two products of a query and a key + 128 fits into 16 bits: 2·63·255 < 2^15
_SAFE = 1e-30, 1e28  # what scales are multiplied with stays finite and normal


class Bytes(NamedTuple):
    """Rows as whole numbers, and what each is to be multiplied with."""

    whole: Tensor  # (…, N, D) float64: whole numbers, whose products and sums are exact
    scale: Tensor  # (…, N) float32

    @staticmethod
    def of_queries(x: Tensor) -> Bytes:
        whole, scale = _whole(x, _QUERY)
        return Bytes(whole, scale / (_QUERY * _KEY))

    @staticmethod
    def of_keys(x: Tensor) -> Bytes:
        return Bytes(*_whole(x, _KEY))

    def at(self, which: Tensor) -> Bytes:
        """The rows (B, H, N) that each chunk has in a list (B, H, C, V) of its own."""
        rows = which.flatten(2)
        whole = self.whole.gather(2, rows[..., None].expand(*rows.shape, self.whole.shape[-1]))
        return Bytes(whole.unflatten(2, which.shape[2:]), self.scale.gather(2, rows).unflatten(2, which.shape[2:]))

    def products(self, keys: Bytes) -> Tensor:
        """With each key, (…, N, Nk) float32, relative to the query's scale."""
        return (self.whole @ keys.whole.mT).to(torch.float32) * keys.scale[..., None, :]


def _whole(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    x = rounded(x)
    top = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    whole = (x / torch.where(top > 0, top, 1) * most).round()
    return whole.to(torch.float64), top.clamp(*_SAFE).squeeze(-1)
