"""How Coterie complains: the argument, what was expected, what came."""

from __future__ import annotations

SECOND_DERIVATIVE = (
    "coterie.attention has no second derivative: its backward pass recomputes scores and is not itself "
    "differentiable. Use first-order gradients, or torch's scaled_dot_product_attention where you need more."
)


def expect(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise `ValueError: name: expected …, got …` unless the condition holds.

    >>> expect(False, "key_mask", "shape (2, 128)", (2, 64))
    Traceback (most recent call last):
    ValueError: key_mask: expected shape (2, 128), got (2, 64)
    """
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def expect_type(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise `TypeError: name: expected …, got …` unless the condition holds."""
    if not condition:
        raise TypeError(f"{name}: expected {expected}, got {got}")


def expect_int(name: str, value: object, *, at_least: int, at_most: int = 2**31 - 1) -> None:
    """The value must be an int (a bool is not one) in [at_least, at_most]."""
    expect_type(isinstance(value, int) and not isinstance(value, bool), name, "an int", type(value).__name__)
    expect(isinstance(value, int) and value >= at_least, name, f"an int ≥ {at_least}", value)
    expect(isinstance(value, int) and value <= at_most, name, f"an int ≤ {at_most}", value)


def expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """The value must be one of the choices, which the error lists."""
    expect(value in choices, name, "one of " + ", ".join(map(repr, choices)), repr(value))
