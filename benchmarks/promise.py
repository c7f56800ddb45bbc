"""`python -m benchmarks.promise`: how often `coterie.fit` promises more than it keeps on documents that it never met.

simulated  plans whose true fidelity is known, documents with normal, skewed and heavy-tailed noise; and how often one
           test passes a plan that is exactly at the border, which is the worst case
minilm     fits of MiniLM on disjoint random documents, judged on the same fresh ones, and on a text of another kind

Both set the certificate beside what was done before it: the cheapest plan that held on two thirds of the documents was
made more exact until it held on the last third. At lengths that make so many fits affordable, nothing is faster than
dense attention: a plan's cost is the number of scores that it computes, and not its time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import coterie
from benchmarks.models import MiniLM
from benchmarks.texts import NoTextError, text
from coterie.cli.console import bars
from coterie.cli.inputs import documentation
from coterie.files import write_json
from coterie.fitting import to_search
from coterie.fitting.bounds import share_bound
from coterie.fitting.certify import certify, judge
from coterie.fitting.measures import Fidelity, Remembered
from coterie.fitting.profile import Profiled, Tried
from coterie.fitting.search import Choices, Searched, cheapest, search
from coterie.fitting.task import Task
from coterie.hosts import DENSE, Host, host_of
from coterie.mechanisms import Full, Mechanism
from coterie.observe import Seen, observing

PARTS = ("simulated", "minilm")
WAYS = ("certified", "before")
TARGET, CONFIDENCE = 0.99, 0.95
CANDIDATES = [
    *(f"near-far:near={near}" for near in (4, 8, 16, 32, 64, 128)),
    *(f"local:window={window}" for window in (16, 32, 64)),
    "smyrf:rounds=2,cluster_size=32",
    "smyrf:rounds=4,cluster_size=32",
]
console = Console(width=140)

# --- two ways to choose -----------------------------------------------------------------------------------------------


def before(task: Task, remembered: Any, searched: Searched) -> Choices:
    """More exact plans, one after the other, until the mean of the documents that check holds."""
    last, chosen = len(searched.plans) - 1, searched.chosen
    while chosen < last:
        ((_, scores),) = remembered.on_checked(searched.plans[chosen])
        if statistics.fmean(scores) >= TARGET:
            break
        chosen = min(last, chosen + max(1, len(searched.plans) // 20))
    return searched.plans[chosen]


def choose(way: str, task: Task, remembered: Any, searched: Searched) -> Choices:
    """The plan that `coterie.fit` takes, or took before it certified."""
    return before(task, remembered, searched) if way == "before" else certify(task, remembered, searched).plan


def task_of(host: Any, documents: tuple[list[Any], list[Any]], candidates: list[Mechanism]) -> Task:
    """What every fit here is asked for."""
    return Task(host, *documents, TARGET, CONFIDENCE, None, candidates, None, 0.0, 0.0, lambda *_: None)


def searched_on(way: str, documents: int) -> int:
    """How many documents of a fit are searched on."""
    return to_search(documents) if way == "certified" else documents - to_search(documents)


# --- simulated --------------------------------------------------------------------------------------------------------

_PATH = 41  # plans, whose true mean fidelity rises evenly to 1
_LOSS = 0.001  # of each step
NOISE: dict[str, Callable[[random.Random], float]] = {  # factors of a document's loss, of mean 1
    "normal": lambda draw: max(0.0, draw.gauss(1, 0.3)),
    "skewed": lambda draw: draw.expovariate(1),
    "heavy tails": lambda draw: draw.lognormvariate(-0.72, 1.2),
}


def simulated(trials: int) -> list[dict[str, Any]]:
    """How often a promise is broken where the truth is known."""
    rows = []
    for noise, documents in ((noise, count) for noise in NOISE for count in (3, 6, 12, 24)):
        for way in WAYS:
            draw = random.Random(f"{noise} {documents}")
            ends = [_trial(way, documents, NOISE[noise], draw) for _ in range(trials)]
            broken = sum(_true(index) < TARGET - 1e-12 for index in ends)
            first = searched_on(way, documents)
            rows.append(
                {
                    "noise": noise,
                    "documents": documents,
                    "way": way,
                    "trials": trials,
                    "broken": broken,
                    "loss": statistics.fmean(1 - _true(index) for index in ends),
                    "border": _border(documents - first, NOISE[noise], trials) if way == "certified" else math.nan,
                }
            )
    return rows


def _border(documents: int, noise: Callable[[random.Random], float], trials: int) -> float:
    """How often one test passes a plan whose true mean is the target, and should be passed in 5 % of cases."""
    draw = random.Random(documents)
    scores = ([1 - noise(draw) * (1 - TARGET) for _ in range(documents)] for _ in range(trials))
    return sum(judge(each, TARGET, CONFIDENCE, None, -1.0).certified for each in scores) / trials


def _true(index: int) -> float:
    return 1 - _LOSS * (_PATH - 1 - index)


class Known(NamedTuple):
    """Documents of which each loses more or less than others, whatever the plan: what is asked of `Remembered`."""

    factors: list[float]
    scale: Any = SimpleNamespace(lowest=-1.0)
    fitted: tuple[int, ...] = ()
    checked: tuple[int, ...] = ()

    def on_checked(self, plan: Choices) -> list[tuple[int, list[float]]]:
        """The score of each with a plan."""
        return [(0, [1 - factor * (1 - _true(int(plan["m"]))) for factor in self.factors])]

    def on_fitted(self, plan: Choices) -> dict[int, float]:
        """Their mean."""
        return {length: statistics.fmean(scores) for length, scores in self.on_checked(plan)}

    def exact(self, plan: Choices, length: int) -> bool:
        """All dense."""
        return int(plan["m"]) == _PATH - 1

    def doubts(self) -> list[str]:
        """They are as good as any."""
        return []

    def seconds(self, indices: tuple[int, ...]) -> float:
        """Nothing takes any time here."""
        return 0.0

    def documents(self) -> dict[int, int]:
        """How many they are."""
        return {0: len(self.factors)}


def _trial(way: str, documents: int, noise: Callable[[random.Random], float], draw: random.Random) -> int:
    """One fit on documents that are drawn."""
    first = searched_on(way, documents)
    factors = [noise(draw) for _ in range(documents)]
    on, others = Known(factors[:first]), Known(factors[first:])
    plans: list[Choices] = [{"m": str(index)} for index in range(_PATH)]
    seen = {_PATH - 1: 1.0}

    def holds(plan: Choices) -> bool:
        (seen[int(plan["m"])],) = on.on_fitted(plan).values()
        return seen[int(plan["m"])] >= TARGET

    found = Searched(plans, cheapest(plans, holds, lambda: False), seen, [])
    return int(choose(way, task_of(None, ([], []), []), others, found)["m"])


def simulated_table(rows: list[dict[str, Any]]) -> Table:
    """Shares of broken promises, and how much of the loss that is allowed is made use of."""
    table = Table(title=f"simulated: promises of ≥ {TARGET} that are broken, {rows[0]['trials']:,} fits each")
    titles = ("documents' losses", "documents", *(f"{way}: broken" for way in WAYS), "loss used", "loss used")
    for column in (*titles, "one test at the border"):
        table.add_column(column, justify="right")
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{each['broken'] / each['trials']:.1%}" for each in (first, second)]
        used = [f"{each['loss'] / (1 - TARGET):.0%}" for each in (first, second)]
        table.add_row(first["noise"], str(first["documents"]), *cells, *used, f"{first['border']:.1%}")
    return table


# --- minilm -----------------------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """Documents of equal length: those of each fit, fresh ones, and those of another kind."""

    fits: list[list[Any]]
    fresh: list[Any]
    others: list[Any]


def pieces(model: MiniLM, length: int, fits: int, documents: int, fresh: int, data: Path, seed: int) -> Pieces:
    """Python's documentation, cut and shuffled; and speeches."""
    mine = _cut(model, documentation(), length)
    needed = fits * documents + fresh
    if len(mine) < needed:
        raise SystemExit(f"the documentation has {len(mine)} pieces of {length} tokens, and {needed} are needed")
    random.Random(seed).shuffle(mine)
    try:
        others = _cut(model, text("speeches", data, Path()), length)
        random.Random(seed).shuffle(others)
    except NoTextError as error:
        console.print(f"no text of another kind: {error}")
        others = []
    groups = [mine[fresh + documents * n : fresh + documents * (n + 1)] for n in range(fits)]
    return Pieces(groups, mine[:fresh], others[:fresh])


def _cut(model: MiniLM, whole: str, length: int) -> list[Any]:
    tokenizer = model.tokenizer
    ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    edge = tokenizer.cls_token_id, tokenizer.sep_token_id
    inner = length - 2
    starts = range(0, len(ids) - inner + 1, inner)
    return [{"input_ids": torch.tensor([[edge[0], *ids[at : at + inner], edge[1]]])} for at in starts]


@torch.no_grad()
def tried(host: Host, documents: list[Any], candidates: list[Mechanism]) -> list[Tried]:
    """What `fit` makes of its dense pass, with the number of scores instead of seconds."""
    errors: dict[tuple[str, str], list[float]] = {}
    scores: dict[tuple[str, str], list[float]] = {}

    def look(seen: Seen) -> None:
        name = host.name_of(seen)
        exact = seen.attend(Full()).double()
        for mechanism in candidates:
            error = (seen.attend(mechanism).double() - exact).square().sum() / exact.square().sum()
            errors.setdefault((name, str(mechanism)), []).append(float(error))
            plan = mechanism.plan(seen.q, seen.k, **seen.planning())
            scores.setdefault((name, str(mechanism)), []).append(float(plan.pairs_met().double().mean()))
        errors.setdefault((name, DENSE), []).append(0.0)
        scores.setdefault((name, DENSE), []).append(float(seen.q.shape[2] * seen.k.shape[2]))

    host.put_everywhere("full")
    with host.watching(), observing(look):
        for batch in documents:
            host.run(batch)
    mean = statistics.fmean
    return [Tried(*key, mean(errors[key]) ** 0.5, mean(scores[key])) for key in errors]


class Judge:
    """The fidelity of plans on fresh documents, each run once."""

    def __init__(self, host: Host, documents: list[Any]) -> None:
        together = torch.cat([each["input_ids"] for each in documents]).split(20)
        self.host, self.scale = host, Fidelity(host, "hidden", [{"input_ids": some} for some in together])
        for index in range(len(together)):
            self.scale.remember(index)
        self.known: dict[tuple[str, ...], float] = {}

    def __call__(self, plan: Choices) -> float:
        """The mean over all documents, which are of one length."""
        key = tuple(plan[name] for name in sorted(plan))
        if key not in self.known:
            self.host.put(plan)
            sizes = [len(batch["input_ids"]) for batch in self.scale.batches]
            scores = [self.scale.score(index) for index in range(len(sizes))]
            self.known[key] = sum(n * score for n, score in zip(sizes, scores, strict=True)) / sum(sizes)
        return self.known[key]


def one_fit(host: Host, way: str, documents: list[Any], candidates: list[Mechanism]) -> tuple[Choices, float]:
    """The plan that a way chooses, and the share of dense attention's scores that it computes."""
    first = searched_on(way, len(documents))
    parts = documents[:first], documents[first:]
    task = task_of(host, parts, candidates)
    scale = Fidelity(host, "hidden", documents)
    for index in range(len(documents)):
        scale.remember(index)
    remembered = Remembered(task, scale, list(range(first)), list(range(first, len(documents))))
    table = tried(host, parts[0], candidates)
    plan = choose(way, task, remembered, search(task, remembered, Profiled(table, [], [])))
    cost = {(row.module, row.mechanism): row.seconds for row in table}
    dense = sum(cost[module, DENSE] for module in plan)
    return plan, sum(cost[module, spec] for module, spec in plan.items()) / dense


def minilm(fits: int, documents: int, fresh: int, length: int, data: Path, seed: int) -> list[dict[str, Any]]:
    """Fits on disjoint documents, judged on fresh ones."""
    model = MiniLM("sdpa")
    cut = pieces(model, length, fits, documents, fresh, data, seed)
    host = host_of(model.model)
    judges = {"fresh": Judge(host, cut.fresh)}
    if cut.others:
        judges["others"] = Judge(host, cut.others)
    rows = []
    with bars() as tell:
        for number, some in enumerate(cut.fits):
            candidates = [coterie.as_mechanism(each) for each in CANDIDATES]
            for way in WAYS:
                plan, cost = one_fit(host, way, some, candidates)
                found = {name: judged(plan) for name, judged in judges.items()}
                rows.append({"fit": number, "way": way, "cost": cost, "plan": plan, **found})
            tell("fits", number + 1, len(cut.fits))
    host.restore()
    return rows


def minilm_table(rows: list[dict[str, Any]], documents: int, fresh: int, length: int) -> Table:
    """How many of the fits kept their word."""
    table = Table(
        title=f"MiniLM, fits on {documents} documents of {length} tokens each, promised ≥ {TARGET} with "
        f"{CONFIDENCE:.0%}, judged on {fresh} fresh ones"
    )
    kinds = [name for name in ("fresh", "others") if name in rows[0]]
    titles = {"fresh": "fresh documents", "others": "speeches"}
    for column in ("way", "fits", "kept dense", "scores to dense's"):
        table.add_column(column, justify="right")
    for kind in kinds:
        for column in (f"{titles[kind]}: mean", "worst fit", "broken"):
            table.add_column(column, justify="right")
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        dense = sum(set(row["plan"].values()) == {DENSE} for row in mine)
        cells = [way, str(len(mine)), str(dense), f"{statistics.fmean(row['cost'] for row in mine):.2f}"]
        for kind in kinds:
            scores = [row[kind] for row in mine]
            broken = sum(score < TARGET for score in scores)
            low = share_bound(broken, len(scores), 0.975)
            high = 1 - share_bound(len(scores) - broken, len(scores), 0.975)
            said = f"{broken} = {broken / len(scores):.0%} ({low:.0%} … {high:.0%})"
            cells += [f"{statistics.fmean(scores):.4f}", f"{min(scores):.4f}", said]
        table.add_row(*cells)
    return table


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--trials", type=int, default=2000, help="simulated fits of each kind")
    parser.add_argument("--fits", type=int, default=40, help="fits of MiniLM")
    parser.add_argument("--documents", type=int, default=9, help="of each fit, a third of them to search on")
    parser.add_argument("--fresh", type=int, default=200, help="documents that fits are judged on")
    parser.add_argument("--length", type=int, default=160, help="tokens of a document")
    parser.add_argument("--seed", type=int, default=0, help="of which documents are whose")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with nltk, for speeches")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write to")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    found: dict[str, Any] = {"noise": math.sqrt(0.05 * 0.95 / options.fits)}
    if "simulated" in wanted:
        found["simulated"] = simulated(options.trials)
        console.print(simulated_table(found["simulated"]))
    if "minilm" in wanted:
        sizes = (options.documents, options.fresh, options.length)
        found["minilm"] = minilm(options.fits, *sizes, options.data, options.seed)
        console.print(minilm_table(found["minilm"], *sizes))
    write_json(options.out / "promise.json", found)
    console.print(f"wrote {options.out / 'promise.json'}")


if __name__ == "__main__":
    main()
