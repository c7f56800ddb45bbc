"""What is compared: mechanisms, each at its own length."""

from __future__ import annotations

from typing import NamedTuple

import coterie
from coterie.cli.inputs import UserError
from recipes.common.command import checked
from recipes.common.tuning import DENSE


class Entry(NamedTuple):
    """A mechanism, and the tokens that longer articles are cut to."""

    length: int
    mechanism: str

    def __str__(self) -> str:
        return f"{self.length}={self.mechanism}"


def parse(specs: list[str]) -> list[Entry]:
    """The entries of "LENGTH=MECHANISM", each once; first of all dense attention at the shortest length.

    >>> [str(entry) for entry in parse(["4096=longformer:window=512", "512=smyrf:rounds=4,cluster_size=64"])]
    ['512=dense', '4096=longformer:window=512', '512=smyrf']
    """
    found = [_entry(spec) for spec in specs]
    base = Entry(min(entry.length for entry in found), DENSE)
    return list(dict.fromkeys([base, *found]))


def _entry(spec: str) -> Entry:
    length, equals, mechanism = spec.partition("=")
    if not (length.isascii() and length.isdigit() and equals and int(length) >= 2):
        raise UserError(f"--mechanism {spec}: expected LENGTH=MECHANISM, such as 512=smyrf:rounds=4,cluster_size=64.")
    name = checked([mechanism])[-1]
    wanted = None if name == DENSE else coterie.as_mechanism(name)
    if isinstance(wanted, coterie.Longformer) and not wanted.global_tokens:
        raise UserError(f"--mechanism {spec}: the first token, which classifies, must be global: global_tokens=1.")
    return Entry(int(length), name)
