"""The tables of docs/theory.md: python -m benchmarks.theory (about five minutes; each table alone: --only lemma …)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import combinations, product
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

import coterie
from benchmarks.models import Heads, MiniLM, attending, dense
from coterie.analysis.biclustering import (
    Clustering,
    Gadgets,
    Matching3D,
    Problem,
    assumptions,
    balance,
    copies_that_suffice,
    equivalence,
    greedy,
    k22_partition,
    k22_problem,
    k22_target,
    local_search,
    random_clustering,
    softmax_error,
    solve,
    spectral,
    supplement_decides,
)
from coterie.analysis.biclustering.objectives import Objective
from coterie.plan.tiles import count_pairs

SEEDS = 8  # of methods that draw
SIZES = ((8, 2, 4), (9, 3, 4), (12, 3, 1))  # tokens, clusters, sentences
SENTENCES = [
    "The cat sat on the warm mat.",
    "A storm closed the northern harbour overnight.",
    "She reads old maps for a living.",
    "Nobody expected the small team to win.",
]


def _instances(size: int) -> Iterator[Matching3D]:
    cells = [(x, y, z) for x, y, z in product(range(size), repeat=3)]
    if size <= 2:
        for bits in range(2 ** len(cells)):
            yield Matching3D(size, tuple(cell for at, cell in enumerate(cells) if bits >> at & 1))
        return
    draw = np.random.default_rng(size)
    for _ in range(200):
        chosen = draw.choice(len(cells), int(draw.integers(size, 3 * size)), replace=False)
        yield Matching3D(size, tuple(cells[i] for i in chosen))


def lemma(console: Console) -> None:
    """How often each reduction from 3-dimensional matching gives the right answer."""
    table = Table("|X|", "instances", "with a matching", "supplement says so", "wrong", "two matchings", "K₂,₂ says so")
    for size in (1, 2, 3):
        counts = dict.fromkeys(("all", "matching", "supplement", "wrong", "pairs", "squares"), 0)
        for instance in _instances(size):
            truth, claimed = instance.matching() is not None, supplement_decides(instance)
            counts["all"] += 1
            counts["matching"] += truth
            counts["supplement"] += claimed
            counts["wrong"] += truth != claimed
            counts["pairs"] += instance.pairs_match()
            holds = k22_partition(Gadgets.of(instance).edges) is not None
            assert holds == truth, instance
            counts["squares"] += holds
        name = f"{size}, all" if size <= 2 else f"{size}, random"
        table.add_row(name, *(str(counts[key]) for key in counts))
    console.print("Lemma 1: the supplement's reduction and the one through K₂,₂", table)
    wrong = Matching3D(2, ((0, 0, 0), (1, 0, 1), (1, 1, 0)))
    gadgets = Gadgets.of(wrong)
    objectives: tuple[Objective, ...] = ("mass", "softmax")
    for objective in objectives:
        best, target = solve(k22_problem(gadgets.edges, objective)).value, k22_target(gadgets.edges, objective)
        console.print(
            f"the counterexample as 28 + 28 tokens, {objective}: optimum {best:.4f}, a matching has {target:.4f}"
        )


def theorem1(console: Console) -> None:
    """In how many random instances the softmax's best clustering is the one that Theorem 1's proof says."""
    table = Table("scores", "special keys", "a", "max-mass has the same optimum", "the limit has")
    for deviation in (1.0, 2.0, 3.0):
        problems = [Problem.balanced(deviation * np.random.default_rng(s).normal(size=(4, 4)), 2) for s in range(40)]
        for copies, a in ((1, 5.0), (1, 10.0), (1, 40.0), (1, 160.0), (10, 40.0), (100, 40.0)):
            found = [equivalence(problem, a, copies) for problem in problems]
            right, limit = (sum(getattr(each, name) for each in found) for name in ("claim", "limit_claim"))
            table.add_row(f"deviation {deviation:g}", str(copies), f"{a:g}", f"{right} of 40", f"{limit} of 40")
        enough = [copies_that_suffice(problem) for problem in problems]
        console.print(
            f"special keys that suffice, deviation {deviation:g}: median {median(enough):g}, most {max(enough):,}"
        )
    console.print("Theorem 1: 40 random instances of 4 queries and 4 keys in two clusters", table)


def _heads(model: MiniLM, sentences: list[str], length: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Queries, keys and scale, (1, 1, length, 32), of all heads on all sentences, cut to one length."""
    seen: list[Heads] = []

    def attend(heads: Heads) -> Tensor:
        seen.append(heads)
        return dense(heads)

    with attending(attend):
        for sentence in sentences:
            model.embed(torch.tensor([model.tokens(f"{sentence} {sentence}")[:length]]))
    for heads in seen:
        for h in range(heads.q.shape[1]):
            yield heads.q[:, h : h + 1].double(), heads.k[:, h : h + 1].double(), heads.scale


def _improved(q: Tensor, k: Tensor, scale: float, problem: Problem) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Who meets whom exactly in improved-clustered attention, and the top keys of each cluster."""
    clusters, keys = problem.clusters, max(problem.key_sizes)
    plan = coterie.ImprovedClustered(clusters=clusters, topk=keys, space="euclidean").plan(q, k, scale=scale)
    direct = count_pairs(plan)[0, 0, : plan.num_queries, : plan.num_keys].numpy() > 0
    members = np.zeros((clusters, plan.num_keys), dtype=bool)
    for at, row in enumerate(sorted({tuple(each) for each in direct.tolist()}, reverse=True)):
        members[at] = row
    return direct, members


def _shared(problem: Problem, clustering: Clustering) -> float:
    """The value if each cluster of queries may take its own best keys, whoever else has them: not a clustering."""
    total = 0.0
    for cluster, (_, size) in enumerate(clustering.sizes):
        chosen = list(combinations(range(problem.scores.shape[1]), size))
        members = np.zeros((len(chosen), problem.scores.shape[1]), dtype=bool)
        np.put_along_axis(members, np.array(chosen), True, axis=1)
        total += float(problem.losses(members)[np.array(clustering.queries) == cluster].sum(axis=0).min())
    return -total if problem.maximise else total


def _values(q: Tensor, k: Tensor, scale: float, problem: Problem) -> dict[str, float]:
    """Each method's value on one head."""

    def smyrf(seed: int) -> float:
        size = max(problem.query_sizes)
        plan = coterie.Smyrf(rounds=1, cluster_size=size, seed=seed).plan(q, k, scale=scale)
        return problem.value(Clustering.of_plan(plan))

    best = solve(problem)
    direct, members = _improved(q, k, scale, problem)
    shared = float(problem.weights[direct].sum()) if problem.maximise else softmax_error(problem.scores, direct)
    return {
        "optimum": best.value,
        "random": mean(random_clustering(problem, seed).value for seed in range(SEEDS)),
        "SMYRF, one round": mean(smyrf(seed) for seed in range(SEEDS)),
        "spectral co-clustering": spectral(problem).value,
        "improved-clustered, made to fit": balance(problem, members).value,
        "greedy": greedy(problem).value,
        "local search": local_search(problem).value,
        f"local search, {SEEDS} restarts": local_search(problem, restarts=SEEDS).value,
        "the optimum's queries, keys shared": _shared(problem, best.clustering),
        "improved-clustered, keys shared": shared,
    }


def distance(console: Console) -> None:
    """How far methods are from the optimum on small real attention maps."""
    model = MiniLM()
    for length, clusters, sentences in SIZES:
        distance_at(console, model, length, clusters, sentences)


def distance_at(console: Console, model: MiniLM, length: int, clusters: int, sentences: int) -> None:
    """One size of maps."""
    found: dict[str, dict[str, list[float]]] = {"softmax": {}, "mass": {}}
    for q, k, scale in _heads(model, SENTENCES[:sentences], length):
        softmax = Problem.balanced((scale * (q @ k.mT))[0, 0], clusters)
        for problem in (softmax, Problem.balanced(softmax.weights, clusters, "mass")):
            for name, value in _values(q, k, scale, problem).items():
                found[problem.objective].setdefault(name, []).append(value)
    table = Table("method", "error", "/ optimum's", "median ratio", "optimal", "mass kept", "/ optimum's")
    for name in found["softmax"]:
        table.add_row(name, *_row(found, name, length))
    maps, size = len(found["mass"]["optimum"]), length // clusters
    console.print(f"MiniLM, {maps} maps of {length} + {length} tokens, {clusters} clusters of {size} + {size}", table)


def _row(found: dict[str, dict[str, list[float]]], name: str, queries: int) -> list[str]:
    errors, optima = found["softmax"][name], found["softmax"]["optimum"]
    ratios = [e / o for e, o in zip(errors, optima, strict=True)]
    hits = sum(abs(r - 1) < 1e-9 for r in ratios) / len(ratios)
    kept, most = (mean(found["mass"][key]) / queries for key in (name, "optimum"))
    return [
        f"{mean(errors):.3f}",
        f"{mean(errors) / mean(optima):.2f}",
        f"{median(ratios):.2f}",
        f"{hits:.0%}",
        f"{kept:.1%}",
        f"{kept / most:.1%}",
    ]


def theorem2(console: Console) -> None:
    """For how many queries of a real model the assumptions of Theorem 2 hold."""
    model = MiniLM()
    text = " ".join(SENTENCES * 3)
    table = Table("plan", "weights ≤ this count as 0", "sparse", "fair", "effective", "all three", "bound, median")
    seen: list[Heads] = []

    def attend(heads: Heads) -> Tensor:
        seen.append(heads)
        return dense(heads)

    with attending(attend):
        model.embed(torch.tensor([model.tokens(text, 128)]))
    tokens = seen[0].q.shape[2]
    for spec in ("smyrf:rounds=4,cluster_size=32", "smyrf:rounds=4,cluster_size=32,duplicates=once", "topk:k=16"):
        for tolerance in (0.0, 0.01, 0.1):
            checked = [
                assumptions(
                    h.q,
                    h.k,
                    coterie.as_mechanism(spec).plan(h.q, h.k, scale=h.scale, layer=h.layer),
                    most=16,
                    tolerance=tolerance,
                    scale=h.scale,
                )
                for h in seen
            ]
            shares = [mean(float(getattr(c, n).double().mean()) for c in checked) for n in _SHOWN]
            bounds = torch.cat([c.bound[c.hold] for c in checked])
            typical = f"{float(bounds.median()):.2f}" if bounds.numel() else "–"
            table.add_row(spec, f"{tolerance:g}", *(f"{share:.1%}" for share in shares), typical)
    console.print(f"Theorem 2: MiniLM, {len(seen)} layers of 12 heads, {tokens} tokens, T = 16", table)


_SHOWN = ("sparse", "fair", "effective", "hold")
TABLES: dict[str, Callable[[Console], Any]] = {
    "lemma": lemma,
    "theorem1": theorem1,
    "distance": distance,
    "theorem2": theorem2,
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(TABLES), help="one table")
    chosen = parser.parse_args().only
    console = Console(width=None if Console().is_terminal else 140)
    for name, show in TABLES.items():
        if chosen in (None, name):
            show(console)


if __name__ == "__main__":
    main()
