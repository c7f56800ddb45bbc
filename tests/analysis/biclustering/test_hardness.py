"""The supplement's reduction from 3-dimensional matching fails; the one through K₂,₂ holds. Both ways, on all small
instances."""

import re
from itertools import permutations, product

import numpy as np
import pytest

from coterie.analysis.biclustering import (
    Clustering,
    Gadgets,
    Matching3D,
    Problem,
    clusters_of_matching,
    is_k22_partition,
    k22_partition,
    k22_problem,
    k22_target,
    solve,
    squares,
    supplement_decides,
    supplement_problem,
    supplement_target,
    triples_of_clusters,
)
from tests.analysis.biclustering import instances as oracle

COUNTEREXAMPLE = [(0, 0, 0), (1, 0, 1), (1, 1, 0)]  # {(1,1,1), (2,1,2), (2,2,1)} counted from 1


def instances(size):
    """Every set of triples over {0, …, size − 1}³."""
    cells = list(product(range(size), repeat=3))
    for bits in range(2 ** len(cells)):
        yield [cell for at, cell in enumerate(cells) if bits >> at & 1]


def random_instances(size, count, seed=0):
    draw = np.random.default_rng(seed)
    cells = list(product(range(size), repeat=3))
    for _ in range(count):
        number = int(draw.integers(size, 3 * size))
        yield [cells[i] for i in sorted(draw.choice(len(cells), number, replace=False))]


def pairs_match(size, triples):
    """Perfect matchings of X–Y and of Y–Z, by trying all permutations."""
    found = []
    for left, right in ((0, 1), (1, 2)):
        pairs = {(t[left], t[right]) for t in triples}
        found.append(any(all((i, p[i]) in pairs for i in range(size)) for p in permutations(range(size))))
    return all(found)


def test_matchings_are_those_of_brute_force():
    cases = [(1, t) for t in instances(1)] + [(2, t) for t in instances(2)] + [(3, t) for t in random_instances(3, 60)]
    for size, triples in cases:
        found = Matching3D(size, triples).matching()
        assert (found is not None) == oracle.has_matching(size, triples)
        if found is not None:
            assert set(found) <= set(triples)
            assert all(sorted(t[axis] for t in found) == list(range(size)) for axis in range(3))


# The supplement's reduction


def test_the_supplements_own_example():
    instance = Matching3D(2, [(0, 0, 0), (0, 1, 1), (1, 0, 0)])
    assert supplement_decides(instance)
    found = solve(supplement_problem(instance))
    assert triples_of_clusters(instance, found.clustering) == instance.matching() == ((0, 1, 1), (1, 0, 0))


def test_one_direction_holds_a_matching_reaches_the_target():
    for size, triples in [(2, t) for t in instances(2)] + [(3, t) for t in random_instances(3, 60)]:
        instance = Matching3D(size, triples)
        matching = instance.matching()
        if matching is not None:
            clustering = clusters_of_matching(instance, matching)
            assert supplement_problem(instance).value(clustering) == supplement_target(instance)
            assert triples_of_clusters(instance, clustering) == matching


def test_the_target_is_the_largest_value_of_all():
    for triples in instances(2):
        instance = Matching3D(2, triples)
        problem = supplement_problem(instance, r1=2.5)  # r₁ > size·r₂, barely
        assert solve(problem).value <= supplement_target(instance, r1=2.5)


def test_the_other_direction_fails():
    instance = Matching3D(2, COUNTEREXAMPLE)
    assert not oracle.has_matching(2, COUNTEREXAMPLE)
    assert instance.matching() is None
    problem = supplement_problem(instance, r1=100.0)
    best = oracle.best(oracle.mass, problem.scores, (2, 2), (2, 2), largest=True)
    assert best == solve(problem).value == supplement_target(instance, r1=100.0) == 402
    assert supplement_decides(instance, r1=100.0)
    made_up = triples_of_clusters(instance, solve(problem).clustering)
    assert made_up is not None
    assert not set(made_up) <= set(instance.triples)  # (x, y) of one triple with (y, z) of another


def test_all_counterexamples_of_size_two_and_none_is_smaller():
    wrong = [t for t in instances(2) if supplement_decides(Matching3D(2, t)) != oracle.has_matching(2, t)]
    assert len(wrong) == 18
    assert min(map(len, wrong)) == 3
    assert sum(len(t) == 3 for t in wrong) == 8
    assert COUNTEREXAMPLE in wrong
    assert all(supplement_decides(Matching3D(1, t)) == oracle.has_matching(1, t) for t in instances(1))


def test_what_the_supplements_instance_decides_is_two_easy_matchings():
    cases = [(2, t) for t in instances(2)] + [(n, t) for n in (3, 4) for t in random_instances(n, 60, seed=n)]
    for size, triples in cases:
        instance = Matching3D(size, triples)
        assert instance.pairs_match() == pairs_match(size, triples) == supplement_decides(instance)


# The reduction that holds


def random_graph(vertices, seed):
    """Half of the graphs have a partition planted."""
    draw = np.random.default_rng(seed)
    edges = draw.random((vertices, vertices)) < draw.uniform(0.3, 0.8)
    if seed % 2:
        halves = np.repeat(np.arange(vertices // 2), 2)
        edges |= np.equal.outer(draw.permutation(halves), draw.permutation(halves))
    return edges


@pytest.mark.parametrize("vertices", [2, 4, 6])
@pytest.mark.parametrize("objective", ["mass", "softmax"])
def test_the_optimum_reaches_the_target_exactly_if_there_is_a_partition(vertices, objective):
    answers = set()
    for seed in range(40):
        edges = random_graph(vertices, seed)
        high, low = [(1.0, 0.0), (0.1, 0.0), (30.0, -30.0)][seed % 3]
        problem = k22_problem(edges, objective, high=high, low=low)
        target = k22_target(edges, objective, high=high, low=low)
        found = solve(problem)
        expected = oracle.has_squares(edges)
        answers.add(expected)
        assert is_k22_partition(edges, found.clustering) == expected
        sign = -1 if problem.maximise else 1
        assert sign * found.value >= sign * target - 1e-12
        assert (found.value == pytest.approx(target, rel=1e-12)) == expected
        partition = k22_partition(edges)
        assert (partition is not None) == expected
        if partition is not None:
            assert problem.value(partition) == pytest.approx(target, rel=1e-12)
    assert answers == {True, False}


def test_queries_without_edges_do_not_reach_the_target():
    edges = np.ones((4, 4), dtype=bool)
    edges[3] = False
    for graph in (edges, np.zeros((4, 4), dtype=bool)):
        assert k22_partition(graph) is None
        for objective in ("mass", "softmax"):
            found = solve(k22_problem(graph, objective))
            assert not is_k22_partition(graph, found.clustering)
            assert abs(found.value - k22_target(graph, objective)) > 0.1


@pytest.mark.parametrize("keys", [2, 3, 5])
def test_a_row_of_two_scores_is_best_with_high_ones_alone(keys):
    """The inequality of the proof, for clusters of any number of keys: every set of keys of every row."""
    from itertools import combinations

    for gap in (0.01, 1.0, 50.0):
        for number in range(keys, 8):
            row = [gap] * number + [0.0] * (8 - number)
            losses = {}
            for chosen in combinations(range(8), keys):
                labels = [0 if j in chosen else 1 for j in range(8)]
                losses[chosen] = (oracle.softmax_error([row], [0], labels), sum(j < number for j in chosen))
            best = min(loss for loss, _ in losses.values())
            for loss, hits in losses.values():
                assert (loss <= best * (1 + 1e-9) + 1e-15) == (hits == keys)


@pytest.mark.parametrize("size", [1, 2])
def test_a_matching_exists_exactly_if_the_gadgets_can_be_cut_into_squares(size):
    for triples in instances(size):
        instance = Matching3D(size, triples)
        gadgets = Gadgets.of(instance)
        partition = k22_partition(gadgets.edges)
        assert (partition is not None) == oracle.has_matching(size, triples)
        if len(triples) <= 3:
            assert (partition is not None) == oracle.gadget_graph_has_squares(gadgets.edges.tolist())
        if partition is not None:
            _both_ways(instance, gadgets, partition)


def test_and_on_random_instances():
    answers = []
    for triples in random_instances(3, 25, seed=1):
        instance = Matching3D(3, triples)
        gadgets = Gadgets.of(instance)
        partition = k22_partition(gadgets.edges)
        answers.append(partition is not None)
        assert answers[-1] == oracle.has_matching(3, triples)
        if partition is not None:
            _both_ways(instance, gadgets, partition)
    assert set(answers) == {True, False}


def _both_ways(instance: Matching3D, gadgets: Gadgets, partition: Clustering) -> None:
    matching = gadgets.matching_of(partition)
    assert set(matching) <= set(instance.triples)
    assert all(sorted(t[axis] for t in matching) == list(range(instance.size)) for axis in range(3))
    back = gadgets.clusters_of(matching)
    for objective in ("mass", "softmax"):
        problem = k22_problem(gadgets.edges, objective)
        for clustering in (partition, back):
            assert is_k22_partition(gadgets.edges, clustering)
            assert problem.value(clustering) == pytest.approx(k22_target(gadgets.edges, objective), rel=1e-12)
    assert gadgets.matching_of(back) == matching


def test_the_gadgets_are_as_the_docs_say():
    instance = Matching3D(2, COUNTEREXAMPLE)
    gadgets = Gadgets.of(instance)
    assert gadgets.edges.shape == (2 * 2 + 8 * 3, 2 * 2 + 8 * 3)
    sides = dict.fromkeys(gadgets.queries, "query") | dict.fromkeys(gadgets.keys, "key")
    assert len(sides) == sum(gadgets.edges.shape)
    degree = {v: int(n) for v, n in zip(gadgets.queries, gadgets.edges.sum(1), strict=True)}
    degree |= {v: int(n) for v, n in zip(gadgets.keys, gadgets.edges.sum(0), strict=True)}
    for vertex, number in degree.items():
        kind = vertex[0]
        assert isinstance(kind, str)
        if kind == "c":
            assert number == 2
        elif kind == "a":
            assert number == 4
        elif kind in "bd":
            assert number == (3 if vertex[2] != "w" else 2 + instance.size)
        else:
            axis = "xyzw".index(kind)
            times = sum(t[axis] == vertex[1] for t in COUNTEREXAMPLE) if axis < 3 else len(COUNTEREXAMPLE)
            assert number == 2 * times


@pytest.mark.parametrize(
    ("size", "triples", "objective"),
    [
        (1, [(0, 0, 0)], "mass"),
        (1, [(0, 0, 0)], "softmax"),
        (2, [(0, 0, 0), (1, 1, 1)], "mass"),
        (2, [(0, 0, 0), (0, 1, 1)], "mass"),
        (2, [(0, 0, 0), (1, 1, 0)], "softmax"),
        (2, [(0, 0, 0), (0, 1, 1), (1, 0, 0)], "mass"),  # the supplement's example
        (2, COUNTEREXAMPLE, "softmax"),
    ],
    ids=str,
)
def test_the_gadgets_through_the_general_solver(size, triples, objective):
    """No knowledge of squares: the optimum over all clusterings of up to 28 + 28 tokens reaches the target exactly if
    there is a matching, which is then read from the clusters."""
    instance = Matching3D(size, triples)
    gadgets = Gadgets.of(instance)
    found = solve(k22_problem(gadgets.edges, objective))
    reached = found.value == pytest.approx(k22_target(gadgets.edges, objective), rel=1e-9)
    assert reached == oracle.has_matching(size, triples) == is_k22_partition(gadgets.edges, found.clustering)
    if reached:
        assert gadgets.matching_of(found.clustering) == instance.matching()


def test_a_graph_with_too_many_squares_says_so():
    with pytest.raises(ValueError, match=re.escape("at most 500,000 copies of K₂,₂ (a sparser one), got 608,400")):
        squares(np.ones((40, 40)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matching3D(0, []), "size: expected an int ≥ 1, got 0"),
        (lambda: Matching3D(2, [(0, 0, 2)]), "triples: expected (x, y, z) with numbers from 0 to 1, got (0, 0, 2)"),
        (
            lambda: Matching3D(2, [(0, 0)]),  # type: ignore[list-item]
            "triples: expected (x, y, z) with numbers from 0 to 1, got (0, 0)",
        ),
        (lambda: supplement_problem(Matching3D(3, []), r1=3.0), "r1: expected more than size · r2 = 3, got 3.0"),
        (lambda: supplement_problem(Matching3D(3, []), r2=0.0), "r2: expected a number > 0, got 0.0"),
        (lambda: clusters_of_matching(Matching3D(1, []), [(0, 0, 0)]), "matching: expected a matching of the instance"),
        (
            lambda: triples_of_clusters(Matching3D(2, []), Clustering([0], [0])),
            "clustering: expected (queries, keys) =",
        ),
        (lambda: k22_problem(np.ones((3, 3))), "edges: expected as many queries as keys, an even number of each"),
        (lambda: k22_problem(np.ones((2, 4))), "edges: expected as many queries as keys"),
        (lambda: k22_problem(np.ones((2, 2)), low=1.0), "high: expected finite scores with high > low, got (1.0, 1.0)"),
        (lambda: squares(np.ones(3)), "edges: expected a matrix (queries, keys), got (3,)"),
        (
            lambda: Gadgets.of(Matching3D(1, [(0, 0, 0)])).clusters_of([]),
            "matching: expected triples that cover everyone",
        ),
        (
            lambda: Gadgets.of(Matching3D(1, [(0, 0, 0)])).matching_of(
                Clustering(np.repeat(range(5), 2), np.repeat(range(5), 2))
            ),
            "clustering: expected a partition into K₂,₂, got pairs that are no edges",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_clustering_without_a_triple_in_each_cluster_is_none():
    instance = Matching3D(2, [(0, 0, 0), (1, 1, 1)])
    assert triples_of_clusters(instance, Clustering([0, 0, 1, 1], [0, 0, 1, 1])) is None


def test_an_edge_pays_only_if_r1_is_large():
    """Why r₁ > size·r₂ is asked for: with less, trading r₁ for many r₂ beats the target."""
    triples = [(0, y, z) for y in range(3) for z in range(3)] + [(1, 0, 0), (2, 0, 0)]
    small = Matching3D(3, triples)
    weights = np.where(supplement_problem(small).scores == 6, 0.01, supplement_problem(small).scores)
    assert solve(Problem(weights, (2,) * 3, (2,) * 3, "mass")).value > 3 * (2 * 0.01 + 1)
