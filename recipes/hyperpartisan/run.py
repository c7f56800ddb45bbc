"""Fine-tune on Hyperpartisan: few tokens with SMYRF, or many with Longformer's window and with near–far."""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import typer

from coterie.cli.inputs import UserError
from recipes.common import command, comparison
from recipes.common.classification import FineTuning, Task
from recipes.common.digest import digest
from recipes.common.models import out_folder
from recipes.common.precision import in_bf16
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.scores import accuracy
from recipes.common.splits import Labelled, dataset, stratified, unique
from recipes.common.study import Result, Study
from recipes.common.training import Schedule
from recipes.hyperpartisan.articles import CLASSES, load
from recipes.hyperpartisan.entries import Entry, parse

ENTRIES = [
    "512=smyrf:rounds=4,cluster_size=64",
    "4096=longformer:window=512,global_tokens=1",
    "4096=near-far:near=448",
]
QUICK = [["--data", "{data}/hyperpartisan"]]
_TEST = 0.1  # of the articles


class Comparison(NamedTuple):
    """The same articles, model and schedule at several lengths."""

    articles: list[Labelled]
    data: str
    model: str
    schedule: Schedule

    def tuning(self, length: int, seed: int) -> FineTuning:
        """A seed draws its own split, the same one at every length."""
        train, test = stratified(self.articles, _TEST, seed, self.data)
        task = Task("Hyperpartisan", accuracy, CLASSES, dataset(train), dataset(test))
        return FineTuning(task, self.model, length, self.schedule, positions=length)

    def run(self, study: Study, entries: list[Entry], seeds: int, shown: Bar) -> list[Result]:
        """Train and test each entry with each seed."""
        results = []
        for seed in range(seeds):
            for length, mechanisms in by_length(entries).items():
                tuning, part = self.tuning(length, seed), study.part(str(length))
                for found in tuning.run(part, mechanisms, [seed], shown, interchange=False):
                    named = {
                        key: {str(Entry(length, name)): each for name, each in found[key].items()}
                        for key in ("scores", "also")
                    }
                    results.append({**found, **named, "trained": str(Entry(length, found["trained"]))})
        return results

    def costs(self, study: Study, entries: list[Entry], repeats: int, texts: int, shown: Bar) -> list[Result]:
        """What a step costs, in the order of the entries."""
        rows = {}
        for length, mechanisms in by_length(entries).items():
            part = study.part(str(length))
            for row in self.tuning(length, 0).costs(part, mechanisms, repeats, shown, texts=texts):
                entry = str(Entry(length, row["mechanism"]))
                rows[entry] = {**row, "mechanism": entry}
        return [rows[str(entry)] for entry in entries]


def by_length(entries: list[Entry]) -> dict[int, list[str]]:
    """The mechanisms of each length."""
    lengths = dict.fromkeys(entry.length for entry in entries)
    return {length: [entry.mechanism for entry in entries if entry.length == length] for length in lengths}


def main(
    data: Annotated[str, typer.Option(help="A folder with articles*.xml and ground-truth*.xml, or a hub name.")],
    model: command.Model = "demo",
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="LENGTH=MECHANISM: any mechanism's string, or 'dense', at so many tokens; several compare."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; each draws its own split.")] = 1,
    articles: Annotated[int | None, typer.Option(min=4, help="Use so many; all by default.")] = None,
    epochs: Annotated[float, typer.Option(min=0.01)] = 1,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    at_once: Annotated[int, typer.Option(min=1, help="Articles of a batch that are in memory together.")] = 2,
    rate: Annotated[float, typer.Option(help="Of Adam.")] = 5e-5,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Fine-tune on Hyperpartisan with 512 tokens and SMYRF, and with 4,096 and Longformer's window or near–far.

    The split is random for each seed, 90 % and 10 % of each class (SMYRF's supplement, §15.1), and the same for all
    mechanisms. A model with fewer positions gets a table that is interpolated.
    """
    entries = parse(mechanism or ENTRIES)
    if batch % at_once:
        raise UserError(f"--batch {batch} must be a multiple of --at-once {at_once}.")
    found = load(data)
    different = unique(found)
    used = min(articles or len(different), 24 if quick else len(different))
    if used < len(different):
        _, different = stratified(different, used / len(different), 0, data)
    schedule = Schedule(epochs, batch, rate, warmup=0.1, by_length=True, bf16=in_bf16(bf16), at_once=at_once)
    compared = Comparison(different, data, model, schedule)
    for length, mechanisms in by_length(entries).items():
        compared.tuning(length, 0).check(mechanisms)
    settings = {
        "recipe": "hyperpartisan",
        "data": data,
        "model": model,
        "entries": [str(entry) for entry in entries],
        "seeds": seeds,
        "articles": len(different),
        "data digest": digest(different),
        **schedule._asdict(),
    }
    study = Study.open(out_folder(out, "hyperpartisan", quick), settings, fresh=fresh)
    with bar(seeds * len(entries) + len(by_length(entries))) as shown:
        results = compared.run(study, entries, seeds, shown)
        costs = compared.costs(study, entries, 1 if quick else 3, 4 if quick else 8, shown)
    base = str(entries[0])
    title, columns, rows = comparison.trained_with(results, costs, "accuracy", base=base)
    said = comparison.summary("Hyperpartisan", results, "accuracy", base)
    finish(
        study.folder,
        [(f"Hyperpartisan, {model}, length=mechanism: {title}", columns, rows)],
        {"results": results, "costs": costs},
        partial(comparison.draw, results=results, costs=costs, score="accuracy"),
        words=f"{said} {len(different)} of {len(found)} articles were used, one that occurs twice once.",
    )
