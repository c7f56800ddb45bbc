"""How the generator's blocks attend: densely, or each with a mechanism that meets a part of the pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import coterie
from coterie.analysis import sized
from coterie.cli.inputs import UserError
from coterie.mechanisms import Full, Mechanism, as_mechanism
from coterie.observe import Seen
from recipes.common import command
from recipes.common.seeded import seeded
from recipes.terrain.images import Given
from recipes.terrain.network import Generator

# Every query gets the answer of the mean query: what is left of attention if it chooses nothing.
COMMON = "clustered:clusters=1"

Choice = Mapping[str, Mechanism]  # by the name of a block; others are dense


class Way(NamedTuple):
    """How the generator attends.

    Attributes:
        mechanism: its string.
        part: it is sized so that one in so many pairs meets; 0 takes it as it is.
        where: a block, or what the names of several begin with; all of them if it is empty.
    """

    mechanism: str
    part: int = 0
    where: str = ""

    def __str__(self) -> str:
        part = f", 1/{self.part}" if self.part else ""
        return f"{self.where}{'=' * bool(self.where)}{self.mechanism}{part}"


def ways(specs: list[str], parts: list[int], blocks: list[str]) -> list[Way]:
    """Every way that a command line asks for; NAME=… is a mechanism in one block, or in those below a name.

    >>> [str(way) for way in ways(["middle_block=near-far:near=9", "smyrf"], [2], ["middle_block.1"])]
    ['middle_block=near-far:near=9, 1/2', 'smyrf, 1/2']
    """
    found = []
    for spec in specs:
        name, equals, rest = spec.partition("=")
        where, mechanism = (name, rest) if equals and ":" not in name else ("", spec)
        if where and not any(_below(block, where) for block in blocks):
            raise UserError(
                f"--mechanism {spec}: there is no block {where!r}; blocks that attend: {', '.join(blocks)}."
            )
        for each in command.checked([mechanism])[1:]:  # "dense", which it begins with, is what all are compared with
            if as_mechanism(each).size_field is None:
                raise UserError(f"--mechanism {spec}: nothing in it says how many pairs meet, so it cannot be sized.")
            found += [Way(each, part, where) for part in parts]
    return list(dict.fromkeys(found))


def _below(block: str, name: str) -> bool:
    return block == name or block.startswith(f"{name}.")


def attend_by(model: Generator, choice: Choice) -> None:
    """Let the blocks that are named attend by mechanisms, and all others densely."""
    blocks = model.attentions()
    unknown = sorted(set(choice) - set(blocks))
    if unknown:
        raise ValueError(f"choice: expected names of blocks ({', '.join(blocks)}), got {unknown[0]!r}")
    for name, block in blocks.items():
        block.mechanism = choice.get(name)


@torch.no_grad()
def watch(model: Generator, at: Given) -> dict[str, Seen]:
    """Every attention of the dense generator while it makes an image, by block, in the order in which they run."""
    names = list(model.attentions())
    found: dict[str, Seen] = {}

    def look(seen: Seen) -> None:
        found[names[seen.call.layer]] = seen

    attend_by(model, dict.fromkeys(names, Full()))
    try:
        with coterie.observing(look):
            model(*at)
    finally:
        attend_by(model, {})
    return found


def by_tokens(seen: Mapping[str, Seen]) -> dict[int, dict[str, Seen]]:
    """The blocks over so many tokens, the most first."""
    counts = sorted({each.q.shape[2] for each in seen.values()}, reverse=True)
    return {count: {name: each for name, each in seen.items() if each.q.shape[2] == count} for count in counts}


def choose(way: Way, seen: Mapping[str, Seen], least: int = 0) -> dict[str, Mechanism]:
    """The mechanism of each block over at least so many tokens, sized on the first block with as many."""
    chosen: dict[str, Mechanism] = {}
    for tokens, blocks in by_tokens(seen).items():
        mine = [name for name in blocks if tokens >= least and (not way.where or _below(name, way.where))]
        if mine:
            mechanism, first = as_mechanism(way.mechanism), blocks[mine[0]]
            if way.part:
                mechanism = sized(mechanism, max(1, tokens // way.part), first.q, first.k)
            chosen |= dict.fromkeys(mine, mechanism)
    return chosen


def pairs(seen: Mapping[str, Seen]) -> int:
    """How many pairs of tokens these blocks have, over all heads."""
    return sum(each.q.shape[1] * each.q.shape[2] * each.k.shape[2] for each in seen.values())


class Generated(NamedTuple):
    """An image, and how many scores mechanisms computed for it, means of keys and queries among them."""

    image: Tensor
    met: int


@torch.no_grad()
def generate(model: Generator, at: Given, choice: Choice, seed: int = 0) -> Generated:
    """An image, with blocks that attend as they are told.

    Args:
        seed: what mechanisms draw with.
    """
    met = 0

    def look(seen: Seen) -> None:
        nonlocal met
        plan = as_mechanism(seen.mechanism).plan(seen.q, seen.k, **seen.planning())
        met += int(plan.pairs_met().sum())

    attend_by(model, {name: seeded(each, seed) for name, each in choice.items()})
    try:
        with coterie.observing(look):
            return Generated(model(*at), met)
    finally:
        attend_by(model, {})
