"""Activation checkpointing: what is recomputed in the backward pass runs the same mechanisms, wherever that pass is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint

from coterie.sdpa.running import RUNNING, Moment

Resume = Callable[[Moment], AbstractContextManager[None]]


def remembering_checkpoints(resume: Resume) -> Callable[[], None]:
    """Let checkpoints that are made in a scope remember it, and `resume` it when they recompute.

    PyTorch has no hook for this, so its two kinds of checkpoints are wrapped; they do what they always did in threads
    without a scope. Returns what unwraps them.
    """
    generator, apply = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply

    def recomputing(function: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(_remembering(function, resume), *args, **kwargs)

    def reentrant(function: Any, *args: Any) -> Any:
        return apply(_remembering(function, resume, forward=True), *args)

    def unwrap() -> None:
        checkpoint._checkpoint_without_reentrant_generator = generator
        del checkpoint.CheckpointFunction.apply

    checkpoint._checkpoint_without_reentrant_generator = recomputing  # type: ignore[assignment]
    checkpoint.CheckpointFunction.apply = staticmethod(reentrant)  # type: ignore[method-assign]
    return unwrap


def _remembering(function: Callable[..., Any], resume: Resume, forward: bool = False) -> Callable[..., Any]:
    """The function as it runs now, for later; the first call is the forward pass itself if it is told so."""
    if not RUNNING.scopes:
        return function
    moment, first = Moment.now(), forward

    def again(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return function(*args, **kwargs)
        with resume(moment):
            return function(*args, **kwargs)

    return again
