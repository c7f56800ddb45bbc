"""The answer to one call of SDPA: by a mechanism, or densely where that cannot pay."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from coterie import observe
from coterie.checks import check_transforms
from coterie.functional import attention
from coterie.mechanisms import AtLeast, Mechanism
from coterie.mechanisms.base import without_resampling
from coterie.mechanisms.by_sample import FEW_QUERIES, where_it_pays
from coterie.sdpa.arguments import asked
from coterie.sdpa.running import settled
from coterie.sdpa.scope import DENSE, Caller, Scope, layer_of

sdpa = F.scaled_dot_product_attention  # before anybody patches it


def answer(scope: Scope, caller: Caller, mechanism: Mechanism | None, *args: Any, **kwargs: Any) -> Tensor:
    """Run the mechanism that was chosen for a call; the arguments are SDPA's."""
    with settled():
        name = caller.name
        out = None if mechanism is None else _clustered(scope, caller, mechanism, *args, **kwargs)
        if out is None:
            scope.calls[name] = DENSE
            out = sdpa(*args, **kwargs)
        return out


def _clustered(scope: Scope, caller: Caller, mechanism: Mechanism, *args: Any, **kwargs: Any) -> Tensor | None:
    """None where it is answered densely: up to FEW_QUERIES queries, fewer keys than the mechanism asks for."""
    name = caller.name
    try:
        call = asked(*args, **kwargs)
        least = mechanism.length if isinstance(mechanism, AtLeast) else 0
        if call.q.shape[2] <= FEW_QUERIES or call.k.shape[2] < least:
            return None
        check_transforms(*args, *kwargs.values())
        runs = where_it_pays(mechanism, call.real_queries, call.real_keys)
        if runs is None:
            return None
        if not caller.training:
            runs = without_resampling(runs)
        scope.calls[name] = str(mechanism)
        settings = dict(call.settings)
        if call.keys is not None and call.queries is not None:
            settings |= {"key_mask": call.keys, "query_mask": call.queries, "guests": ~call.queries}
        with observe.called(name):
            out = attention(call.q, call.k, call.v, runs, layer=layer_of(name), **settings)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{mechanism} cannot answer the attention call {name!r}: {error}") from error
    return out.reshape(call.shape)
