"""Mechanisms with other draws."""

from __future__ import annotations

from dataclasses import fields, replace

from coterie.mechanisms import Mechanism


def seeded(mechanism: Mechanism, seed: int) -> Mechanism:
    """The same with another seed, if it draws anything.

    >>> from coterie import as_mechanism
    >>> str(seeded(as_mechanism("smyrf"), 3)), str(seeded(as_mechanism("local"), 3))
    ('smyrf:seed=3', 'local')
    """
    draws = "seed" in {each.name for each in fields(mechanism)}  # type: ignore[arg-type]
    return replace(mechanism, seed=seed) if draws else mechanism  # type: ignore[type-var]
