"""A plan that names padding: the engine goes by the call's masks whatever a mechanism wrote down."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import coterie
from coterie import Means, Mechanism, Plan, Round, Tokens
from tests.cases import MECHANISMS, POSITIONAL, close, padding, tensors

LENGTHS = [23, 9, 1, 0]
SIDES = ("right", "left", "scattered")


@dataclass(frozen=True)
class Careless(Mechanism):
    """Cuts all tokens, padding included, into groups of 6, in two rounds; the second one rolls the keys."""

    duplicates: str = "count"
    bias: bool = False
    skip: bool = False
    window: tuple[int, int] | None = None
    name = "careless"

    def build(self, tokens: Tokens) -> Plan:
        sizes = tokens.sizes
        lead, groups = (sizes.batch, sizes.heads), -(-sizes.queries // 6)

        def cuts(length: int) -> torch.Tensor:
            return (torch.arange(groups + 1) * 6).clamp(max=length).int().expand(*lead, -1)

        rounds = []
        for r in range(2):
            keys = torch.arange(sizes.keys).roll(3 * r).int().expand(*lead, -1)
            queries = torch.arange(sizes.queries).int().expand(*lead, -1)
            skip = torch.full((*lead, sizes.queries, 1), 4, dtype=torch.int32) if self.skip else None
            bias = torch.linspace(-1, 1, sizes.keys)[keys].contiguous() if self.bias else None
            start, stop = cuts(sizes.keys)[..., :-1], cuts(sizes.keys)[..., 1:]
            rounds.append(Round(queries, cuts(sizes.queries), keys, start, stop, bias, skip, self.window))
        plan = tokens.plan(tuple(rounds), duplicates=self.duplicates)
        if plan.self_keys is None:
            return plan
        own = torch.arange(sizes.queries).int().expand(sizes.batch, -1)
        return replace(plan, self_keys=own)  # of the padding too


def dense(q, k, v, plan: Plan, query_mask, key_mask, bias=None):
    """Softmax over the plan's pairs that both masks allow; written with every pair, and differentiable."""
    groups = q.shape[1] // k.shape[1]
    real = query_mask[:, None, :, None] & key_mask[:, None, None, :]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    q = torch.where(query_mask[:, None, :, None], q, 0)
    k, v = (torch.where(key_mask[:, None, :, None], x, 0) for x in (k, v))
    counts = plan.to_dense().double()
    if plan.duplicates == "once":
        counts = counts.clamp(max=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)
    met = real & (counts > 0)
    scores = torch.where(met, scores + counts.clamp(min=1).log(), -math.inf)
    heard = met.any(-1)
    weights = torch.where(met, scores, -1e300).softmax(-1) * met
    lse = torch.where(heard, torch.where(met, scores, -1e300).logsumexp(-1), -math.inf)
    return weights @ v, lse


SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "once": ({"duplicates": "once"}, False),
    "bias": ({"bias": True}, False),
    "skip": ({"skip": True}, False),
    "window": ({"window": (-4, 4)}, False),
    "causal": ({}, True),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_padding_that_a_mechanism_put_into_its_plan_changes_nothing(name, side, wild):
    settings, causal = SETTINGS[name]
    mechanism = Careless(**settings)
    mask = padding(4, 23, LENGTHS, side)
    q, k, v = tensors(4, 4, 23, key_heads=2, value_dim=5)
    for x in (q, k, v):
        x.transpose(1, 2)[~mask] = wild
        x.requires_grad_()
    out, lse = coterie.attention(q, k, v, mechanism, key_mask=mask, is_causal=causal, enable_gqa=True, return_lse=True)
    plan = mechanism.plan(q, k, key_mask=mask, is_causal=causal)
    bias = torch.linspace(-1, 1, 23).double() if mechanism.bias else None
    if name == "plain":
        assert (plan.to_dense().sum((1, 3)) > 0)[~mask].all(), "this mechanism does name padding"
    want, want_lse = dense(q, k, v, plan, mask, mask, bias)
    if causal:  # whose groups held padding alone falls back on itself
        alone = (want_lse == -math.inf) & mask[:, None]
        want = torch.where(alone[..., None], v.double().repeat_interleave(2, 1).nan_to_num(0), want)
        assert (lse[alone] > -math.inf).all()
        want_lse = torch.where(alone, lse.double(), want_lse)
    close(out, want)
    close(lse, want_lse)
    padded = ~mask[:, None].expand_as(lse)
    assert (out[padded] == 0).all()
    assert (lse[padded] == -math.inf).all()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    heard = lse.detach() > -math.inf
    grads = torch.autograd.grad((out * weight).sum() + lse[heard].sum(), (q, k, v))
    if not causal:
        wanted = torch.autograd.grad((want * weight).sum() + want_lse[heard].sum(), (q, k, v))
        for grad, one in zip(grads, wanted, strict=True):
            close(grad, one)
    for grad in grads:
        assert (grad.transpose(1, 2)[~mask] == 0).all()
        assert grad.isfinite().all()


@pytest.mark.usefixtures("backend")
def test_padding_in_cross_attention_dropout_and_a_float_mask():
    query_mask, key_mask = padding(3, 17, [17, 5, 0], "left"), padding(3, 30, [12, 30, 4], "scattered")
    q, k, v = tensors(3, 2, 17, 30)
    q.transpose(1, 2)[~query_mask] = math.nan
    k.transpose(1, 2)[~key_mask] = math.inf
    v.transpose(1, 2)[~key_mask] = math.nan
    bias = torch.randn(3, 2, 17, 30, dtype=q.dtype, requires_grad=True)
    masks: dict[str, Any] = {"query_mask": query_mask, "key_mask": key_mask}
    for x in (q, k, v):
        x.requires_grad_()
    out = coterie.attention(q, k, v, Careless(), attn_mask=bias, **masks)
    want, _ = dense(q, k, v, Careless().plan(q, k), query_mask, key_mask, bias.double())
    close(out, want)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v, bias))
    for grad, one in zip(grads, wanted, strict=True):
        close(grad, one)
    torch.manual_seed(3)
    dropped = coterie.attention(q, k, v, Careless(), dropout_p=0.4, **masks)
    torch.manual_seed(3)
    sides = ((q, query_mask), (k, key_mask), (v, key_mask))
    q0, k0, v0 = (torch.where(m[:, None, :, None], x, 0) for x, m in sides)
    close(dropped, coterie.attention(q0, k0, v0, Careless(), dropout_p=0.4, **masks))
    assert all(g.isfinite().all() for g in torch.autograd.grad(dropped.sum(), (q, k, v)))


@dataclass(frozen=True)
class Borrowing(Mechanism):
    """Every query, padded or not, borrows the answer of the mean of the real ones; `mass` also takes its mass."""

    mass: bool = False
    padded_queries: bool = False
    padded_keys: bool = False
    name = "borrowing"
    causality = "none"

    def build(self, tokens: Tokens) -> Plan:
        sizes = tokens.sizes
        lead = (sizes.batch, sizes.heads)
        zero = torch.zeros(sizes.batch, 1, dtype=torch.int32)

        def mean(real, everyone: bool, length: int) -> Means:
            order, count = real
            if everyone:
                order, count = torch.arange(length).expand(sizes.batch, -1), torch.full_like(count, length)
            return Means(tokens.per_head(order), tokens.per_head(zero), tokens.per_head(count[:, None]))

        row = torch.full((*lead, 1), sizes.queries, dtype=torch.int32)
        key = torch.full((*lead, 1), sizes.keys, dtype=torch.int32)
        ends = torch.tensor([0, 1], dtype=torch.int32).expand(*lead, -1)
        answer = row.expand(*lead, sizes.queries)
        return tokens.plan(
            (Round(row, ends, key, ends[..., :1], ends[..., 1:]),),
            query_means=mean(tokens.real_queries, self.padded_queries, sizes.queries),
            key_means=mean(tokens.real_keys, self.padded_keys, sizes.keys),
            answer=answer,
            mass=answer if self.mass else None,
        )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_padded_query_borrows_no_answer(mass, given):
    q, k, v = tensors(3, 2, 10)
    mask = padding(3, 10, [10, 4, 1], "left")
    for x in (q, k, v):
        x.transpose(1, 2)[~mask] = math.nan
        x.requires_grad_()
    mechanism = Borrowing(mass=mass)
    plan = mechanism.plan(q, k, key_mask=mask) if given else None
    out, lse = coterie.attention(q, k, v, mechanism, key_mask=mask, plan=plan, return_lse=True)
    padded = ~mask[:, None].expand_as(lse)
    assert (out[padded] == 0).all()
    assert (lse[padded] == -math.inf).all()
    for b in range(3):
        average = v[b][:, mask[b]].mean(1, keepdim=True)
        close(out[b][:, mask[b]], average.expand_as(out[b][:, mask[b]]))  # nor does a mass weigh where nobody was met
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all((g.transpose(1, 2)[~mask] == 0).all() and g.isfinite().all() for g in grads)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mean_that_holds_padding_is_refused_by_name(which, given, compiled, backend):
    q, k, v = tensors(2, 2, 10)
    mask = padding(2, 10, [10, 4], "right")
    mechanism = Borrowing(padded_queries=which == "query", padded_keys=which == "key")
    plan = mechanism.plan(q, k, key_mask=mask) if given else None

    def run(q, k, v, mask):
        return coterie.attention(q, k, v, mechanism, key_mask=mask, plan=plan)

    if compiled:
        if backend == "reference":
            pytest.skip("the reference backend is not traced in one graph")
        torch.compiler.reset()
        run = torch.compile(run, fullgraph=True, backend="eager")
    with pytest.raises(
        ValueError,
        match=f"{which}_mask: expected to be the mask that the plan's means were made with, got one that hides",
    ):
        run(q, k, v, mask)
    everyone = torch.ones_like(mask)
    assert run(q, k, v, everyone).isfinite().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", MECHANISMS)
def test_our_own_plans_name_no_padding_so_masks_change_no_bit(name):
    """grouped_attention without masks is what ran before: the plan alone keeps padding out."""
    q, k, v = tensors(4, 2, 61)
    mask = padding(4, 61, [61, 30, 2, 0], "scattered" if name not in POSITIONAL else "left")
    plan = MECHANISMS[name].plan(q, k, key_mask=mask)
    counts = plan.to_dense()
    assert not counts.transpose(1, 2)[~mask].any()
    assert not counts.permute(0, 3, 1, 2)[~mask].any()
    with_masks = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask, return_lse=True)
    without = coterie.grouped_attention(q, k, v, plan)
    assert torch.equal(with_masks.out, without.out)
    assert torch.equal(with_masks.lse, without.lse)
