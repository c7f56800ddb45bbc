"""That what `python -m benchmarks.gpu --ahead` compiles stands for every kernel that `auto` can choose.

A kernel's code is decided by what its call and its round have (causality, a window, masks, dropout, …), and its tile by
whether a pair needs registers of its own, besides width, dtype and group. So a kernel that is compiled stands for all
with a part of what it has, in a tile that is chosen in the same way. Nothing is compiled here: launches are looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import variants

from coterie.call import Call
from coterie.engine.flat import Inputs
from tests.cases import CAUSAL, MECHANISMS

pytest.importorskip("triton")
KERNELS = ("round_forward", "round_queries", "round_keys")
IN_A_CALL = ("causal", "query_places", "key_places", "key_mask", "query_mask", "mask", "added", "seed")
IN_A_ROUND = ("bias", "skip", "counts", "low")
SUMS = {"round_queries": {7: "sums of pairs", 8: "sums of rows"}, "round_keys": {9: "sums of keys"}}
HEAVY = {"mask", "seed", "once", "counts", "skip"}  # what sizes of tiles depend on
MASKS = {  # float masks, which are differentiated: they have all that bool ones have
    "none": None,
    "pairs": (1, 1, 64, 64),
    "queries": (1, 2, 64, 1),
    "keys": (1, 2, 1, 64),
    "heads": (1, 2, 1, 1),
}
Kind = tuple[str, bool, int]  # kernel, whether heads share a tile, how heavy it is


def kind_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Kind, frozenset[str]]:
    """How the tile of a launch was chosen, and what the code of its kernel has in it."""
    name = kernel.fn.__name__
    has = {what for at, what in SUMS.get(name, {}).items() if args[at] is not None}
    for each in args:
        fields = {"Call": IN_A_CALL, "Round": IN_A_ROUND}.get(type(each).__name__, ())
        has |= {field for field in fields if getattr(each, field) is not None}
        if isinstance(each, tuple) and each and type(each[0]).__name__ == "Met":
            has |= {"once"} | {f"once, {x}" for met in each for x in IN_A_ROUND[1:] if getattr(met, x) is not None}
    heavy = 2 if "once" in has and has & {"mask", "seed"} else 1 if has & HEAVY else 0
    return (name, constants.get("POOL", 1) > 1, heavy), frozenset(has)


@pytest.fixture
def launched(monkeypatch):
    """The kinds of kernels that would have been launched."""
    from coterie.engine.kernels import gradients, launches, rounds

    found: set[tuple[Kind, frozenset[str]]] = set()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if kernel.fn.__name__ in KERNELS:
            found.add(kind_of(kernel, args, constants))

    for module in (gradients, launches, rounds):
        monkeypatch.setattr(module, "launch", launch)
    return found


def attend(name, causal, mask, dropout, pooled):
    """Forward and backward of a padded call."""
    from coterie.engine.kernels import gradients, launches

    heads, queries = (4, 16) if pooled else (2, 64)
    q, k = torch.randn(1, heads, queries, 4), torch.randn(1, 1 if pooled else 2, 64, 4)
    plan = MECHANISMS[name].plan(q, k, is_causal=causal, backend="native")
    if mask is not None:
        shape = (1, mask[1] if mask[1] == 1 else heads, mask[2] if mask[2] == 1 else queries, mask[3])
        if (plan.query_means and shape[2] > 1) or (plan.key_means and shape[3] > 1):
            return  # refused
        mask = torch.zeros(shape)
    settings: dict[str, Any] = {"is_causal": causal, "dropout_p": dropout, "backend": "native", "attn_mask": mask}
    settings |= {f"{name}_mask": torch.ones(1, x.shape[2], dtype=torch.bool) for name, x in (("query", q), ("key", k))}
    call = Call.of(q, k, k.clone(), **settings)
    given = Inputs.of(replace(call, seed=torch.tensor(5) if dropout else None), plan)
    out, lse, alone = launches.forward(given)
    gradients.backward(given, out, lse, out, lse, alone, mask is not None)


def test_every_kernel_has_a_part_of_one_that_is_compiled(launched):
    for variant in variants.VARIANTS.values():
        for size in variants.GROUPS:
            variants._attend(variant, size, 4, torch.float32)
    compiled = set(launched)
    launched.clear()
    for name in (n for n in MECHANISMS if n == "smyrf-once" or not n.startswith("smyrf-")):  # other hashes, same rounds
        for causal in {False, name in CAUSAL}:
            for pooled in (False, True):
                attend(name, causal, None, 0.0, pooled)
                for mask in MASKS.values():
                    attend(name, causal, mask, 0.1, pooled)
    assert len(launched) > 100
    alone = {(kind, has) for kind, has in launched if not any(kind == k and has <= more for k, more in compiled)}
    assert alone == set()
