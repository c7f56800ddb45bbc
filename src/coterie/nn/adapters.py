"""Adapters: how a module that writes its attention out by hand attends, said once more with SDPA."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import nn

from coterie.checks import expect, expect_type
from coterie.sdpa.looks import looks_like_attention

Adapter = Callable[..., Any]
Kind = type[nn.Module] | str | Callable[[nn.Module], bool]
_Adapter = TypeVar("_Adapter", bound=Adapter)
_REGISTRY: dict[Any, Adapter] = {}  # the latest last


def adapter(kind: Kind) -> Callable[[_Adapter], _Adapter]:
    """Decorator: teach `coterie.nn.swap` how a kind of modules attends.

    The function takes the module and what its `forward` takes, and returns what that returns. It gets q, k, v, scale
    and masks from the call, passes them to `torch.nn.functional.scaled_dot_product_attention`, where the mechanism then
    runs, and puts the answer back. So it can be tested without Coterie: it must give what the module gives.
    What it does not take, it refuses, as any function does.

    Args:
        kind: a class, whose subclasses are meant too if they keep its `forward`; the name of one
            ("package.module.Class"), so that nothing is imported; or a function that looks at a module and says whether
            it is meant. Later ones go first.

    Example:
        >>> import coterie, torch
        >>> import torch.nn.functional as F
        >>> class ByHand(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x @ x.mT).softmax(-1) @ x
        >>> @coterie.nn.adapter(ByHand)
        ... def by_hand(module, x):
        ...     return F.scaled_dot_product_attention(x, x, x, scale=1.0)
        >>> model = torch.nn.Sequential(ByHand())
        >>> x = torch.randn(2, 50, 8)
        >>> dense = model(x)
        >>> with coterie.nn.swap(model, "full") as swapped:
        ...     print(swapped.replaced, torch.allclose(model(x), dense, atol=1e-5))
        ['0'] True
    """
    wanted = 'a class, "package.module.Class", or a function of a module'
    expect_type(isinstance(kind, str) or callable(kind), "kind", wanted, type(kind).__name__)
    is_module = not isinstance(kind, type) or issubclass(kind, nn.Module)
    expect_type(is_module, "kind", "a class of torch.nn.Module", kind)

    def enter(function: _Adapter) -> _Adapter:
        expect_type(callable(function), "adapter", "a function (module, …)", type(function).__name__)
        _REGISTRY.pop(kind, None)
        _REGISTRY[kind] = function
        return function

    return enter


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter that knows a module, if there is one. It says what the forward of a class does, and not what one does
    that a subclass or a single module has in its place."""
    if "forward" in vars(module):
        return None
    found = (function for kind, function in reversed(_REGISTRY.items()) if _means(kind, module))
    return next(found, None)


def _means(kind: Any, module: nn.Module) -> bool:
    if isinstance(kind, str | type):
        meant = _class(kind, module)
        return meant is not None and type(module).forward is meant.forward
    return bool(kind(module))


def _class(kind: str | type, module: nn.Module) -> Any:
    """The class that a kind is, if a module is of it."""
    if isinstance(kind, type):
        return kind if isinstance(module, kind) else None
    return next((each for each in type(module).__mro__ if f"{each.__module__}.{each.__qualname__}" == kind), None)


def attends_by_hand(module: nn.Module) -> bool:
    """Whether a module looks like attention, has a softmax in its own code, and no SDPA; or an adapter knows its class,
    but not its forward."""
    known = any(isinstance(kind, str | type) and _class(kind, module) is not None for kind in _REGISTRY)
    if known and adapter_of(module) is None:
        return "scaled_dot_product_attention" not in source(type(module).forward)
    if type(module).__module__.startswith("torch.") or not looks_like_attention(module):
        return False
    code = source_of(module)
    return "softmax" in code.lower() and "scaled_dot_product_attention" not in code


def source_of(module: nn.Module) -> str:
    """What the classes of a module say, torch's own apart; empty where it was written without a file."""
    mine = [each for each in type(module).__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    return "\n".join(map(source, mine))


@cache
def source(code: Any) -> str:
    """The code of a class or a function; empty where it was written without a file."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def check_known(unknown: dict[str, nn.Module]) -> None:
    """Refuse modules that no adapter knows."""
    listed = ", ".join(f"{name or 'the model itself'} ({type(module).__name__})" for name, module in unknown.items())
    expect(
        not unknown,
        "model",
        "modules whose attention an adapter knows (coterie.nn.adapter registers one), or a dict of the calls to choose",
        f"attention that is written out by hand in {listed}",
    )
