"""Theorem 1: the claim fails, the limit holds, more special keys repair it. Theorem 2: its assumptions on plans."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.analysis.biclustering import (
    Clustering,
    Problem,
    assumptions,
    copies_that_suffice,
    equivalence,
    limit_error,
    softmax_error,
    solve,
    special_at_home,
    special_problem,
    squared_mass,
    with_special_keys,
)
from coterie.plan.plan import Duplicates
from tests.analysis.biclustering import instances as oracle
from tests.cases import tensors

SMALL = Problem(np.log([[4, 3, 4, 4], [1, 1, 3, 4]]), (1, 1), (2, 2))  # e^{q·k} are whole numbers
DRAWN = range(40)
FAILING = {6, 33}  # of those


def drawn(seed):
    """The 4 + 4 instances of the docs: normal scores of deviation 2, two clusters of 2 + 2."""
    return Problem.balanced(2 * np.random.default_rng(seed).normal(size=(4, 4)), 2)


def by_loops(problem, value, largest):
    found = [(value(a, b), a, b) for a, b in oracle.clusterings(problem.query_sizes, problem.key_sizes)]
    best = max(found) if largest else min(found)
    return Clustering(best[1], best[2]).canonical()


def test_the_smallest_counterexample_by_hand():
    """e^{q·k} = 4 3 4 4 / 1 1 3 4. Keys {0, 1} to the first query: mass 16 + 9 + 9 + 16 = 50, lost are 4 + 4 and 1 + 1,
    so the limit is 64 + 32 + 4 + 2 = 102. Keys {0, 2}: mass 49, lost are 3 + 4 and 1 + 3: 49 + 25 + 16 + 10 = 100."""
    claim, truth = Clustering([0, 1], [0, 0, 1, 1]), Clustering([0, 1], [0, 1, 0, 1])
    assert squared_mass(SMALL.scores, claim) == pytest.approx(50)
    assert squared_mass(SMALL.scores, truth) == pytest.approx(49)
    assert limit_error(SMALL.scores, claim) == pytest.approx(102)
    assert limit_error(SMALL.scores, truth) == pytest.approx(100)
    for a in (10.0, 20.0, 40.0, 80.0, 160.0):
        found = equivalence(SMALL, a)
        assert (found.mass, found.softmax, found.limit) == (claim, truth, truth)
        assert not found.claim
        assert found.limit_claim


def test_with_two_keys_the_claim_cannot_fail():
    """Each query loses one key, so both terms of the limit are the same square: no counterexample has fewer tokens."""
    for seed in DRAWN:
        for queries in (2, 4):
            problem = Problem.balanced(2 * np.random.default_rng(seed).normal(size=(queries, 2)), 2)
            assert equivalence(problem, 40.0).claim


def test_the_error_tends_to_the_limit():
    clustering = Clustering([0, 1, 1, 0], [1, 0, 0, 1])
    for copies in (1, 3):
        limit = limit_error(drawn(0).scores, clustering, copies)
        gaps = []
        for a in (5.0, 10.0, 20.0, 40.0):
            scaled = with_special_keys(drawn(0).scores, a, copies)
            error = softmax_error(scaled, special_at_home(clustering, copies))
            gaps.append(abs(error * copies**2 * math.exp(2 * a) / limit - 1))
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] < 1e-12


def test_the_limit_is_written_with_loops():
    scores, clustering = drawn(3).scores, Clustering([0, 1, 1, 0], [1, 0, 0, 1])
    for copies in (1, 4):
        total = 0.0
        for i in range(4):
            lost = [math.exp(scores[i, j]) for j in range(4) if clustering.queries[i] != clustering.keys[j]]
            total += sum(lost) ** 2 / copies + sum(x * x for x in lost)
        assert limit_error(scores, clustering, copies) == pytest.approx(total, rel=1e-12)


def test_special_keys_go_home_when_a_is_large():
    """Over all 210 clusterings of 4 queries and 8 keys: nobody is parted from its special key, and the rest of the
    clustering is what `equivalence` found."""
    for seed in range(8):
        problem = drawn(seed)
        found = solve(special_problem(problem, 20.0)).clustering
        assert found.keys[4:] == found.queries
        assert Clustering(found.queries, found.keys[:4]) == equivalence(problem, 20.0).softmax


def test_special_keys_of_several_copies_go_home_too():
    found = solve(special_problem(SMALL, 20.0, copies=3)).clustering
    assert found.keys[4:] == found.queries * 3


@pytest.mark.parametrize("a", [10.0, 20.0, 40.0, 80.0])
def test_what_holds_on_random_instances(a):
    """The optimum of the softmax is that of the limit in all; the claim fails in the same few for every large a."""
    found = {seed: equivalence(drawn(seed), a) for seed in DRAWN}
    assert all(each.limit_claim for each in found.values())
    assert {seed for seed, each in found.items() if not each.claim} == FAILING


@pytest.mark.parametrize("seed", sorted(FAILING))
def test_the_failing_instances_by_loops(seed):
    """a = 8, so that the formula as it is written still has enough digits."""
    problem, special = drawn(seed), with_special_keys(drawn(seed).scores, 8.0)
    best = by_loops(problem, lambda a, b: oracle.softmax_error(special, a, b + a), largest=False)
    heaviest = by_loops(problem, lambda a, b: oracle.mass(np.exp(2 * problem.scores), a, b), largest=True)
    found = equivalence(problem, 8.0)
    assert (found.softmax, found.mass) == (best, heaviest)
    assert best != heaviest


def test_enough_special_keys_make_the_claim_true():
    for problem in (SMALL, *map(drawn, DRAWN)):
        assert equivalence(problem, 40.0, copies_that_suffice(problem)).claim
    for problem in (SMALL, *map(drawn, FAILING)):  # and not by accident: these fail with one
        assert not equivalence(problem, 40.0).claim


@given(st.lists(st.lists(st.integers(1, 6), min_size=4, max_size=4), min_size=2, max_size=2))
def test_whole_numbers_have_a_polynomial_number_of_special_keys(rows):
    """With e^{q·k} whole, the gap is at least 1, so Σ S_q² + 1 special keys are enough whatever the instance."""
    problem = Problem(np.log(rows), (1, 1), (2, 2))
    enough = sum(sum(row) ** 2 for row in rows) + 1
    assert copies_that_suffice(problem) <= enough
    assert equivalence(problem, 60.0, enough).claim


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_special_keys([[1.0]], math.inf), "a: expected a finite number, got inf"),
        (lambda: with_special_keys([[1.0]], 3.0, 0), "copies: expected an int ≥ 1, got 0"),
        (lambda: with_special_keys([[1.0]], 3.0, hidden=3.0), "hidden: expected less than a = 3, got 3.0"),
        (lambda: with_special_keys([[math.nan]], 3.0), "scores: expected numbers, got NaN"),
        (lambda: limit_error([[1.0]], Clustering([0], [0]), 0), "copies: expected an int ≥ 1, got 0"),
        (
            lambda: equivalence(Problem.balanced(np.zeros((12, 12)), 3), 9.0),
            "problem: expected at most 1,000 partitions",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# Theorem 2


def sharp(tokens=23, heads=2, key_heads=1, seed=0):
    """Queries with a few large inner products each: k is a copy of q, in topics."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.nn.functional.normalize(torch.randn(6, 16, generator=generator, dtype=torch.float64), dim=-1)
    which = torch.randint(6, (1, heads, tokens), generator=generator)
    q = 30 * topics[which]
    k = 30 * topics[which[:, :key_heads]]
    return q, k, torch.randn(1, key_heads, tokens, 5, generator=generator, dtype=torch.float64)


def dense_output(q, k, v, *, causal=False, key_mask=None):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        mask = mask.tril(k.shape[2] - q.shape[2])
    mask = mask[None, None] if key_mask is None else mask & key_mask[:, None, None]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )


@pytest.mark.parametrize("mechanism", ["full", "smyrf:rounds=1,cluster_size=23", "smyrf:rounds=3,cluster_size=23"])
def test_all_assumptions_hold_and_the_output_is_dense(mechanism):
    q, k, v = sharp()
    plan = coterie.as_mechanism(mechanism).plan(q, k)
    found = assumptions(q, k, plan)
    assert found.hold.all()
    out = coterie.attention(q, k, v, None, plan=plan, enable_gqa=True)
    torch.testing.assert_close(out, dense_output(q, k, v), rtol=1e-9, atol=1e-11)
    assert found.describe() == "sparse 100.0 %, fair 100.0 %, effective 100.0 %, all 100.0 %"


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("duplicates", ["count", "once"])
def test_the_bound_holds_wherever_it_is_finite(causal, rounds, duplicates):
    q, k, v = sharp(seed=rounds)
    plan = coterie.Smyrf(rounds=rounds, cluster_size=6, duplicates=duplicates).plan(q, k, is_causal=causal)
    out = coterie.attention(q, k, v, None, plan=plan, is_causal=causal, enable_gqa=True)
    exact = dense_output(q, k, v, causal=causal)
    seen = 0
    for tolerance in (0.0, 1e-9, 1e-3, 0.03, 0.2):
        found = assumptions(q, k, plan, tolerance=tolerance)
        limit = found.bound * v.norm(dim=-1).max()
        assert ((out - exact).norm(dim=-1) <= limit + 1e-9).all()
        seen += int(found.bound.isfinite().sum())
        if duplicates == "once":
            assert (found.fair | ~found.effective).all()
    assert seen > 0


def test_the_predicates_are_those_of_loops():
    q, k, _ = tensors(batch=2, heads=4, queries=17, keys=19, key_heads=2, dtype=torch.float64)
    q = 3 * q
    real_keys = torch.arange(19) < torch.tensor([[19], [12]])
    real_queries = torch.arange(17) < torch.tensor([[17], [9]])
    plan = coterie.Smyrf(rounds=3, cluster_size=5).plan(
        q, k, key_mask=real_keys, query_mask=real_queries, is_causal=True, causal_offset=1
    )
    found = assumptions(q, k, plan, most=4, tolerance=0.02, key_mask=real_keys, query_mask=real_queries)
    counts = plan.to_dense()
    kinds = set()
    for b in range(2):
        for h in range(4):
            for i in range(17):
                if not real_queries[b, i]:
                    assert not found.hold[b, h, i]
                    continue
                keys = [j for j in range(19) if real_keys[b, j] and j <= i + 1]
                weights = oracle.softmax([float(q[b, h, i] @ k[b, h // 2, j]) / math.sqrt(q.shape[-1]) for j in keys])
                large = [j for j, w in zip(keys, weights, strict=True) if w > 0.02]
                met = [int(counts[b, h, i, j]) for j in large]
                wanted = (1 <= len(large) <= 4, len(set(met)) <= 1, all(met))
                kinds.add(wanted)
                assert tuple(bool(x[b, h, i]) for x in (found.sparse, found.fair, found.effective)) == wanted
                assert bool(found.bound[b, h, i].isfinite()) == (wanted[1] and wanted[2])
    assert len(kinds) > 3


def test_without_fairness_the_theorem_fails():
    """Two keys of equal weight, one met twice: the merge gives it two thirds. "once" repairs it."""
    q = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    k = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)

    def round_of(keys):
        index = lambda values: torch.tensor([[values]], dtype=torch.int32)  # noqa: E731
        return coterie.Round(index([0]), index([0, 1]), index(keys), index([0]), index([len(keys)]))

    cases: list[tuple[Duplicates, bool, float]] = [("count", False, 2 / 3), ("once", True, 0.5)]
    for duplicates, fair, expected in cases:
        plan = coterie.Plan(
            1, 2, 1, (round_of([0, 1]), round_of([1])), torch.zeros(1, dtype=torch.int32), duplicates=duplicates
        )
        found = assumptions(q, k, plan)
        assert bool(found.fair) == fair
        assert bool(found.effective)
        assert bool(found.bound.isfinite()) == fair
        assert float(coterie.attention(q, k, v, None, plan=plan)) == pytest.approx(expected)


def test_without_effectiveness_the_theorem_fails():
    q = k = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    found = assumptions(q, k, coterie.Local(window=1).plan(q, k))
    assert found.fair.sum() == 0  # itself once, all others never
    assert not found.effective.any()


def test_nan_in_padding_is_harmless():
    q, k, _ = sharp()
    mask = torch.arange(23)[None] < 20
    plan = coterie.Smyrf(cluster_size=5).plan(q, k, key_mask=mask)
    clean = assumptions(q, k, plan, key_mask=mask, query_mask=mask)
    k[:, :, 20:] = float("nan")
    dirty = assumptions(q, k, plan, key_mask=mask, query_mask=mask)
    assert torch.equal(clean.hold, dirty.hold)
    assert torch.equal(clean.bound, dirty.bound)


@pytest.mark.parametrize(
    ("mechanism", "settings", "message"),
    [
        ("near-far:near=3", {}, "plan: expected keys that are met directly; Theorem 2 says nothing about means"),
        ("full", {"tolerance": 1.0}, "tolerance: expected a number in [0, 1), got 1.0"),
        ("full", {"most": 0}, "most: expected an int ≥ 1, got 0"),
        ("full", {"key_mask": torch.ones(1, 3, dtype=torch.bool)}, "key_mask: expected"),
        ("full", {"query_mask": torch.ones(1, 3, dtype=torch.bool)}, "query_mask: expected"),
    ],
)
def test_theorem_two_refuses_what_it_says_nothing_about(mechanism, settings, message):
    q, k, _ = sharp()
    with pytest.raises(ValueError, match=re.escape(message)):
        assumptions(q, k, coterie.as_mechanism(mechanism).plan(q, k), **settings)


def test_a_plan_is_a_plan():
    q, k, _ = sharp()
    with pytest.raises(TypeError, match=r"plan: expected a coterie\.Plan, got str"):
        assumptions(q, k, "full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plan"):
        assumptions(q[:, :, :5], k, coterie.Full().plan(q, k))
