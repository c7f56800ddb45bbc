"""The reference engine against loops over the pairs of a plan, and against SDPA."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import coterie
from coterie.plan import Means, Plan, Round
from tests import cases
from tests.cases import CAUSAL, MEANS, MECHANISMS, all_close, check_gradients, close, padding, tensors
from tests.oracles import naive_attention, softmax_over

LENGTHS = [1, 2, 63, 111]
pytestmark = pytest.mark.usefixtures("backend")


def met_by(plan, b, h):
    """Counts of one head as the oracle wants them; "once" is a matter of the plan."""
    counts = plan.to_dense()[b, h]
    return counts.clamp(max=1) if plan.duplicates == "once" else counts


def assert_oracle(q, k, v, plan, out, lse, scale=None, bias=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            hk = h // groups
            pair_bias = None if bias is None else bias[b, h]
            want = softmax_over(q[b, h], k[b, hk], v[b, hk], scale, met_by(plan, b, h), pair_bias)
            close(out[b, h], want[0])
            close(lse[b, h], want[1])


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in MEANS])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_softmax_over_the_planned_pairs(name, length):
    q, k, v = tensors(1, 2, length, value_dim=5)
    plan = MECHANISMS[name].plan(q, k)
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], return_lse=True)
    assert_oracle(q, k, v, plan, out, lse)
    assert (plan.to_dense().sum(-1) > 0).all(), "everybody meets somebody"


@pytest.mark.parametrize("name", [n for n in CAUSAL if n not in MEANS])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(63, 63, None), (20, 63, None), (63, 20, None), (31, 40, 3)])
def test_causal_pairs(name, queries, keys, offset):
    q, k, v = tensors(1, 2, queries, keys)
    plan = CAUSAL[name].plan(q, k, is_causal=True, causal_offset=offset)
    out, lse = coterie.attention(q, k, v, CAUSAL[name], is_causal=True, causal_offset=offset, return_lse=True)
    assert_oracle(q, k, v, plan, out, lse)
    shift = keys - queries if offset is None else offset
    counts = plan.to_dense()
    for i in range(queries):
        for j in range(keys):
            if j > i + shift:
                assert not counts[:, :, i, j].any()
        if 0 <= i + shift < keys:
            assert (counts[:, :, i].sum(-1) > 0).all(), "a row alone with the future attends to itself"


def test_a_row_alone_with_the_future_attends_to_itself():
    q, k, v = tensors(1, 1, 40)
    plan = coterie.Smyrf(rounds=1, cluster_size=4).plan(q, k, is_causal=True)
    visible = coterie.Smyrf(rounds=1, cluster_size=4).plan(q, k).to_dense()[0, 0].tril()
    lonely = (visible.sum(-1) == 0).nonzero().squeeze(-1)
    assert len(lonely) > 3
    out = coterie.attention(q, k, v, None, plan=plan, is_causal=True)
    close(out[0, 0, lonely], v[0, 0, lonely])


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [("reference", torch.float64), *(("reference", d) for d in DTYPES), *(("native", d) for d in DTYPES)],
)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(111, 111, False), (63, 200, False), (111, 111, True)])
def test_full_equals_sdpa_within_the_error_of_naive_attention(engine, dtype, queries, keys, causal):
    q, k, v = tensors(2, 3, queries, keys, dim=32, dtype=dtype)
    weight = torch.randn(2, 3, queries, 32, dtype=torch.float64).to(dtype)
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1) if causal else None
    scale = 32**-0.5

    def run(attend, kind):
        inputs = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        grads = torch.autograd.grad(out, inputs, weight.to(kind))
        return [out.detach().double(), *(g.double() for g in grads)]

    exact = run(lambda q, k, v: naive_attention(q, k, v, scale, hidden), torch.float64)
    naive = run(lambda q, k, v: naive_attention(q, k, v, scale, hidden), dtype)
    sdpa = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), torch.float64)
    ours = run(lambda q, k, v: coterie.attention(q, k, v, "full", is_causal=causal, backend=engine), dtype)
    for index, (found, near, truth, theirs) in enumerate(zip(ours, naive, exact, sdpa, strict=True)):
        torch.testing.assert_close(truth, theirs, rtol=1e-10, atol=1e-10)
        error, allowed = (found - truth).abs().max(), (near - truth).abs().max()
        if dtype == torch.float64:
            assert error <= 1e-10
        else:
            assert error <= max(1e-6, float(allowed) * (2 if index == 0 else 3))


@pytest.mark.parametrize("name", MECHANISMS)
def test_output_and_lse_dtypes(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = tensors(1, 2, 30, dtype=dtype)
        out, lse = coterie.attention(q, k, v, MECHANISMS[name], return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        exact = coterie.attention(q.double(), k.double(), v.double(), None, plan=MECHANISMS[name].plan(q, k))
        assert (out.double() - exact).abs().max() < {torch.float32: 1e-5}.get(dtype, 2e-2)


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in CAUSAL])
def test_mean_queries_refuse_to_be_causal(name):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"is_causal: expected False for '.*', whose mean queries .* got True"):
        coterie.attention(q, k, v, MECHANISMS[name], is_causal=True)


@pytest.mark.parametrize(("name", "causal"), [(n, False) for n in MECHANISMS] + [(n, True) for n in CAUSAL])
def test_gradcheck(name, causal):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 13, 16, dim=3, value_dim=2, key_heads=1))
    plan = MECHANISMS[name].plan(q, k, is_causal=causal)

    def run(q, k, v):
        out, lse = coterie.attention(q, k, v, None, plan=plan, is_causal=causal, enable_gqa=True, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0)

    check_gradients(run, (q, k, v))


def test_gradcheck_of_a_float_mask_in_every_broadcast_shape():
    q, k, v = (x.requires_grad_() for x in tensors(2, 2, 7, 9, dim=3))
    plan = coterie.Smyrf(rounds=2, cluster_size=3).plan(q, k)
    for shape in [(2, 2, 7, 9), (1, 2, 7, 9), (2, 1, 7, 9), (7, 9), (2, 1, 1, 9), (1, 1, 7, 1), (2, 7, 9), (1, 9)]:
        mask = torch.randn(shape, dtype=cases.DTYPE, requires_grad=True)

        def run(q, k, v, mask):
            return coterie.attention(q, k, v, None, plan=plan, attn_mask=mask)

        check_gradients(run, (q, k, v, mask))


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in MEANS])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_pairs_are_looked_up_at_the_planned_pairs(name, kind):
    q, k, v = tensors(2, 2, 30, 41)
    allowed = torch.rand(2, 2, 30, 41) < 0.7
    allowed[0, 0, 3] = False  # a row that may attend to nobody
    bias = torch.zeros(2, 2, 30, 41, dtype=cases.DTYPE)
    if kind == "float":
        bias = torch.randn(2, 2, 30, 41, dtype=cases.DTYPE)
    bias = bias.masked_fill(~allowed, -math.inf)
    plan = MECHANISMS[name].plan(q, k)
    mask = allowed if kind == "bool" else bias
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], attn_mask=mask, return_lse=True)
    assert_oracle(q, k, v, plan, out, lse, bias=bias)
    assert (out[0, 0, 3] == 0).all()
    assert lse[0, 0, 3] == -math.inf


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_has_no_row_in_a_mask_of_pairs(name):
    q, k, v = tensors(2, 2, 30)
    with pytest.raises(ValueError, match=r"attn_mask: expected a (mask of keys|key_mask), .* got \(1, 1, 30, 30\)"):
        coterie.attention(q, k, v, MECHANISMS[name], attn_mask=torch.ones(30, 30, dtype=torch.bool))


def test_a_mean_query_obeys_a_bias_of_keys():
    q, k, v = tensors(2, 2, 5, 12)
    bias = torch.randn(2, 2, 1, 12, dtype=cases.DTYPE, requires_grad=True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    weight = torch.randn_like(want)
    wanted = torch.autograd.grad((want * weight).sum(), bias)
    # One cluster a query, or all keys recomputed: dense attention.
    for mechanism in (coterie.Clustered(clusters=50), coterie.ImprovedClustered(clusters=3, topk=12)):
        out = coterie.attention(q, k, v, mechanism, attn_mask=bias)
        close(out, want)
        all_close(torch.autograd.grad((out * weight).sum(), bias), wanted)


def test_full_takes_every_mask_that_sdpa_takes():
    q, k, v = tensors(3, 2, 20, 31)
    shapes = [(20, 31), (2, 20, 31), (1, 20, 31), (3, 1, 20, 31), (1, 2, 20, 31), (3, 2, 20, 31), (20, 1), (1, 31)]
    for shape in shapes:
        for mask in (torch.rand(shape) < 0.8, torch.randn(shape, dtype=cases.DTYPE)):
            mask = mask if mask.dtype != torch.bool else mask.index_fill(-1, torch.tensor([0]), True)
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            close(coterie.attention(q, k, v, "full", attn_mask=mask), want)


def test_key_masks_in_the_shapes_of_sdpa():
    q, k, v = tensors(3, 2, 20, 31)
    mask = padding(3, 31, [31, 17, 5], "left")
    want = coterie.attention(q, k, v, "smyrf:cluster_size=8", key_mask=mask)
    lowest = torch.finfo(cases.DTYPE).min
    for same in (
        mask,
        mask[:, None, None, :],
        torch.zeros(3, 31).to(cases.DTYPE).masked_fill(~mask, -math.inf)[:, None, None, :],
        torch.zeros(3, 31).to(cases.DTYPE).masked_fill(~mask, lowest)[:, None, None, :],
    ):
        assert torch.equal(coterie.attention(q, k, v, "smyrf:cluster_size=8", attn_mask=same), want)
        clustered = coterie.attention(q, k, v, "improved-clustered:clusters=3,topk=5", attn_mask=same)
        assert torch.equal(clustered, coterie.attention(q, k, v, "improved-clustered:clusters=3,topk=5", key_mask=mask))
    both = coterie.attention(q, k, v, "full", attn_mask=mask, key_mask=padding(3, 31, [20, 31, 31]))
    want = coterie.attention(q, k, v, "full", key_mask=mask & padding(3, 31, [20, 31, 31]))
    assert torch.equal(both, want)


def test_a_float_key_mask_that_says_more_is_a_bias_too():
    q, k, v = tensors(2, 2, 20, 31)
    bias = torch.randn(2, 1, 1, 31, dtype=cases.DTYPE)
    bias[1, ..., 20:] = -math.inf
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(coterie.attention(q, k, v, "full", attn_mask=bias), want)


# --- duplicates ------------------------------------------------------------------------------------------------------


def random_plan(generator, rows=11, keys=9, rounds=3, groups=4, with_extras=True):
    """A ragged plan: empty groups, unused slots, repeated keys, overlapping ranges, biases, skips, windows, counts."""

    def integer(low, high, shape=()):
        return torch.randint(low, high, shape, generator=generator)

    made = []
    for _ in range(rounds):
        slots = int(integer(1, rows + 1))
        order = torch.randperm(rows, generator=generator)[:slots]
        offsets = torch.sort(integer(0, slots + 1, (groups + 1,))).values
        offsets[0] = 0
        capacity = 14
        ends = torch.sort(integer(0, capacity + 1, (groups, 2))).values
        skip = torch.sort(integer(-1, keys, (slots, 2))).values if with_extras and integer(0, 2) else None
        made.append(
            Round(
                query_order=order.int()[None, None],
                query_offsets=offsets.int()[None, None],
                key_order=integer(0, keys, (capacity,)).int()[None, None],
                key_start=ends[:, 0].int()[None, None],
                key_stop=ends[:, 1].int()[None, None],
                bias=torch.randn(1, 1, capacity, generator=generator) if with_extras and integer(0, 2) else None,
                skip=None if skip is None else skip.int()[None, None],
                window=(-4, 5) if with_extras and integer(0, 2) else None,
                counts=integer(0, 4, (1, 1, groups, capacity)).short() if with_extras and integer(0, 2) else None,
            )
        )
    return made


def looped_pairs(plan):
    """(round, query, key, bias) of every met pair of a one-head plan, by loops over its definition."""
    found = []
    for r, each in enumerate(plan.rounds):
        for g in range(each.groups):
            for slot in range(int(each.query_offsets[0, 0, g]), int(each.query_offsets[0, 0, g + 1])):
                i = int(each.query_order[0, 0, slot])
                for key_slot in range(int(each.key_start[0, 0, g]), int(each.key_stop[0, 0, g])):
                    j = int(each.key_order[0, 0, key_slot])
                    position = i + int(plan.offset[0])
                    if each.skip is not None and j in each.skip[0, 0, slot].tolist():
                        continue
                    if each.window is not None and not each.window[0] <= position - j <= each.window[1]:
                        continue
                    if plan.causal and j > position:
                        continue
                    bias = 0.0 if each.bias is None else float(each.bias[0, 0, key_slot])
                    if each.counts is not None:
                        stands_for = int(each.counts[0, 0, g, key_slot - int(each.key_start[0, 0, g])])
                        if stands_for == 0:
                            continue
                        bias += math.log(stands_for)
                    found.append((r, i, j, bias))
    return found


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from(["count", "once"]), st.integers(-2, 3))
def test_random_plans_against_loops(seed, causal, duplicates, offset):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = tensors(1, 1, 11, 9, dim=3, seed=seed)
    plan = Plan(
        num_queries=11,
        num_keys=9,
        key_heads=1,
        rounds=tuple(random_plan(generator)),
        offset=torch.tensor([offset], dtype=torch.int32),
        duplicates=duplicates,
        causal=causal,
    ).validate()
    pairs = looped_pairs(plan)
    counts = torch.zeros(11, 9, dtype=torch.int32)
    for _, i, j, _ in pairs:
        counts[i, j] += 1
    assert torch.equal(plan.to_dense()[0, 0], counts)
    assert int(plan.pairs_met()) == len(pairs)
    out, lse = coterie.grouped_attention(q, k, v, plan)
    for i in range(11):
        terms = [(scale_dot(q, k, i, j) + bias, j) for _, i2, j, bias in pairs if i2 == i]
        if duplicates == "once":
            terms = [(s - math.log(int(counts[i, j])), j) for s, j in terms]
        total = sum(math.exp(s) for s, _ in terms)
        if not terms:
            assert (out[0, 0, i] == 0).all()
            assert lse[0, 0, i] == -math.inf
            continue
        want = torch.stack([math.exp(s) / total * v[0, 0, j] for s, j in terms]).sum(0)
        close(out[0, 0, i], want)
        assert math.isclose(float(lse[0, 0, i]), math.log(total), rel_tol=1e-5, abs_tol=1e-5)


def scale_dot(q, k, i, j):
    return float(q[0, 0, i] @ k[0, 0, j]) / math.sqrt(q.shape[-1])


def test_duplicates_can_be_overridden():
    q, k, v = tensors(1, 1, 40)
    count = coterie.Smyrf(rounds=4, cluster_size=20).plan(q, k)
    once = coterie.Smyrf(rounds=4, cluster_size=20, duplicates="once").plan(q, k)
    assert torch.equal(
        coterie.grouped_attention(q, k, v, count, duplicates="once").out, coterie.grouped_attention(q, k, v, once).out
    )
    with pytest.raises(ValueError, match="duplicates: expected one of 'count', 'once', got 'twice'"):
        coterie.grouped_attention(q, k, v, count, duplicates="twice")  # type: ignore[arg-type]


# --- counts ----------------------------------------------------------------------------------------------------------


def counted_plan(kind, heads=2, groups=5, size=2, keys=9, met=7, **settings):
    """Groups that all meet the same keys, and count them in their own ways; the first counts nobody."""
    generator = torch.Generator().manual_seed(4)
    lead, rows = (1, heads), groups * size
    order = torch.stack([torch.randperm(rows, generator=generator) for _ in range(heads)])[None]
    offsets = (torch.arange(groups + 1) * size).int().expand(*lead, -1)
    key_order = torch.stack([torch.randperm(keys, generator=generator)[:met] for _ in range(heads)])[None]
    counts = torch.randint(0, 5, (*lead, groups, met), generator=generator).to(kind)
    counts[..., 1] = torch.iinfo(kind).max
    counts[..., 0, :] = 0
    ends = torch.full((*lead, groups), met, dtype=torch.int32)
    each = Round(order.int(), offsets, key_order.int(), torch.zeros_like(ends), ends, counts=counts, **settings)
    offset = torch.zeros(1, dtype=torch.int32)
    return Plan(num_queries=rows, num_keys=keys, key_heads=1, rounds=(each,), offset=offset).validate()


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
@pytest.mark.parametrize("biased", [False, True])
def test_a_key_stands_for_as_many_as_its_group_counts(kind, biased):
    bias = torch.linspace(-1, 1, 14).view(1, 2, 7) if biased else None
    plan = counted_plan(kind, bias=bias)
    each = plan.rounds[0]
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 10, 9, dim=3, key_heads=1))
    out, lse = coterie.grouped_attention(q, k, v, plan, scale=0.7)
    for h in range(2):
        weights, added = torch.zeros(10, 9), torch.zeros(10, 9)
        for slot, i in enumerate(each.query_order[0, h].tolist()):
            for w, j in enumerate(each.key_order[0, h].tolist()):
                weights[i, j] = each.counts[0, h, slot // 2, w]
                added[i, j] = bias[0, h, w] if bias is not None else 0
        want = softmax_over(q[0, h].detach(), k[0, 0].detach(), v[0, 0].detach(), 0.7, weights, added)
        close(out[0, h], want[0])
        close(lse[0, h], want[1])
    silent = each.query_order[0, 0, :2].long()
    assert (out[0, 0, silent] == 0).all()
    assert (lse[0, 0, silent] == -math.inf).all()

    def run(q, k, v):
        out, lse = coterie.grouped_attention(q, k, v, plan, scale=0.7)
        return out, lse.masked_fill(lse == -math.inf, 0)

    check_gradients(run, (q, k, v))


@pytest.mark.parametrize(("heads", "met"), [(2, 160), (1, 300)])
@pytest.mark.parametrize("counted", [False, True])
def test_groups_that_share_a_range_equal_groups_with_ranges_of_their_own(heads, met, counted):
    """Over the edges of the native engine's blocks, in rows and in keys."""
    shared = counted_plan(torch.int16, heads, groups=36, size=4, keys=400, met=met)
    each = shared.rounds[0]
    if not counted:
        each = replace(each, counts=None)
    starts = (torch.arange(36) * met).int().expand(1, heads, -1)
    apart = replace(each, key_order=each.key_order.repeat(1, 1, 36), key_start=starts, key_stop=starts + met)
    q, k, v = (x.requires_grad_() for x in tensors(1, heads, 144, 400, key_heads=1))
    found = []
    for one in (each, apart):
        out, lse = coterie.grouped_attention(q, k, v, replace(shared, rounds=(one,)))
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append((out, lse, *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    all_close(found[0], found[1])


# --- virtual rows ----------------------------------------------------------------------------------------------------


def test_key_means_with_bias_and_positions_equal_the_formula_and_its_gradient():
    """What NearFar will use: two exact keys and two means, causal, on two query heads that share a key head."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 6, 8, dim=3, key_heads=1))
    segments = [[0, 1, 2], [4, 3]]
    keys = torch.tensor([[7, 1, 8, 9]]).expand(2, -1)  # 8 and 9 are the means
    bias = torch.tensor([[0.0, 0.0, math.log(3), math.log(2)]]).expand(2, -1)

    def index(x):
        return torch.as_tensor(x, dtype=torch.int32)

    plan = Plan(
        num_queries=6,
        num_keys=8,
        key_heads=1,
        rounds=(
            Round(
                query_order=index(torch.arange(6)).expand(1, 2, 6),
                query_offsets=index([0, 6]).expand(1, 2, 2),
                key_order=index(keys)[None],
                key_start=index([0]).expand(1, 2, 1),
                key_stop=index([4]).expand(1, 2, 1),
                bias=bias[None].contiguous(),
            ),
        ),
        offset=index([2]),
        causal=True,
        key_means=Means(
            order=index([0, 1, 2, 4, 3])[None, None],
            start=index([0, 3])[None, None],
            stop=index([3, 5])[None, None],
            positions=index([2, 4])[None, None],
        ),
    ).validate()
    out, lse = coterie.grouped_attention(q, k, v, plan)
    k2, v2 = (torch.stack([x[0, 0, s].mean(0) for s in segments]) for x in (k, v))
    k_all, v_all = torch.cat([k[0, 0], k2]), torch.cat([v[0, 0], v2])
    positions = [7, 1, 2, 4]
    wants, lses = [], []
    for h in range(2):
        for i in range(6):
            rows = [(c, j) for c, j in enumerate(keys[0].tolist()) if positions[c] <= i + 2]
            s = torch.stack([q[0, h, i] @ k_all[j] / math.sqrt(3) + float(bias[0, c]) for c, j in rows])
            wants.append(s.softmax(0) @ v_all[[j for _, j in rows]])
            lses.append(s.logsumexp(0))
    want, want_lse = torch.stack(wants).view(1, 2, 6, -1), torch.stack(lses).view(1, 2, 6)
    close(out, want)
    close(lse, want_lse)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v))
    theirs = torch.autograd.grad((want * weight).sum() + want_lse.sum(), (q, k, v))
    all_close(ours, theirs)
    dense = plan.to_dense()[0, 0]
    assert dense[5].tolist() == [1, 2, 1, 1, 1, 0, 0, 1]  # key 1 exactly and in a mean


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
def test_dropout_is_right_on_average_and_repeats_with_the_seed(name):
    q, k, v = tensors(1, 2, 30)
    exact = coterie.attention(q, k, v, MECHANISMS[name])
    torch.manual_seed(1)
    first = coterie.attention(q, k, v, MECHANISMS[name], dropout_p=0.3)
    second = coterie.attention(q, k, v, MECHANISMS[name], dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(first, coterie.attention(q, k, v, MECHANISMS[name], dropout_p=0.3))
    assert not torch.equal(first, second)
    mean = sum(coterie.attention(q, k, v, MECHANISMS[name], dropout_p=0.3) for _ in range(300)) / 300
    assert (mean - exact).abs().mean() < 0.06 * exact.abs().mean() + 0.02
    assert (coterie.attention(q, k, v, MECHANISMS[name], dropout_p=1.0) == 0).all()


def test_dropout_drops_weights_of_pairs_in_forward_and_backward():
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 12, 10, dim=10))
    identity = torch.eye(10, dtype=cases.DTYPE)[None, None]
    torch.manual_seed(3)
    weights = coterie.attention(q, k, identity, "full", dropout_p=0.4)
    exact = (q @ k.mT / math.sqrt(10)).softmax(-1)
    kept = weights != 0
    close(weights, torch.where(kept, exact / 0.6, 0))
    assert 0.4 < kept.double().mean() < 0.8
    torch.manual_seed(3)
    out = coterie.attention(q, k, v, "full", dropout_p=0.4)
    want = torch.where(kept, exact / 0.6, 0) @ v
    close(out, want)
    grad = torch.randn_like(out)
    all_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad))


# --- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smyrf", "improved", "full"])
def test_a_second_derivative_is_refused_in_words(name):
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 20))
    out = coterie.attention(q, k, v, MECHANISMS[name])
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"coterie\.attention has no second derivative"):
        grad.pow(2).sum().backward()


def test_a_second_derivative_through_the_mask_alone_is_refused_too():
    q, k, v = tensors(1, 1, 6)
    mask = torch.randn(6, 6, dtype=cases.DTYPE, requires_grad=True)
    (grad,) = torch.autograd.grad(coterie.attention(q, k, v, "full", attn_mask=mask).sum(), mask, create_graph=True)
    with pytest.raises(RuntimeError, match=r"coterie\.attention has no second derivative"):
        grad.sum().backward()


def test_a_wild_upstream_gradient_stays_with_the_keys_of_its_row():
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 6))
    out = coterie.attention(q, k, v, "full", is_causal=True)
    grad = torch.ones_like(out)
    grad[:, :, 2] = math.nan
    for found in torch.autograd.grad(out, (k, v), grad):
        assert found[0, 0].isnan().any(-1).tolist() == [True, True, True, False, False, False]


def test_only_the_gradients_asked_for():
    q, k, v = tensors(1, 1, 20)
    v.requires_grad_()
    coterie.attention(q, k, v, "smyrf").sum().backward()
    assert v.grad is not None
    assert not coterie.attention(q, k, v.detach(), "smyrf").requires_grad


def test_autocast_takes_its_dtype_as_sdpa_does():
    q, k, v = tensors(1, 2, 40, dtype=torch.float32)
    mask = torch.randn(40, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("full", "smyrf:cluster_size=8"):
            out = coterie.attention(q, k, v, name, attn_mask=mask)
            assert out.dtype == torch.bfloat16
            plain = coterie.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), name, attn_mask=mask)
            assert torch.equal(out, plain)
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert coterie.attention(q.double(), k.double(), v.double(), "full").dtype == torch.float64
        plan = coterie.Full().plan(q, k)
        assert coterie.grouped_attention(q, k, v, plan).out.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, and how many of that many elements were made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel():
                self.numel = max(self.numel, x.numel())
        return out


def test_memory_does_not_grow_with_cluster_size():
    """N = 16,384, 8 heads of 64, 4 rounds of 64: no tensor of N × 64 × 4 scores a head, forward or backward."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 8, 16_384, dim=64, dtype=torch.float32))
    with Largest() as seen:
        coterie.attention(q, k, v, coterie.Smyrf(rounds=4, cluster_size=64)).sum().backward()
    assert seen.numel <= 2 * q.numel()  # q itself, or queries and keys side by side
    assert seen.numel < 8 * 16_384 * 64 * 4 / 2
