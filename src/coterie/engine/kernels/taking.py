"""The gradient of rows that were taken from others, the same in every run."""

from __future__ import annotations

from torch import Tensor

from coterie.engine.kernels.gradients import add_lists
from coterie.engine.kernels.rounds import lists_by_row


def add_rows(grad: Tensor, rows: Tensor, count: int) -> Tensor:
    """(B, H, count, D): the sum of the grad (B, H, N, D) of each row, in the order of N; `rows` (B, H, N) says whose.

    PyTorch's own kernels add such rows as they come, and their last digits differ from run to run.
    """
    total = grad.new_zeros((*rows.shape[:2], count, grad.shape[-1]))
    lists = lists_by_row(rows.flatten(0, 1), count)
    add_lists(grad.contiguous(), *lists, total, 1)
    return total
