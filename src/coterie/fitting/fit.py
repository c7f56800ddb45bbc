"""`fit` and `trade_off`: the fastest attention for every layer that keeps a fidelity, certified."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from coterie.checks import expect, expect_type
from coterie.fitting.candidates import default_candidates, positions_matter
from coterie.fitting.decoding.writer import decoders_among, expect_writer
from coterie.fitting.measures import Measure
from coterie.fitting.result import AtLength, Fit
from coterie.fitting.steps import Asked, environment, fits, to_search
from coterie.hosts import host_of
from coterie.mechanisms import as_mechanism
from coterie.progress import Progress, telling


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
    decode: bool = False,
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
    too few for a promise, `Fit.certified` is False. Ctrl-C while plans are certified keeps what has been found. The
    model is left as it was: `Fit.apply` changes it.

    Args:
        model: on Hugging Face's attention interface; or any that `coterie.nn.swap` takes.
        batches: dicts for a Hugging Face model; tensors or tuples of arguments for others. All lengths count: the
            fidelity must hold for each, and times are added up.
        fidelity: in (0, 1].
        confidence: of the promise, in [0.5, 1).
        share: promise that at least such a share of documents, in (0, 1), has the fidelity, instead of their mean: a
            mean hides bad ones.
        measure: "hidden", the cosine of final hidden states, or "outputs" of what a model gives that is not Hugging
            Face's; "loss", dense over clustered loss of the next token (the default of language models); or a callable
            (model, batch) → score, the higher the better. What your task counts says more than a cosine.
        held_out: batches that certify; by default the last two thirds of `batches` of each length.
        candidates: mechanisms to try; a range of them by default.
        ordered: whether neighbours among the tokens belong together, so that windows are among the default
            candidates. By default they are if the model is Hugging Face's or has positions: rows of a set come in any
            order, and a window that held on batches in one order fails in another.
        decode: also choose what answers new tokens over `coterie.hf.Cache`, in each layer: `Fit.decode`. Its fidelity
            is the dense loss of tokens behind a text over the fitted one, whatever `measure` is. For language models,
            and longer texts than two chunks; the candidates are the near–far ones.
        seconds: a budget. Documents are left out, if `held_out` is given, candidates not tried and plans not run that
            there is no time for; the notes say so.
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
    (found,) = trade_off(
        model,
        batches,
        [fidelity],
        confidence=confidence,
        share=share,
        measure=measure,
        held_out=held_out,
        candidates=candidates,
        ordered=ordered,
        decode=decode,
        seconds=seconds,
        seed=seed,
        progress=progress,
    )
    return found


def trade_off(
    model: Any,
    batches: Iterable[Any],
    fidelities: Sequence[float] = (0.95, 0.99, 0.999),
    *,
    confidence: float = 0.95,
    share: float | None = None,
    measure: Measure | None = None,
    held_out: Iterable[Any] | None = None,
    candidates: Sequence[Any] | None = None,
    ordered: bool | None = None,
    decode: bool = False,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> list[Fit]:
    """What several fidelities cost: a `fit` for each, in their order, of which most of the work is shared.

    Each promise is made with the confidence on its own. After a Ctrl-C there are those that were found, the most exact
    ones.

    Example:
        >>> import coterie, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
        >>> found = coterie.trade_off(model, [torch.randn(1, 64, 32) for _ in range(3)], [0.8, 0.9])
        >>> [each.fidelity for each in found], found[0].attention_seconds[1] <= found[1].attention_seconds[1]
        ([0.8, 0.9], True)
    """
    start = time.monotonic()
    expect_type(isinstance(fidelities, Sequence), "fidelities", "a list of numbers", type(fidelities).__name__)
    expect(len(fidelities) > 0, "fidelities", "at least one", "none")
    for fidelity in fidelities:
        expect_type(isinstance(fidelity, int | float), "fidelity", "a number", type(fidelity).__name__)
        expect(0 < fidelity <= 1, "fidelity", "a number in (0, 1]", fidelity)
    expect_type(isinstance(confidence, int | float), "confidence", "a number", type(confidence).__name__)
    expect(0.5 <= confidence < 1, "confidence", "a number in [0.5, 1)", confidence)
    expect_type(share is None or isinstance(share, int | float), "share", "a number or None", type(share).__name__)
    expect(share is None or 0 < share < 1, "share", "a number in (0, 1), or None", share)
    expect_type(seconds is None or isinstance(seconds, int | float), "seconds", "a number", type(seconds).__name__)
    expect(seconds is None or seconds >= 0, "seconds", "a number ≥ 0, or None", seconds)
    mine, others = list(batches), None if held_out is None else list(held_out)
    if others is None:
        expect(len(mine) >= 2, "batches", "at least 2, as some are held out", len(mine))
    else:
        expect(bool(mine) and bool(others), "batches, held_out", "at least one of each", "none")
    expect_type(ordered is None or isinstance(ordered, bool), "ordered", "True, False or None", type(ordered).__name__)
    host = host_of(model)
    windows = positions_matter(host) if ordered is None else ordered
    tried = default_candidates(seed, ordered=windows) if candidates is None else candidates
    wanted = [as_mechanism(each) for each in tried]
    left_out = candidates is None and ordered is None and not windows
    expect_type(isinstance(decode, bool), "decode", "True or False", type(decode).__name__)
    for batch in (*mine, *(others or ())):
        host.check(batch)
    decoders = decoders_among(None if candidates is None else wanted, seed) if decode else None
    if decoders is not None:
        expect_writer(host, [*mine, *(others or ())], decoders)
    targets = [float(each) for each in fidelities]
    asked = Asked(
        host, mine, others, targets, float(confidence), share, measure, wanted, left_out, seed, start, seconds, decoders
    )
    bars = telling(progress)
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with bars as tell:
            return fits(asked, tell)
    finally:
        host.restore()
        for module, was in training:
            module.training = was


__all__ = ["AtLength", "Fit", "default_candidates", "environment", "fit", "to_search", "trade_off"]
