"""The mode that catches calls of SDPA while a scope is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coterie.sdpa.answering import answer, sdpa
from coterie.sdpa.compiling import COMPILED, stay_eager
from coterie.sdpa.recomputing import remembering_checkpoints
from coterie.sdpa.running import RUNNING, Frame, Moment, entered, passed_on, settled
from coterie.sdpa.scope import DENSE, Scope
from coterie.sdpa.shared import Shared

_whole = F.multi_head_attention_forward  # torch.nn.MultiheadAttention's, which hides its SDPA call from modes


class Catching(TorchFunctionMode):
    """Everything that is called in a scope comes by here."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED)
        if (func is sdpa or func is _whole) and not RUNNING.settled:
            return _caught(self.scope, func, args, given)
        return func(*args, **given)


def _caught(scope: Scope, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for each in RUNNING.scopes:
        each.called = True
    caller = scope.caller()
    if caller is None or not scope.chosen.names_call(caller.name):
        if caller is not None:
            scope.calls[caller.name] = DENSE
        with passed_on():
            return func(*args, **kwargs)
    mechanism = scope.chosen.of(caller.name)
    here: Callable[..., Tensor] = partial(answer, scope, caller, mechanism)
    if func is sdpa:
        return here(*args, **kwargs)
    if mechanism is None:
        scope.calls[caller.name] = DENSE
        with settled():
            return func(*args, **kwargs)
    if signature(_whole).bind(*args, **kwargs).arguments.get("need_weights", True):
        raise ValueError(
            f"need_weights: expected False in {caller.name!r}, as clustered attention never forms the weights, got "
            "True, which is the default of torch.nn.MultiheadAttention; coterie.nn.swap has another default where its "
            "forward is PyTorch's own"
        )
    return _with_sdpa(here)(*args, **kwargs)


def _with_sdpa(here: Callable[..., Tensor]) -> FunctionType:
    """PyTorch's own multi_head_attention_forward, but for whom it calls: its SDPA is ours, and no mode is asked."""
    names = {**_whole.__globals__, "scaled_dot_product_attention": here, "has_torch_function": lambda tensors: False}
    made = FunctionType(_whole.__code__, names, _whole.__name__, _whole.__defaults__)
    made.__kwdefaults__ = _whole.__kwdefaults__
    return made


@contextmanager
def opened(scope: Scope) -> Iterator[None]:
    """Inside, calls are caught in this thread, and again where a checkpoint recomputes them."""
    depth = len(RUNNING.scopes)
    RUNNING.scopes.append(scope)
    try:
        with scope.watching(), _CHECKPOINTS.held(), _EAGER.held(), Catching(scope):
            yield
    finally:
        del RUNNING.scopes[depth:]


@contextmanager
def inside(scope: Scope, module: nn.Module, name: str) -> Iterator[Frame]:
    """A module's forward runs, with its scope open around it."""
    frame = Frame(module, scope, name)
    with entered(frame):
        if any(each is scope for each in RUNNING.scopes):
            yield frame
        else:
            with opened(scope):
                yield frame


@contextmanager
def _resumed(moment: Moment) -> Iterator[None]:
    """Inside, everything is under way that was then: what is recomputed is caught as it was, by the same names."""
    if not all(scope.active for scope in moment.scopes):
        raise RuntimeError(
            "coterie.nn.swap was undone between the forward and the backward pass of a checkpoint, which would "
            "recompute with the model's own attention; undo it after the backward pass"
        )
    now = RUNNING.frames, RUNNING.scopes, RUNNING.settled
    RUNNING.frames, RUNNING.scopes, RUNNING.settled = [frame.copy() for frame in moment.frames], [], False
    try:
        with ExitStack() as scopes:
            for scope in moment.scopes:
                scopes.enter_context(opened(scope))
            yield
    finally:
        RUNNING.frames, RUNNING.scopes, RUNNING.settled = now


_CHECKPOINTS = Shared(partial(remembering_checkpoints, _resumed))
_EAGER = Shared(stay_eager)
