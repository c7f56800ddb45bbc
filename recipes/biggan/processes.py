"""Several processes (`accelerate launch`): each sees its share of a batch, and all take the same steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.biggan.attention import attend_by, blocks
from recipes.common.processes import processes


def average(tensors: list[Tensor]) -> None:
    """Their means over all processes, in place; one message."""
    count = processes().num_processes
    if count == 1 or not tensors:
        return
    flat = torch.cat([each.detach().flatten() for each in tensors])
    dist.all_reduce(flat)
    flat /= count
    start = 0
    for each in tensors:
        each.detach().copy_(flat[start : start + each.numel()].view_as(each))
        start += each.numel()


def average_gradients(model: nn.Module) -> None:
    """As if one process had seen the whole batch; batch norms still see their own share."""
    average([p.grad for p in model.parameters() if p.grad is not None])


def average_statistics(model: nn.Module) -> None:
    """What batch norms have stored."""
    average([buffer for name, buffer in model.named_buffers() if "stored_" in name])


def same_mechanisms(model: nn.Module) -> None:
    """The first process decides how many rounds everybody takes."""
    chosen: list[Any] = [str(block.mechanism) for block in blocks(model)]
    if processes().num_processes == 1 or not chosen:
        return
    dist.broadcast_object_list(chosen)
    for block, mechanism in zip(blocks(model), chosen, strict=True):
        attend_by(block, mechanism)
