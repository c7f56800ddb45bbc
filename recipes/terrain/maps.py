"""The attention maps of one image: their singular values, and what mechanisms change in them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from coterie.analysis import AttentionErrors, Spectra, head_spectra
from coterie.analysis.errors import call_errors
from coterie.observe import Seen
from recipes.common import ranks as common
from recipes.common.study import Result
from recipes.terrain.attending import Choice, Way, by_tokens


def errors_of(seen: Mapping[str, Seen], choice: Choice) -> dict[str, AttentionErrors]:
    """What mechanisms change in each block of the dense generator."""
    return {name: call_errors(each, choice[name]) for name, each in seen.items()}


def spectra_of(seen: Mapping[str, Seen], way: Way, errors: Mapping[str, AttentionErrors]) -> Spectra:
    """The singular values of every head of these blocks, and the error of a mechanism in each."""
    heads = []
    for name, each in seen.items():
        wrong = errors[name].output().value
        found = head_spectra(each.q, each.k, module=name)
        heads += [replace(head, error=float(wrong[head.sample, head.head])) for head in found]
    return Spectra(str(way), tuple(heads))


def ranks(found: Spectra, seen: Mapping[str, Seen], errors: Mapping[str, AttentionErrors]) -> list[Result]:
    """A row for each number of tokens: its heads' ranks, and the mean mass on the keys that a mechanism meets."""
    rows = []
    for tokens, blocks in by_tokens(seen).items():
        mass = statistics.fmean(float(errors[name].mean("mass").value) for name in blocks)
        heads = [each for each in found.heads if each.module in blocks]
        rows.append({"tokens": tokens, "blocks": len(blocks), **common.ranks(heads), "mass": mass})
    return rows
