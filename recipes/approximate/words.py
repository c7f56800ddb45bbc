"""What the figures say, in words."""

from __future__ import annotations

from coterie.hf import FEW_QUERIES
from recipes.approximate.kept import Estimate, Kept
from recipes.common.study import Result

PAPERS = 25  # clusters, on SQuAD at 380 tokens
_ALL = 0.95  # of dense attention's scores: nothing is saved


def words(dense: Estimate, found: list[Kept], costs: list[Result], short: float, chance: float = 0.0) -> str:
    """Which mechanisms keep the dense score within one standard error, and from how many clusters on.

    Args:
        short: the share of texts that run densely whatever is asked.
        chance: the best score of one answer to everything.
    """
    if dense.value - chance <= 2 * dense.error:
        beside = f", and one answer to everything {100 * chance:.1f}" if chance else ""
        return f"The dense model scores {dense.shown()}{beside}: it has learned nothing that could be kept."
    by_mechanism = {cost["mechanism"]: cost for cost in costs}
    said = []
    for template in dict.fromkeys(each.point.template for each in found):
        mine = [each for each in found if each.point.template == template]
        said.append(f"{template} {_kept(mine)}. {_met(mine, by_mechanism)}")
    if chance:
        said.append(f"One answer to everything scores {100 * chance:.1f}.")
    if short:
        said.append(
            f"{short:.0%} of the test texts have at most {FEW_QUERIES} tokens and run densely, whatever is asked."
        )
    return "\n".join(said)


def _kept(sweep: list[Kept]) -> str:
    """Of one template, clusters ascending."""
    at = next((each for each in sweep if each.point.clusters == PAPERS), None)
    if at is not None and at.within:
        return f"keeps the dense score within one standard error at {PAPERS} clusters ({at.difference.shown('+')})"
    start = f"does not at {PAPERS} ({at.difference.shown('+')}), but " if at is not None else ""
    first = _from(sweep)
    if first is not None:
        return f"{start}keeps the dense score within one standard error from {first} clusters on"
    last = sweep[-1]
    return f"does not keep the dense score within one standard error up to {last.point.clusters} clusters" + (
        f" ({last.difference.shown('+')})"
    )


def _from(sweep: list[Kept]) -> int | None:
    """The number of clusters from which on each one tried keeps the score."""
    found = None
    for each in reversed(sweep):
        if not each.within:
            break
        found = each.point.clusters
    return found


def _met(sweep: list[Kept], costs: dict[str, Result]) -> str:
    """Where it computes about as many scores as dense attention, which is no approximation to speak of."""
    for each in sweep:
        cost = costs[each.point.mechanism]
        if cost["scores"] >= _ALL * cost["dense_scores"]:
            return (
                f"From {each.point.clusters} clusters on a query computes {cost['scores']:.0f} scores or more where "
                f"dense attention computes {cost['dense_scores']:.0f}: these texts are too short to save anything."
            )
    most = max((costs[each.point.mechanism] for each in sweep), key=lambda cost: float(cost["scores"]))
    return f"A query computes at most {most['scores']:.0f} scores of dense attention's {most['dense_scores']:.0f}."
