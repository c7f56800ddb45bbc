"""The weights that a mechanism gives to the keys, whatever means it attends through: the engine is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie.call import Call
from coterie.engine.api import execute
from coterie.exact import blocks
from coterie.plan import Plan
from coterie.plan.slices import restrict


def engine_weights(call: Call, plan: Plan, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The weights ŵ that the engine gives the keys, for some queries (B, R): blocks of columns, each (B, H, R, block).

    An output is Σ_j ŵ_ij·v_j, so values that are columns of the identity make it the weights, whatever means the plan
    attends through. What stands for a row of −1 is of no meaning.
    """
    wide = torch.promote_types(call.q.dtype, torch.float32)
    mask = call.pair_mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(wide)
    call = replace(call, q=call.q.to(wide), k=call.k.to(wide), pair_mask=mask, dropout_p=0)
    small = restrict(plan, rows)
    index = rows.clamp(min=0)[:, None, :, None]
    each = plan.batch * max(plan.heads * plan.query_rows, plan.key_heads * plan.key_rows)
    for columns in blocks(plan.num_keys, each):
        width = columns.stop - columns.start
        identity = torch.zeros(plan.num_keys, width, dtype=wide, device=plan.device)
        identity[columns] = torch.eye(width, dtype=wide, device=plan.device)
        values = identity.expand(plan.batch, plan.key_heads, -1, -1)
        out = execute(replace(call, v=values), small).out
        yield columns, out.gather(2, index.expand(-1, plan.heads, -1, width)).double()
