"""Induced set attention against the paper's formula, written with loops in float64."""

import math

import pytest
import torch

import coterie
from tests.cases import fails, mistakes, padding


def block(points=3, feedforward=None, width=8, heads=2):
    torch.manual_seed(0)
    made = coterie.nn.InducedSetAttention(width, heads, points, feedforward).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def norm(row, layer):
    mean = row.mean()
    return (row - mean) / torch.sqrt(((row - mean) ** 2).mean() + 1e-5) * layer.weight + layer.bias


def mab(x, y, part):
    """MAB(X, Y) row by row and head by head: x (N, D), y (M, D)."""
    width, heads = x.shape[1], part.attend.num_heads
    size = width // heads
    (wq, wk, wv), (bq, bk, bv) = part.attend.in_proj_weight.chunk(3), part.attend.in_proj_bias.chunk(3)
    rows = []
    for each in x:
        q, found = wq @ each + bq, []
        for head in range(heads):
            mine = slice(size * head, size * (head + 1))
            scores = [(q[mine] @ (wk @ other + bk)[mine]) / math.sqrt(size) for other in y]
            weights = torch.stack(scores).softmax(0)
            values = [weight * (wv @ other + bv)[mine] for weight, other in zip(weights, y, strict=True)]
            found.append(sum(values, torch.zeros(size, dtype=x.dtype)))
        h = norm(each + part.attend.out_proj.weight @ torch.cat(found) + part.attend.out_proj.bias, part.norm1)
        inner = (part.linear1.weight @ h + part.linear1.bias).clamp(min=0)
        rows.append(norm(h + part.linear2.weight @ inner + part.linear2.bias, part.norm2))
    return torch.stack(rows)


def formula(made, x):
    return mab(x, mab(made.points, x, made.gather), made.spread)


@pytest.mark.parametrize(("length", "points", "feedforward"), [(1, 1, None), (7, 3, 5), (13, 20, None)])
def test_rows_and_gradients_are_the_formulas(length, points, feedforward):
    made = block(points, feedforward)
    x, push = torch.randn(2, 2, length, 8, dtype=torch.float64).unbind(0)
    x.requires_grad_()
    leaves = [x, *made.parameters()]
    found, wanted = made(x), torch.stack([formula(made, row) for row in x])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, push), torch.autograd.grad(wanted, leaves, push), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("side", ["right", "left", "scattered"])
def test_a_padded_row_gets_what_it_would_get_alone_whatever_the_padding_holds(side):
    made = block()
    real = padding(4, 11, [11, 5, 1, 0], side)
    x = torch.randn(4, 11, 8, dtype=torch.float64)
    x[~real] = math.nan
    x.requires_grad_()
    found = made(x, key_padding_mask=~real)
    assert (found[~real] == 0).all()
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    assert (grad[~real] == 0).all()
    for b in range(3):
        one = x[b, real[b]].detach().requires_grad_()
        alone = made(one[None])[0]
        torch.testing.assert_close(found[b, real[b]], alone)
        torch.testing.assert_close(grad[b, real[b]], torch.autograd.grad(alone.square().sum(), one)[0])
    assert made(x[3:], key_padding_mask=~real[3:]).isfinite().all()  # nobody at all


def test_the_order_of_rows_does_not_matter():
    made = block()
    x, order = torch.randn(1, 9, 8, dtype=torch.float64), torch.randperm(9)
    torch.testing.assert_close(made(x[:, order]), made(x)[:, order])


def test_it_trains_in_float32_and_its_weights_are_kept():
    made = coterie.nn.InducedSetAttention(8, 2, points=4)
    again = coterie.nn.InducedSetAttention(8, 2, points=4)
    again.load_state_dict(made.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(made(x), again(x))
    made(x).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in made.parameters())


X = torch.zeros(2, 5, 8)
MADE = coterie.nn.InducedSetAttention(8, 2, points=4)


@mistakes(
    [
        (lambda: MADE(X, is_causal=True), ValueError, r"is_causal: expected False for induced points, which would mix"),
        (lambda: MADE(X, is_causal=1), TypeError, r"is_causal: expected a bool, got int"),
        (lambda: MADE([X]), TypeError, r"x: expected a tensor, got list"),
        (lambda: MADE(X[0]), ValueError, r"x: expected shape \(batch, length, 8\), got \(5, 8\)"),
        (lambda: MADE(X[..., :4]), ValueError, r"x: expected shape \(batch, length, 8\), got \(2, 5, 4\)"),
        (lambda: MADE(X, torch.zeros(2, 4)), ValueError, r"key_padding_mask: expected shape \(2, 5\), got \(2, 4\)"),
        (lambda: MADE(X, torch.zeros(2, 5)), TypeError, r"dtype torch.bool \(True = padding\), got torch.float32"),
        (lambda: coterie.nn.InducedSetAttention(8, 3), ValueError, r"num_heads: expected a divisor of embed_dim, 8"),
        (lambda: coterie.nn.InducedSetAttention(8, 2, 0), ValueError, r"points: expected an int ≥ 1, got 0"),
        (lambda: coterie.nn.InducedSetAttention(8, 2, 2, 0), ValueError, r"dim_feedforward: expected an int ≥ 1"),
    ]
)
def test_refusals(case):
    fails(case)
