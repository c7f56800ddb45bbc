"""What fidelity means: answers of the clustered model against those of the dense one, 1 if nothing has changed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.checks import expect
from coterie.fitting.task import Task
from coterie.hosts import DENSE, HfHost, Host, without_labels

Measure = str | Callable[[Any, Any], float]
_SLICE = 512  # tokens whose logits are there at the same time


class Fidelity:
    """Compare a host with what it was when dense.

    "hidden": the mean cosine of the final hidden states of real tokens.
    "loss": the dense model's loss of the next token over the clustered one's.
    A callable (model, batch) → score, the higher the better: 1 − (dense − clustered) / |dense|, where |dense| is the
    mean over all batches of that length, as a single one may score 0.
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
        expect(
            self.measure != "loss" or _speaks(host),
            "measure",
            "'hidden' or a callable, as the model predicts no next token",
            "'loss'",
        )
        self._decodes = isinstance(host, HfHost) and bool(host.model.config.is_encoder_decoder)
        self._dense: list[Any] = []

    @property
    def lowest(self) -> float | None:
        """The lowest score that there can be: of a cosine, of a ratio of losses; nobody knows of a user's own."""
        return {"hidden": -1.0, "loss": 0.0}[self.measure] if isinstance(self.measure, str) else None

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return self.measure if isinstance(self.measure, str) else getattr(self.measure, "__name__", "score")

    def remember(self, index: int) -> None:
        """The dense answer to a batch; to be called while the host is dense, in order."""
        assert index == len(self._dense)
        self._dense.append(self._answer(self.batches[index]))

    def expect_worth(self) -> None:
        """Raise if the dense model scores 0 on all batches of a length: nothing could be lost there."""
        for length in sorted({length_of(batch) for batch in self.batches} if callable(self.measure) else ()):
            unit = self._unit(length)
            got = f"a mean size of {unit:g} at {length:,} tokens"
            expect(math.isfinite(unit) and unit > 0, "measure", "scores of the dense model that are not all 0", got)

    def by_length(self, indices: list[int]) -> dict[int, list[float]]:
        """The fidelity of the host as it is now on these batches, by their length."""
        found: dict[int, list[float]] = {}
        for index in indices:
            score = self._compare(self._dense[index], self._answer(self.batches[index]), self.batches[index])
            found.setdefault(length_of(self.batches[index]), []).append(score)
        return dict(sorted(found.items()))

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
            mask = real_tokens(batch, self._decodes)
            return float(cosine.mean() if mask is None or mask.shape != cosine.shape else cosine[mask].mean())
        if self.measure == "loss":
            return float(dense / found) if found else float(dense == found)
        # found / dense, and the same for scores below 0: what is lost counts against the size of what there was
        return float(1 - (dense - found) / self._unit(length_of(batch)))

    def _unit(self, length: int) -> float:
        """The mean size of the dense scores at a length; NaN if one is."""
        pairs = zip(self.batches, self._dense, strict=True)
        return statistics.fmean(abs(score) for batch, score in pairs if length_of(batch) == length)


class Remembered(NamedTuple):
    """The dense model's answers to all batches: those that plans are searched on, and those that certify one."""

    task: Task
    scale: Fidelity
    fitted: list[int]
    checked: list[int]

    def on_fitted(self, plan: Mapping[str, str]) -> dict[int, float]:
        """The fidelity of a plan on the batches of the search, by length: their mean, or what a share of them has."""
        return {length: typical(scores, self.task.share) for length, scores in self._of(plan, self.fitted).items()}

    def on_checked(self, plan: Mapping[str, str]) -> dict[int, list[float]]:
        """On each of those that certify, by length."""
        return self._of(plan, self.checked)

    def documents(self) -> dict[int, int]:
        """How many certify, by length."""
        return dict(sorted(Counter(length_of(self.scale.batches[index]) for index in self.checked).items()))

    def _of(self, plan: Mapping[str, str], indices: list[int]) -> dict[int, list[float]]:
        self.task.host.put(self.task.whole(plan))
        return self.scale.by_length(indices)


def remember(task: Task, measure: Measure | None) -> Remembered:
    """Run every batch densely, once."""
    fitted, total = len(task.fitted), len(task.fitted) + len(task.checked)
    scale = Fidelity(task.host, measure, task.fitted + task.checked)
    task.host.put_everywhere(DENSE)
    for index in range(total):
        scale.remember(index)
        task.tell("dense answers", index + 1, total)
    scale.expect_worth()
    return Remembered(task, scale, list(range(fitted)), list(range(fitted, total)))


def typical(scores: list[float], share: float | None) -> float:
    """The mean of some scores; or the highest that such a share of them reaches. NaN if one is.

    >>> typical([0.9, 0.8, 1.0, 0.7], None), typical([0.9, 0.8, 1.0, 0.7], 0.75), typical([0.9, 0.7], 0.95)
    (0.85, 0.8, 0.7)
    """
    if share is None or any(math.isnan(score) for score in scores):
        return statistics.fmean(scores)
    return sorted(scores, reverse=True)[math.ceil(share * len(scores)) - 1]


def least(scores: Mapping[int, float]) -> float:
    """The worst of some lengths; NaN if one is."""
    return math.nan if any(math.isnan(score) for score in scores.values()) else min(scores.values())


def real_tokens(batch: Any, decoder: bool = False) -> Tensor | None:
    """The padding mask of a batch, if it has one: Hugging Face's, or PyTorch's, where True is padding."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("decoder_attention_mask" if decoder else "attention_mask")
    padding = batch.get("src_key_padding_mask", batch.get("key_padding_mask"))
    if mask is None and isinstance(padding, Tensor):
        mask = ~padding if padding.dtype == torch.bool else padding == 0
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def length_of(batch: Any) -> int:
    """Tokens in each sequence of a batch: the second dimension of its input, or the pixels of images (B, C, H, W).

    Features of speech come as (B, bins, frames) or (B, frames, bins): frames are the more.
    """
    if isinstance(batch, Mapping):
        speech = batch.get("input_features")
        if isinstance(speech, Tensor) and speech.ndim == 3:
            return max(speech.shape[1:])
        named = [batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)]
        first = next(iter([*named, *batch.values()]), None)
    else:
        first = batch[0] if isinstance(batch, tuple) else batch
    fits = isinstance(first, Tensor) and first.ndim >= 2
    expect(fits, "batches", "inputs of two or more dimensions, (batch, length, …)", type(first).__name__)
    assert isinstance(first, Tensor)
    return int(first.shape[1]) if first.ndim < 4 else math.prod(first.shape[2:])


def _speaks(host: Host) -> bool:
    """Whether a model predicts next tokens."""
    if not isinstance(host, HfHost) or host.model.config.is_encoder_decoder:
        return False
    return bool(host.model.can_generate()) and host.model.get_output_embeddings() is not None


def _loss(host: Host, batch: Any) -> float:
    """The mean loss of the next token. Logits are made a few at a time where the head is a plain matrix; some models
    scale or transform before it (Granite, Cohere, BERT), and then they make all of them themselves."""
    ids, mask = batch["input_ids"], real_tokens(batch)
    head = host.model.get_output_embeddings()
    plain = _head_is_plain(host, ids[:1, :4], head)
    hidden = host.hidden(batch) if plain else host.run(without_labels(batch)).logits
    total, count = 0.0, 0
    for row in range(ids.shape[0]):
        wanted = torch.ones_like(ids[row], dtype=torch.bool) if mask is None else mask[row]
        states, targets = hidden[row, :-1][wanted[1:]], ids[row, 1:][wanted[1:]]
        for h, t in zip(states.split(_SLICE), targets.split(_SLICE), strict=True):
            logits = head(h) if plain else h
            total += float(F.cross_entropy(logits.float(), t, reduction="sum"))
        count += targets.numel()
    return total / max(1, count)


def _head_is_plain(host: Host, ids: Tensor, head: Any) -> bool:
    """Whether the model's logits are its output embeddings times its hidden states, and nothing else."""
    logits, alone = host.run({"input_ids": ids}).logits, head(host.hidden({"input_ids": ids}))
    return logits.shape == alone.shape and torch.allclose(logits.float(), alone.float(), rtol=1e-2, atol=1e-2)
