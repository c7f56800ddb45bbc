"""Factors: the two patterns of a factorized mechanism, and how heads and layers share them out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.plan import Round
from coterie.planning.tokens import Tokens

FACTORS = ("merged", "heads", "layers")


def shared_out(
    factors: str, tokens: Tokens, first: Callable[[], Round], second: Callable[[bool], Round]
) -> list[Round]:
    """The rounds of a factorized mechanism (Child et al., 2019, §5.2).

    Args:
        factors: "merged": every head meets both patterns; "heads": even heads the first and odd heads the second;
            "layers": even layers the first and odd layers the second.
        first: makes the round of the first pattern.
        second: makes that of the second, without the pairs of the first if it is told so.
    """
    if factors == "merged":
        return [first(), second(True)]
    if factors == "layers":
        return [second(False) if tokens.layer % 2 else first()]
    odd = torch.arange(tokens.sizes.heads, device=tokens.device) % 2 == 1
    return [_of_heads(first(), ~odd), _of_heads(second(False), odd)]


def _of_heads(each: Round, heads: Tensor) -> Round:
    """The round in these heads; others have no group in it."""
    return Round(
        query_order=each.query_order,
        query_offsets=torch.where(heads[:, None], each.query_offsets, 0),
        key_order=each.key_order,
        key_start=each.key_start,
        key_stop=each.key_stop,
        window=each.window,
    )
