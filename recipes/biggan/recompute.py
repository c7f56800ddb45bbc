"""Activation checkpointing: parts of a network that run again in the backward pass instead of being remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_again: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Whether what runs now has run before: statistics must not count it twice."""
    return _again.get()


@contextmanager
def _second_time() -> Iterator[None]:
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def maybe(run: Callable[..., Tensor], *inputs: Tensor, recompute: bool) -> Tensor:
    """Run a part of a network, and again in the backward pass if asked."""
    if not (recompute and torch.is_grad_enabled()):
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_time()))
