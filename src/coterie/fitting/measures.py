"""What fidelity means: answers of the clustered model against those of the dense one, 1 if nothing has changed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.checks import expect
from coterie.fitting.lengths import Lengths, same_as
from coterie.fitting.task import Task
from coterie.hosts import DENSE, HfHost, Host, without_labels
from coterie.mechanisms import AtLeast, Full, as_mechanism

Measure = str | Callable[[Any, Any], float]
_SLICE = 512  # tokens whose logits are there at the same time


class Scale(Protocol):
    """What tells the fidelity of a host on batches, of which the dense answers are known."""

    batches: list[Any]
    seconds: dict[int, float]  # of the dense answers

    @property
    def name(self) -> str:
        """What it is called in reports."""

    @property
    def lowest(self) -> float | None:
        """The lowest score that there can be, if there is one."""

    def length(self, index: int) -> int:
        """The tokens of a batch."""

    def exact(self, choices: Mapping[str, str], length: int) -> bool:
        """Whether choices change nothing with so many tokens."""

    def score(self, index: int) -> float:
        """The fidelity of the host as it is now on a batch."""


class Fidelity:
    """Compare a host with what it was when dense.

    "hidden": the mean cosine of the final hidden states of real tokens; "outputs": that of whatever a model gives that
    is not Hugging Face's.
    "loss": the dense model's loss of the next token over the clustered one's.
    A callable (model, batch) → score, the higher the better: 1 − (dense − clustered) / |dense|, where |dense| is the
    mean over all batches of that length, as a single one may score 0.
    """

    def __init__(self, host: Host, measure: Measure | None, batches: list[Any]) -> None:
        self.host, self.batches, self.lengths = host, batches, Lengths(host)
        states = "hidden" if isinstance(host, HfHost) else "outputs"
        self.measure: Measure = measure if measure is not None else ("loss" if _speaks(host) else states)
        known = callable(self.measure) or self.measure in (states, "hidden", "loss")
        expect(known, "measure", f"'{states}', 'loss' or a callable", measure)
        unspoken = f"'{states}' or a callable, as the model predicts no next token"
        expect(self.measure != "loss" or _speaks(host), "measure", unspoken, "'loss'")
        if self.measure == "hidden":
            self.measure = states
        self._decodes = isinstance(host, HfHost) and bool(host.model.config.is_encoder_decoder)
        self._dense: dict[int, Any] = {}
        self.seconds: dict[int, float] = {}  # of the dense answers

    @property
    def lowest(self) -> float | None:
        """The lowest score that there can be: of a cosine, of a ratio of losses; nobody knows of a user's own."""
        if callable(self.measure):
            return None
        return 0.0 if self.measure == "loss" else -1.0

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return self.measure if isinstance(self.measure, str) else getattr(self.measure, "__name__", "score")

    def exact(self, choices: Mapping[str, str], length: int) -> bool:
        """Whether choices are dense with so many tokens: all of them begin later."""
        return all(begins(spec) > length for spec in choices.values())

    def remember(self, index: int) -> None:
        """The dense answer to a batch."""
        batch, start = self.batches[index], time.perf_counter()
        self._dense[index] = self.lengths.answer(batch, lambda: self._answer(batch), untouched=callable(self.measure))
        self.seconds[index] = time.perf_counter() - start

    def length(self, index: int) -> int:
        """The tokens of a batch that was answered."""
        return self.lengths.of(self.batches[index])

    def expect_worth(self) -> None:
        """Raise if the dense model scores 0 on all batches of a length: nothing could be lost there."""
        for length in sorted(set(map(self.length, self._dense)) if callable(self.measure) else ()):
            unit = self._unit(length)
            got = f"a mean size of {unit:g} at {length:,} tokens"
            expect(math.isfinite(unit) and unit > 0, "measure", "scores of the dense model that are not all 0", got)

    def score(self, index: int) -> float:
        """The fidelity of the host as it is now on a batch."""
        batch = self.batches[index]
        return self._compare(self._dense[index], self._answer(batch), batch)

    @torch.no_grad()
    def _answer(self, batch: Any) -> Any:
        if callable(self.measure):
            return float(self.measure(self.host.model, batch))
        if self.measure == "loss":
            return _loss(self.host, batch)
        found = self.host.hidden(batch).detach().clone()  # a model may write its next answer into the same memory
        what = "a callable, as the cosine of a single number is a sign"
        expect(found.ndim >= 2 and found.shape[-1] > 1, "measure", what, f"outputs of shape {tuple(found.shape)}")
        return found

    def _compare(self, dense: Any, found: Any, batch: Any) -> float:
        if self.measure in ("hidden", "outputs"):
            cosine = F.cosine_similarity(dense.double(), found.double(), dim=-1)
            mask = real_tokens(batch, self._decodes)
            return float(cosine.mean() if mask is None or mask.shape != cosine.shape else cosine[mask].mean())
        if self.measure == "loss":
            return float(dense / found) if found else float(dense == found)
        # found / dense, and the same for scores below 0: what is lost counts against the size of what there was
        return float(1 - (dense - found) / self._unit(self.lengths.of(batch)))

    def _unit(self, length: int) -> float:
        """The mean size of the dense scores at a length; NaN if one is."""
        return statistics.fmean(abs(score) for index, score in self._dense.items() if self.length(index) == length)


@dataclass
class Remembered:
    """The dense model's answers to all batches: those that plans are searched on, and those that certify one; and how
    every plan did that was run on one of them."""

    task: Task
    scale: Scale
    fitted: list[int]
    checked: list[int]
    known: dict[tuple[tuple[tuple[str, str], ...], int], float] = field(default_factory=dict)
    interrupted: bool = False  # by the user, who gets what there is

    def doubts(self) -> list[str]:
        """Why documents can certify nothing, whatever they score: some are the same, or a length is missing."""
        marks = [same_as(self.scale.batches[index]) for index in (*self.fitted, *self.checked)]
        mine, others = marks[: len(self.fitted)], marks[len(self.fitted) :]
        found = []
        if len(set(others)) < len(others) or set(mine) & set(others):
            found.append("Not certified: some of the documents are the same, and one that is seen twice is no new one.")
        lengths = {self.scale.length(index) for index in self.fitted} - {self.scale.length(i) for i in self.checked}
        if lengths:
            missing = ", ".join(f"{each:,}" for each in sorted(lengths))
            found.append(f"Not certified: no held-out document has {missing} tokens.")
        return found

    def on_fitted(self, plan: Mapping[str, str], target: float = -math.inf) -> dict[int, float]:
        """The fidelity of a plan on the batches of the search, by length: their mean, or what a share of them has.

        From the longest on, up to the first that misses the target.
        """
        found: dict[int, float] = {}
        for length, indices in self._by_length(self.fitted).items():
            found[length] = typical(self._scores(plan, indices), self.task.share)
            if not found[length] >= target:
                break
        return found

    def on_checked(self, plan: Mapping[str, str]) -> Iterator[tuple[int, list[float]]]:
        """On each of those that certify, by length, from the longest on: whoever has seen enough runs no more."""
        for length, indices in self._by_length(self.checked).items():
            yield length, self._scores(plan, indices)

    def exact(self, plan: Mapping[str, str], length: int) -> bool:
        """Whether a plan is dense with so many tokens."""
        return self.scale.exact(self.task.whole(plan), length)

    def documents(self) -> dict[int, int]:
        """How many certify, by length."""
        return {length: len(indices) for length, indices in sorted(self._by_length(self.checked).items())}

    def seconds(self, indices: list[int]) -> float:
        """What some batches took the dense model."""
        return sum(self.scale.seconds[index] for index in indices)

    def _by_length(self, indices: list[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index in sorted(indices, key=self.scale.length, reverse=True):
            found.setdefault(self.scale.length(index), []).append(index)
        return found

    def _scores(self, plan: Mapping[str, str], indices: list[int]) -> list[float]:
        if self.exact(plan, self.scale.length(indices[0])):
            return [1.0] * len(indices)
        key = tuple(sorted(self.task.whole(plan).items()))
        if any((key, index) not in self.known for index in indices):
            self.task.host.put(self.task.whole(plan))
        for index in indices:
            if (key, index) not in self.known:
                self.known[key, index] = self.scale.score(index)
        return [self.known[key, index] for index in indices]


def begins(spec: str) -> float:
    """The number of keys from which on a choice is anything else than dense attention.

    >>> begins("dense"), begins("near-far@2048"), begins("near-far")
    (inf, 2048, 0)
    """
    mechanism = Full() if spec == DENSE else as_mechanism(spec)
    if isinstance(mechanism, Full):
        return math.inf
    return mechanism.length if isinstance(mechanism, AtLeast) else 0


def typical(scores: list[float], share: float | None) -> float:
    """The mean of some scores; or the highest that such a share of them reaches. NaN if one is.

    >>> typical([0.9, 0.8, 1.0, 0.7], None), typical([0.9, 0.8, 1.0, 0.7], 0.75), typical([0.9, 0.7], 0.95)
    (0.85, 0.8, 0.7)
    """
    if share is None or any(math.isnan(score) for score in scores):
        return statistics.fmean(scores)
    return sorted(scores, reverse=True)[math.ceil(share * len(scores)) - 1]


def least(scores: Mapping[int, float]) -> float:
    """The worst of some lengths; NaN if one is, or if there are none."""
    return math.nan if any(map(math.isnan, scores.values())) else min(scores.values(), default=math.nan)


def real_tokens(batch: Any, decoder: bool = False) -> Tensor | None:
    """The padding mask of a batch, if it has one: Hugging Face's, or PyTorch's, where True is padding."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("decoder_attention_mask" if decoder else "attention_mask")
    padding = batch.get("src_key_padding_mask", batch.get("key_padding_mask"))
    if mask is None and isinstance(padding, Tensor):
        mask = ~padding if padding.dtype == torch.bool else padding == 0
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


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
