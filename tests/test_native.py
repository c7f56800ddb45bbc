"""What the native engine promises beyond the reference: the same plans, the same bits, compiled graphs, safety."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.engine import native
from coterie.planning import native as planning
from tests.cases import CAUSAL, MECHANISMS, close, padding, tensors


def results(mechanism, q, k, v, **kwargs):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = coterie.attention(*inputs, mechanism, return_lse=True, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, lse, *torch.autograd.grad((out * weight).sum() + lse.sum(), inputs)


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2, 5), (111, 111), (300, 70), (70, 300)])
@pytest.mark.parametrize("grid", [True, False], ids=["exact", "rounded"])
def test_plans_equal_the_references(name, queries, keys, grid):
    """Always on exactly representable inputs; otherwise too, as doubtful comparisons are made again in float64."""
    q, k, _ = tensors(2, 4, queries, keys, dim=24, key_heads=2, dtype=torch.float32)
    if grid:
        q, k = ((x * 4).round() / 4 for x in (q, k))  # many ties
    mask = padding(2, keys, [keys, max(1, keys // 2)], "scattered")
    for causal in (False, True) if name in CAUSAL else (False,):
        plans = [
            MECHANISMS[name].plan(q, k, key_mask=mask, is_causal=causal, layer=3, backend=backend).validate()
            for backend in ("reference", "native")
        ]
        assert torch.equal(plans[0].to_dense(), plans[1].to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plans_of_short_floats_equal_the_references(dtype):
    q, k, _ = tensors(1, 2, 200, dim=16, dtype=dtype)
    q[0, 0, 3, 2], k[0, 1, 5, 1] = float("inf"), float("nan")
    for name, mechanism in MECHANISMS.items():
        reference, ours = (mechanism.plan(q, k, backend=b).to_dense() for b in ("reference", "native"))
        assert torch.equal(reference, ours), name


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(0, 2**40))
def test_radix_sort_is_the_reference_sort(scores, bits):
    from coterie.grouping import order_by

    values = torch.tensor(scores, dtype=torch.float32)
    mask = torch.tensor([bool(bits >> i & 1) for i in range(len(scores))])
    assert planning.order_by(values, mask).tolist() == order_by(values, mask).tolist()


def test_many_hamming_bits_and_clusters():
    q, k, _ = tensors(1, 2, 150, dtype=torch.float32)
    for bits, clusters in ((1, 3), (64, 40), (65, 5), (200, 200)):
        mechanism = coterie.Clustered(clusters=clusters, bits=bits)
        labels = [mechanism.plan(q, k, backend=b).answer for b in ("reference", "native")]
        assert torch.equal(*labels)


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("batch", "heads"), [(2, 3), (1, 1)])
def test_the_same_bits_for_any_number_of_threads(name, batch, heads):
    q, k, v = tensors(batch, heads, 333, dim=16, dtype=torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(results(MECHANISMS[name], q, k, v))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_copy_of_the_kernels_agrees(isa, tmp_path):
    """Each instruction set in a process of its own; the engine says which one it took."""
    code = f"""
import torch, coterie, coterie.engine.native as native
from tests.cases import MECHANISMS, tensors
from tests.test_native import results
q, k, v = tensors(1, 2, 111, dim=20, value_dim=12, dtype=torch.float32)
found = {{name: results(m, q, k, v) for name, m in MECHANISMS.items()}}
torch.save((native.instruction_set(), found), {str(tmp_path / "found.pt")!r})
"""
    env = {**os.environ, "COTERIE_ISA": isa}
    root = os.path.dirname(os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=env)
    name, found = torch.load(tmp_path / "found.pt")
    assert name == isa or native.instruction_set() == "portable"
    q, k, v = tensors(1, 2, 111, dim=20, value_dim=12, dtype=torch.float32)
    for mechanism, theirs in found.items():
        for a, b in zip(theirs, results(MECHANISMS[mechanism], q, k, v), strict=True):
            close(a, b)


# --- processes and threads -------------------------------------------------------------------------------------------


def test_several_python_threads_at_once():
    q, k, v = tensors(1, 2, 200, dtype=torch.float32)
    want = results("smyrf:cluster_size=16", q, k, v)
    wrong = []

    def work():
        for _ in range(5):
            found = results("smyrf:cluster_size=16", q, k, v)
            wrong.extend(not torch.equal(a, b) for a, b in zip(found, want, strict=True))

    team = [threading.Thread(target=work) for _ in range(4)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    assert len(wrong) == 4 * 5 * 5
    assert not any(wrong)


def test_forked_workers():
    code = """
import os, torch, coterie
q = torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
want = coterie.attention(q, q, q, "improved-clustered:clusters=8,topk=9")
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        again = coterie.attention(q, q, q, "improved-clustered:clusters=8,topk=9")
        os._exit(0 if torch.equal(again, want) else 1)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""
    # One thread in torch itself: its own OpenMP pool does not survive a fork, whatever runs on it.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, env=env)


# --- malformed plans at the op itself --------------------------------------------------------------------------------


def raw_call(query_means=(), key_means=(), tensors=None, **changes):
    def index(values):
        return torch.tensor(values, dtype=torch.int32)[None, None]

    parts = {
        "query_order": index([2, 0, 3, 1]),
        "query_offsets": index([0, 1, 4]),
        "key_order": index([4, 1, 0]),
        "key_start": index([0, 1]),
        "key_stop": index([2, 3]),
    }
    parts.update({name: index(values) for name, values in changes.items()})
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 5, 8)
    given = {"k": k, "v": k, "offset": torch.zeros(1, dtype=torch.int32)} | (tensors or {})
    bias, skip = ([given[name]] if name in given else [] for name in ("bias", "skip"))
    lists = (list(parts.values()), bias, skip, list(query_means), list(key_means), [len(bias), len(skip), 0, 0, 0])
    others = (given.get(name) for name in ("offset", "self_keys", "key_mask", "query_mask"))
    return native.attend_op(q, given["k"], given["v"], given.get("mask"), *lists, *others, None, False, False, 1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_order": [2, 0, 4, 1]}, r"rounds\[0\].query_order: expected indices in \[0, 4\), got 4"),
        ({"query_order": [2, 0, -1, 1]}, r"query_order: expected indices in \[0, 4\), got -1"),
        ({"query_order": [2, 0, 2, 1]}, r"query_order: expected each query at most once in a round"),
        ({"query_offsets": [1, 1, 4]}, r"query_offsets: expected a first offset of 0, got 1"),
        ({"query_offsets": [0, 3, 2]}, r"query_offsets: expected 0 ≤ start ≤ stop ≤ 4, got start 3, stop 2"),
        ({"query_offsets": [0, 1, 2**30]}, r"query_offsets: expected 0 ≤ start ≤ stop ≤ 4"),
        ({"key_order": [4, 5, 0]}, r"key_order: expected indices in \[0, 5\), got 5"),
        ({"key_order": [4, -(2**31), 0]}, r"key_order: expected indices in \[0, 5\), got -2147483648"),
        ({"key_start": [-1, 1]}, r"key_start, key_stop: expected 0 ≤ start ≤ stop ≤ 3, got start -1"),
        ({"key_stop": [2, 4]}, r"key_start, key_stop: expected 0 ≤ start ≤ stop ≤ 3, got start 1, stop 4"),
        ({"key_stop": [2]}, r"expected as many offsets as groups"),
    ],
)
def test_the_op_refuses_malformed_plans_before_it_touches_anything(changes, message):
    with pytest.raises(ValueError, match=message):
        raw_call(**changes)


def test_the_op_refuses_malformed_means():
    order, start, stop = (torch.tensor(values, dtype=torch.int32)[None, None] for values in ([0, 1], [0], [2]))
    raw_call(query_means=[order, start, stop])
    with pytest.raises(ValueError, match=r"query_means.order: expected indices in \[0, 4\), got 8"):
        raw_call(query_means=[order + 8, start, stop])
    with pytest.raises(ValueError, match=r"key_means.start, stop: expected 0 ≤ start ≤ stop ≤ 2"):
        raw_call(key_means=[order, start, stop + 1])
    with pytest.raises(ValueError, match=r"expected as many starts as stops"):
        raw_call(key_means=[order, start, stop.repeat(1, 1, 2)])
    with pytest.raises(ValueError, match=r"expected means for this batch and these heads"):
        raw_call(key_means=[order.repeat(1, 2, 1), start, stop])


def test_ops_refuse_shapes_that_do_not_fit_together():
    x, keys, seed = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros((), dtype=torch.int64)
    real, real_keys, two = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool), torch.tensor([2, 2])
    labels = torch.zeros(2, 4, 5, dtype=torch.int64)
    for message, call in {
        r"key_mask: expected shape \(2, 7\)": lambda: planning.smyrf_orders_op(
            x, keys, real, real, two, seed, 1, 0, False, 0
        ),
        r"q: expected a multiple of the 3 key heads": lambda: planning.smyrf_orders_op(
            x, torch.zeros(2, 3, 7, 8), real, real_keys, two, seed, 1, 0, False, 0
        ),
        r"groups: expected shape \(2\)": lambda: planning.smyrf_orders_op(
            x, keys, real, real_keys, two[:1], seed, 1, 0, False, 0
        ),
        r"columns: expected shape \(2\)": lambda: planning.cross_polytope_op(x, real, two[:1], seed, 4, 1, 0),
        r"mask: expected shape \(2, 5\)": lambda: planning.hamming_kmeans_op(x, real_keys, seed, 2, 1, 8, 0),
        r"clusters: expected at least 1, got 0": lambda: planning.hamming_kmeans_op(x, real, seed, 0, 1, 8, 0),
        r"labels: expected shape \(2, 4, 5\)": lambda: planning.cluster_means_op(x, real, labels[:1], 2),
        r"labels: expected numbers below 2": lambda: planning.cluster_means_op(x, real, labels + 2, 2),
        r"queries: expected shape \(2, 4, 5, 8\)": lambda: planning.top_keys_op(
            x.double()[..., :4], keys, real_keys, None, 2, False
        ),
        r"limits: expected shape \(2, 5\)": lambda: planning.top_keys_op(x.double(), keys, real_keys, two, 2, False),
        r"mask: expected shape \(2, 4, 5\)": lambda: planning.order_by_op(x[..., 0], real),
        r"labels: expected numbers below 3": lambda: planning.group_by_op(labels + 3, labels == 0, 3),
        r"mask: expected shape \(2, 4, 5\)\Z": lambda: planning.group_by_op(labels, real, 3),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k", torch.zeros(1, 1, 5, 4), r"k: expected shape \(1, 1, 5, 8\)"),
        ("v", torch.zeros(1, 1, 4, 8), r"v: expected shape \(1, 1, 5, 8\)"),
        ("mask", torch.zeros(1, 1, 4, 4), r"mask: expected 1 or 5 on axis 3"),
        ("offset", torch.zeros(2, dtype=torch.int32), r"offset: expected shape \(1\)"),
        ("self_keys", torch.zeros(1, 5, dtype=torch.int32), r"self_keys: expected shape \(1, 4\)"),
        ("key_mask", torch.ones(1, 4, dtype=torch.bool), r"key_mask: expected shape \(1, 5\)"),
        ("query_mask", torch.ones(2, 4, dtype=torch.bool), r"query_mask: expected shape \(1, 4\)"),
        ("bias", torch.zeros(1, 1, 2), r"bias: expected shape \(1, 1, 3\)"),
        ("skip", torch.zeros(1, 1, 3, 1, dtype=torch.int32), r"skip: expected shape \(1, 1, 4, 1\)"),
    ],
)
def test_the_attend_op_refuses_tensors_that_do_not_fit_the_plan(name, value, message):
    with pytest.raises(ValueError, match=message):
        raw_call(tensors={name: value})
