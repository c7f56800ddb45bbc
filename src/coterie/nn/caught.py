"""A module's forward inside a scope: what `swap` puts in the place of `module.forward`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from coterie.nn.adapters import Adapter
from coterie.sdpa.catching import inside
from coterie.sdpa.compiling import eagerly, loaded
from coterie.sdpa.looks import looks_like_attention, never_called
from coterie.sdpa.scope import DENSE, Scope


class Caught:
    """Calls a module's own forward, or its adapter, so that calls of SDPA are caught and named after the module.

    It holds no closure, so that models which have it can be copied and pickled.
    """

    def __init__(self, module: nn.Module, name: str, scope: Scope, adapter: Adapter | None, whole: bool) -> None:
        self.module, self.name, self.scope, self.adapter = module, name, scope, adapter
        self.whole = whole  # this is the model itself: when it is through, something must have been called
        self.before = module.__dict__.get("forward")  # whatever else has taken its place

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own)

    @property
    def _own(self) -> Any:
        return type(self.module).forward.__get__(self.module) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scope.active:
            return self._own(*args, **kwargs)
        return (eagerly(_run) if loaded() else _run)(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward itself."""
        adapted = self.adapter is not None and self.scope.chosen.clusters(self.name)
        with inside(self.scope, self.module, self.name) as frame:
            if adapted:
                assert self.adapter is not None
                out = self.adapter(self.module, *args, **kwargs)
                if frame.calls == 0:
                    kind = type(self.module).__name__
                    raise RuntimeError(f"the adapter for {self.name} ({kind}) called no scaled_dot_product_attention")
            else:
                out = self._own(*args, **kwargs)
                if self.adapter is not None and frame.calls == 0:
                    self.scope.called = True
                    self.scope.calls[self.name] = DENSE
        if self.whole and not self.scope.called:
            like = {name: each for name, each in self.module.named_modules() if looks_like_attention(each)}
            raise RuntimeError(
                never_called(type(self.module).__name__, {name: type(each).__name__ for name, each in like.items()})
            )
        if self.name == "":
            self.scope.check_came()
        return out

    def put(self) -> None:
        """Take the place of the module's forward."""
        self.module.__dict__["forward"] = self

    def take(self) -> None:
        """Give it back, unless somebody else has taken it since; then the scope, which is closed, says to pass on."""
        if self.module.__dict__.get("forward") is not self:
            return
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before


def _run(caught: Caught, *args: Any, **kwargs: Any) -> Any:
    return caught.run(*args, **kwargs)


def is_caught(module: nn.Module) -> bool:
    """Whether a swap is in effect in a module."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, Caught) and forward.scope.active
