"""`fit`: choose a mechanism for every layer so that a fidelity holds, at the least time; certify it on other data."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from coterie._version import __version__
from coterie.checks import expect, expect_type
from coterie.fitting.candidates import default_candidates, positions_matter
from coterie.fitting.certify import all_dense, certify
from coterie.fitting.measures import Measure, least, length_of, remember
from coterie.fitting.profile import Profiled, profile
from coterie.fitting.result import AtLength, Fit
from coterie.fitting.search import Choices, Searched, search
from coterie.fitting.speed import time_passes
from coterie.fitting.task import Task
from coterie.hosts import DENSE, host_of
from coterie.mechanisms import as_mechanism
from coterie.progress import Progress, telling

_NO_WINDOWS = (
    "Windows were not tried: nothing in the model says that the order of its tokens means something (ordered=True "
    "tries them)."
)


def fit(
    model: Any,
    batches: Iterable[Any],
    fidelity: float = 0.99,
    *,
    confidence: float = 0.95,
    share: float | None = None,
    measure: Measure | None = None,
    held_out: Iterable[Any] | None = None,
    candidates: Sequence[Any] | None = None,
    ordered: bool | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Fit:
    """The cheapest attention that keeps a model's answers on data like yours, layer by layer, with a promise.

    A third of the batches is searched on. One dense pass tries every candidate in every attention module: its time
    here and its output's error. That gives a path of plans from the fastest to all dense, and halving finds the
    cheapest that holds. The other batches certify: about five plans of the path, from an exact one to the one that was
    found, are tested once each, up to the first that fails, and the last that held is taken. So the promise is that
    with a probability of `confidence` the mean fidelity on all documents like these is at least `fidelity`. A batch
    counts as one document. Where nothing pays or nothing can be promised it is dense, and says so; where documents are
    too few for a promise, `Fit.certified` is False. The model is left as it was: `Fit.apply` changes it.

    Args:
        model: on Hugging Face's attention interface; or any that `coterie.nn.swap` takes.
        batches: dicts for a Hugging Face model; tensors or tuples of arguments for others. All lengths count: the
            fidelity must hold for each, and times are added up.
        fidelity: in (0, 1].
        confidence: of the promise, in [0.5, 1).
        share: promise that at least such a share of documents, in (0, 1), has the fidelity, instead of their mean: a
            mean hides bad ones.
        measure: "hidden", the cosine of final hidden states; "loss", dense over clustered loss of the next token (the
            default of language models); or a callable (model, batch) → score, the higher the better.
        held_out: batches that certify; by default the last two thirds of `batches` of each length.
        candidates: mechanisms to try; a range of them by default.
        ordered: whether neighbours among the tokens belong together, so that windows are among the default
            candidates. By default they are if the model is Hugging Face's or has positions: rows of a set come in any
            order, and a window that held on batches in one order fails in another.
        seconds: a budget; when it is used up, the best plan so far is certified and returned.
        seed: of the mechanisms.
        progress: True draws bars, on a terminal with rich or in a notebook; or a function that is called with
            (what, done, total).

    Example:
        >>> import coterie, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
        >>> found = coterie.fit(model, [torch.randn(1, 64, 32) for _ in range(3)], fidelity=0.9)
        >>> sorted(found.choices), found.held_out >= 0.9
        (['layers.0.self_attn', 'layers.1.self_attn'], True)
    """
    expect_type(isinstance(fidelity, int | float), "fidelity", "a number", type(fidelity).__name__)
    expect(0 < fidelity <= 1, "fidelity", "a number in (0, 1]", fidelity)
    expect_type(isinstance(confidence, int | float), "confidence", "a number", type(confidence).__name__)
    expect(0.5 <= confidence < 1, "confidence", "a number in [0.5, 1)", confidence)
    expect_type(share is None or isinstance(share, int | float), "share", "a number or None", type(share).__name__)
    expect(share is None or 0 < share < 1, "share", "a number in (0, 1), or None", share)
    fitted, checked = _split(list(batches), held_out)
    expect_type(ordered is None or isinstance(ordered, bool), "ordered", "True, False or None", type(ordered).__name__)
    host = host_of(model)
    windows = positions_matter(host) if ordered is None else ordered
    tried = default_candidates(seed, ordered=windows) if candidates is None else candidates
    wanted = [as_mechanism(each) for each in tried]
    left_out = candidates is None and ordered is None and not windows
    for batch in (*fitted, *checked):
        host.check(batch)
    bars, start = telling(progress), time.monotonic()
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        fitted.sort(key=length_of, reverse=True)  # if time runs out, the long ones have been tried
        with bars as tell:
            asked = (float(fidelity), float(confidence), share)
            found = _fit(Task(host, fitted, checked, *asked, wanted, seconds, start, tell), measure, seed)
            return replace(found, notes=[*found.notes, _NO_WINDOWS]) if left_out else found
    finally:
        host.restore()
        for module, was in training:
            module.training = was


def _fit(task: Task, measure: Measure | None, seed: int) -> Fit:
    """The steps, each of which hands a record on."""
    remembered = remember(task, measure)
    profiled = profile(task)
    searched = search(task, remembered, profiled)
    certified = certify(task, remembered, searched)
    timed = time_passes(task, profiled, certified)
    if timed.speedup < 1:  # what saves time in attention alone may cost it elsewhere
        said = f"The plan that held makes the whole model {timed.speedup:.2f}× as fast: it is not taken."
        certified, timed = all_dense(task, remembered, [*certified.notes, said]), timed.all_dense()
    choices = task.whole(certified.plan)
    return Fit(
        choices=choices,
        measure=remembered.scale.name,
        fidelity=task.target,
        calibrated=certified.calibrated,
        held_out=least({tokens: each.fidelity for tokens, each in certified.judged.items()}),
        confidence=task.confidence,
        share=task.share,
        certified=certified.sure,
        windows=task.host.windows(),
        table=profiled.table,
        attention_seconds=timed.attention_seconds,
        lengths=timed.lengths,
        seed=seed,
        notes=[*profiled.notes, *searched.notes, *certified.notes, *_remarks(choices, searched, profiled)],
        environment=environment(),
    )


def _remarks(choices: Choices, searched: Searched, profiled: Profiled) -> list[str]:
    """What the choices themselves give rise to."""
    if set(choices.values()) == {DENSE}:
        if len(searched.plans) > 1:  # something was faster, and could not be found or promised in time
            return ["Dense attention is kept everywhere."]
        return [f"Nothing pays at {', '.join(map(str, profiled.lengths))} tokens: dense attention is kept everywhere."]
    if any("@" in spec for spec in choices.values()):
        return ["Short inputs stay dense: the number after '@' is that of keys from which a mechanism runs."]
    return []


def _split(batches: list[Any], held_out: Iterable[Any] | None) -> tuple[list[Any], list[Any]]:
    if held_out is not None:
        others = list(held_out)
        expect(bool(batches) and bool(others), "batches, held_out", "at least one of each", "none")
        return batches, others
    expect(len(batches) >= 2, "batches", "at least 2, as some are held out", len(batches))
    by_length: dict[int, list[Any]] = {}
    for batch in batches:
        by_length.setdefault(length_of(batch), []).append(batch)
    fitted: list[Any] = []
    checked: list[Any] = []
    for tokens, some in by_length.items():
        expect(len(some) >= 2, "batches", "at least 2 of each length, as some are held out", f"1 of {tokens} tokens")
        count = to_search(len(some))
        fitted += some[:count]
        checked += some[count:]
    return fitted, checked


def to_search(documents: int) -> int:
    """How many of some documents plans are searched on: a third. A promise needs the others more.

    >>> to_search(2), to_search(6), to_search(20)
    (1, 2, 6)
    """
    return max(1, documents // 3)


def environment() -> dict[str, str]:
    """What a figure depends on."""
    found = {
        "coterie": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    try:
        import transformers
    except ImportError:
        return found
    return found | {"transformers": transformers.__version__}


__all__ = ["AtLength", "Fit", "default_candidates", "environment", "fit"]
