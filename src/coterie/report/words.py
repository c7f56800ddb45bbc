"""What a fit found, in sentences for somebody who did not run it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coterie.fitting.result import AtLength, Fit

_MEASURES = {
    "hidden": "cosine of the final hidden states",
    "outputs": "cosine of the outputs",
    "loss": "loss of the next token, dense over fitted",
}
_METHODS = {
    "t": "Student's t, corrected for skewness",
    "betting": "a bet, which assumes nothing of the documents",
    "binomial": "counting, which assumes nothing of the documents",
}


def measure_words(measure: str) -> str:
    """What fidelity is measured by; a function of the user's own is called by its name.

    >>> measure_words("hidden"), measure_words("accuracy")
    ('cosine of the final hidden states', 'accuracy')
    """
    return _MEASURES.get(measure, measure)


def percent(share: float) -> str:
    """A share as a percentage without digits that nobody gave.

    >>> percent(0.95).split(), percent(0.995).split()
    (['95', '%'], ['99.5', '%'])
    """
    return f"{100 * share:g}\u00a0%"  # never at the end of one line and the start of the next


def times(ratio: float) -> str:
    """How many times as fast; a budget may end a fit before it is timed.

    >>> times(1.5), times(float("nan"))
    ('1.50×', 'not timed')
    """
    return f"{ratio:.2f}×" if math.isfinite(ratio) else "not timed"


def lowest(found: Fit) -> AtLength | None:
    """The length whose bound is the lowest, and of equal ones one that is not exact; None where there are no bounds, as
    in fits of old.

    Example:
        >>> from coterie.fitting.result import AtLength, Fit
        >>> at = [AtLength(n, 1.0, 1.0, 0.5, 4, bound, "t") for n, bound in ((512, 0.999), (2048, 0.994))]
        >>> lowest(Fit({}, "hidden", 0.99, 1.0, 1.0, [], (1.0, 1.0), at, 0)).tokens
        2048
        >>> at = [AtLength(n, 1.0, 1.0, 0.5, 4, 1.0, method) for n, method in ((512, "exact"), (2048, "t"))]
        >>> lowest(Fit({}, "hidden", 0.99, 1.0, 1.0, [], (1.0, 1.0), at, 0)).tokens
        2048
    """
    bounded = [at for at in found.lengths if math.isfinite(at.bound)]
    return min(bounded, key=lambda at: (at.bound, at.method == "exact"), default=None)


def meaning(found: Fit) -> list[str]:
    """What may be expected of the fitted model, what is behind that, and what is not covered."""
    fidelity = f"Fidelity is the {measure_words(found.measure)}; it is 1 where nothing has changed."
    if found.all_dense:
        return ["Every attention module stays as it was, so the model answers exactly as before, and as fast."]
    return [" ".join([*_expected(found), fidelity]), *_evidence(found), *_uncovered(found)]


def _expected(found: Fit) -> list[str]:
    lengths = _either([f"{at.tokens:,}" for at in found.lengths]) or "the same number of"
    if found.certified:
        hundred = f"Of a hundred fits made like this one, at least {100 * found.confidence:g} are right about that."
        take = f"Take new documents like yours, of {lengths} tokens."
        if found.share is None:
            return [f"{take} Averaged over very many of them, the fidelity is at least {found.fidelity:g}.", hundred]
        return [f"{take} At least {percent(found.share)} of them have a fidelity of {found.fidelity:g}.", hundred]
    if not math.isfinite(found.held_out):
        return ["Nothing is promised: this plan was not run on documents that were held out."]
    seen = f"{found.held_out:.4f} was seen on documents that were held out"
    if found.holds:
        return [f"{seen}, which is what was asked for, but nothing is promised of other documents."]
    return [f"{seen}, which is less than the {found.fidelity:g} that was asked for: do not use this plan unchecked."]


def _evidence(found: Fit) -> list[str]:
    at = lowest(found)
    if at is None:
        return ["No bound is known: documents were too few for one, or an older version made this fit."]
    if at.method == "exact":
        return []
    count = f"{at.documents:,} document{'s' * (at.documents != 1)}"
    how = f"by {_METHODS.get(at.method, at.method)}, from {count} of {at.tokens:,} tokens"
    if found.share is not None:
        return [f"With {percent(found.confidence)} confidence, {at.bound:.1%} of documents at least hold: {how}."]
    return [
        f"With {percent(found.confidence)} confidence, the mean is at least {at.bound:.4f} at the hardest length: "
        f"{how}, whose own mean is {at.fidelity:.4f}."
    ]


def _uncovered(found: Fit) -> list[str]:
    dense, fitted = (sum(getattr(at, f"{kind}_seconds") for at in found.lengths) for kind in ("dense", "fitted"))
    single = "a single document, " if found.share is None else ""
    timed = math.isfinite(dense) and math.isfinite(fitted)
    each = "one held-out document" + " of each length" * (len(found.lengths) > 1)
    took = f": {each} took {fitted:.2f} s instead of {dense:.2f} s." if timed else "; not in this fit."
    return [
        f"Not covered: other kinds of text, other lengths, {single}a model that was trained further, and speed, which "
        f"is measured, on one machine{took}"
    ]


def _either(words: Sequence[str]) -> str:
    """Words as a sentence counts them.

    >>> _either(["512", "2,048", "4,096"]), _either(["512"])
    ('512, 2,048 or 4,096', '512')
    """
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
