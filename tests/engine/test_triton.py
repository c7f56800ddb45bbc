"""The Triton kernels in their interpreter: the engine's own tests, in small, and what is theirs alone."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import coterie
from coterie.engine import triton
from coterie.engine.flat import Inputs
from coterie.plan import Plan, Round
from tests.cases import CAUSAL, MEANS, MECHANISMS, all_close, close, padding, tensors
from tests.engine import test_engine as semantics
from tests.fuzz import plans as fuzz

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_backend")


# --- the engine's semantics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in MEANS])
def test_equals_softmax_over_the_planned_pairs(name):
    semantics.test_equals_softmax_over_the_planned_pairs(name, 35)


@pytest.mark.parametrize("length", [1, 2])
def test_few_tokens(length):
    semantics.test_equals_softmax_over_the_planned_pairs("smyrf", length)


@pytest.mark.parametrize("name", ["smyrf", "local", "near-far", "reformer"])
def test_nobody_to_attend_to(name):
    for queries, keys in ((0, 5), (5, 0)):
        q, k, v = (x.requires_grad_() for x in tensors(1, 2, queries, keys))
        out, lse = coterie.attention(q, k, v, MECHANISMS[name], return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_mask_without_keys_has_a_gradient_without_numbers():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 5, 0))
    mask = torch.zeros(1, 2, 5, 0, requires_grad=True)
    out = coterie.attention(q, k, v, "smyrf", is_causal=True, attn_mask=mask)
    assert [x.numel() for x in torch.autograd.grad(out.sum(), (q, mask))] == [q.numel(), 0]


@pytest.mark.parametrize("name", [n for n in CAUSAL if n not in MEANS and not n.startswith("smyrf-")])
def test_causal_pairs(name):
    semantics.test_causal_pairs(name, 19, 27, 5)


def test_a_row_alone_with_the_future_attends_to_itself():
    semantics.test_a_row_alone_with_the_future_attends_to_itself()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(33, 47, False), (41, 41, True)])
def test_full_equals_sdpa_within_the_error_of_naive_attention(dtype, queries, keys, causal):
    semantics.test_full_equals_sdpa_within_the_error_of_naive_attention("triton", dtype, queries, keys, causal)


@pytest.mark.parametrize(("name", "causal"), [(n, False) for n in MECHANISMS] + [(n, True) for n in CAUSAL])
def test_gradients(name, causal):
    semantics.test_gradcheck(name, causal)


def test_gradients_of_a_float_mask_in_every_broadcast_shape():
    semantics.test_gradcheck_of_a_float_mask_in_every_broadcast_shape()


@pytest.mark.parametrize("name", ["smyrf-once", "local", "topk"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_pairs_are_looked_up_at_the_planned_pairs(name, kind):
    semantics.test_masks_of_pairs_are_looked_up_at_the_planned_pairs(name, kind)


def test_a_mean_query_obeys_a_bias_of_keys():
    semantics.test_a_mean_query_obeys_a_bias_of_keys()


def test_a_float_key_mask_that_says_more_is_a_bias_too():
    semantics.test_a_float_key_mask_that_says_more_is_a_bias_too()


def test_random_plans_against_loops():
    semantics.test_random_plans_against_loops()


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_a_key_stands_for_as_many_as_its_group_counts(kind):
    semantics.test_a_key_stands_for_as_many_as_its_group_counts(kind, biased=True)


def test_key_means_with_bias_and_positions_equal_the_formula_and_its_gradient():
    semantics.test_key_means_with_bias_and_positions_equal_the_formula_and_its_gradient()


def test_dropout_drops_weights_of_pairs_in_forward_and_backward():
    semantics.test_dropout_drops_weights_of_pairs_in_forward_and_backward()


def test_a_second_derivative_is_refused_in_words():
    semantics.test_a_second_derivative_is_refused_in_words("smyrf")


def test_a_wild_upstream_gradient_stays_with_the_keys_of_its_row():
    semantics.test_a_wild_upstream_gradient_stays_with_the_keys_of_its_row()


def test_only_the_gradients_asked_for():
    semantics.test_only_the_gradients_asked_for()


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_against_the_oracle(seed):
    case = fuzz.draw(seed)
    if case.tensors[0].dtype in (torch.float64, torch.bfloat16):  # the interpreter multiplies bfloat16 wrongly
        case.tensors = tuple(x.float() for x in case.tensors)  # type: ignore[assignment]
        case.mask = case.mask.float() if case.mask is not None and case.mask.is_floating_point() else case.mask
    fuzz.check(case, "triton")


# --- what is theirs alone ---------------------------------------------------------------------------------------------


def compare(q, k, v, plan, *, tolerance=1.0, **settings):
    """Forward and backward, lse included, against the reference in float64."""
    found = []
    for backend, dtype in (("triton", q.dtype), ("reference", torch.float64)):
        inputs = a, b, c = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        if "attn_mask" in settings:
            settings["attn_mask"] = settings["attn_mask"].detach().to(dtype).requires_grad_()
            inputs = [*inputs, settings["attn_mask"]]
        torch.manual_seed(5)  # of dropout
        out, lse = coterie.grouped_attention(a, b, c, plan, backend=backend, **settings)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(dtype)
        loss = (out * weight).sum() + torch.where(lse.isfinite(), lse, 0).square().sum()
        found.append((out, lse, *torch.autograd.grad(loss, inputs)))
    all_close(*found, loose=tolerance)


@pytest.mark.parametrize("name", ["smyrf", "improved", "near-far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_gqa_and_another_value_dim(name, dtype):
    q, k, v = tensors(2, 2, 29, 37, dim=20, value_dim=40, key_heads=1, dtype=dtype)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # as models lay them out
    key_mask, query_mask = padding(2, 37, [37, 21], "left"), padding(2, 29, [18, 29])
    plan = MECHANISMS[name].plan(q.float(), k.float(), key_mask=key_mask, query_mask=query_mask, backend="native")
    for x, mask in ((q, query_mask), (k, key_mask), (v, key_mask)):
        x.transpose(1, 2)[~mask] = math.nan
    settings = {"key_mask": key_mask, "query_mask": query_mask}
    compare(q, k, v, plan, tolerance=100.0 if dtype == torch.float16 else 1.0, **settings)


@pytest.mark.parametrize("dim", [1, 17, 96, 256])
def test_head_dims(dim):
    q, k, v = tensors(1, 1, 19, 23, dim=dim, value_dim=max(1, dim // 2), dtype=torch.float32)
    compare(q, k, v, coterie.Smyrf(rounds=2, cluster_size=8).plan(q, k, backend="native"))


def ragged(heads, rows, keys, *, windowed):
    """A round of five groups over several tiles: one without queries, one without keys, and keys listed twice."""
    order = torch.rand(1, heads, rows).argsort(-1).int()
    offsets = torch.tensor([0, rows // 2 + 9, rows // 2 + 9, rows - 8, rows - 3, rows - 1]).int().expand(1, heads, -1)
    bounds = torch.randint(0, keys + 21, (2, 1, heads, 5)).sort(0).values.int()
    bounds[:, ..., 0] = torch.tensor([3, keys + 9]).view(2, 1, 1)
    bounds[1, ..., 3] = bounds[0, ..., 3]
    key_order = torch.randint(0, keys, (1, heads, keys + 20)).int()
    bias = torch.randn(key_order.shape)
    bias[torch.rand(bias.shape) < 0.1] = -math.inf
    skip = torch.randint(0, keys, (1, heads, rows, 3)).sort(-1).values.int()
    window = (-20, 31) if windowed else None
    return Round(order, offsets, key_order, bounds[0], bounds[1], bias=bias, skip=skip, window=window)


@pytest.mark.parametrize("kind", ["causal", "once", "dropout", "a mask", "float16 and a mask"])
def test_several_tiles_with_everything_at_once(kind):
    """Padding, grouped heads, another value dim, biases and lists of keys to skip, over the edges of tiles."""
    rows, keys, dtype = 47, 41, torch.float16 if "float16" in kind else torch.float32
    q, k, v = tensors(1, 2, rows, keys, dim=20, value_dim=40, key_heads=1, dtype=dtype)
    plan = Plan(
        num_queries=rows,
        num_keys=keys,
        key_heads=1,
        rounds=tuple(ragged(2, rows, keys, windowed=r == 1) for r in range(2)),
        offset=torch.tensor([-9], dtype=torch.int32),
        causal=kind == "causal",
        duplicates="once" if kind == "once" else "count",
    )
    settings: dict[str, Any] = {"key_mask": padding(1, keys, [35], "left"), "query_mask": padding(1, rows, [44])}
    if kind == "dropout":
        settings["dropout_p"] = 0.3
    if "a mask" in kind:
        mask = torch.randn(1, 2, rows, keys, dtype=dtype)
        mask[torch.rand(mask.shape) < 0.2] = -math.inf
        mask[:, :, 11] = -math.inf  # a query that nobody is left to
        settings["attn_mask"] = mask
    compare(q, k, v, plan, tolerance=100.0 if dtype == torch.float16 else 1.0, **settings)


def test_query_heads_that_share_a_plan_are_pooled():
    """Small groups, two query heads on each key head, one plan for all: as blocks of a window would be."""
    rows, size = 22, 4
    groups = -(-rows // size)
    order = torch.randperm(rows).int().expand(1, 4, -1)
    offsets = (torch.arange(groups + 1) * size).clamp(max=rows).int().expand(1, 4, -1)
    key_order = torch.randperm(30).int().expand(1, 4, -1)
    starts, stops = ((torch.arange(groups) * 3 + more).int().expand(1, 4, -1) for more in (0, 9))
    each = Round(order, offsets, key_order, starts, stops, window=(-9, 12))
    offset = torch.full((1,), 8, dtype=torch.int32)
    plan = Plan(num_queries=rows, num_keys=30, key_heads=2, rounds=(each,), offset=offset, causal=True)
    q, k, v = tensors(1, 4, rows, 30, key_heads=2, dtype=torch.float32)
    from coterie.engine.kernels import launches, rounds

    call = coterie.call.Call.of(q, k, v)
    (given,) = rounds.given_rounds(Inputs.of(call, plan))
    sizes = launches.Prepared.of(Inputs.of(call, plan)).call
    assert rounds.pooled_heads(given, sizes, once=False) == 2
    assert rounds.pooled_heads(given, sizes, once=True) == 1
    compare(q, k, v, plan)


@pytest.mark.parametrize("atomics", [False, True])
def test_many_slots_a_key_in_portions(atomics, monkeypatch):
    """More key slots than are kept in memory at a time, and a mask of keys to differentiate."""
    from coterie.engine.kernels import gradients

    monkeypatch.setenv("COTERIE_ATOMICS", str(int(atomics)))
    monkeypatch.setattr(gradients, "_LEAST", 7)
    q, k, v = tensors(1, 2, 13, 9, key_heads=1, dtype=torch.float32)
    compare(q, k, v, coterie.TopK(k=5).plan(q, k, backend="native"))


def test_gradients_of_a_mask_that_lies_otherwise():
    q, k, v = tensors(1, 2, 7, 9, dtype=torch.float32)
    plan = coterie.Full().plan(q, k, backend="native")
    leaf = torch.randn(2, 9, 7, requires_grad=True)
    found = []
    for backend in ("triton", "native"):
        for mask in (leaf.mT[None], leaf[:1].mT.expand(2, -1, -1)[None]):
            out = coterie.grouped_attention(q, k, v, plan, attn_mask=mask, backend=backend).out
            found.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    all_close(found[:2], found[2:])


def test_gradients_are_the_same_in_every_run():
    q, k, v = (x.requires_grad_() for x in tensors(2, 2, 21, dtype=torch.float32))
    plan = coterie.Smyrf(rounds=2, cluster_size=5).plan(q, k, backend="native")

    def run():
        return torch.autograd.grad(coterie.grouped_attention(q, k, v, plan).out.square().sum(), (q, k, v))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


class Adds(TorchDispatchMode):
    """Remembers operations that a GPU adds up with in whatever order its threads come."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if name in ("index_add", "scatter_add", "scatter_reduce") and out.is_floating_point():
            self.found.append(name)
        return out


@pytest.mark.parametrize("name", ["smyrf", "clustered", "improved", "near-far", "borrowed"])
def test_nothing_is_added_in_an_order_that_changes(name):
    """Rows that several queries borrow get the sum of their gradients: PyTorch's own kernels would use atomics."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 25, dtype=torch.float32))
    plan = MECHANISMS["improved" if name == "borrowed" else name].plan(q, k, backend="native")
    if name == "borrowed":
        plan = replace(plan, mass=plan.answer)
    with Adds() as adds:
        out, lse = coterie.grouped_attention(q, k, v, plan)
        torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    assert adds.found == []
    compare(q, k, v, plan)


def test_rows_that_are_taken_add_up_their_gradients_in_order():
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    rows = torch.randint(0, 5, (2, 3, 40))
    grad = torch.randn(2, 3, 40, 7) * 10.0 ** torch.randint(-3, 4, (2, 3, 40, 1))
    found = triton.rows_at(x, rows)
    want = torch.zeros(2, 3, 5, 7)
    for b, h, n in itertools.product(range(2), range(3), range(40)):
        assert torch.equal(found[b, h, n], x[b, h, rows[b, h, n]])
        want[b, h, rows[b, h, n]] += grad[b, h, n]
    assert torch.equal(torch.autograd.grad(found, x, grad)[0], want)


def test_values_without_columns_leave_the_gradient_of_lse():
    q, k, v = tensors(1, 2, 9, 11, value_dim=0, dtype=torch.float32)
    compare(q, k, v, coterie.Full().plan(q, k, backend="native"))


@pytest.mark.parametrize("name", ["smyrf", "clustered", "clustered-euclidean", "improved", "near-far", "reformer"])
def test_only_the_first_axis_of_a_grid_grows_with_heads_and_samples(name, monkeypatch):
    """A GPU takes 65,535 programs along all others. Nothing runs here: grids are looked at."""
    from triton.runtime.interpreter import GridExecutor

    grids = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **kwargs: grids.append(self.grid))
    q, k, v = torch.zeros(3, 25, 2, 40, 1).requires_grad_().unbind(0)
    coterie.attention(q, k, v, MECHANISMS[name], is_causal=name in CAUSAL).sum().backward()
    assert max(grid[0] for grid in grids) >= 50
    assert all(size <= 8 for grid in grids for size in grid[1:])  # programs that share the rows of a tile of keys


def test_products_are_tf32_where_pytorch_was_told_so():
    """By `fp32_precision`, after which the older question is an error."""
    from coterie.engine.kernels.precision import precision

    matmul = torch.backends.cuda.matmul
    before, q = matmul.fp32_precision, tensors(1, 1, 5, dtype=torch.float32)[0]
    assert precision(torch.float32) == "ieee"
    try:
        matmul.fp32_precision = "tf32"
        assert (precision(torch.float32), precision(torch.float16)) == ("tf32", "ieee")
        assert coterie.attention(q, q, q, "full").isfinite().all()
    finally:
        matmul.fp32_precision = before
    torch.set_float32_matmul_precision("high")
    assert precision(torch.float32) == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert precision(torch.float32) == "ieee"


def test_before_torch_2_9_tf32_is_asked_for_in_another_way(monkeypatch):
    from coterie.engine.kernels.precision import precision

    class Older:
        allow_tf32 = False

    monkeypatch.setattr(torch.backends.cuda, "matmul", Older)
    assert precision(torch.float32) == "ieee"
    Older.allow_tf32 = True
    assert precision(torch.float32) == "tf32"


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_draws_what_the_reference_draws(causal):
    q, k, v = tensors(2, 2, 15, key_heads=1, dtype=torch.float32)
    plan = coterie.Smyrf(rounds=2, cluster_size=4).plan(q, k, is_causal=causal, backend="native")
    compare(q, k, v, plan, dropout_p=0.4)
    out = coterie.grouped_attention(q, k, v, plan, dropout_p=1.0).out
    assert (out == 0).all()


def test_a_value_that_is_not_finite_reaches_only_whom_it_meets():
    q, k, v = tensors(1, 1, 12, dtype=torch.float32)
    v[0, 0, 4] = math.inf
    out = coterie.attention(q, k, v, "full", is_causal=True)
    assert out[0, 0].isfinite().all(-1).tolist() == [i < 4 for i in range(12)]


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("smyrf:cluster_size=8,rounds=2", True),
        ("near-far:near=4", False),
        ("near-far:near=4,chunk=8", True),
        ("improved-clustered:clusters=3,topk=4", False),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_compiles_into_one_graph_with_gradients(name, causal):
    def run(q, k, v):
        return coterie.attention(q, k, v, name, is_causal=causal, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (21, 26):
        q, k, v = (x.requires_grad_() for x in tensors(1, 2, length, dtype=torch.float32))
        found, want = compiled(q, k, v), run(q, k, v)
        close(found, want)
        all_close(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, want)))


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 9, dtype=torch.float32))
    call = coterie.call.Call.of(q, k, v, backend="triton")
    plan = coterie.Local(window=3).plan(q, k, is_causal=True, backend="native")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton.attend_op, tuple(Inputs.of(call, plan)), test_utils=tests)
    rows = torch.randint(0, 9, (1, 2, 30))
    torch.library.opcheck(triton.take_op, (q, rows), test_utils=tests)
    torch.library.opcheck(triton.add_op, (torch.randn(1, 2, 30, 4), rows, 9), test_utils=tests[::2])


def test_it_is_the_interpreter_that_runs():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert coterie.backends()["triton"] == "available (in its interpreter, on the CPU)"
