"""Dynamic convolution against its formula, with loops in float64."""

import doctest
import math

import pytest
import torch
from recipes.common import dynamic_convolution
from recipes.common.dynamic_convolution import DynamicConvolution, DynamicConvolutionLayer

from tests.cases import fails, mistakes, padding


def test_the_example_of_its_docstring():
    found = doctest.testmod(dynamic_convolution)
    assert found.attempted
    assert not found.failed


def formula(made, x, causal):
    """One sequence (N, width)."""
    length, width = x.shape
    size, kernel = width // made.heads, made.kernel
    inner = [made.enter.weight @ row + made.enter.bias for row in x]
    z = [row[:width] * (1 / (1 + torch.exp(-row[width:]))) for row in inner]
    rows = []
    for i in range(length):
        taps = (made.taps.weight @ z[i]).view(made.heads, kernel)
        found = []
        for c in range(width):
            weights = taps[c // size].exp() / taps[c // size].exp().sum()
            total = torch.zeros((), dtype=x.dtype)
            for t in range(1, kernel + 1):
                at = i + t - (kernel if causal else math.ceil((kernel + 1) / 2))
                if 0 <= at < length:
                    total = total + weights[t - 1] * z[at][c]
            found.append(total)
        rows.append(made.leave.weight @ torch.stack(found) + made.leave.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "kernel"), [(1, 1), (7, 3), (5, 4), (6, 15)])
def test_rows_and_gradients_are_the_formulas(causal, length, kernel):
    torch.manual_seed(0)
    made = DynamicConvolution(6, 3, kernel).double()
    x, push = torch.randn(2, 2, length, 6, dtype=torch.float64).unbind(0)
    x.requires_grad_()
    leaves = [x, *made.parameters()]
    found, wanted = made(x, is_causal=causal), torch.stack([formula(made, row, causal) for row in x])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, push), torch.autograd.grad(wanted, leaves, push), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_row_gets_what_it_would_get_alone(side):
    made = DynamicConvolution(6, 3, 5).double()
    real = padding(3, 9, [9, 4, 1], side)
    x = torch.randn(3, 9, 6, dtype=torch.float64)
    x[~real] = math.nan
    found = made(x, key_padding_mask=~real)
    assert (found[~real] == 0).all()
    for b in range(3):
        torch.testing.assert_close(found[b, real[b]], made(x[b, real[b]][None])[0])


def test_a_causal_layer_does_not_see_what_comes_later():
    layer = DynamicConvolutionLayer(6, 2, 12, 4).double()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    other = torch.cat([x[:, :5], torch.randn(1, 4, 6, dtype=torch.float64)], 1)
    assert torch.equal(layer(x, is_causal=True)[:, :5], layer(other, is_causal=True)[:, :5])
    assert not torch.allclose(layer(x)[:, :5], layer(other)[:, :5])


@mistakes(
    [
        (lambda: DynamicConvolution(6, 4, 3), ValueError, r"heads: expected a divisor of the width, 6, got 4"),
        (lambda: DynamicConvolution(6, 3, 0), ValueError, r"kernel: expected an int ≥ 1, got 0"),
        (lambda: DynamicConvolution(6, 3, 3)(torch.zeros(2, 6)), ValueError, r"x: expected shape \(batch, length, wid"),
        (
            lambda: DynamicConvolution(6, 3, 3)(torch.zeros(1, 2, 6), torch.zeros(1, 2)),
            TypeError,
            r"key_padding_mask: expected dtype torch.bool \(True = padding\), got torch.float32",
        ),
    ]
)
def test_refusals(case):
    fails(case)
