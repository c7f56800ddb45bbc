"""A model that writes: its prefill as it was fitted, and what answers new tokens over the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from coterie.checks import expect
from coterie.fitting.measures import begins
from coterie.hosts import HfHost, Host
from coterie.mechanisms import Mechanism, NearFar, as_mechanism
from coterie.mechanisms.at_least import AtLeast
from coterie.observe import Seen

_LEAST = 32  # tokens of a text: some to read, and some to write
_TAKEN = {"input_ids", "attention_mask", "labels"}  # of a batch; labels are its own tokens


class Writer(Host):
    """A Hugging Face model whose choices are those for new tokens; its prefill stays what it is.

    Args:
        host: the model.
        prefill: what runs there while a text is read.
    """

    def __init__(self, host: HfHost, prefill: Mapping[str, str]) -> None:
        super().__init__(host.model)
        self.host, self.prefill = host, dict(prefill)

    @property
    def names(self) -> list[str]:
        return self.host.decoders()

    def put(self, choices: Mapping[str, str], decode: Mapping[str, str] | None = None) -> None:
        self.host.put(self.prefill, choices)

    def undo(self) -> None:
        self.host.undo()

    def restore(self) -> None:
        self.host.restore()

    def name_of(self, seen: Seen) -> str:
        return self.host.name_of(seen)

    def read(self, batch: Mapping[str, Tensor], tokens: int, cache: Any) -> None:
        """Prefill: the first tokens of a batch go into a cache."""
        body = getattr(self.model, "base_model", self.model)  # of a text that is read, no logits are wanted
        self._call(body, batch, 0, tokens, cache)

    def write(self, batch: Mapping[str, Tensor], start: int, stop: int, cache: Any) -> Tensor:
        """The logits of tokens that follow those in the cache, (B, stop − start, words)."""
        found: Tensor = self._call(self.model, batch, start, stop, cache).logits
        return found

    @torch.no_grad()
    def _call(self, model: Any, batch: Mapping[str, Tensor], start: int, stop: int, cache: Any) -> Any:
        mask = mask_of(batch)[:, :stop]
        ids = batch["input_ids"][:, start:stop]
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)


def mask_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Which tokens are real, 1 or 0."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"]) if mask is None else mask


def dense_up_to(spec: str) -> float:
    """The number of tokens up to which near–far decoding is dense: two chunks, or where it says itself; inf if it is.

    >>> dense_up_to("dense"), dense_up_to("near-far:chunk=64"), dense_up_to("near-far:chunk=64@1000")
    (inf, 128, 999)
    """
    first = begins(spec)
    if first == float("inf"):
        return first
    mechanism = as_mechanism(spec)
    inner = mechanism.inner if isinstance(mechanism, AtLeast) else mechanism
    assert isinstance(inner, NearFar)
    return max(2 * inner.chunk, first - 1)


def decoders_among(candidates: Sequence[Mechanism] | None, seed: int) -> list[Mechanism]:
    """The candidates that can decode: those of a user, or near–far attention of several sizes."""
    if candidates is None:
        return [NearFar(near=near, seed=seed) for near in (32, 64, 128, 256, 512)]
    found = [each for each in candidates if isinstance(each.inner if isinstance(each, AtLeast) else each, NearFar)]
    what = "'near-far' among them with decode=True, as no other mechanism has a form for decoding"
    expect(bool(found), "candidates", what, ", ".join(map(str, candidates)) or "none")
    return found


def expect_writer(host: Host, batches: Sequence[Any], candidates: Sequence[Mechanism]) -> HfHost:
    """Refuse what cannot be fitted for decoding, before anything is computed: a model that does not write, or texts in
    which near–far decoding has nothing to leave out."""
    kind = type(host.model).__name__
    causal = isinstance(host, HfHost) and not host.model.config.is_encoder_decoder and host.model.can_generate()
    expect(causal, "decode", "a model of transformers that writes: a decoder, and no encoder before it", kind)
    assert isinstance(host, HfHost)
    keeps = "past_key_values" in signature(host.model.forward).parameters and bool(host.decoders())
    what = "a model that keeps keys and values of causal self-attention, without a window of its own"
    expect(keeps, "decode", what, kind)
    longest = 0
    for batch in batches:
        host.check(batch)
        plain = "input_ids" in batch and set(batch) <= _TAKEN
        what = "input_ids and attention_mask alone with decode=True"
        expect(plain, "batches", what, ", ".join(batch) or "nothing")
        longest = max(longest, batch["input_ids"].shape[1])
    shortest = max(_LEAST, min(dense_up_to(str(each)) for each in candidates))
    what = f"a text of more than {shortest:,.0f} tokens with decode=True, as new tokens see so many exactly"
    expect(longest > shortest, "batches", what, f"{longest:,} at most")
    return host
