"""Problems, objectives, exact solvers, easy cases and heuristics, against brute force over all clusterings."""

import math
import re
from collections.abc import Callable

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.analysis.biclustering import (
    Clustering,
    Problem,
    attention_map,
    balance,
    count_partitions,
    every_clustering,
    greedy,
    local_search,
    max_mass,
    one_key_each,
    one_query_each,
    one_to_one,
    product_error,
    random_clustering,
    realise,
    softmax_error,
    solve,
    spectral,
)
from coterie.analysis.biclustering import exact as exact_module
from coterie.analysis.biclustering.objectives import Objective
from tests.analysis.biclustering import instances as oracle

SIZES = [((2, 2), (2, 2)), ((1, 3), (2, 2)), ((1, 2), (2, 1)), ((4,), (3,)), ((1, 1, 2), (2, 1, 1)), ((1, 1), (1, 3))]
VALUES: dict[Objective, Callable[..., float]] = {"mass": oracle.mass, "softmax": oracle.softmax_error}


def draw(shape, seed=0, spread=1.5):
    return np.random.default_rng(seed).normal(size=shape) * spread


def brute(problem):
    return oracle.best(
        VALUES[problem.objective], problem.scores, problem.query_sizes, problem.key_sizes, problem.maximise
    )


@pytest.mark.parametrize("objective", ["mass", "softmax"])
@pytest.mark.parametrize("method", ["partitions", "ilp"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_exact_solvers_find_the_best_of_all_clusterings(objective, method, sizes, seed):
    queries, keys = sizes
    problem = Problem(draw((sum(queries), sum(keys)), seed), queries, keys, objective)
    found = solve(problem, method=method)
    assert found.value == pytest.approx(brute(problem), rel=1e-9, abs=1e-12)
    problem.check(found.clustering)
    value = VALUES[objective](problem.scores, found.clustering.queries, found.clustering.keys)
    assert value == pytest.approx(found.value, rel=1e-9)


@pytest.mark.parametrize("objective", ["mass", "softmax"])
@pytest.mark.parametrize(("shape", "clusters"), [((7, 7), 3), ((8, 8), 2), ((9, 9), 3), ((5, 10), 5)], ids=str)
def test_both_exact_solvers_agree_beyond_brute_force(objective, shape, clusters):
    problem = Problem.balanced(draw(shape, 5), clusters, objective)
    by_partitions, by_ilp = (solve(problem, method=m).value for m in ("partitions", "ilp"))
    assert by_partitions == pytest.approx(by_ilp, rel=1e-9)


@given(
    st.lists(st.lists(st.floats(-60, 60), min_size=4, max_size=4), min_size=3, max_size=3),
    st.sampled_from([((1, 2), (2, 2)), ((2, 1), (1, 3)), ((3,), (4,))]),
)
def test_values_are_those_of_the_formulas(rows, sizes):
    scores = np.array(rows)
    for a, b in oracle.clusterings(*sizes)[::7]:
        clustering = Clustering(a, b)
        assert softmax_error(scores, clustering) == pytest.approx(oracle.softmax_error(rows, a, b), rel=1e-9, abs=1e-14)
        assert max_mass(scores, clustering) == pytest.approx(oracle.mass(rows, a, b), rel=1e-9, abs=1e-9)
        assert softmax_error(scores, clustering.together) == pytest.approx(softmax_error(scores, clustering))
        for objective, value in VALUES.items():
            problem = Problem(scores, sizes[0], sizes[1], objective)
            assert problem.value(clustering) == pytest.approx(value(rows, a, b), rel=1e-9, abs=1e-9)
        lost = [(s + 1.5) ** 2 for i, row in enumerate(rows) for j, s in enumerate(row) if a[i] != b[j]]
        assert product_error(scores, clustering, 1.5) == pytest.approx(sum(lost), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_product_error_is_a_max_mass_problem(seed):
    """Eq. 6: the best clusterings of ‖P̂_ε − P‖² are those of the mass (P + a)²."""
    scores, a = draw((4, 4), seed), 3.0
    found = solve(Problem.balanced((scores + a) ** 2, 2, "mass"))
    every = [product_error(scores, Clustering(*c), a) for c in oracle.clusterings((2, 2), (2, 2))]
    assert product_error(scores, found.clustering, a) == pytest.approx(min(every))


def test_any_weights_are_a_product_error():
    weights = np.abs(draw((5, 3)))
    q, k = realise(weights, a=7.0)
    np.testing.assert_allclose((q @ k.T + 7.0) ** 2, weights)


def test_small_errors_keep_their_digits():
    """One key of score a beside others: the error is about e^{−2a}, far below the rounding of 1 − p."""
    scores = np.array([[80.0, 1.0, 0.0], [80.0, 0.0, 1.0]])
    lost = math.exp(-160) * (math.e**2 + math.e**2)  # the key that is not met, and the mass that the first one gets
    assert softmax_error(scores[:1], np.array([[True, False, True]])) == pytest.approx(lost, rel=1e-9)


def test_a_cluster_far_below_the_best_key_still_adds_up_to_one():
    scores = np.array([[0.0, -900.0, -901.0]])
    share = oracle.softmax([0.0, -1.0])
    expected = 1 + share[0] ** 2 + share[1] ** 2
    assert softmax_error(scores, np.array([[False, True, True]])) == pytest.approx(expected, rel=1e-12)


def test_hidden_pairs_and_queries_that_meet_nobody():
    """A causal map: −inf above the diagonal. The first query alone with later keys gives 0, as in the engine."""
    scores = np.where(np.tri(4, dtype=bool), draw((4, 4)), -np.inf)
    problem = Problem.balanced(scores, 2)
    assert solve(problem).value == pytest.approx(brute(problem), rel=1e-9)
    assert softmax_error(scores, Clustering([0, 1, 1, 0], [1, 0, 1, 0])) == pytest.approx(
        oracle.softmax_error(scores, [0, 1, 1, 0], [1, 0, 1, 0])
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_clustering_comes_once(sizes):
    problem = Problem(np.zeros((sum(sizes[0]), sum(sizes[1]))), *sizes)
    found = [c.canonical() for c in every_clustering(problem)]
    expected = {Clustering(a, b).canonical() for a, b in oracle.clusterings(*sizes)}
    assert len(found) == len(set(found)) == len(expected)
    assert set(found) == expected
    assert count_partitions(problem) == len(exact_module._partitions(sum(sizes[1]), exact_module._types(problem)))


def test_balanced_problems_are_cut_as_smyrf_cuts():
    q, k = torch.randn(2, 1, 1, 11, 4).unbind(0)
    clustering = Clustering.of_plan(coterie.Smyrf(rounds=1, cluster_size=4).plan(q, k[:, :, :7]))
    problem = Problem.balanced(np.zeros((11, 7)), 3)
    assert clustering.sizes == tuple(zip(problem.query_sizes, problem.key_sizes, strict=True))


# The easy cases


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4, 1), (3, 2), (2, 3), (2, 4), (1, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_one_query_each_is_the_flow_of_networkx(queries, keys, seed):
    weights = np.random.default_rng(seed).integers(-9, 30, (queries, queries * keys))
    graph = networkx.DiGraph()
    for i in range(queries):
        graph.add_node(("q", i), demand=-keys)
        for j in range(queries * keys):
            graph.add_edge(("q", i), ("k", j), capacity=1, weight=-int(weights[i, j]))
    for j in range(queries * keys):
        graph.add_node(("k", j), demand=1)
    found = one_query_each(weights, keys)
    assert found.value == -networkx.min_cost_flow_cost(graph)
    assert found.clustering.sizes == ((1, keys),) * queries
    if queries * keys <= 6:
        problem = Problem(weights, (1,) * queries, (keys,) * queries, "mass")
        assert found.value == brute(problem) == solve(problem).value


def test_one_to_one_is_a_matching():
    weights = np.random.default_rng(3).integers(0, 50, (7, 7))
    graph = networkx.Graph()
    graph.add_weighted_edges_from((("q", i), ("k", j), int(weights[i, j])) for i in range(7) for j in range(7))
    pairs = networkx.max_weight_matching(graph, maxcardinality=True)
    assert one_to_one(weights).value == sum(graph.edges[pair]["weight"] for pair in pairs)


@pytest.mark.parametrize("objective", ["mass", "softmax"])
@pytest.mark.parametrize("queries", [(1, 1, 1), (2, 2, 2), (3, 3), (1, 1, 1, 1), (5,)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_one_key_each_is_exact_for_both_objectives(objective, queries, seed):
    problem = Problem(draw((sum(queries), len(queries)), seed), queries, (1,) * len(queries), objective)
    assert one_key_each(problem).value == pytest.approx(brute(problem), rel=1e-9)


def test_the_b_matching_does_not_solve_the_softmax_objective():
    """One query and two keys: the softmax loss is no sum over keys, and no choice of weights in sight makes it one."""
    worse = 0
    for seed in range(40):
        problem = Problem(draw((2, 4), seed, 2.0), (1, 1), (2, 2))
        for weights in (attention_map(problem.scores), attention_map(problem.scores) ** 2, np.exp(2 * problem.scores)):
            found = problem.value(one_query_each(weights, 2).clustering)
            assert found >= brute(problem) * (1 - 1e-9)
        worse += problem.value(one_query_each(attention_map(problem.scores), 2).clustering) > brute(problem) * 1.001
    assert worse > 0


# Heuristics


@pytest.mark.parametrize("objective", ["mass", "softmax"])
@pytest.mark.parametrize("seed", range(6))
def test_heuristics_are_feasible_and_never_better_than_the_optimum(objective, seed):
    scores = np.abs(draw((7, 9), seed)) if objective == "mass" else draw((7, 9), seed)
    problem = Problem.balanced(scores, 3, objective)
    sign = -1 if problem.maximise else 1
    optimum = sign * solve(problem).value
    for method in (greedy, local_search, spectral, random_clustering):
        found = method(problem)
        problem.check(found.clustering)
        value = VALUES[objective](problem.scores, found.clustering.queries, found.clustering.keys)
        assert found.value == pytest.approx(value, rel=1e-9)
        assert sign * found.value >= optimum - 1e-9
    polished = [local_search(problem, start(problem).clustering).value for start in (greedy, spectral)]
    assert sign * polished[0] <= sign * greedy(problem).value + 1e-12
    assert sign * polished[1] <= sign * spectral(problem).value + 1e-12
    assert sign * local_search(problem, restarts=8).value <= sign * local_search(problem).value + 1e-12


@pytest.mark.parametrize("objective", ["mass", "softmax"])
def test_no_single_swap_improves_what_local_search_found(objective):
    problem = Problem.balanced(draw((9, 8), 4), 3, objective)
    found = local_search(problem)
    sign = -1 if problem.maximise else 1
    for side in ("queries", "keys"):
        labels = list(getattr(found.clustering, side))
        for i in range(len(labels)):
            for j in range(i):
                swapped = list(labels)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                both = {"queries": found.clustering.queries, "keys": found.clustering.keys} | {side: tuple(swapped)}
                assert sign * problem.value(Clustering(**both)) >= sign * found.value - 1e-9


@pytest.mark.parametrize("method", [greedy, local_search, spectral])
def test_planted_clusters_are_found(method):
    """Clear blocks, shuffled: any method worth its name finds them."""
    generator = np.random.default_rng(1)
    planted = Clustering(*(generator.permutation(np.repeat(np.arange(5), 5)) for _ in range(2)))
    scores = np.where(planted.together, 6.0, 0.0) + 0.1 * generator.normal(size=(25, 25))
    assert method(Problem.balanced(scores, 5)).clustering == planted.canonical()


def test_balance_fits_any_clusters_to_the_sizes():
    problem = Problem.balanced(draw((6, 6)), 3)
    shared = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]], dtype=bool)
    problem.check(balance(problem, shared).clustering)


def test_a_constant_map_is_nobodys_trouble():
    problem = Problem.balanced(np.zeros((5, 5)), 2)
    for method in (greedy, local_search, spectral, solve):
        assert method(problem).value == pytest.approx(brute(Problem.balanced(np.zeros((5, 5)), 2)))


def test_one_cluster_loses_nothing():
    for method in (greedy, local_search, spectral, solve):
        assert method(Problem.balanced(draw((3, 5)), 1)).value == pytest.approx(0, abs=1e-15)


def test_larger_problems_take_local_search():
    problem = Problem.balanced(draw((96, 101), 1, 3.0), 8)
    found = local_search(problem)
    problem.check(found.clustering)
    assert found.value < greedy(problem).value


# Plans


def test_a_round_of_a_plan_is_a_clustering():
    q, k = torch.randn(2, 2, 4, 13, 8, dtype=torch.float64).unbind(0)
    plan = coterie.Smyrf(rounds=3, cluster_size=4).plan(q, k[:, :2], is_causal=True)  # 4 heads on 2
    for r in range(3):
        alone = coterie.Plan.from_dict(
            {
                name.replace(f"rounds.{r}.", "rounds.0."): x
                for name, x in coterie.Smyrf(rounds=3, cluster_size=4).plan(q, k[:, :2]).to_dict().items()
                if not name.startswith("rounds.") or name.startswith(f"rounds.{r}.")
            }
        )
        found = Clustering.of_plan(plan, round=r, batch=1, head=3)
        assert (torch.from_numpy(found.together).int() == alone.to_dense()[1, 3]).all()


@pytest.mark.parametrize(
    ("mechanism", "settings", "message"),
    [
        (
            "improved-clustered:clusters=3",
            {},
            "plan: expected a round of plain groups, as Smyrf writes them, got means",
        ),
        ("local", {}, "plan: expected a round of plain groups, as Smyrf writes them, got window"),
        ("topk:k=3", {}, "plan: expected all keys in one group each"),
        ("smyrf:cluster_size=4", {"round": 4}, "round: expected an int ≤ 3, got 4"),
        ("smyrf:cluster_size=4", {"head": 1}, "head: expected an int ≤ 0, got 1"),
        ("smyrf:cluster_size=4", {"batch": -1}, "batch: expected an int ≥ 0, got -1"),
    ],
)
def test_plans_that_are_no_biclustering_are_refused(mechanism, settings, message):
    q = torch.randn(1, 1, 12, 4)
    plan = coterie.as_mechanism(mechanism).plan(q, q)
    with pytest.raises(ValueError, match=re.escape(message)):
        Clustering.of_plan(plan, **settings)


def test_padding_is_refused_by_name():
    q = torch.randn(1, 1, 12, 4)
    plan = coterie.Smyrf(cluster_size=4).plan(q, q, key_mask=torch.arange(12)[None] < 9)
    with pytest.raises(ValueError, match=r"all queries in one group each \(drop padding first\), got not so: rows \[9"):
        Clustering.of_plan(plan)
    with pytest.raises(TypeError, match=r"plan: expected a coterie\.Plan, got str"):
        Clustering.of_plan("smyrf")  # type: ignore[arg-type]


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Problem([[1.0, math.nan]], (1,), (2,)), "scores: expected numbers, got NaN"),
        (lambda: Problem([[1.0, math.inf]], (1,), (2,)), "scores: expected scores below inf, got inf"),
        (lambda: Problem([[-math.inf] * 2], (1,), (2,)), "scores: expected a key for every query"),
        (lambda: Problem([[1.0, -math.inf]], (1,), (2,), "mass"), "scores: expected finite numbers, got inf"),
        (lambda: Problem([1.0], (1,), (1,)), "scores: expected a matrix (queries, keys) of one head, got (1,)"),
        (lambda: Problem(np.zeros((2, 0)), (2,), (0,)), "scores: expected a matrix"),
        (lambda: Problem(np.zeros((4, 4)), (2, 1), (2, 2)), "query_sizes: expected sizes that add up to 4, got (2, 1)"),
        (lambda: Problem(np.zeros((4, 4)), (2, 2), (4, 0)), "key_sizes: expected an int ≥ 1, got 0"),
        (
            lambda: Problem(np.zeros((4, 4)), (2, 2), (1, 1, 2)),
            "key_sizes: expected 2 clusters, as many as query_sizes",
        ),
        (
            lambda: Problem(np.zeros((4, 4)), (4,), (4,), "kl"),  # type: ignore[arg-type]
            "objective: expected one of 'mass', 'softmax', got 'kl'",
        ),
        (lambda: Problem.balanced(np.zeros((4, 3)), 4), "clusters: expected at most 3, so that each has a query and a"),
        (lambda: Problem.balanced(np.zeros((4, 3)), 0), "clusters: expected an int ≥ 1, got 0"),
        (
            lambda: Clustering([0, 2], [0, 1]),
            "queries: expected a member in each of the clusters 0 … 2, got none in [1]",
        ),
        (lambda: Clustering([0, 1], [0, 0]), "keys: expected a member in each of the clusters 0 … 1, got none in [1]"),
        (lambda: Clustering([0, 0.5], [0]), "queries: expected clusters numbered from 0, got 0.5"),
        (lambda: Clustering([0, -1], [0]), "queries: expected clusters numbered from 0, got -1"),
        (lambda: Clustering([], []), "queries: expected at least one query and one key, got none"),
        (
            lambda: max_mass([[1.0]], Clustering([0], [0, 0])),
            "clustering: expected (queries, keys) = (1, 1), got (1, 2)",
        ),
        (lambda: softmax_error([[1.0]], np.ones((2, 1), bool)), "together: expected shape (1, 1), got (2, 1)"),
        (lambda: product_error([[1.0]], Clustering([0], [0]), math.inf), "a: expected a finite number, got inf"),
        (lambda: realise([[-1.0]]), "weights: expected weights ≥ 0, got -1.0"),
        (
            lambda: one_query_each(np.zeros((2, 3)), 2),
            "weights: expected shape (2, 4): 2 keys for each query, got (2, 3)",
        ),
        (lambda: one_query_each(np.zeros((2, 3)), 0), "keys: expected an int ≥ 1, got 0"),
        (
            lambda: one_key_each(Problem.balanced(np.zeros((4, 4)), 2)),
            "problem: expected one key and equally many queries in each",
        ),
        (
            lambda: one_key_each(Problem(np.zeros((3, 2)), (1, 2), (1, 1))),
            "(else use `solve`), got query_sizes (1, 2), key_sizes (1, 1)",
        ),
        (lambda: solve(Problem.balanced(np.zeros((2, 2)), 1), method="sat"), "method: expected one of 'auto', "),
        (lambda: random_clustering(Problem.balanced(np.zeros((2, 2)), 1), -1), "seed: expected an int ≥ 0, got -1"),
        (lambda: local_search(Problem.balanced(np.zeros((2, 2)), 1), restarts=-1), "restarts: expected an int ≥ 0"),
        (lambda: spectral(Problem.balanced(-np.eye(2), 1, "mass")), "problem: expected weights ≥ 0 for spectral"),
        (lambda: spectral(Problem.balanced(np.eye(2), 1), -1), "seed: expected an int ≥ 0, got -1"),
        (
            lambda: balance(Problem.balanced(np.eye(2), 2), np.ones((1, 2), bool)),
            "members: expected shape (2, 2), got (1, 2)",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_clusterings_of_other_sizes_are_refused():
    problem = Problem.balanced(np.zeros((4, 4)), 2)
    with pytest.raises(
        ValueError, match=re.escape("expected clusters of (queries, keys) [(2, 2), (2, 2)], got [(1, 2), ")
    ):
        problem.value(Clustering([0, 0, 0, 1], [0, 0, 1, 1]))
    with pytest.raises(ValueError, match=re.escape("expected (queries, keys) = (4, 4), got (2, 2)")):
        local_search(problem, Clustering([0, 1], [0, 1]))


def test_what_is_too_large_for_an_exact_answer_says_what_would_work():
    with pytest.raises(
        ValueError, match=r"at most 100,000 partitions .*`local_search` takes any size.* 2,627,625 part"
    ):
        solve(Problem.balanced(np.zeros((16, 16)), 4), method="partitions")
    with pytest.raises(ValueError, match=r"or 60,000 variables .* got .* partitions and 19,8\d\d,\d\d\d,\d+ variables"):
        solve(Problem.balanced(np.zeros((32, 32)), 2))


def test_running_out_of_time_is_an_error():
    problem = Problem.balanced(draw((12, 12)), 4)
    with pytest.raises(ValueError, match=r"expected one that HiGHS solves in 1e-05 s, got: .*ime limit"):
        solve(problem, method="ilp", seconds=1e-5)
