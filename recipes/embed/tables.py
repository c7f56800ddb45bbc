"""The tables, the words below them and the plot."""

from __future__ import annotations

from typing import Any

from recipes.common.results import Table
from recipes.common.scores import mean_and_error, shown
from recipes.common.study import Result
from recipes.embed.measure import DENSE, FITTED

Found = dict[int, Result]  # by length


def retrieval(found: Found, kind: str, title: str, limit: int | None) -> Table:
    """How well sections are found; differences to dense are those of the same queries."""
    rows = []
    for length, ways in found.items():
        dense = ways[DENSE][kind]["ndcg"]
        for name, way in ways.items():
            mine = way[kind]
            apart = [a - b for a, b in zip(mine["ndcg"], dense, strict=True)]
            cells = [_tokens(length, limit), name, shown(mine["ndcg"])]
            cells += ["" if name == DENSE else shown(apart, sign="+")]
            rows.append([*cells, shown(mine["recall_1"]), shown(mine["recall_10"])])
    columns = ["tokens", "attention", "nDCG@10", "difference to dense", "recall@1", "recall@10"]
    return f"{title} × 100, ± standard error over queries", columns, rows


def speed(found: Found, limit: int | None) -> Table:
    """Documents a second, what is left of their embeddings, and STS-B."""
    rows = []
    for length, ways in found.items():
        base = ways[DENSE]["documents_per_second"]
        for name, way in ways.items():
            rate, near = way["documents_per_second"], way["fidelity"]
            cells = [_tokens(length, limit), name, f"{rate:.3g}", f"{rate / base:.2f}×"]
            cells += ["", ""] if name == DENSE else [shown(near, unit=1, digits=4), f"{min(near):.4f}"]
            rows.append([*cells, "–" if way["stsb"] is None else f"{100 * way['stsb']:.2f}"])
    columns = ["tokens", "attention", "documents a second", "× dense"]
    columns += ["cosine with dense, mean", "least", "STS-B Spearman × 100"]
    return "whole documents, ± standard error over documents", columns, rows


def words(found: Found, fits: dict[int, Result], limit: int | None, sections: str) -> str:
    """What has to be known to read the tables."""
    lines = [_outcome(found), sections]
    longer = [length for length in found if limit is not None and length > limit]
    if longer:
        lines.append(
            f"* The model has {limit:,} positions, which were interpolated for {_list(longer)} tokens. It was not "
            "trained for that: speed and the difference to dense are what is measured there. What interpolation itself "
            f"costs is the difference between dense at {min(found):,} and at {max(found):,} tokens, sections alone."
        )
    for length, fit in fits.items():
        kinds = ", ".join(f"{spec} in {n}" for spec, n in _counts(fit["modules"]).items())
        lines.append(
            f"{FITTED} at {length:,} tokens: {kinds} layers; cosine of hidden states on held-out text "
            f"{fit['held_out']:.4f} (asked {fit['fidelity']})."
        )
    return "\n".join(lines)


def _outcome(found: Found) -> str:
    """The longest documents, in a sentence."""
    length = max(found)
    dense = found[length][DENSE]["documents_per_second"]
    others = [
        f"{name} embeds {way['documents_per_second'] / dense:.2f}× as many documents a second as dense, at a cosine of "
        f"{mean_and_error(way['fidelity'])[0]:.3f}"
        for name, way in found[length].items()
        if name != DENSE
    ]
    return f"At {length:,} tokens " + ("; ".join(others) or "only dense ran") + "."


def draw(rates: Any, scores: Any, found: Found) -> None:
    """Documents a second and nDCG against length."""
    lengths = list(found)
    for name in found[lengths[0]]:
        rates.plot(lengths, [found[n][name]["documents_per_second"] for n in lengths], "o-", label=name)
        for kind, line in (("late", "o-"), ("alone", "x:")):
            some = [mean_and_error(found[n][name][kind]["ndcg"])[0] for n in lengths]
            scores.plot(lengths, some, line, color=rates.lines[-1].get_color(), label=f"{name}, {kind}")
    for axes in (rates, scores):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.set_xlabel("tokens of a document")
        axes.legend(fontsize="x-small")
    rates.set_yscale("log")
    rates.set_ylabel("documents a second")
    scores.set_ylabel("nDCG@10 of sections")


def _tokens(length: int, limit: int | None) -> str:
    return f"{length:,}{'*' * (limit is not None and length > limit)}"


def _list(lengths: list[int]) -> str:
    return ", ".join(f"{n:,}" for n in lengths)


def _counts(modules: dict[str, str]) -> dict[str, int]:
    specs = list(modules.values())
    return {spec: specs.count(spec) for spec in dict.fromkeys(specs)}
