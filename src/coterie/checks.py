"""How Coterie complains: the argument, what was expected, what came."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from operator import index
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad

SECOND_DERIVATIVE = (
    "coterie.attention has no second derivative: its backward pass recomputes scores and is not itself "
    "differentiable. Use first-order gradients, or torch's scaled_dot_product_attention where you need more."
)

FORWARD_MODE = (
    "coterie.attention has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp, jacfwd, hessian). "
    "Use backward(), torch.autograd.grad or torch.autograd.functional.jacobian."
)
TRANSFORM = (
    "coterie.attention takes no torch.func transform (grad, vjp, jacrev, vmap) and no is_grads_batched. Take "
    "backward(), torch.autograd.grad or torch.autograd.functional.jacobian for derivatives, the batch axis for vmap."
)


def expect(condition: bool, name: str, expected: str, got: object, *values: object) -> None:
    """Raise `ValueError: name: expected …, got …` unless the condition holds.

    What is expected may be a format of `values`. Sizes belong there, not into an f-string: writing a size down makes it
    a constant of a graph that is being compiled, which then serves no other.

    >>> expect(False, "key_mask", "shape {}", (2, 64), (2, 128))
    Traceback (most recent call last):
    ValueError: key_mask: expected shape (2, 128), got (2, 64)
    """
    if not condition:
        raise ValueError(f"{name}: expected {_filled(expected, values)}, got {got}")


def expect_type(condition: bool, name: str, expected: str, got: object, *values: object) -> None:
    """Raise `TypeError: name: expected …, got …` unless the condition holds; `values` as in `expect`."""
    if not condition:
        raise TypeError(f"{name}: expected {_filled(expected, values)}, got {got}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """What to say behind a name that nobody knows: the one that looks most like it; "" if none does.

    >>> did_you_mean("nearfar", ["near-far", "smyrf"]), did_you_mean("full", ["near-far", "smyrf"])
    (" (did you mean 'near-far'?)", '')
    """
    close = get_close_matches(str(name).strip().lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _filled(expected: str, values: tuple[object, ...]) -> str:
    return expected.format(*values) if values else expected


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int, or a size that stands for any in a traced graph; a bool is neither."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def expect_int(name: str, value: object, *, at_least: int, at_most: int = 2**31 - 1) -> None:
    """The value must be an int (a bool is not one) in [at_least, at_most]."""
    expect_type(is_int(value), name, "an int", type(value).__name__)
    expect(is_int(value) and value >= at_least, name, "an int ≥ {}", value, at_least)
    expect(is_int(value) and value <= at_most, name, "an int ≤ {}", value, at_most)


def expect_seed(value: object) -> None:
    """The argument `seed` must be an int ≥ 0 that fits 63 bits."""
    expect_int("seed", value, at_least=0, at_most=2**63 - 1)


def expect_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a function does not know, as Python itself would."""
    allowed = set(known)
    for name in given:
        if name not in allowed:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """The value must be one of the choices, which the error lists."""
    if value not in choices:
        expect(False, name, "one of " + ", ".join(map(repr, choices)), repr(value))


def check_scale(scale: float | None, dim: int) -> float:
    """The scale of the scores; 1/√D by default."""
    if scale is None:
        return 1.0 / math.sqrt(index(dim))
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    expect_type(number, "scale", "a number", type(scale).__name__)
    expect(abs(scale) < math.inf, "scale", "a finite number", scale)  # isfinite is not traced
    return float(scale)


def check_dropout(dropout_p: float) -> None:
    """A probability."""
    number = isinstance(dropout_p, int | float) and not isinstance(dropout_p, bool)
    expect_type(number, "dropout_p", "a number", type(dropout_p).__name__)
    expect(0.0 <= dropout_p <= 1.0, "dropout_p", "a probability in [0, 1]", dropout_p)


def check_flag(name: str, value: object) -> None:
    """A bool, and nothing that merely looks like one."""
    expect_type(isinstance(value, bool), name, "a bool", type(value).__name__)


def check_token_mask(
    name: str, mask: Tensor | None, shape: tuple[int, int], device: torch.device, *, real: bool = True
) -> None:
    """A (batch, length) bool mask, True for real tokens, or for the others."""
    if mask is None:
        return
    meaning = "real token" if real else "padding"
    expect_type(isinstance(mask, Tensor), name, "a tensor", type(mask).__name__)
    expect(tuple(mask.shape) == shape, name, "shape {}", tuple(mask.shape), shape)
    expect_type(mask.dtype == torch.bool, name, "dtype torch.bool (True = {})", mask.dtype, meaning)
    expect(mask.device == device, name, "device {}", mask.device, device)


def check_transforms(*inputs: object) -> None:
    """Refuse derivatives that would silently be 0, and transforms that there is no rule for."""
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        # A graph does not see tangents, so it is compiled for calls outside of forward mode alone.
        if forward_mode:
            raise RuntimeError(FORWARD_MODE)
        return
    functorch = torch._C._functorch
    for x in inputs:
        if not isinstance(x, Tensor):
            continue
        if forward_mode and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(FORWARD_MODE)
        if functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x):
            raise RuntimeError(TRANSFORM)
