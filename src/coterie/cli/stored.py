"""What `coterie fit --save` wrote, read again."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.inputs import UserError
from coterie.fitting.decoding.writer import dense_up_to
from coterie.fitting.measures import begins
from coterie.fitting.result import Fit


def read_fit(path: Path) -> Fit:
    """A stored fit, or a sentence that says what is wrong with the file."""
    try:
        return Fit.load(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what 'coterie fit --save' writes.") from error


def begins_at(found: Fit) -> float:
    """The number of tokens from which on anything of a fit runs; inf if all of it is dense.

    >>> begins_at(Fit({"a": "dense", "b": "near-far@2048"}, "loss", 0.9, 1.0, 1.0, [], (1.0, 1.0), [], 0))
    2048
    """
    over_cache = {} if found.decode is None else found.decode.choices
    return min([*map(begins, found.choices.values()), *(dense_up_to(spec) + 1 for spec in over_cache.values())])
