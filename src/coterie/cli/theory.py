"""`coterie theory`: attention biclustering as an optimisation problem, on instances of the user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from coterie.cli import inputs
from coterie.cli.console import Json, Model, Text, Trust, out, print_json, print_table, spinner
from coterie.cli.inputs import UserError
from coterie.cli.own import Import, import_files

app = typer.Typer(help="How good could clusters be? See docs/theory.md.", no_args_is_help=True)

Scores = Annotated[
    Path | None, typer.Argument(help="A matrix of scores (queries × keys), .npy or .csv; a random one by default.")
]
Size = Annotated[int, typer.Option(min=1, help="Queries and keys of a random one.")]
Clusters = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int, typer.Option(min=0, help="Of a random one.")]


@app.command("solve")
def solve_command(
    scores: Scores = None,
    clusters: Clusters = 3,
    objective: Annotated[str, typer.Option(help="'softmax' (an error) or 'mass'.")] = "softmax",
    size: Size = 9,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """The best clusters of a small attention map, and how near heuristics come."""
    from coterie.analysis import biclustering as bi

    if objective not in ("softmax", "mass"):
        raise UserError(f"--objective must be 'softmax' or 'mass', not {objective!r}.")
    given = bi.Problem.balanced(_read(scores, size, seed), clusters)
    problem = given if objective == "softmax" else bi.Problem.balanced(given.weights, clusters, "mass")
    with spinner("solving"):
        found = {
            "exact": bi.solve(problem),
            "greedy": bi.greedy(problem),
            "local search": bi.local_search(problem),
            "spectral co-clustering": bi.spectral(problem),
            "random": bi.random_clustering(problem, seed),
        }
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "value": each.value,
            "queries": list(map(int, each.clustering.queries)),
            "keys": list(map(int, each.clustering.keys)),
        }
        for name, each in found.items()
    ]
    if as_json:
        print_json(rows)
        return
    words = (
        "attention within clusters, the more the better"
        if objective == "mass"
        else "‖σ(P̂₀) − σ(P)‖²_F, the less the better"
    )
    print_table(
        f"{len(problem.scores)} queries, {problem.scores.shape[1]} keys, {clusters} clusters: {words}",
        ["method", "value", "cluster of each query", "of each key"],
        [[r["method"], f"{r['value']:.4f}", _labels(r["queries"]), _labels(r["keys"])] for r in rows],
    )


@app.command()
def matching(
    triples: Annotated[list[str], typer.Argument(help="Triples of a 3-dimensional matching, such as 1,1,1 2,1,2.")],
    as_json: Json = False,
) -> None:
    """Is there a 3-dimensional matching? What the supplement's reduction says, and what ours does."""
    from coterie.analysis import biclustering as bi

    parts = [re.fullmatch(r"(\d+),(\d+),(\d+)", text) for text in triples]
    if not all(parts):
        raise UserError(
            f"triples must be three numbers from 1 on with commas, such as 1,1,1; not {' '.join(triples)!r}."
        )
    numbers = [tuple(int(x) - 1 for x in part.groups()) for part in parts if part]
    size = 1 + max(max(triple) for triple in numbers)
    instance = bi.Matching3D(size, tuple(numbers))  # type: ignore[arg-type]
    with spinner("deciding"):
        found = instance.matching()
        answers = {
            "by looking": found is not None,
            "the supplement's reduction": bi.supplement_decides(instance),
            "ours, partition into K₂,₂": bi.k22_partition(bi.Gadgets.of(instance).edges) is not None,
        }
    chosen = None if found is None else [[x + 1 for x in triple] for triple in found]
    if as_json:
        print_json({"answers": answers, "matching": chosen})
        return
    print_table("Is there a matching?", ["decided", "answer"], [[k, "yes" if v else "no"] for k, v in answers.items()])
    if chosen is not None:
        out.print("matching: " + " ".join(",".join(map(str, triple)) for triple in chosen))
    if answers["by looking"] != answers["the supplement's reduction"]:
        out.print("The supplement's weights only know pairs: a cluster may combine pairs of different triples.")


@app.command()
def equivalence(
    scores: Scores = None,
    clusters: Clusters = 2,
    a: Annotated[float, typer.Option(help="Score of a special key with its query.")] = 40.0,
    copies: Annotated[int, typer.Option(min=1, help="Special keys for each query.")] = 1,
    size: Size = 4,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Theorem 1 on an instance: does the softmax problem with special keys have the optimum that is claimed?"""
    from coterie.analysis import biclustering as bi

    problem = bi.Problem.balanced(_read(scores, size, seed), clusters)
    with spinner("solving"):
        found = bi.equivalence(problem, a, copies)
    rows = {
        "softmax, special keys": found.softmax,
        "claimed: max Σ e^{2q·k}": found.mass,
        "our limit": found.limit,
    }
    if as_json:
        each = {
            name: {"queries": list(map(int, c.queries)), "keys": list(map(int, c.keys))} for name, c in rows.items()
        }
        print_json({"claim": found.claim, "limit_claim": found.limit_claim, "optima": each})
        return
    print_table(
        f"the best clusters, a = {a:g}, {copies} special keys a query",
        ["objective", "cluster of each query", "of each key"],
        [[name, _labels(c.queries), _labels(c.keys)] for name, c in rows.items()],
    )
    out.print(f"the claim {'holds' if found.claim else 'fails'}; the limit {'holds' if found.limit_claim else 'fails'}")


@app.command("assumptions")
def assumptions_command(
    model: Model,
    text: Text = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens.")] = 256,
    mechanism: Annotated[str, typer.Option(help="One that meets keys directly.")] = "smyrf:rounds=8,cluster_size=32",
    imported: Import = None,
    most: Annotated[int, typer.Option(min=1, help="Keys that a query may need, T.")] = 32,
    tolerance: Annotated[float, typer.Option(help="Dense weights up to this count as 0.")] = 0.01,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Theorem 2 on a model: for how many queries of each module do its three assumptions hold?"""
    import coterie
    from coterie.analysis.biclustering.theorem2 import call_assumptions
    from coterie.hosts import watch_dense
    from coterie.mechanisms.base import plan_call
    from coterie.observe import Seen

    import_files(imported)
    chosen = coterie.as_mechanism(mechanism)
    source = inputs.read_text(text) if text else inputs.documentation()
    shares: dict[str, list[float]] = {}

    def look(name: str, seen: Seen) -> None:
        found = call_assumptions(seen.call, plan_call(chosen, seen.call), most=most, tolerance=tolerance)
        parts = (found.sparse, found.fair, found.effective, found.hold)
        shares[name] = [float(part[found.real].double().mean()) for part in parts]

    with spinner(f"loading {model} and checking"):
        loaded = inputs.load_model(model, trust=trust_remote_code)
        watch_dense(loaded.model, inputs.cut(loaded, source, [length], 2)[0][0], look)
    columns = ["sparse", "fair", "effective", "all three"]
    if as_json:
        print_json({name: dict(zip(columns, row, strict=True)) for name, row in shares.items()})
        return
    print_table(
        f"{chosen} on {length} tokens: queries for which the assumptions of Theorem 2 hold",
        ["attention module", *columns],
        [[name, *(f"{share:.1%}" for share in row)] for name, row in shares.items()],
    )


def _labels(labels: Any) -> str:
    return " ".join(str(int(x)) for x in labels)


def _read(path: Path | None, size: int, seed: int) -> Any:
    if path is None:
        return np.random.default_rng(seed).normal(size=(size, size)) * 2
    try:
        return np.load(path) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",", ndmin=2)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a matrix of numbers (.npy, or .csv with commas).") from error
