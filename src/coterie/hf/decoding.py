"""New tokens over a cache: `coterie.hf.use(model, …, decode="near-far")`."""

from __future__ import annotations

import math
import threading
from functools import cache

import torch
from torch import Tensor

from coterie.checks import expect
from coterie.hf import questions, turn
from coterie.hf.all_keys import Visible
from coterie.hf.asked import Asked
from coterie.hf.buffers import BufferedLayer, holder, made_of_cached
from coterie.hf.masks import Rules
from coterie.hf.questions import Question
from coterie.hf.sites import Site
from coterie.hf.windows import window_of
from coterie.mechanisms import Full, Mechanism, NearFar
from coterie.mechanisms.at_least import AtLeast
from coterie.mechanisms.by_sample import FEW_QUERIES
from coterie.mechanisms.near_far.decoding import Step
from coterie.mechanisms.near_far.finished import Finished


def form(mechanism: Mechanism | None) -> Mechanism | None:
    """What decodes if a mechanism is asked to; None is dense. Most mechanisms have no such form."""
    inner = mechanism.inner if isinstance(mechanism, AtLeast) else mechanism
    known = inner is None or isinstance(inner, Full | NearFar)
    expect(known, "decode", "'dense' or 'near-far', as no other mechanism has a form for decoding", mechanism)
    return None if inner is None or isinstance(inner, Full) else mechanism


def fits(site: Site) -> bool:
    """Whether new tokens of an attention module look back at a cache that only grows."""
    module = site.module
    hides = bool(getattr(module, "is_causal", False)) or bool(getattr(module, "is_decoder", False))
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    # Llama 4's chunks forget what is behind them, as windows do.
    chunked = kinds is not None and index is not None and kinds[index] == "chunked_attention"
    return site.kind == "self" and hides and not chunked and not window_of(site)


def is_step(q: Tensor, k: Tensor) -> bool:
    """Whether a call of attention is a few new tokens after others."""
    return 0 < q.shape[2] <= FEW_QUERIES and q.shape[2] < k.shape[2]


class _Pass(threading.local):
    """What the layers of one pass have in common, as they share its mask."""

    mask: Tensor | None = None
    queries: int = 0
    whole: bool = False  # no token is padding
    counted: Tensor | None = None  # 0, 1, 2, …: the places of tokens, where none is padding
    real: Tensor | None = None  # (B, N) bool
    before: Tensor | None = None  # what was real in the pass before
    goes_on: bool = False  # whether this one is that one and new tokens
    rules: Rules | None = None
    asking: Tensor | None = None  # (B, Nq) bool: queries that are real tokens
    step: Step | None = None
    visible: Visible | None = None


_pass = _Pass()


def visible(call: Asked, mask: Tensor | None) -> Visible | None:
    """What new tokens see, if the mask hides padding and the future alone; worked out once for all layers."""
    if mask is None or mask.dtype != torch.int16:
        return None
    queries, keys = call.q.shape[2], call.k.shape[2]
    if _pass.mask is not mask or _pass.queries != queries:
        rules = Rules.decode(mask)
        if rules is None or rules.real.shape != (call.q.shape[0], keys):
            return None
        _note(mask, rules, queries)
    assert _pass.rules is not None
    if not _pass.rules.causal or _pass.rules.window:
        return None
    if _pass.visible is None:
        at = torch.arange(1, queries + 1, device=call.q.device) + _pass.rules.offset[:, None]
        seen = at.clamp(0, keys).to(torch.int32).contiguous()
        real = None if _pass.whole else _pass.rules.real.to(torch.uint8).contiguous()
        _pass.visible = Visible(real, seen, real is None and bool((seen == keys).all()))
    turn.leave(call.module, _pass.asking)
    return _pass.visible


def _note(mask: Tensor | None, rules: Rules, queries: int) -> None:
    """Keep what follows from a mask for the other layers."""
    whole, before = bool(rules.real.all()), _pass.real
    longer = before is not None and before.shape[0] == rules.real.shape[0] and before.shape[1] <= rules.real.shape[1]
    _pass.goes_on = longer if whole and _pass.whole else _begins(before, rules.real)
    _pass.before, _pass.whole = before, whole
    _pass.mask, _pass.queries, _pass.real, _pass.rules = mask, queries, rules.real, rules
    _pass.asking, _pass.step, _pass.visible = rules.real_queries(queries), None, None


@cache
def _name(mechanism: Mechanism) -> str:
    """What messages call it; to write it takes as long as a small layer."""
    return f"decode={mechanism}"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what a cache knows of its tokens is in no graph
def answer(call: Asked, mechanism: Mechanism, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """(B, H, Nq, Dv): what new tokens get, by near–far attention over their cache."""
    least, options = (mechanism.length, mechanism.inner) if isinstance(mechanism, AtLeast) else (0, mechanism)
    assert isinstance(options, NearFar)
    name = _name(mechanism)
    layer = holder(call.k)
    if layer is None:
        what, kind = "attention over the keys and values that are cached", type(call.module).__name__
        expect(not made_of_cached(call.k), name, what, f"{kind}, which makes others of them")
        raise ValueError(
            f"{name} needs the keys and values of earlier tokens in coterie.hf.Cache: generate with "
            "past_key_values=coterie.hf.Cache(model)."
        )
    expect(bias is None, name, "attention without a position bias", f"that of {type(call.module).__name__}")
    expect(not call.dropout, name, "no dropout", call.dropout)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    expect(not grad, name, "torch.no_grad(), as decoding has no gradient", "tensors that require it")
    step, real = _step(call, mask, name)
    turn.leave(call.module, _pass.asking)
    index = int(getattr(call.module, "layer_idx", None) or 0)
    scale = 1 / math.sqrt(call.q.shape[-1]) if call.scale is None else call.scale
    question = Question(call.module, call.q, call.k, call.v, step, scale, index)
    return questions.answer(question, lambda: _finished(layer, options, index, real), least)


def _step(call: Asked, mask: Tensor | None, name: str) -> tuple[Step, Tensor]:
    """Which tokens are real, and what each query sees; worked out once for all layers that share a mask."""
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if mask is None or _pass.mask is not mask or _pass.queries != queries:
        rules = None if mask is None else Rules.decode(mask)
        if mask is None and queries == 1:
            everyone = call.q.new_ones(batch, keys, dtype=torch.bool)
            rules = Rules(everyone, torch.full((batch,), keys - 1, dtype=torch.int32, device=call.q.device), True)
        fits = rules is not None and rules.causal and not rules.window
        expect(fits, name, "a mask that only hides padding and the future", "another one")
        assert rules is not None
        shape = tuple(rules.real.shape)
        expect(shape == (batch, keys), "attention_mask", "one for {} keys", shape, (batch, keys))
        _note(mask, rules, queries)
    assert _pass.rules is not None
    if _pass.step is None:
        _pass.step = _counted(_pass.rules, queries) if _pass.whole else _placed(_pass.rules, queries)
    return _pass.step, _pass.rules.real


def _counted(rules: Rules, queries: int) -> Step:
    """Where each token is, if none is padding: no step over all of them is needed but to count on."""
    batch, length = rules.real.shape
    known = _pass.counted
    if known is None or len(known) < length or known.device != rules.real.device:
        known = _pass.counted = torch.arange(2 * length, dtype=torch.int32, device=rules.real.device)
    at = torch.arange(queries, dtype=torch.int32, device=rules.real.device) + rules.offset[:, None]
    return Step(known[:length].expand(batch, -1).contiguous(), at.clamp(-1, length - 1).to(torch.int32).contiguous())


def _placed(rules: Rules, queries: int) -> Step:
    upto = rules.real.cumsum(-1)
    place = torch.where(rules.real, upto - 1, rules.real.shape[1]).to(torch.int64)
    order = torch.arange(rules.real.shape[1], dtype=torch.int32, device=rules.real.device).expand_as(place)
    real = order.new_zeros(place.shape[0], place.shape[1] + 1).scatter(1, place, order)[:, :-1].contiguous()
    at = torch.arange(queries, device=upto.device) + rules.offset[:, None]
    rank = torch.nn.functional.pad(upto, (1, 0)).gather(1, (at + 1).clamp(0, upto.shape[1]).long()) - 1
    return Step(real, rank.to(torch.int32))


def _begins(before: Tensor | None, real: Tensor) -> bool:
    """Whether tokens that were real are so still, and the others are not."""
    if before is None or before.shape[0] != real.shape[0] or before.shape[1] > real.shape[1]:
        return False
    return torch.equal(before, real[:, : before.shape[1]])


def _finished(layer: BufferedLayer, options: NearFar, index: int, real: Tensor) -> Finished:
    """The clusters of a layer's cache; made anew for another mechanism, or where other tokens are real than before."""
    same = layer.finished is not None and layer.seen is not None and layer.finished.options == options
    if same and layer.seen is not real:
        same = _pass.goes_on if layer.seen is _pass.before else _begins(layer.seen, real)
    if not same or layer.finished is None:
        layer.finished = Finished(options, index)
    layer.seen = real
    return layer.finished
