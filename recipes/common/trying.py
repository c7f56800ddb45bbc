"""Mechanisms are tried out before anything is trained or written: what one refuses is said in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coterie.cli.inputs import UserError


@contextmanager
def trying(mechanism: str, where: str) -> Iterator[None]:
    """A block that runs a mechanism once, without gradients.

    >>> with trying("local", "on images"):
    ...     raise ValueError("no rows")
    Traceback (most recent call last):
    coterie.cli.inputs.UserError: local cannot run on images: no rows
    """
    try:
        with torch.no_grad():
            yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"{mechanism} cannot run {where}: {error}") from error
