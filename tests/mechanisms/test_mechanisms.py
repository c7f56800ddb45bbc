"""Each mechanism against its paper's formula."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import coterie
from coterie.planning.orders import Parts, order_by
from tests import cases
from tests.cases import MECHANISMS, all_close, check_gradients, close, fails, mistakes, tensors
from tests.oracles import (
    clustered,
    fixed_met,
    improved_clustered,
    merge_rounds,
    softmax_over,
    strided_met,
    window_met,
)

pytestmark = pytest.mark.usefixtures("backend")


def groups_of(plan, r, b, h):
    """[(query rows, key rows)] of one head's round."""
    each = plan.rounds[r]
    found = []
    for g in range(each.groups):
        rows = each.query_order[b, h, each.query_offsets[b, h, g] : each.query_offsets[b, h, g + 1]].tolist()
        keys = each.key_order[b, h, each.key_start[b, h, g] : each.key_stop[b, h, g]].tolist()
        found.append((rows, keys))
    return found


# --- Smyrf -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 63, 111])
def test_smyrf_equals_eq_15_round_by_round(length):
    q, k, v = tensors(1, 2, length)
    smyrf = coterie.Smyrf(rounds=4, cluster_size=16)
    plan = smyrf.plan(q, k)
    out = coterie.attention(q, k, v, smyrf)
    for h in range(2):
        rounds = []
        for r in range(4):
            met: list[list[int]] = [[]] * length
            for rows, keys in groups_of(plan, r, 0, h):
                for i in rows:
                    met[i] = keys
            rounds.append(met)
        close(out[0, h], merge_rounds(q[0, h], k[0, h], v[0, h], 8**-0.5, rounds))


@pytest.mark.parametrize("length", [2, 63, 111])
def test_smyrf_once_equals_softmax_over_the_union(length):
    q, k, v = tensors(1, 2, length)
    once = coterie.Smyrf(rounds=4, cluster_size=16, duplicates="once")
    plan = once.plan(q, k)
    out, lse = coterie.attention(q, k, v, once, return_lse=True)
    assert length < 16 or (plan.to_dense() > 1).any()
    for h in range(2):
        union = torch.zeros(length, length)
        for r in range(4):
            for rows, keys in groups_of(plan, r, 0, h):
                for i in rows:
                    union[i, keys] = 1
        want = softmax_over(q[0, h], k[0, h], v[0, h], 8**-0.5, union)
        close(out[0, h], want[0])
        close(lse[0, h], want[1])


def test_smyrf_groups_are_the_sorted_hashes_cut_evenly():
    from coterie import draws

    q, k, _ = tensors(1, 2, 111, 70)
    plan = coterie.Smyrf(rounds=2, cluster_size=16, seed=5).plan(q, k, layer=3)
    a = draws.normal(draws.Stream.PROJECTION, (2, 2, 10), seed=5, layer=3, device=q.device)
    q, k = q.double(), k.double()
    for h in range(2):
        bound = max(float(x @ x) for x in q[0, h]) + max(float(x @ x) for x in k[0, h])
        for r in range(2):
            hash_q = [float(x @ a[h, r, :8]) + math.sqrt(bound - float(x @ x)) * float(a[h, r, 9]) for x in q[0, h]]
            hash_k = [float(x @ a[h, r, :8]) + math.sqrt(bound - float(x @ x)) * float(a[h, r, 8]) for x in k[0, h]]
            found = groups_of(plan, r, 0, h)
            assert [i for rows, _ in found for i in rows] == sorted(range(111), key=hash_q.__getitem__)
            assert [j for _, keys in found for j in keys] == sorted(range(70), key=hash_k.__getitem__)
            for side in (0, 1):
                sizes = [len(group[side]) for group in found]
                assert len(sizes) == 7
                assert max(sizes) - min(sizes) <= 1


def test_more_groups_than_keys_leaves_nobody_alone():
    q, k, v = tensors(1, 1, 200, 3)
    plan = coterie.Smyrf(rounds=1, cluster_size=10).plan(q, k)
    assert (plan.to_dense().sum(-1) == 1).all()
    assert coterie.attention(q, k, v, "smyrf").isfinite().all()


def peaked(copies, queries=24, dim=24):
    """Assumption 1: of each query's scores only those of its own key's `copies` copies are not negligible."""
    basis = torch.eye(queries, dim, dtype=cases.DTYPE) * 40
    k = basis.repeat(copies, 1)
    v = torch.randn(queries * copies, 5, dtype=cases.DTYPE)
    return basis[None, None], k[None, None], v[None, None]


def plan_of(rounds, queries, keys, duplicates):
    """A plan from explicit lists: rounds[r] = [(query rows, key rows)]."""
    made = []
    for groups in rounds:
        lists = [[x for part in side for x in part] for side in zip(*groups, strict=True)]
        edges = [
            torch.tensor([0] + [len(part) for part in side]).cumsum(0).int()[None, None]
            for side in zip(*groups, strict=True)
        ]
        order, keys_order = (torch.tensor(x, dtype=torch.int32)[None, None] for x in lists)
        made.append(coterie.Round(order, edges[0], keys_order, edges[1][..., :-1], edges[1][..., 1:]))
    zero = torch.zeros(1, dtype=torch.int32)
    return coterie.Plan(queries, keys, 1, tuple(made), zero, duplicates=duplicates).validate()


def test_theorem_2_the_assumptions_make_it_exact():
    """Assumptions 1 (sparse), 2 (fair: each big pair meets equally often) and 3 (effective) hold by construction."""
    q, k, v = peaked(copies=2)
    dense = F.scaled_dot_product_attention(q, k, v)
    first = [([i], [i, i + 24, (i + 5) % 48]) for i in range(24)]
    second = [([i], [i + 24, (i + 7) % 48, i]) for i in range(24)]
    fair = plan_of([first, second], 24, 48, "count")
    close(coterie.grouped_attention(q, k, v, fair).out, dense)


def test_theorem_2_without_assumption_2_needs_once():
    q, k, v = peaked(copies=2)
    dense = F.scaled_dot_product_attention(q, k, v)
    # Unfair: each query meets its first big key twice and its second once.
    first = [([i], [i, i + 24]) for i in range(24)]
    second = [([i], [i, (i + 5) % 24]) for i in range(24)]
    count = coterie.grouped_attention(q, k, v, plan_of([first, second], 24, 48, "count")).out
    once = coterie.grouped_attention(q, k, v, plan_of([first, second], 24, 48, "once")).out
    assert (count - dense).abs().max() > 0.05
    close(once, dense)


@pytest.mark.parametrize("duplicates", ["count", "once"])
def test_theorem_2_for_plans_that_smyrf_itself_makes(duplicates):
    """Well separated bundles of one query and its key: where a real plan covers a query's key, the row is dense."""
    q, k, v = peaked(copies=1)
    smyrf = coterie.Smyrf(rounds=8, cluster_size=8, duplicates=duplicates)
    covered = smyrf.plan(q, k).to_dense()[0, 0].diagonal() > 0
    assert covered.sum() > 12
    out = coterie.attention(q, k, v, smyrf)
    close(out[0, 0][covered], F.scaled_dot_product_attention(q, k, v)[0, 0][covered])


# --- Clustered and ImprovedClustered ---------------------------------------------------------------------------------


def labels_of(plan, h, queries):
    """The cluster of each query, read off the plan."""
    return (plan.answer[0, h] - queries).tolist()


@pytest.mark.parametrize("space", ["hamming", "euclidean"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2, 9), (37, 37), (40, 21)])
def test_clustered_equals_the_formula_and_its_gradient(space, queries, keys):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, queries, keys, value_dim=5))
    mechanism = coterie.Clustered(clusters=5, iterations=3, space=space)
    plan = mechanism.plan(q, k)
    out = coterie.attention(q, k, v, mechanism)
    want = torch.stack([clustered(q[0, h], k[0, h], v[0, h], 8**-0.5, labels_of(plan, h, queries)) for h in (0, 1)])[
        None
    ]
    close(out, want)
    grad = torch.randn_like(out)
    all_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad))


@pytest.mark.parametrize("space", ["hamming", "euclidean"])
@pytest.mark.parametrize(("queries", "keys", "topk"), [(1, 1, 1), (2, 9, 3), (37, 37, 6), (40, 21, 20), (21, 13, 50)])
def test_improved_clustered_equals_the_formula_and_its_gradient_mass_included(space, queries, keys, topk):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, queries, keys, value_dim=5))
    mechanism = coterie.ImprovedClustered(clusters=5, topk=topk, iterations=3, space=space)
    plan = mechanism.plan(q, k)
    out = coterie.attention(q, k, v, mechanism)
    want = torch.stack(
        [improved_clustered(q[0, h], k[0, h], v[0, h], 8**-0.5, labels_of(plan, h, queries), topk) for h in (0, 1)]
    )[None]
    close(out, want)
    grad = torch.randn_like(out)
    all_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad))
    assert (plan.to_dense() == 1).all(), "each pair meets once: exactly or through the mean"


@pytest.mark.parametrize("length", [1, 2, 63, 200])
def test_improved_clustered_with_all_keys_is_dense(length):
    q, k, v = (x.requires_grad_() for x in tensors(2, 2, length))
    out = coterie.attention(q, k, v, coterie.ImprovedClustered(clusters=9, topk=length + 3))
    dense = F.scaled_dot_product_attention(q, k, v)
    close(out, dense)
    grad = torch.randn_like(out)
    all_close(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(dense, (q, k, v), grad))


@pytest.mark.parametrize("space", ["hamming", "euclidean"])
def test_more_clusters_than_queries_and_empty_clusters(space):
    q, k, v = tensors(1, 2, 5, 12)
    many = coterie.Clustered(clusters=50, space=space)
    means = many.plan(q, k).query_means
    assert means is not None
    assert int((means.stop - means.start == 0).sum()) >= 2 * 45
    # One cluster a query is dense attention.
    close(coterie.attention(q, k, v, many), F.scaled_dot_product_attention(q, k, v))
    same = q[:, :, :1].expand(1, 2, 5, 8)  # all queries alike: one cluster takes them all, the others stay empty
    for mechanism in (many, coterie.ImprovedClustered(clusters=50, topk=4, space=space)):
        close(coterie.attention(same, k, v, mechanism), F.scaled_dot_product_attention(same, k, v))


def test_clustered_members_share_their_answer():
    q, k, v = tensors(1, 1, 60)
    plan = coterie.Clustered(clusters=6).plan(q, k)
    out = coterie.attention(q, k, v, coterie.Clustered(clusters=6))[0, 0]
    for label in set(labels_of(plan, 0, 60)):
        members = [i for i, x in enumerate(labels_of(plan, 0, 60)) if x == label]
        assert (out[members] == out[members[0]]).all()


# --- Reformer, Routing, Local, Longformer, TopK ----------------------------------------------------------------------


def test_reformer_with_shared_queries_and_keys_is_the_papers_scheme():
    q, _, _ = tensors(1, 2, 111)
    plan = coterie.Reformer(rounds=2, chunk_size=16).plan(q, q)
    for h in range(2):
        for r in range(2):
            found = groups_of(plan, r, 0, h)
            order = [i for rows, _ in found for i in rows]
            assert sorted(order) == list(range(111))
            sizes = [len(rows) for rows, _ in found]
            assert max(sizes) - min(sizes) <= 1
            for g, (rows, keys) in enumerate(found):
                assert keys == (found[g - 1][0] if g else []) + rows


def test_reformer_buckets_are_sorted_by_position():
    from coterie import draws
    from coterie.planning import hashing

    q, k, _ = tensors(1, 1, 80)
    plan = coterie.Reformer(rounds=1, chunk_size=10).plan(q, k)
    rotation = draws.normal(draws.Stream.ROTATION, (1, 8, 4), seed=0, device=q.device)
    columns = torch.tensor([4])
    for side, x in ((0, q), (1, k)):
        bucket = hashing.cross_polytope(x.double(), rotation, columns)[0, 0].tolist()
        order = plan.rounds[0].query_order if side == 0 else plan.rounds[0].key_order
        assert order[0, 0].tolist() == sorted(range(80), key=lambda i: (bucket[i], i))


def test_strict_reformer_by_loops():
    """A query meets the keys of its bucket in the last chunk begun at its position and in the one before."""
    from coterie import draws
    from coterie.planning import hashing

    q, k, _ = tensors(1, 1, 90)
    plan = coterie.Reformer(rounds=1, chunk_size=5, strict=True).plan(q, k, is_causal=True)
    rotation = draws.normal(draws.Stream.ROTATION, (1, 8, 9), seed=0, device=q.device)
    columns = torch.tensor([9])
    query_bucket, key_bucket = (hashing.cross_polytope(x.double(), rotation, columns)[0, 0].tolist() for x in (q, k))
    for i in range(90):
        so_far = [j for j in range(i + 1) if key_bucket[j] == query_bucket[i]]
        chunk = max(0, len(so_far) - 1) // 5
        want = so_far[max(0, chunk - 1) * 5 :] or [i]
        assert plan.to_dense()[0, 0, i].nonzero().squeeze(-1).tolist() == want


def test_routing_sends_each_query_to_its_centroid_and_the_centroid_picks_keys():
    q, k, _ = tensors(1, 2, 50, 40)
    plan = coterie.Routing(clusters=4, window=7, iterations=3).plan(q, k)
    for h in range(2):
        found = groups_of(plan, 0, 0, h)
        assert sorted(i for rows, _ in found for i in rows) == list(range(50))
        assert all(len(set(keys)) == 7 for _, keys in found)
        # Lloyd on the unit vectors of both sides: the centroids that the plan must have used.
        points = torch.cat([F.normalize(q[0, h], dim=-1), F.normalize(k[0, h], dim=-1)])
        from coterie.planning.kmeans import starts
        from tests.oracles import euclidean_lloyd

        first = starts(torch.ones(1, 90, dtype=torch.bool), 2, 4, seed=0, layer=0)[0, h].tolist()
        labels = euclidean_lloyd(points, first, 2)
        means = [points[[i for i, x in enumerate(labels) if x == c]].mean(0) for c in range(4)]
        centroids = F.normalize(torch.stack(means), dim=-1)
        for c, (rows, keys) in enumerate(found):
            for i in rows:
                assert int((centroids @ points[i]).argmax()) == c
            scores = (points[50:] @ centroids[c]).tolist()
            assert keys == sorted(sorted(range(40), key=lambda j: -scores[j])[:7])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(1, 1, None), (300, 300, None), (50, 270, None), (40, 30, 5)])
@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_local_window(causal, queries, keys, offset, window):
    q, k, _ = tensors(1, 1, queries, keys, dim=2)
    plan = coterie.Local(window=window).plan(q, k, is_causal=causal, causal_offset=offset)
    shift = keys - queries if offset is None else offset
    met = plan.to_dense()[0, 0]
    near = [[window_met(i, j, shift, window, causal) for j in range(keys)] for i in range(queries)]
    want = torch.tensor(near).int()
    for i in range(queries):
        if causal and not want[i].any() and 0 <= i + shift < keys:
            want[i, i + shift] = 1
    assert torch.equal(met, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_longformer(causal, offset):
    q, k, _ = tensors(2, 1, 40, 43, dim=2)
    key_mask = torch.ones(2, 43, dtype=torch.bool)
    key_mask[1, :4] = False  # the first real tokens are global
    met = (
        coterie.Longformer(window=5, global_tokens=3)
        .plan(q, k, key_mask=key_mask, is_causal=causal, causal_offset=offset)
        .to_dense()
    )
    for b in range(2):
        real = [j for j in range(43) if key_mask[b, j]]
        for i in range(40):
            for j in range(43):
                pair = j in real and (window_met(i, j, offset, 5, causal) or j in real[:3] or i + offset in real[:3])
                pair = pair and not (causal and j > i + offset)
                assert int(met[b, 0, i, j]) == int(pair), (b, i, j)


# Lengths that no stride divides, more queries than keys, a cache in front, queries before the first and after the last.
PLACES = [(1, 1, None), (40, 40, None), (11, 50, None), (40, 9, None), (30, 20, 4), (13, 6, -20), (7, 7, 19)]
FACTORIZED = [
    *(coterie.Strided(stride=7, factors=factors) for factors in ("merged", "heads")),
    *(coterie.Fixed(stride=9, summary=2, factors=factors) for factors in ("merged", "heads")),
]
FACTORS = {"merged": ((1, 2), (1, 2)), "heads": ((1,), (2,)), "layers": ((2,), (2,))}  # of both heads, in layer 3


def alone(met: list[bool], place: int, causal: bool) -> list[int]:
    """The row of a query; causal, one that meets nobody meets itself."""
    row = [int(pair) for pair in met]
    if causal and not any(met) and 0 <= place < len(met):
        row[place] = 1
    return row


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), PLACES)
@pytest.mark.parametrize("stride", [1, 7, 1000])
@pytest.mark.parametrize("factors", FACTORS)
def test_strided(causal, queries, keys, offset, stride, factors):
    q, k, _ = tensors(1, 2, queries, keys, dim=2)
    mechanism = coterie.Strided(stride=stride, factors=factors)
    met = mechanism.plan(q, k, is_causal=causal, causal_offset=offset, layer=3).validate().to_dense()[0]
    shift = keys - queries if offset is None else offset
    for head, patterns in enumerate(FACTORS[factors]):
        for i in range(queries):
            place = i + shift
            want = [any(strided_met(place, j, stride, causal, p) for p in patterns) for j in range(keys)]
            assert met[head, i].tolist() == alone(want, place, causal), (head, i)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), PLACES)
@pytest.mark.parametrize(("stride", "summary"), [(1, 1), (5, 2), (1000, 3)])
@pytest.mark.parametrize("factors", FACTORS)
def test_fixed(causal, queries, keys, offset, stride, summary, factors):
    q, k, _ = tensors(2, 2, queries, keys, dim=2)
    key_mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(keys)) < 0.7
    key_mask[0] = True
    mechanism = coterie.Fixed(stride=stride, summary=summary, factors=factors)
    masks: Any = {"key_mask": key_mask, "query_mask": torch.ones(2, queries, dtype=torch.bool)}
    plan = mechanism.plan(q, k, **masks, is_causal=causal, causal_offset=offset, layer=3)
    met = plan.validate().to_dense()
    shift = keys - queries if offset is None else offset
    for b in range(2):
        real = key_mask[b].tolist()
        before = [sum(real[:j]) for j in range(keys + 1)]
        for head, patterns in enumerate(FACTORS[factors]):
            for i in range(queries):
                place = i + shift
                inside = min(max(place, 0), keys)
                at = before[inside] + place - inside
                want = [
                    real[j]
                    and (j <= place or not causal)
                    and any(fixed_met(at, before[j], stride, summary, False, p) for p in patterns)
                    for j in range(keys)
                ]
                row = alone(want, place if 0 <= place < keys and real[place] else -1, causal)
                assert met[b, head, i].tolist() == row, (b, head, i)


def test_patterns_of_the_sparse_transformer_are_the_papers():
    """Without padding, causal, both sides of one length: A¹ and A² as they are written there."""
    q, k, _ = tensors(1, 1, 29, dim=2)
    for pattern in (1, 2):
        strided = coterie.Strided(stride=5, factors="layers").plan(q, k, is_causal=True, layer=pattern - 1)
        fixed = coterie.Fixed(stride=5, summary=2, factors="layers").plan(q, k, is_causal=True, layer=pattern - 1)
        for i in range(29):
            want = [int(strided_met(i, j, 5, True, pattern)) for j in range(29)]
            assert strided.to_dense()[0, 0, i].tolist() == want
            met = [fixed_met(i, j, 5, 2, True, pattern) for j in range(29)]
            assert fixed.to_dense()[0, 0, i].tolist() == alone(met, i, True)


@pytest.mark.parametrize("mechanism", FACTORIZED, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_factorized_patterns_are_softmax_over_the_pairs_with_gradients(mechanism, causal):
    inputs = [x.requires_grad_() for x in tensors(1, 2, 11, 13, dim=1)]
    check_gradients(lambda q, k, v: coterie.attention(q, k, v, mechanism, is_causal=causal), inputs)
    q, k, v = (x.detach() for x in inputs)
    met = mechanism.plan(q, k, is_causal=causal).to_dense()[0]
    assert met.max() == 1  # each pair once
    out = coterie.attention(q, k, v, mechanism, is_causal=causal)
    for head in range(2):
        close(out[0, head], softmax_over(q[0, head], k[0, head], v[0, head], 1.0, met[head])[0])


@pytest.mark.parametrize("causal", [False, True])
def test_topk_is_the_true_top(causal):
    q, k, _ = tensors(2, 2, 30, 40)
    met = coterie.TopK(k=6).plan(q, k, is_causal=causal).to_dense()
    for b in range(2):
        for h in range(2):
            for i in range(30):
                seen = range(i + 11) if causal else range(40)
                scores = {j: float(q[b, h, i] @ k[b, h, j]) for j in seen}
                want = sorted(scores, key=lambda j: -scores[j])[:6]
                assert met[b, h, i].nonzero().squeeze(-1).tolist() == sorted(want)


def test_a_negative_scale_turns_the_top_around():
    q, k, _ = tensors(1, 1, 9, 20)
    best = coterie.TopK(k=3).plan(q, k, scale=-1.0).to_dense()
    assert torch.equal(best, coterie.TopK(k=3).plan(-q, k).to_dense())


def test_ties_go_to_the_first_position():
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert order_by(scores, torch.ones(4, dtype=torch.bool)).tolist() == [1, 3, 0, 2]
    q, k = torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 9, 4)
    assert coterie.TopK(k=3).plan(q, k).to_dense()[0, 0, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


# --- names, strings, JSON --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
def test_string_and_json_forms_go_both_ways(name):
    mechanism = MECHANISMS[name]
    for form in (str(mechanism), mechanism.to_json(), mechanism.to_dict(), json.loads(mechanism.to_json()), mechanism):
        assert coterie.as_mechanism(form) == mechanism
        assert hash(coterie.as_mechanism(form)) == hash(mechanism)


def test_strings_are_short_and_forgiving():
    assert str(coterie.Smyrf()) == "smyrf"
    assert str(coterie.Smyrf(rounds=2, resample=True)) == "smyrf:rounds=2,resample=true"
    assert coterie.as_mechanism(" Improved_Clustered : topk = 5 ") == coterie.ImprovedClustered(topk=5)
    assert coterie.as_mechanism("reformer:strict=True") == coterie.Reformer(strict=True)


def test_the_public_defaults():
    assert coterie.Smyrf() == coterie.Smyrf(4, 64, "smyrf", "projection", "count", 0, False)
    assert coterie.Clustered() == coterie.Clustered(100, 10, "hamming", 63, 0)
    assert coterie.ImprovedClustered() == coterie.ImprovedClustered(100, 32, 10, "hamming", 63, 0)
    assert coterie.NearFar() == coterie.NearFar(64, "auto", "auto", 2, 128, False, 0, 4)
    assert coterie.Reformer() == coterie.Reformer(4, 64, False, 0)
    assert coterie.TopK() == coterie.TopK(32)
    assert list(coterie.list_mechanisms())[:10] == [
        "smyrf", "clustered", "improved-clustered", "near-far", "reformer", "routing", "local", "longformer", "topk",
        "full",
    ]  # fmt: skip


BAD = [
    (lambda: coterie.Smyrf(rounds=0), ValueError, r"rounds: expected an int ≥ 1, got 0"),
    (lambda: coterie.Smyrf(rounds=math.nan), TypeError, r"rounds: expected an int, got float"),  # type: ignore[arg-type]
    (lambda: coterie.Smyrf(rounds=True), TypeError, r"rounds: expected an int, got bool"),
    (lambda: coterie.Smyrf(cluster_size=-4), ValueError, r"cluster_size: expected an int ≥ 1, got -4"),
    (lambda: coterie.Smyrf(transform="x"), ValueError, r"transform: expected one of 'smyrf', 'none', .* got 'x'"),
    (lambda: coterie.Smyrf(hash="x"), ValueError, r"hash: expected one of 'projection', .* got 'x'"),
    (lambda: coterie.Smyrf(duplicates="x"), ValueError, r"duplicates: expected one of 'count', 'once', got 'x'"),  # type: ignore[arg-type]
    (lambda: coterie.Smyrf(resample=1), TypeError, r"resample: expected a bool, got int"),  # type: ignore[arg-type]
    (lambda: coterie.Smyrf(seed=-1), ValueError, r"seed: expected an int ≥ 0, got -1"),
    (lambda: coterie.Clustered(clusters=0), ValueError, r"clusters: expected an int ≥ 1, got 0"),
    (lambda: coterie.Clustered(iterations=-1), ValueError, r"iterations: expected an int ≥ 0, got -1"),
    (lambda: coterie.Clustered(space="x"), ValueError, r"space: expected one of 'hamming', 'euclidean', got 'x'"),
    (lambda: coterie.Clustered(bits=0), ValueError, r"bits: expected an int ≥ 1, got 0"),
    (lambda: coterie.ImprovedClustered(topk=0), ValueError, r"topk: expected an int ≥ 1, got 0"),
    (lambda: coterie.NearFar(near=-1), ValueError, r"near: expected an int ≥ 0, got -1"),
    (lambda: coterie.NearFar(query_clusters=0), ValueError, r"query_clusters: expected an int ≥ 1, got 0"),
    (lambda: coterie.NearFar(key_clusters="x"), ValueError, r"key_clusters: expected an int ≥ 1 or 'auto', got 'x'"),
    (lambda: coterie.NearFar(key_clusters=2.5), TypeError, r"key_clusters: expected an int, got float"),  # type: ignore[arg-type]
    (lambda: coterie.NearFar(chunk=0), ValueError, r"chunk: expected an int ≥ 1, got 0"),
    (lambda: coterie.NearFar(strict=1), TypeError, r"strict: expected a bool, got int"),  # type: ignore[arg-type]
    (lambda: coterie.Reformer(chunk_size=0), ValueError, r"chunk_size: expected an int ≥ 1, got 0"),
    (lambda: coterie.Reformer(strict="yes"), TypeError, r"strict: expected a bool, got str"),  # type: ignore[arg-type]
    (lambda: coterie.Routing(window=0), ValueError, r"window: expected an int ≥ 1, got 0"),
    (lambda: coterie.Local(window=2.5), TypeError, r"window: expected an int, got float"),  # type: ignore[arg-type]
    (lambda: coterie.Longformer(global_tokens=-1), ValueError, r"global_tokens: expected an int ≥ 0, got -1"),
    (lambda: coterie.Strided(stride=0), ValueError, r"stride: expected an int ≥ 1, got 0"),
    (lambda: coterie.Strided(factors="both"), ValueError, r"factors: expected one of 'merged', .* got 'both'"),
    (lambda: coterie.Fixed(stride=2.5), TypeError, r"stride: expected an int, got float"),  # type: ignore[arg-type]
    (lambda: coterie.Fixed(summary=0), ValueError, r"summary: expected an int ≥ 1, got 0"),
    (lambda: coterie.Fixed(stride=4), ValueError, r"summary: expected at most the 4 keys of a block, got 8"),
    (lambda: coterie.Fixed(factors="x"), ValueError, r"factors: expected one of 'merged', .* got 'x'"),
    (lambda: coterie.TopK(k=0), ValueError, r"k: expected an int ≥ 1, got 0"),
    (lambda: coterie.as_mechanism("nope"), ValueError, r"mechanism: expected one of smyrf, clustered, .* got 'nope'"),
    (lambda: coterie.as_mechanism("smyrf:size=3"), ValueError, r"smyrf: expected a field of rounds, .* got 'size'"),
    (lambda: coterie.as_mechanism("full:size=3"), ValueError, r"full: expected a field of no fields, got 'size'"),
    (lambda: coterie.as_mechanism("smyrf:rounds"), ValueError, r"expected name:field=value,…, got 'smyrf:rounds'"),
    (lambda: coterie.as_mechanism("smyrf:rounds=nan"), TypeError, r"rounds: expected an int, got str"),
    (
        lambda: coterie.as_mechanism("topk:k=1,k=2"),
        ValueError,
        r"mechanism: expected 'k' only once, got 'topk:k=1,k=2'",
    ),
    (lambda: coterie.Local(window=10**30), ValueError, r"window: expected an int ≤ 2147483647, got 10+$"),
    (lambda: coterie.Smyrf(seed=2**64), ValueError, r"seed: expected an int ≤ 9223372036854775807, got"),
    (lambda: coterie.as_mechanism({"rounds": 3}), ValueError, r"a dict with the key 'mechanism', got \['rounds'\]"),
    (lambda: coterie.as_mechanism("{oops"), ValueError, r"mechanism: expected a JSON object, got '{oops'"),
    (lambda: coterie.as_mechanism(7), TypeError, r"mechanism: expected a Mechanism, a string or a dict, got int"),
    (lambda: coterie.register("Bad Name"), ValueError, r"name: expected a lower-case name .* got 'Bad Name'"),
    (
        lambda: coterie.register("full")(coterie.TopK),
        ValueError,
        r"name: expected a name that is not taken, got 'full'",
    ),
]


@mistakes(BAD)
def test_bad_hyper_parameters(case):
    fails(case)


# --- long inputs alone ------------------------------------------------------------------------------------------------


def test_at_least_is_dense_below_and_the_other_from_there_on():
    mechanism = coterie.as_mechanism("smyrf:rounds=2,cluster_size=16@61")
    for length, runs in ((60, coterie.Full()), (61, coterie.Smyrf(rounds=2, cluster_size=16))):
        q, k, v = torch.randn(3, 2, 3, length, 8, dtype=cases.DTYPE).unbind(0)
        for causal in (False, True):
            found = coterie.attention(q, k, v, mechanism, is_causal=causal)
            assert torch.equal(found, coterie.attention(q, k, v, runs, is_causal=causal))


@pytest.mark.parametrize("inner", ["near-far:near=9,chunk=16", "improved-clustered:clusters=5,topk=7", "topk:k=5"])
@pytest.mark.parametrize("causal", [False, True])
def test_at_least_counts_the_keys_of_each_sample(inner, causal):
    """Whatever a batch is padded to, and whichever way the bound is said."""
    if causal and inner.startswith("improved"):
        pytest.skip("improved-clustered attends through mean queries, which refuse is_causal")
    lengths = [61, 40, 39, 7, 0]
    q, k, v = (x.requires_grad_() for x in cases.tensors(5, 2, 61))
    mask = cases.padding(5, 61, lengths)
    for ask in ({"mechanism": f"{inner}@40"}, {"mechanism": inner, "dense_below": 40}):
        out = coterie.attention(q, k, v, key_mask=mask, is_causal=causal, **ask)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        for b, length in enumerate(lengths):
            q_b, k_b, v_b = (x[b : b + 1, :, :length] for x in (q, k, v))
            runs = inner if length >= 40 else "full"
            want = coterie.attention(q_b, k_b, v_b, runs, is_causal=causal)
            cases.close(out[b : b + 1, :, :length], want)
            for got, one in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
                cases.close(got[b], one[b], loose=10)


def test_at_least_needs_of_the_other_only_what_runs():
    q = torch.randn(2, 2, 40, 8)
    mask = cases.padding(2, 40, [20, 7])
    clustered = coterie.as_mechanism("clustered:clusters=3@30")
    want = coterie.attention(q, q, q, "full", key_mask=mask, is_causal=True)
    assert torch.equal(coterie.attention(q, q, q, clustered, key_mask=mask, is_causal=True), want)
    with pytest.raises(ValueError, match="is_causal: expected False for 'clustered'"):
        coterie.attention(q, q, q, clustered, key_mask=cases.padding(2, 40, [30, 7]), is_causal=True)


def test_a_given_plan_is_used_as_it_is():
    q = torch.randn(1, 2, 40, 8)
    plan = coterie.Local(window=3).plan(q, q)
    with pytest.raises(ValueError, match="dense_below: expected 0 with a plan, which is used as it is, got 99"):
        coterie.attention(q, q, q, None, plan=plan, dense_below=99)


def test_guests_need_a_mask_of_queries_of_their_shape():
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind(0)
    guests = torch.zeros(1, 20, dtype=torch.bool)
    for run in (
        lambda **more: coterie.attention(q, k, v, "smyrf", **more),
        lambda **more: coterie.Smyrf().plan(q, k, **more),
    ):
        with pytest.raises(ValueError, match="guests: expected a query_mask beside it, got none"):
            run(guests=guests)
        with pytest.raises(ValueError, match=r"guests: expected shape \(1, 20\), got \(1, 19\)"):
            run(guests=guests[:, 1:], query_mask=~guests)
        with pytest.raises(TypeError, match=r"guests: expected dtype torch.bool"):
            run(guests=guests.int(), query_mask=~guests)


def test_at_least_as_string_and_json():
    mechanism = coterie.AtLeast(128, coterie.NearFar(near=8))
    assert str(mechanism) == "near-far:near=8@128"
    for form in (str(mechanism), mechanism.to_dict(), mechanism.to_json()):
        assert coterie.as_mechanism(form) == mechanism
    q = torch.randn(1, 1, 200, 8)
    coterie.as_mechanism("clustered@999").plan(q, q, is_causal=True)  # which is dense, and can
    with pytest.raises(ValueError, match="is_causal: expected False for 'clustered'"):
        coterie.as_mechanism("clustered@99").plan(q, q, is_causal=True)


@pytest.mark.parametrize(
    "spec", ["local@", "local@x", "local@-3", "local@0", "local@1@2", {"mechanism": "local", "at_least": 0}]
)
def test_at_least_needs_a_length(spec):
    with pytest.raises(ValueError, match=r"mechanism: expected a number of keys after '@'|length: expected"):
        coterie.as_mechanism(spec)


def test_at_least_holds_one_mechanism():
    wrong: list[Any] = [coterie.AtLeast(5, coterie.Full()), "local"]
    for inner in wrong:
        with pytest.raises(TypeError, match="inner: expected"):
            coterie.AtLeast(9, inner)


def test_at_least_draws_anew_in_training_alone():
    layer = coterie.nn.MultiheadAttention(
        16, 2, batch_first=True, mechanism="smyrf:rounds=1,cluster_size=8,resample=true@9"
    )
    x = torch.randn(1, 40, 16)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


# --- mechanisms that plan in a way of their own -----------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand(coterie.Local):
    """Plans each sample alone, and remembers what it was asked."""

    asked: list[Any] = field(default_factory=list)

    def plan(self, q, k, **settings):
        self.asked.append(settings)
        return super().plan(q, k, **settings)


def test_a_plan_method_of_ones_own_is_called_with_what_came():
    q, k, v = tensors(2, 2, 21)
    mechanism = ByHand(window=5)
    out = coterie.attention(q, k, v, mechanism, is_causal=True)
    close(out, coterie.attention(q, k, v, coterie.Local(window=5), is_causal=True))
    coterie.attention(q, k, v, mechanism, is_causal=True, causal_offset=-3)
    assert [each["causal_offset"] for each in mechanism.asked] == [None, -3]
    first = mechanism.asked[0] | {"key_mask": None, "query_mask": None}
    assert mechanism.plan(q[:1], k[:1], **first).batch == 1


def test_a_patched_plan_method_is_not_passed_by(monkeypatch):
    q, k, v = tensors(1, 2, 21)
    real, calls = coterie.Mechanism.plan, []

    def counted(self, *args, **settings):
        calls.append(self)
        return real(self, *args, **settings)

    monkeypatch.setattr(coterie.Mechanism, "plan", counted)
    coterie.attention(q, k, v, "local")
    assert len(calls) == 1


def test_a_planning_step_swallows_no_option():
    q, k, _ = tensors(1, 1, 20)

    class Typo(coterie.Local):
        def build(self, tokens):
            parts = Parts.whole(tokens.query_mask)
            tokens.steps.kmeans(tokens.raw_q, parts, 2, 1, seed=0, layer=0, sampel=3)
            return super().build(tokens)

    with pytest.raises(TypeError, match="unexpected keyword argument 'sampel'"):
        Typo().plan(q, k)
