"""Look at new tokens while a model decodes, and at what other mechanisms would answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.hf import all_keys
from coterie.hf.asked import Asked
from coterie.mechanisms import Mechanism, NearFar
from coterie.mechanisms.at_least import AtLeast
from coterie.mechanisms.near_far.decoding import Step, decode
from coterie.mechanisms.near_far.finished import Finished


class Question(NamedTuple):
    """A few new tokens of one layer, and the cache that they look at.

    Attributes:
        module: whose attention it is.
        q: (B, H, Nq, D).
        k, v: (B, Hk, N, D) all that is cached, the keys of these queries included.
        step: which keys are real, and what each query sees.
        scale: of the scores.
        layer: its number, for random draws.
    """

    module: Any  # an nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    step: Step
    scale: float
    layer: int

    def last(self) -> Question:
        """Its last token alone, as decoding goes."""
        return self._replace(q=self.q[:, :, -1:], step=Step(self.step.real, self.step.rank[:, -1:].contiguous()))

    def dense(self) -> Tensor:
        """What dense attention answers, (B, H, Nq, Dv)."""
        rank, real = self.step.rank, self.step.real.long()
        seen = torch.arange(real.shape[1], device=real.device) <= rank[..., None]  # (B, Nq, N), by rank
        counted = torch.zeros_like(seen, dtype=torch.int32).scatter_add_(2, real[:, None].expand_as(seen), seen.int())
        out = self.attend((counted > 0)[:, None])
        return out.masked_fill((rank < 0)[:, None, :, None], 0.0)

    def attend(self, pairs: Tensor | None = None) -> Tensor:
        """Dense attention as it is when a model decodes; without a mask, all keys are seen."""
        call = Asked(self.module, self.q, self.k, self.v, self.scale, 0.0)
        if pairs is None and all_keys.answers(call):
            return all_keys.answer(call, all_keys.Visible.everything(self.q, self.k))
        shared = self.q.shape[1] != self.k.shape[1]
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=pairs, scale=self.scale, enable_gqa=shared
        )

    def clusters(self, mechanism: Mechanism) -> Finished:
        """An empty store of the clusters that a mechanism decodes with."""
        inner = mechanism.inner if isinstance(mechanism, AtLeast) else mechanism
        assert isinstance(inner, NearFar)
        return Finished(inner, self.layer)

    def near_far(self, finished: Finished, least: int = 0) -> Tensor:
        """What near–far attention answers, (B, H, Nq, Dv); clusters that are missing are made."""
        return decode(finished, self.q, self.k, self.v, self.step, self.scale, least=least)[0]


_looking: ContextVar[Callable[[Question], Tensor] | None] = ContextVar("coterie_questions", default=None)


@contextmanager
def answering(look: Callable[[Question], Tensor]) -> Iterator[None]:
    """Inside, `look` answers every call that a mechanism other than dense attention would decode."""
    token = _looking.set(look)
    try:
        yield
    finally:
        _looking.reset(token)


def answer(question: Question, finished: Callable[[], Finished], least: int) -> Tensor:
    """By whoever is looking, or by the clusters of the cache."""
    look = _looking.get()
    with torch.no_grad():
        return look(question) if look is not None else question.near_far(finished(), least)
