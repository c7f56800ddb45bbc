"""Planning on a GPU, in Triton's interpreter: the plans of the reference, and nothing that the host would wait for."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import coterie
from coterie import planning
from coterie.call import Call
from coterie.engine.flat import Inputs
from coterie.planning import best_keys, largest, lloyd, search, triton
from coterie.planning.orders import Parts, top_indices
from coterie.planning.steps import NearSearch
from tests.cases import CAUSAL, MECHANISMS, padding, tensors
from tests.planning.test_near_keys import Case

pytest.importorskip("triton")
ONE_EACH = [next(n for n, m in MECHANISMS.items() if type(m) is each) for each in coterie.list_mechanisms().values()]
CALLS = [(n, False) for n in MECHANISMS] + [
    (n, True) for n in CAUSAL if n.startswith(("near-far", "reformer", "smyrf"))
]


@pytest.fixture(autouse=True)
def _many_rows_in_a_program(monkeypatch):
    """The interpreter takes as long for a program of many rows as for one of few."""
    monkeypatch.setattr(largest, "_ROWS", 64)
    monkeypatch.setattr(best_keys, "_ROWS", 64)
    monkeypatch.setattr(best_keys, "_KEYS", 512)


def whole_numbers(*shape, seed):
    """Few of them: full of ties, and nothing that float32 would round."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def plans(name, q, k, causal, mask):
    settings = {"key_mask": mask, "is_causal": causal, "layer": 3}
    return [MECHANISMS[name].plan(q, k, backend=b, **settings).validate() for b in ("reference", "triton")]


@pytest.mark.parametrize(("name", "causal"), CALLS)
def test_plans_equal_the_references_on_whole_numbers(name, causal):
    q, k = whole_numbers(2, 2, 41, 5, seed=1), whole_numbers(2, 1, 41, 5, seed=2)
    reference, ours = plans(name, q, k, causal, padding(2, 41, [41, 23], "scattered"))
    assert torch.equal(reference.to_dense(), ours.to_dense())


@pytest.mark.parametrize("name", ["smyrf", "clustered", "improved-euclidean", "near-far", "routing"])
def test_plans_differ_from_the_references_only_at_ties(name):
    """No two random rows tie: the plans are equal, too."""
    q, k, _ = tensors(1, 2, 50, 61, dim=7, dtype=torch.float32)
    reference, ours = plans(name, q, k, False, None)
    assert torch.equal(reference.to_dense(), ours.to_dense())


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("name", ONE_EACH)
def test_few_tokens(name, length):
    q, k = whole_numbers(1, 2, length, 4, seed=1), whole_numbers(1, 2, length, 4, seed=2)
    reference, ours = plans(name, q, k, name in CAUSAL, None)
    assert torch.equal(reference.to_dense(), ours.to_dense())


def test_wild_numbers_count_as_nothing():
    q, k = whole_numbers(1, 1, 20, 4, seed=1), whole_numbers(1, 1, 20, 4, seed=2)
    q[0, 0, 3, 1], k[0, 0, 7, 2] = float("inf"), float("nan")
    for name in ("smyrf", "clustered-euclidean", "near-far"):
        reference, ours = plans(name, q, k, False, None)
        assert torch.equal(reference.to_dense(), ours.to_dense())


def test_parts_without_a_known_size_are_halved_all_the_same():
    x = whole_numbers(1, 1, 12, 3, seed=4)
    order = torch.arange(12, dtype=torch.int32)[None]
    start, stop = (torch.tensor([bounds], dtype=torch.int32) for bounds in ([0, 7], [7, 12]))
    leaves, together = torch.tensor([[3, 2]]), torch.tensor([1])
    want = coterie.planning.reference.halve(x, Parts(order, start, stop), leaves, 3, together)
    assert torch.equal(triton.halve(x, Parts(order, start, stop), leaves, 3, together), want)


# --- small parts, each in one program ---------------------------------------------------------------------------------


def small_parts(*, dim=5, clusters=4, **options):
    """Seven parts of two samples, one of them empty and one with fewer rows than clusters, whose rows lie anywhere."""
    x = whole_numbers(2, 3, 57, dim, seed=5)
    order = torch.stack([torch.randperm(57), torch.randperm(57)]).int()
    start = torch.tensor([[0, 7, 7, 30, 31, 33, 50], [2, 3, 9, 21, 21, 40, 41]], dtype=torch.int32)
    stop = torch.tensor([[7, 7, 30, 31, 33, 50, 54], [3, 9, 21, 21, 40, 41, 57]], dtype=torch.int32)
    counts = torch.randint(1, clusters + 1, (2, 7))
    settings = {"counts": counts, "seed": 3, "layer": 2, **options}
    return x, Parts(order, start, stop), clusters, settings


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"per_head": False}, {"sample": 2}], ids=["plain", "shared", "sample"])
def test_one_program_clusters_a_small_part_as_the_reference_does(iterations, options, monkeypatch):
    monkeypatch.setattr(lloyd, "lloyd", None)  # what is for large parts
    x, parts, clusters, settings = small_parts(**options)
    found = triton.kmeans(x, parts, clusters, iterations, **settings)
    want = coterie.planning.reference.kmeans(x, parts, clusters, iterations, **settings)
    assert torch.equal(found[0], want[0])
    exist = (torch.arange(clusters) < settings["counts"][..., None]) & (parts.sizes > 0)[..., None]
    ours, theirs = (each.unflatten(2, (7, clusters)).movedim(1, 3)[exist] for each in (found[1], want[1]))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "clusters"), [(1, 1), (33, 31), (64, 32), (100, 16)])
def test_a_small_part_gets_what_a_large_one_gets(dim, clusters, monkeypatch):
    x, parts, _, settings = small_parts(dim=dim, clusters=clusters)
    small = triton.kmeans(x, parts, clusters, 2, **settings)
    monkeypatch.setattr(lloyd, "_small", lambda rows, centroids: False)
    large = triton.kmeans(x, parts, clusters, 2, **settings)
    assert torch.equal(small[0], large[0])
    torch.testing.assert_close(small[1], large[1], rtol=1e-6, atol=1e-6)


def test_parts_that_are_no_larger_than_a_sample_are_trained_on_as_they_are(monkeypatch):
    x, parts, clusters, settings = small_parts(sample=23)
    known = Parts(parts.order, parts.start, parts.stop, most=23)
    want = triton.kmeans(x, parts, clusters, 2, **settings)
    monkeypatch.setattr(triton, "_training_sample", None)
    assert torch.equal(triton.kmeans(x, known, clusters, 2, **settings)[0], want[0])


# --- the largest scores -----------------------------------------------------------------------------------------------


def by_sorting(scores, seen, count):
    """Python's own sort: the largest first, ties by position; what is taken, by position, then 0."""
    found = torch.zeros(*scores.shape[:-1], count, dtype=torch.int64)
    rows = zip(
        *(x.expand_as(y).flatten(0, -2) for x, y in ((scores, scores), (seen, scores), (found, found))), strict=True
    )
    for row, there, target in rows:
        order = sorted((-score, j) for j, score in enumerate(row.tolist()) if there[j])
        top = sorted(j for _, j in order[:count])
        target[: len(top)] = torch.tensor(top, dtype=torch.int64)
    return found


SCORES = {
    "random": torch.randn(1, 2, 5, 150),
    "ties": torch.randint(-2, 3, (1, 2, 5, 150)).float(),
    "zeros of both signs": torch.randint(-1, 2, (1, 2, 5, 150)).float() * 0.0,
    "wide": torch.randn(1, 2, 5, 150) * 10.0 ** torch.randint(-44, 38, (1, 2, 5, 150)),
    "double": torch.randn(1, 2, 5, 150, dtype=torch.float64),
    "one": torch.randn(1, 2, 5, 1),
}


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("kind", SCORES)
def test_the_largest_scores_are_those_that_a_sort_finds(kind, rows, monkeypatch):
    monkeypatch.setattr(largest, "_ROWS", rows)
    scores = SCORES[kind]
    seen = torch.rand(1, 5, scores.shape[-1]) < torch.tensor([0.0, 0.02, 0.5, 0.9, 1.0])[:, None]
    for count in (1, min(7, scores.shape[-1]), scores.shape[-1]):
        want = by_sorting(scores.float(), seen[:, None].expand_as(scores), count)
        assert torch.equal(largest.largest_seen(scores, seen, count), want)


def test_scores_that_no_number_holds_count_as_the_reference_has_it():
    scores = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 3e38, -3e38])[None, None, None]
    seen = torch.ones(1, 1, 6, dtype=torch.bool)
    want = top_indices(scores, seen, 4).sort(-1).values
    assert torch.equal(largest.largest_seen(scores, seen, 4), want)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_some_rows_at_a_time_give_the_same_plan(causal, monkeypatch):
    """However long the input is, no more of them are in memory."""
    seen, find = [], largest.largest_op

    def watched(scores: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        seen.append(scores.numel())
        return find(scores, *more)

    monkeypatch.setattr(largest, "largest_op", watched)
    q, k = whole_numbers(1, 2, 61, 5, seed=1), whole_numbers(1, 1, 61, 5, seed=2)
    (reference, ours), whole = plans("topk", q, k, causal, None), max(seen)
    monkeypatch.setattr(triton, "_BUDGET", 700)
    seen.clear()
    in_parts = plans("topk", q, k, causal, None)[1]
    assert max(seen) <= 700 < whole
    assert torch.equal(ours.to_dense(), reference.to_dense())
    assert torch.equal(in_parts.to_dense(), reference.to_dense())


# --- the best keys of groups, in the clusters that they choose --------------------------------------------------------


def same_picks(case, search):
    for found, want in zip(case.run(triton, search), case.run(planning.reference, search), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("tile", [(2, 16), (8, 64), (64, 512)], ids=str)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_best_keys_are_those_of_the_reference(tile, whole, wild, monkeypatch):
    """Ragged clusters, some of them empty, and tiles of groups that do not search together."""
    monkeypatch.setattr(best_keys, "_ROWS", tile[0])
    monkeypatch.setattr(best_keys, "_KEYS", tile[1])
    case = Case(tile[0], keys=60, dim=24 if wild else 5, whole=whole, wild=wild)
    same_picks(case, NearSearch(7, 15, wide=False))


@pytest.mark.parametrize(
    ("keys", "near", "reach"), [(0, 0, 1), (1, 1, 1), (5, 0, 5), (9, 9, 1), (33, 1, 1), (90, 12, 90)]
)
def test_best_keys_of_few_and_of_all(keys, near, reach):
    same_picks(Case(3, keys=keys, key_heads=1), NearSearch(near, max(1, near, reach), wide=True))


def test_best_keys_that_all_tie_are_the_first():
    case = Case(1, keys=70, dim=8).seeing_all(70)
    case.tokens.raw_k.fill_(1.0)
    case.tokens.__dict__.pop("k", None)
    same_picks(case, NearSearch(20, 30, wide=False))


@pytest.mark.parametrize("causal", [False, True])
def test_some_chunks_at_a_time_give_the_same_plan(causal, monkeypatch):
    q, k = whole_numbers(1, 2, 61, 5, seed=1), whole_numbers(1, 1, 61, 5, seed=2)
    monkeypatch.setattr(search, "_BUDGET", 700)
    reference, ours = plans("near-far", q, k, causal, None)
    assert torch.equal(ours.to_dense(), reference.to_dense())


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                strides = zip(x.shape, x.stride(), strict=True)
                self.numbers = max(self.numbers, math.prod(n for n, stride in strides if stride))
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length(causal):
    """With its logarithm, if causal: four times the length, and six levels of means where there were four.

    Shapes follow from shapes, so plans of lengths that nobody computes here say what is in memory.
    """
    found = []
    for length in (1 << 15, 1 << 17):
        with FakeTensorMode(), Largest() as made:
            q, k = (torch.empty(1, 2, length, 64) for _ in range(2))
            coterie.NearFar().plan(q, k, is_causal=causal, backend="triton")
        found.append(made.numbers)
    assert found[1] <= (6.1 if causal else 4.1) * found[0]


# --- nothing that the host waits for ----------------------------------------------------------------------------------

WAITS = {
    "aten::_local_scalar_dense",  # .item(), int(), bool()
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::_unique2",
    "aten::unique_dim",
}


class Waits(TorchDispatchMode):
    """Remembers operations for whose result, or its shape, the host would have to wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        masked = name.startswith("aten::index") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITS or masked:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch):
    """Counts outside of kernels: their interpreter reads everything on the host."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def unseen(self, *args, **kwargs):
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)
    with Waits() as waits:
        yield waits.found


def test_the_check_sees_who_waits(monkeypatch):
    with counting(monkeypatch) as found:
        x = torch.arange(3)
        int(x.max())
        x[x > 1]
        x.repeat_interleave(x)
    assert set(found) >= {"aten::_local_scalar_dense", "aten::repeat_interleave.Tensor"}
    assert len(found) >= 3


@pytest.mark.parametrize(
    ("name", "causal"),
    [("smyrf", True), ("clustered", False), ("improved-euclidean", False), ("near-far", False), ("near-far", True)]
    + [(name, False) for name in ("routing", "reformer", "topk", "local")],
)
def test_a_call_makes_the_host_wait_for_nothing(name, causal, monkeypatch):
    from coterie.engine.kernels import gradients, launches

    q, k, v = tensors(1, 2, 25, dim=4, dtype=torch.float32)
    with counting(monkeypatch) as found:
        call = Call.of(q, k, v, is_causal=causal, backend="triton")
        plan = MECHANISMS[name].plan(q, k, is_causal=causal, backend="triton")
        given = Inputs.of(call, plan)
        out, lse, alone = launches.forward(given)
        gradients.backward(given, out, lse, out, lse, alone, False)
    assert found == []
