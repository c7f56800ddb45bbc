"""torch.compile: modes and hooks do not survive in a graph, so compiled models run eagerly where calls are caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

COMPILED = (
    "calls of scaled_dot_product_attention cannot be caught in a graph that is being compiled; call torch.compile "
    "before coterie.replacing is opened, and the model runs eagerly in it"
)


def loaded() -> bool:
    """Whether the compiler is; it is as large as all the rest of PyTorch."""
    return "torch._dynamo" in sys.modules


def stay_eager() -> Callable[[], object]:
    """Let whatever is compiled run eagerly; returns what ends that."""
    if not loaded() or not hasattr(torch.compiler, "set_stance"):
        return lambda: None
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


@cache
def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which the compiler leaves alone, as well as whatever it calls."""
    return torch.compiler.disable(function)
