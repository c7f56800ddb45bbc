"""`replacing`: a context in which every call of SDPA runs a mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as modules

from coterie.checks import expect, expect_type
from coterie.functional import MechanismLike
from coterie.sdpa.catching import opened
from coterie.sdpa.compiling import COMPILED
from coterie.sdpa.looks import looks_like_attention, never_called
from coterie.sdpa.running import RUNNING, Frame
from coterie.sdpa.scope import Chosen, Scope, check_modules
from coterie.sdpa.shared import Shared


@dataclass(frozen=True)
class Replaced:
    """What `replacing` replaces.

    Attributes:
        calls: what has run, by the name of the call: a mechanism, or "dense".
    """

    calls: dict[str, str]


class _Context(Scope):
    """The scope of one `replacing`, which names calls by the modules that run in it."""

    def __init__(self, chosen: Chosen, model: nn.Module | None) -> None:
        super().__init__(chosen)
        self._model = model
        self._first = len(RUNNING.frames)  # modules that were under way before are none of ours
        self._outside = Frame(None)
        self._names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._like: dict[str, str] = {}  # modules that have run and look like attention
        self._ran = False

    def running_module(self) -> tuple[Frame, str] | None:
        """The innermost module, by its name in the outermost one or in the model that was given."""
        ours = [frame for frame in RUNNING.frames[self._first :] if frame.scope is None]
        if not ours and self._model is None:
            return self._outside, ""
        names = self._named(ours)
        return next(((f, names[id(f.module)]) for f in reversed(ours) if id(f.module) in names), None)

    def _named(self, ours: list[Frame]) -> dict[int, str]:
        root = self._model if self._model is not None else ours[0].module
        assert root is not None
        if root not in self._names:
            self._names[root] = {id(module): name for name, module in root.named_modules()}
        return self._names[root]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the modules that run in this thread are known."""
        with _HOOKS.held():
            yield

    def ran(self, frame: Frame) -> None:
        """A module starts to run."""
        self._ran = True
        if looks_like_attention(frame.module):
            ours = [each for each in RUNNING.frames[self._first :] if each.scope is None]
            self._like[self._named(ours).get(id(frame.module), "")] = type(frame.module).__name__

    def check(self) -> None:
        """At the end: something must have been replaced, and every name must have been one."""
        if self._ran and not self.called:
            raise RuntimeError(never_called("what ran in coterie.replacing", self._like))
        if self._model is None or self._ran:
            unknown = [name for name in self.chosen.names if name not in self.calls]
            expect(not unknown, "mechanism", f"names among {list(self.calls)}", unknown)


def _enter(module: nn.Module, args: Any) -> None:
    looking = [scope for scope in RUNNING.scopes if isinstance(scope, _Context)]
    if looking:
        frame = Frame(module)
        RUNNING.frames.append(frame)
        for scope in looking:
            scope.ran(frame)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    for depth in reversed(range(len(RUNNING.frames))):
        frame = RUNNING.frames[depth]
        if frame.module is module and frame.scope is None:
            del RUNNING.frames[depth:]
            return


def _hook() -> Callable[[], None]:
    """PyTorch's hooks on all modules; they look away in threads where nobody replaces."""
    before = modules.register_module_forward_pre_hook(_enter)
    after = modules.register_module_forward_hook(_leave, always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


_HOOKS = Shared(_hook)


@contextmanager
def replacing(
    mechanism: MechanismLike | Mapping[str, Any] | None, *, model: nn.Module | None = None
) -> Iterator[Replaced]:
    """Inside this context, calls of `torch.nn.functional.scaled_dot_product_attention` run a mechanism.

    It holds for whatever code makes the call, in this thread. A call is named after the module that makes it, as
    `model.named_modules()` names it in the model that was called; a second call in the same forward gets "#1" behind
    that name, and so on. Masks, `is_causal` (query i sees keys ≤ i), dropout, scale and grouped heads are taken as they
    come, and what a mechanism cannot do is refused by the name of the call. Up to `coterie.hf.FEW_QUERIES` queries, and
    fewer keys than a mechanism asks for ("near-far@1024"), are answered densely. Where there are as many queries as
    keys, a mask of keys is taken for the queries too: masked queries are answered, but no group depends on them.

    Contexts nest, and the innermost that decides on a call wins. Checkpoints recompute with what they were made with.

    Args:
        mechanism: who meets whom, for all calls; or a dict from names of calls to that, and others are left alone.
            None and "dense" are dense attention.
        model: name calls as this model does, and leave those of others alone.

    Yields:
        A `Replaced`, whose `calls` says what ran in each call.

    Raises:
        RuntimeError: at the end, if modules have run and nothing was called; it names those that look like attention.

    Example:
        >>> import coterie, torch
        >>> import torch.nn.functional as F
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         return F.scaled_dot_product_attention(x, x, x)
        >>> model = torch.nn.Sequential(Attention(), Attention())
        >>> with coterie.replacing("near-far:near=16") as replaced:
        ...     out = model(torch.randn(1, 4, 100, 8))
        >>> replaced.calls
        {'0': 'near-far:near=16', '1': 'near-far:near=16'}
    """
    expect_type(model is None or isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    if torch.compiler.is_compiling():
        raise RuntimeError(COMPILED)
    chosen = Chosen(mechanism)
    if model is not None:
        check_modules(chosen, dict(model.named_modules()))
    scope = _Context(chosen, model)
    depth = len(RUNNING.frames)
    try:
        with opened(scope):
            yield Replaced(scope.calls)
    finally:
        del RUNNING.frames[depth:]
    scope.check()
