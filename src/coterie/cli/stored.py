"""What `coterie fit --save` wrote, read again."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.inputs import UserError
from coterie.fitting.result import Fit


def read_fit(path: Path) -> Fit:
    """A stored fit, or a sentence that says what is wrong with the file."""
    try:
        return Fit.load(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what 'coterie fit --save' writes.") from error
