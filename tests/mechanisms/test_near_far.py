"""Near-far attention: the formula, its limits, and that no key is lost or counted twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie import NearFar
from coterie.mechanisms.near_far.search import Search
from coterie.plan.tiles import count_pairs
from coterie.planning import native as planning
from coterie.planning import reference
from coterie.planning.orders import Parts, compact
from tests.cases import all_close, close, padding, tensors
from tests.oracles import near_far

pytestmark = pytest.mark.usefixtures("backend")


def agree(found, want):
    """As `close`, but a plan keeps the log of a count in float32."""
    if found.dtype == torch.float64:
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
    else:
        close(found, want)


def labels_of(order, start, stop, size):
    """The segment of each row."""
    labels = [-1] * size
    for segment, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        for row in order[a:b].tolist():
            labels[row] = segment
    return labels


@pytest.mark.parametrize(("queries", "keys", "near"), [(40, 40, 7), (11, 50, 16), (50, 11, 3), (40, 40, 0), (1, 30, 4)])
def test_equals_the_formula_and_its_gradient(queries, keys, near):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, queries, keys, value_dim=5))
    mechanism = NearFar(near=near, query_clusters=4, key_clusters=6)
    plan, out = mechanism.plan(q, k), coterie.attention(q, k, v, mechanism)
    heads = []
    for h in (0, 1):
        meet, means = plan.rounds[0], plan.key_means
        assert means is not None
        offsets = meet.query_offsets[0, h]
        groups = labels_of(meet.query_order[0, h], offsets[:-1], offsets[1:], queries)
        clusters = labels_of(means.order[0, h], means.start[0, h], means.stop[0, h], keys)
        heads.append(near_far(q[0, h], k[0, h], v[0, h], 8**-0.5, groups, clusters, near))
    want = torch.stack(heads)[None]
    agree(out, want)
    grad = torch.randn_like(out)
    for found, exact in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad), strict=True
    ):
        agree(found, exact)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 63, 150])
@pytest.mark.parametrize("mechanism", [NearFar(near=500, chunk=16), NearFar(near=500, chunk=4, strict=True)])
def test_all_keys_near_is_dense(mechanism, length, causal):
    q, k, v = (x.requires_grad_() for x in tensors(2, 2, length))
    out, want = (
        coterie.attention(q, k, v, mechanism, is_causal=causal),
        F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )
    close(out, want)
    grad = torch.randn_like(out)
    all_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near", [0, 5])
def test_one_key_a_cluster_is_dense(near, causal):
    q, k, v = tensors(2, 2, 90)
    mechanism = NearFar(near=near, key_clusters=8 if causal else 90, chunk=8)
    close(
        coterie.attention(q, k, v, mechanism, is_causal=causal),
        F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


@pytest.mark.parametrize("near", [0, 1, 20])
def test_clusters_of_equal_keys_and_values_are_exact(near):
    q, k, v = tensors(2, 2, 70, 9)
    which = torch.arange(63) % 9
    k, v = k[:, :, which], v[:, :, which]
    mechanism = NearFar(near=near, key_clusters=63)
    sizes = mechanism.plan(q, k).key_means
    assert sizes is not None
    assert int((sizes.stop - sizes.start).max()) == 7
    agree(coterie.attention(q, k, v, mechanism), F.scaled_dot_product_attention(q, k, v))


def seen_by_each(plan):
    """How many keys each query meets, (B, H, Nq): a mean counts for as many as its group says."""
    total = torch.zeros(plan.batch, plan.heads, plan.num_queries, dtype=torch.float64)
    for each in plan.rounds:
        assert each.bias is None
        for b in range(plan.batch):
            for h in range(plan.heads):
                offsets = each.query_offsets[b, h].tolist()
                for g, (start, stop) in enumerate(
                    zip(each.key_start[b, h].tolist(), each.key_stop[b, h].tolist(), strict=True)
                ):
                    keys, weights = each.key_order[b, h, start:stop], torch.ones(stop - start)
                    if each.counts is not None:
                        weights = each.counts[b, h, g, : stop - start].double()
                    for i in each.query_order[b, h, offsets[g] : offsets[g + 1]].tolist():
                        hidden = plan.causal & (keys < plan.num_keys) & (keys > i + int(plan.offset[b]))
                        total[b, h, i] += weights[~hidden].sum()
    return total


@settings(max_examples=25)
@given(
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(0, 12),
    st.sampled_from([1, 2, 7]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_causal_queries_meet_every_key_before_them_once(queries, cache, near, chunk, strict, padded, seed):
    keys = queries + cache
    q, k, _ = tensors(2, 2, queries, keys, key_heads=1, seed=seed)
    mask = padding(2, keys, [keys, max(1, keys // 2)], "scattered") if padded else torch.ones(2, keys, dtype=torch.bool)
    plan = NearFar(near=near, chunk=chunk, strict=strict, key_clusters=1 if chunk == 1 else 2).plan(
        q, k, is_causal=True, key_mask=mask, query_mask=mask[:, cache:]
    )
    plan.validate()
    want = mask.cumsum(-1)[:, None, cache:].expand(2, 2, -1) * mask[:, None, cache:]
    torch.testing.assert_close(seen_by_each(plan), want.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [220, 333])
def test_means_of_old_chunks_merge(length):
    """With chunks of 2 there are blocks of 2, 4 … chunks: no key is lost, and means grow with the log of the length."""
    q, k, _ = tensors(1, 1, length)
    plan = NearFar(near=3, chunk=2, key_clusters=1).plan(q, k, is_causal=True)
    torch.testing.assert_close(seen_by_each(plan)[0, 0], torch.arange(1.0, length + 1).double(), rtol=1e-4, atol=1e-4)
    most = int((plan.rounds[1].key_stop - plan.rounds[1].key_start).max())
    assert most <= 3 + 33 * 3 < length / 2


def test_nothing_of_the_future_is_averaged_in():
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 60))
    out = coterie.attention(q, k, v, NearFar(near=4, chunk=4), is_causal=True)
    for row in (5, 30, 58):
        for grad in torch.autograd.grad(out[0, 0, row].sum(), (q, k, v), retain_graph=True):
            assert (grad[0, 0, row + 1 :] == 0).all()


def test_a_cache_in_front():
    """Queries at the end of the keys see all of them, and near = everything is dense."""
    q, k, v = tensors(2, 2, 20, 90, key_heads=1)
    mask = torch.ones(20, 90, dtype=torch.bool).tril(70)
    want = F.scaled_dot_product_attention(q, k.expand(2, 2, 90, 8), v.expand(2, 2, 90, 8), attn_mask=mask)
    close(coterie.attention(q, k, v, NearFar(near=90, chunk=8), is_causal=True, enable_gqa=True), want)


def test_a_cluster_that_is_all_picked_is_not_met():
    q, k, _ = tensors(1, 1, 6)
    assert (NearFar(near=6).plan(q, k).to_dense() == 1).all()


@pytest.mark.parametrize("strict", [False, True])
def test_a_chunk_longer_than_the_sequence(strict):
    q, k, v = tensors(1, 1, 6)
    mechanism = NearFar(near=2, chunk=2**31 - 1, strict=strict)
    close(
        coterie.attention(q, k, v, mechanism, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_heads_that_share_keys_share_clusters():
    q, k, _ = tensors(1, 4, 80, key_heads=2)
    means = NearFar(near=4).plan(q, k).key_means
    assert means is not None
    assert means.order.shape[1] == 2


@pytest.mark.parametrize("causal", [False, True])
def test_centroids_trained_on_a_sample_are_the_same_in_both_backends(causal):
    q, k, _ = tensors(2, 2, 700, key_heads=1, dtype=torch.float32)
    mechanism = NearFar(near=6, query_clusters=3, key_clusters=4, chunk=96)
    first, second = (
        mechanism.plan(q, k, is_causal=causal, key_mask=padding(2, 700, [700, 411]), backend=backend).to_dense()
        for backend in ("reference", "native")
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_planning_survives_wild_numbers(bad):
    q, k, _ = tensors(1, 2, 120, dtype=torch.float32)
    k[0, 0, 3, 2], q[0, 1, 7] = bad, bad
    for causal in (False, True):
        plans = [
            NearFar(near=5, chunk=8).plan(q, k, is_causal=causal, backend=backend).validate()
            for backend in ("reference", "native")
        ]
        assert all(plan.to_dense().sum() > 0 for plan in plans)


@pytest.mark.parametrize("near", [1, 50])
def test_wild_numbers_spread_alike_in_both_backends(near):
    """A cluster that is all picked has the bias −inf: its mean is met by nobody, NaN or not."""
    q, k, v = tensors(1, 2, 17, dim=3, dtype=torch.float32)
    k[0, 0, 4, 1], v[0, 1, 5], q[0, 0, 3] = float("nan"), float("inf"), float("nan")
    found = []
    for backend in ("reference", "native"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        mechanism = NearFar(near=near, query_clusters=3, key_clusters=2)
        out = coterie.attention(inputs[0], inputs[1], inputs[2], mechanism, backend=backend)
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=2e-5)


# --- the native steps refuse what would read out of bounds ------------------------------------------------------------


def test_kmeans_refuses_malformed_parts():
    x, seed = torch.zeros(1, 1, 4, 8), torch.tensor(0)

    def bounds(*given):
        return (torch.tensor([each], dtype=torch.int32) for each in given)

    def run(*given):
        order, start, stop = bounds(*given)
        return planning.kmeans_op(x, order, start, stop, None, None, seed, 2, 1, 0, False, True, 0)

    run([0, 1, 2, 3], [0, 2], [2, 4])
    order, start, stop = bounds([0, 1, 2, 3], [0], [4])
    for counts, first, clusters, sample, message in (
        (torch.ones(3, dtype=torch.int64), None, 2, 0, r"counts: expected shape \(1, 1\)"),
        (None, torch.zeros(1, dtype=torch.float64), 2, 0, r"centroids: expected shape \(1, 1, 2, 8\)"),
        (None, None, 0, 0, r"clusters: expected at least 1, got 0"),
        (None, None, 2, -3, r"sample: expected at least 0, got -3"),
    ):
        with pytest.raises(ValueError, match=message):
            planning.kmeans_op(x, order, start, stop, counts, first, seed, clusters, 1, sample, False, True, 0)
    with pytest.raises(ValueError, match=r"stop: expected shape \(1, 1\)"):
        planning.kmeans_op(x, order, start, order, None, None, seed, 2, 1, 0, False, True, 0)
    with pytest.raises(ValueError, match=r"order: expected 2 dimensions, got 1"):
        planning.kmeans_op(x, order[0], start, stop, None, None, seed, 2, 1, 0, False, True, 0)
    for wrong, message in (
        (([0, 1, 2, 9], [0, 2], [2, 4]), r"parts.order: expected indices in \[0, 4\), got 9"),
        (([0, 1, 2, 3], [0, 1], [2, 4]), r"parts: expected 2 ≤ start ≤ stop ≤ 4, got start 1, stop 4"),
        (([0, 1, 2, 3], [0, 2], [2, 5]), r"parts: expected 2 ≤ start ≤ stop ≤ 4, got start 2, stop 5"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*wrong)


def test_near_keys_refuses_malformed_clusters():
    x = torch.zeros(1, 1, 4, 8)

    def run(
        order=(0, 1, 2, 3), stop=(2, 4), visible=((0, 1),), seen=(2,), queries=None, used=(2,), together=(1,), **given
    ):
        clusters = [torch.tensor([[each]], dtype=torch.int32) for each in (order, (0, 2), stop)]
        shown, count = (torch.tensor([each], dtype=torch.int32) for each in (visible, seen))
        queries = x[:, :, :2] if queries is None else queries
        numbers = {"near": 1, "reach": 4, "wide": False, "room": 2} | given
        groups = torch.tensor([used]), torch.tensor([together])
        return planning.near_keys_op(queries, x, clusters, shown, count, *groups, *numbers.values())

    run()
    run(wide=True, room=5)
    for wrong, message in (
        ({"order": (0, 1, 2, 4)}, r"clusters.order: expected indices in \[0, 4\), got 4"),
        ({"visible": ((0, 2),)}, r"visible: expected indices in \[0, 2\), got 2"),
        ({"visible": ((1, 0),)}, r"visible: expected ascending indices, got 0 after 1"),
        ({"visible": ((1, 1),)}, r"visible: expected ascending indices, got 1 after 1"),
        ({"stop": (3, 4)}, r"clusters: expected one behind the other, got start 2 after stop 3"),
        ({"seen": (3,)}, r"seen: expected at most 2, got 3"),
        ({"room": 1}, r"seen: expected at most 1, got 2"),
        ({"seen": (2, 2)}, r"seen: expected shape \(1, 1\)"),
        ({"used": (3,)}, r"used: expected at most 2, got 3"),
        ({"used": (-1,)}, r"used: expected at most 2, got -1"),
        ({"used": (1, 1)}, r"used: expected shape \(1, 1\)"),
        ({"together": (0,)}, r"together: expected at least 1, got 0"),
        ({"together": (1, 1)}, r"together: expected shape \(1, 1\)"),
        ({"near": 3, "reach": 2}, r"reach: expected at least 3, got 2"),
        ({"order": (0,) * 9, "stop": (9, 9)}, r"clusters: expected at most 4 keys, got 9"),
        ({"queries": torch.zeros(1, 1, 2, 3)}, r"queries: expected shape \(1, 1, 2, 8\)"),
        ({"queries": torch.zeros(2, 1, 2, 8)}, r"queries: expected shape \(1, 1, 2, 8\)"),
        (
            {"visible": ((0, 1),) * 3, "seen": (2,) * 3, "used": (0,) * 3, "together": (1,) * 3},
            r"visible: expected a chunk for equally many of the 2 groups, got 3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(**wrong)


def test_a_cluster_that_an_int16_cannot_count_is_refused_or_wide():
    keys = 2**15
    x = torch.zeros(1, 1, keys, 1)
    clusters = [torch.arange(keys).view(1, 1, -1).int(), torch.zeros(1, 1, 1).int(), torch.full((1, 1, 1), keys).int()]
    seen = torch.zeros(1, 1, 1).int(), torch.ones(1, 1).int(), torch.ones(1, 1).long(), torch.ones(1, 1).long()
    query = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"clusters: expected at most 32767 keys, got 32768"):
        planning.near_keys_op(query, x, clusters, *seen, 3, 9, False, 1)
    picks, left = planning.near_keys_op(query, x, clusters, *seen, 3, 9, True, 1)
    assert sorted(picks.flatten().tolist()) == [0, 1, 2]
    assert left.tolist() == [[[[keys - 3]]]]


def test_halve_refuses_malformed_parts():
    x = torch.zeros(1, 1, 4, 8)

    def run(order=(0, 1, 2, 3), start=(0, 2), stop=(2, 4), leaves=(1, 2), together=(1,)):
        rows, first, last = (torch.tensor([each], dtype=torch.int32) for each in (order, start, stop))
        return planning.halve_op(x, rows, first, last, torch.tensor([leaves]), torch.tensor(together))

    assert run().tolist() == [[[0, 1, 2, 3]]]
    for wrong, message in (
        ({"order": (0, 1, 2, 9)}, r"parts.order: expected indices in \[0, 4\), got 9"),
        ({"stop": (2, 5)}, r"parts: expected 2 ≤ start ≤ stop ≤ 4, got start 2, stop 5"),
        ({"leaves": (1,)}, r"leaves: expected shape \(1, 2\)"),
        ({"leaves": (1, -1)}, r"leaves: expected at least 0, got -1"),
        ({"together": (0,)}, r"together: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**wrong)


# --- sinks, small groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_sinks_are_met_once_and_exactly_by_everybody(strict):
    q, k, _ = tensors(2, 4, 150, key_heads=2)
    mask = padding(2, 150, [150, 120], "left")
    mechanism = NearFar(near=3, chunk=8, sinks=3, strict=strict)
    plan = mechanism.plan(q, k, is_causal=True, key_mask=mask, query_mask=mask)
    counts = count_pairs(plan)
    for b, first in enumerate((0, 30)):
        for place in range(3):
            met = counts[b, :, first + place : 150, first + place]
            assert (met == 1).all()
    means = plan.key_means
    assert means is not None
    assert not means.includes(torch.arange(150) < torch.tensor([[3], [33]]))


def test_a_sink_that_is_unlike_all_keys_is_not_lost():
    """One key that all queries look for, behind which nothing like it comes: without sinks its mean would hide it."""
    q, k, v = tensors(1, 1, 600, dim=8, dtype=torch.float32)
    q[..., 0], k[:, :, :, 0], k[:, :, 0, 0] = 6.0, 0.0, 6.0
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def error(sinks):
        mechanism = NearFar(near=0, chunk=32, sinks=sinks)
        return float((coterie.attention(q, k, v, mechanism, is_causal=True) - want).norm() / want.norm())

    assert error(1) < 0.05 < 0.5 < error(0)


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 10**6))
def test_halves_are_the_same_in_both_backends_and_lose_nobody(length, leaf, together, whole, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, length, 5, generator=generator)
    x = (2 * x).round() if whole else x
    order, count = compact(torch.rand(2, length, generator=generator) < 0.8)
    cut = (count // 2)[:, None]
    parts = Parts(order, torch.cat([0 * cut, cut], 1).int(), torch.cat([cut, count[:, None]], 1).int())
    leaves = (parts.sizes + leaf - 1) // leaf
    given_leaves = leaves, max(1, int(leaves.max())), torch.full((2,), together)
    found, want = (steps.halve(x, parts, *given_leaves) for steps in (planning, reference))
    for b in range(2):
        n = int(count[b])
        assert torch.equal(found[b, :, :n], want[b, :, :n])
        assert torch.equal(found[b, :, :n].sort(-1).values, order[b, :n].sort().values.expand(2, -1))


def test_halves_put_alike_rows_side_by_side():
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randperm(32, generator=generator) % 4
    corners = torch.tensor([[10.0, 3.0], [10.0, -3.0], [-10.0, 3.0], [-10.0, -3.0]])
    x = (corners[kinds] + 0.1 * torch.randn(32, 2, generator=generator))[None, None]
    whole = Parts.whole(torch.ones(1, 32, dtype=torch.bool))
    order = planning.halve(x, whole, torch.tensor([[8]]), 8, torch.tensor([2]))
    assert all(len(set(part.tolist())) == 1 for part in kinds[order[0, 0].long()].split(8))


def test_parts_of_nobody():
    nobody = Parts.whole(torch.zeros(2, 5, dtype=torch.bool))
    x = torch.randn(2, 1, 5, 8)
    for labels, centroids in (planning.kmeans(x, nobody, 3, 2, seed=0, layer=0),):
        assert (labels == 0).all()
        assert (centroids == 0).all()


# --- strict groups ----------------------------------------------------------------------------------------------------


def peaked(seed, length=2048):
    """Tokens of eight kinds: a query looks for the keys of its kind. With the dense outputs of a causal call."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 8, (length,), generator=generator)
    k = torch.randn(1, 1, 8, 64, generator=generator)[:, :, kinds]
    k = k + 0.3 * torch.randn(1, 1, length, 64, generator=generator)
    v = torch.randn(1, 1, length, 64, generator=generator)
    return 3 * k, k, v, F.scaled_dot_product_attention(3 * k, k, v, is_causal=True)


def mean_error(strict, queries, rows, mask=None):
    """Of these rows, over eight draws. In one of them a chunk's founders may all lack a kind that comes later."""
    total, mechanism = 0.0, NearFar(near=64, strict=strict)
    for seed in range(8):
        q, k, v, want = peaked(seed)
        settings = {"is_causal": True, "query_mask": mask, "backend": "native"}
        found = coterie.attention(q[:, :, -queries:], k, v, mechanism, **settings) - want[:, :, -queries:]
        total += float(found[:, :, rows].norm() / want[:, :, -queries:][:, :, rows].norm()) / 8
    return total


@pytest.mark.parametrize("queries", [100, 129, 160, 192])
def test_strict_groups_behind_a_cache_are_good_judges(queries):
    rows = slice(-min(128, queries), None)
    assert mean_error(True, queries, rows) <= 1.5 * mean_error(False, queries, rows)


@pytest.mark.parametrize("kept", [0, 8, 48])
def test_strict_groups_behind_masked_queries_are_good_judges(kept):
    real = torch.ones(1, 2048, dtype=torch.bool)
    real[:, 1664 + kept : 1792] = False
    rows = slice(1792, 1920)
    assert mean_error(True, 2048, rows, real) <= 1.3 * mean_error(False, 2048, rows, real)


class Narrow(NearFar):
    """Looks at so few keys that groups search in parties."""

    search = Search(party=3, reach=2, least=8)


@settings(max_examples=12)
@given(
    st.integers(1, 70),
    st.integers(0, 60),
    st.sampled_from(["auto", 1, 3, 9]),
    st.sampled_from([NearFar, Narrow]),
    st.booleans(),
    st.data(),
)
def test_strict_rows_behind_a_cache_do_not_depend_on_later_tokens(queries, cache, groups, kind, masked, data):
    """Neither on what they are, nor on whether they are masked, nor on whether they are there."""
    mechanism, keys = kind(near=4, chunk=8, query_clusters=groups, key_clusters=2, strict=True), queries + cache
    cut, seed = data.draw(st.integers(0, queries)), data.draw(st.integers(0, 100))
    (q, k, _), (q2, k2, _) = (tensors(1, 2, queries, keys, key_heads=1, seed=s) for s in (seed, seed + 1))
    generator = torch.Generator().manual_seed(seed)
    real, other = (torch.rand(1, queries, generator=generator) < (0.6 if masked else 2) for _ in range(2))
    want = mechanism.plan(q, k, is_causal=True, query_mask=real).to_dense()[:, :, :cut]
    q2 = torch.cat([q[:, :, :cut], 3 * q2[:, :, cut:]], 2)
    k2 = torch.cat([k[:, :, : cache + cut], k2[:, :, cache + cut :]], 2)
    other = torch.cat([real[:, :cut], other[:, cut:]], 1)
    after = mechanism.plan(q2, k2, is_causal=True, query_mask=other).to_dense()[:, :, :cut]
    assert torch.equal(after[..., : cache + cut], want[..., : cache + cut])
    short = mechanism.plan(q[:, :, :cut], k[:, :, : cache + cut], is_causal=True, query_mask=real[:, :cut])
    assert torch.equal(short.to_dense()[..., : cache + cut], want[..., : cache + cut])


@pytest.mark.parametrize("kind", [NearFar, Narrow])
@pytest.mark.parametrize(("queries", "cache"), [(3, 200), (20, 100), (90, 61)])
def test_strict_groups_behind_a_cache_are_the_same_in_both_backends_and_alone(kind, queries, cache):
    mechanism, keys = kind(near=6, chunk=16, strict=True), queries + cache
    q, k, _ = tensors(2, 2, queries, keys, key_heads=1, dtype=torch.float32)
    real = torch.rand(2, queries, generator=torch.Generator().manual_seed(1)) < 0.7
    first, second = (
        mechanism.plan(q, k, is_causal=True, query_mask=real, backend=backend).to_dense()
        for backend in ("reference", "native")
    )
    assert torch.equal(first, second)
    for b in range(2):
        alone = mechanism.plan(q[b : b + 1], k[b : b + 1], is_causal=True, query_mask=real[b : b + 1]).to_dense()
        assert torch.equal(alone[0], first[b])
    more = F.pad(q, (0, 0, 0, 50)), F.pad(k, (0, 0, 0, 50))
    masks = {"query_mask": F.pad(real, (0, 50)), "key_mask": F.pad(torch.ones(2, keys, dtype=torch.bool), (0, 50))}
    padded = mechanism.plan(*more, is_causal=True, **masks).to_dense()
    assert torch.equal(padded[:, :, :queries, :keys], first[..., :keys])
