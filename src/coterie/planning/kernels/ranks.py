"""Scores as numbers that can be cut into digits: how the largest of them are found without sorting.

A threshold is made digit by digit, four bits at a time. `reached` counts how many scores reach each of the 16 edges
that the next digit may bring; the largest digit that is still reached by as many as are wanted is the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank_of(score):
    """A uint32 that grows with a float; −0 and 0 are one number."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def edges_of(lowest, bits):
    """The thresholds (rows, 16) that a row's may become, if its next four bits lie at `bits`."""
    return lowest[:, None] | (tl.arange(0, 16).to(tl.uint32)[None, :] << tl.cast(bits, tl.uint32))


@triton.jit
def longer(lowest, bits, reached, wanted):
    """The threshold (rows,) with four bits more: the last of the edges that so many `reached` as are wanted."""
    digit = tl.sum((reached >= wanted[:, None]).to(tl.int32), 1) - 1
    return lowest | (digit.to(tl.uint32) << tl.cast(bits, tl.uint32))
