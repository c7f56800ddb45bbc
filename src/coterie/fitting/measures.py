"""What fidelity means: answers of the clustered model against those of the dense one, 1 if nothing has changed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import expect
from coterie.fitting.hosts import HfHost, Host

Measure = str | Callable[[Any, Any], float]
_SLICE = 512  # tokens whose logits are there at the same time


class Fidelity:
    """Compare a host with what it was when dense.

    "hidden": the mean cosine of the final hidden states of real tokens.
    "loss": the dense model's loss of the next token over the clustered one's.
    A callable (model, batch) → score, the higher the better: 1 − (dense − clustered) / |dense|.
    """

    def __init__(self, host: Host, measure: Measure | None, batches: list[Any]) -> None:
        self.host, self.batches = host, batches
        self.measure: Measure = measure if measure is not None else ("loss" if _speaks(host) else "hidden")
        expect(
            callable(self.measure) or self.measure in ("hidden", "loss"),
            "measure",
            "'hidden', 'loss' or a callable",
            measure,
        )
        self._dense: list[Any] = []

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return self.measure if isinstance(self.measure, str) else getattr(self.measure, "__name__", "score")

    def remember(self, index: int) -> None:
        """The dense answer to a batch; to be called while the host is dense, in order."""
        assert index == len(self._dense)
        self._dense.append(self._answer(self.batches[index]))

    def by_length(self, indices: list[int]) -> dict[int, float]:
        """The fidelity of the host as it is now: for each length the mean over its batches."""
        found: dict[int, list[float]] = {}
        for index in indices:
            score = self._compare(self._dense[index], self._answer(self.batches[index]), self.batches[index])
            found.setdefault(length_of(self.batches[index]), []).append(score)
        return {length: statistics.fmean(scores) for length, scores in sorted(found.items())}

    @torch.no_grad()
    def _answer(self, batch: Any) -> Any:
        if self.measure == "hidden":
            return self.host.hidden(batch).detach()
        if self.measure == "loss":
            return _loss(self.host, batch)
        assert not isinstance(self.measure, str)
        return float(self.measure(self.host.model, batch))

    def _compare(self, dense: Any, found: Any, batch: Any) -> float:
        if self.measure == "hidden":
            cosine = F.cosine_similarity(dense.double(), found.double(), dim=-1)
            mask = real_tokens(batch)
            return float(cosine.mean() if mask is None or mask.shape != cosine.shape else cosine[mask].mean())
        if self.measure == "loss":
            return float(dense / found) if found else float(dense == found)
        # found / dense, and the same for scores below 0: what is lost counts against the size of what there was
        return 1 - (dense - found) / abs(dense) if dense else float(found >= dense)


def real_tokens(batch: Any) -> Tensor | None:
    """The padding mask of a batch, if it has one."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def length_of(batch: Any) -> int:
    """Tokens in each sequence of a batch."""
    first = (
        next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0] if isinstance(batch, tuple) else batch
    )
    return int(first.shape[1])


def _speaks(host: Host) -> bool:
    """Whether a model predicts next tokens."""
    if not isinstance(host, HfHost) or host.model.config.is_encoder_decoder:
        return False
    return bool(host.model.can_generate()) and host.model.get_output_embeddings() is not None


def _loss(host: Host, batch: Any) -> float:
    expect(_speaks(host), "measure", "'hidden' or a callable, as the model predicts no next token", "'loss'")
    hidden, ids, mask = host.hidden(batch), batch["input_ids"], real_tokens(batch)
    head = host.model.get_output_embeddings()
    total, count = 0.0, 0
    for row in range(ids.shape[0]):
        wanted = torch.ones_like(ids[row], dtype=torch.bool) if mask is None else mask[row]
        states, targets = hidden[row, :-1][wanted[1:]], ids[row, 1:][wanted[1:]]
        for h, t in zip(states.split(_SLICE), targets.split(_SLICE), strict=True):
            total += float(F.cross_entropy(head(h).float(), t, reduction="sum"))
        count += targets.numel()
    return total / max(1, count)
