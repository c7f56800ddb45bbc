"""What the native engine promises beyond the reference: the same plans, the same bits, compiled graphs, safety."""

import math
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie import compiled
from coterie.draws import keep_pairs
from coterie.engine import native
from coterie.planning import native as planning
from tests.cases import CAUSAL, MECHANISMS, SMALL_ROUND, close, index, padding, tensors

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def results(mechanism, q, k, v, **kwargs):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = coterie.attention(inputs[0], inputs[1], inputs[2], mechanism, return_lse=True, **kwargs)
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


@pytest.mark.parametrize("times", [1, 400])  # few are sorted in another way than many
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(0, 2**40))
def test_radix_sort_is_the_reference_sort(times, scores, bits):
    from coterie.planning.orders import order_by

    values = torch.tensor(scores, dtype=torch.float32).repeat(times)
    mask = torch.tensor([bool(bits >> i & 1) for i in range(len(scores))]).repeat(times)
    assert planning.order_by(values, mask).tolist() == order_by(values, mask).tolist()


def test_many_hamming_bits_and_clusters():
    q, k, _ = tensors(1, 2, 150, dtype=torch.float32)
    for bits, clusters in ((1, 3), (64, 40), (65, 5), (200, 200)):
        mechanism = coterie.Clustered(clusters=clusters, bits=bits)
        one, other = (mechanism.plan(q, k, backend=b).answer for b in ("reference", "native"))
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


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


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("batch", "heads", "key_heads"), [(2, 3, 3), (1, 4, 1), (1, 1, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (300, 300)])
def test_the_same_bits_of_a_masks_gradient(name, batch, heads, key_heads, shape):
    """Groups are computed by anybody, and added in one order."""
    q, k, v = tensors(batch, heads, 300, dim=16, key_heads=key_heads, dtype=torch.float32)
    mechanism = MECHANISMS[name]
    plan = mechanism.plan(q, k)
    if shape != (1, 1) and (plan.query_means or plan.key_means):
        pytest.skip("a mean has no place in a mask of pairs")
    mask = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, mask)]
            one, two, three, four = leaves
            out = coterie.grouped_attention(one, two, three, plan, attn_mask=four).out
            found.append(torch.autograd.grad(out, leaves, upstream))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    one, two, three, four = wide
    out = coterie.grouped_attention(one, two, three, plan, attn_mask=four, backend="reference").out
    for ours, want in zip(found[0], torch.autograd.grad(out, wide, upstream.double()), strict=True):
        # The gradient of one number that is added to all scores is 0: what is left of 90,000 terms.
        torch.testing.assert_close(ours.double(), want, rtol=2e-4, atol=2e-4 if want.numel() == 1 else 4e-5)


def test_small_calls_stay_on_one_thread():
    code = """
import torch, coterie
from coterie import compiled
torch.set_num_threads(2)
def teams(length):
    q = torch.randn(1, 8, length, 64)
    before = compiled.regions().calls
    coterie.attention(q, q, q, "smyrf:cluster_size=16")
    return compiled.regions().calls - before
assert teams(8) == 0, teams(8)
assert teams(2048) > 0
"""
    env = {name: value for name, value in os.environ.items() if name != "COTERIE_GRAIN"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=env)


SAME_BITS = """
import sys
import torch, coterie
from coterie import compiled
from tests.cases import CAUSAL, MECHANISMS, padding, tensors
from tests.engine.test_native import results
if compiled.instruction_set() != sys.argv[1]:
    raise SystemExit(3)
for batch, heads in ((2, 2), (1, 1)):
    q, k, v = tensors(batch, heads, 301, dim=20, value_dim=12, dtype=torch.float32)
    mask = padding(batch, 301, [301, 207][:batch])
    for name, mechanism in MECHANISMS.items():
        causal, found, plans = name in CAUSAL, [], []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(mechanism, q, k, v, key_mask=mask, is_causal=causal))
            plans.append(mechanism.plan(q, k, key_mask=mask, is_causal=causal).to_dict())
        for others, plan in zip(found[1:], plans[1:]):
            assert all(torch.equal(a, b) for a, b in zip(found[0], others)), name
            assert all(torch.equal(plans[0][part], plan[part]) for part in plans[0]), name
"""


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_the_same_bits_on_every_instruction_set(isa):
    """Forward, backward and every planning op, for 1, 2 and 3 threads: the set is chosen when the module is loaded."""
    done = subprocess.run(
        [sys.executable, "-c", SAME_BITS, isa],
        cwd=ROOT,
        env={**os.environ, "COTERIE_ISA": isa},
        capture_output=True,
        text=True,
    )
    if done.returncode == 3:
        pytest.skip(f"{isa} does not run on this CPU")
    assert done.returncode == 0, done.stderr


def test_a_misspelt_instruction_set_is_refused():
    env = {**os.environ, "COTERIE_ISA": "avx"}
    done = subprocess.run([sys.executable, "-c", "import coterie"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode
    assert "COTERIE_ISA: expected one of avx512, avx2, portable, got 'avx'" in done.stderr


@pytest.mark.parametrize(("isa", "vnni"), [("portable", "1"), ("avx2", "1"), ("avx2", "0"), ("avx512", "0")])
def test_every_copy_of_the_kernels_agrees(isa, vnni, tmp_path):
    """Each instruction set in a process of its own; the engine says which one it took. Also without VNNI."""
    code = f"""
import torch, coterie
from coterie import compiled
from tests.cases import MECHANISMS, tensors
from tests.engine.test_native import results
q, k, v = tensors(1, 2, 111, dim=20, value_dim=12, dtype=torch.float32)
found = {{name: results(m, q, k, v) for name, m in MECHANISMS.items()}}
torch.save((compiled.instruction_set(), found), {str(tmp_path / "found.pt")!r})
"""
    env = {**os.environ, "COTERIE_ISA": isa, "COTERIE_VNNI": vnni}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=env)
    name, found = torch.load(tmp_path / "found.pt")
    assert name == isa or compiled.instruction_set() != "avx512"
    q, k, v = tensors(1, 2, 111, dim=20, value_dim=12, dtype=torch.float32)
    for mechanism, theirs in found.items():
        for a, b in zip(theirs, results(MECHANISMS[mechanism], q, k, v), strict=True):
            close(a, b)


# --- small groups ----------------------------------------------------------------------------------------------------


def small_groups(size, keys, heads=4, length=97):
    """Groups of so many queries, each with keys of its own from all over the head; the last group is smaller."""
    generator = torch.Generator().manual_seed(size)
    groups = -(-length // size)
    order = torch.stack([torch.randperm(length, generator=generator) for _ in range(heads)])[None].int()
    offsets = (torch.arange(groups + 1) * size).clamp(max=length).int().expand(1, heads, -1)
    met = torch.randint(0, length, (1, heads, groups * keys), generator=generator).int()
    start = (torch.arange(groups) * keys).int().expand(1, heads, -1)
    each = coterie.Round(order, offsets, met, start, start + keys)
    return coterie.Plan(length, length, 2, (each,), torch.zeros(1, dtype=torch.int32)).validate()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17])
@pytest.mark.parametrize(("dim", "value_dim", "keys"), [(64, 64, 176), (32, 80, 13), (16, 128, 300), (24, 16, 40)])
def test_small_groups_equal_the_reference(size, dim, value_dim, keys):
    """Few queries meet their keys where those lie. With and without dropout, masks and wild values."""
    plan = small_groups(size, keys)
    q, k, v = tensors(1, 4, 97, dim=dim, value_dim=value_dim, key_heads=2, dtype=torch.float32)
    wild = v.clone()
    wild[0, 1, 5, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    hidden = torch.ones(1, 97, dtype=torch.bool)
    hidden[0, ::3] = False
    for values, settings in (
        (v, {}),
        (v, {"dropout_p": 0.3}),
        (v, {"key_mask": hidden, "duplicates": "once"}),
        (wild, {}),
    ):
        found = []
        for backend in ("native", "reference"):
            torch.manual_seed(3)
            found.append(coterie.grouped_attention(q, k, values, plan, backend=backend, **settings))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 300])
@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 2**-31, 1.0])
def test_dropout_draws_what_its_definition_draws(keys, p):
    """Sixteen keys at a time, and what is left over; the weights of all pairs, and their gradients."""
    q, k, _ = tensors(2, 3, 21, keys, dtype=torch.float32)
    identity = torch.eye(keys).expand(2, 3, -1, -1)
    torch.manual_seed(7)
    seed = torch.randint(2**62, ())  # as a call draws it
    heads, rows, columns = torch.arange(6)[:, None, None], torch.arange(21)[:, None], torch.arange(keys)
    kept = keep_pairs(heads, rows, columns, dropout_p=p, seed=seed).view(2, 3, 21, keys)
    q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, identity))
    factor = torch.where(kept, 1 / (1 - p), 0.0) if p < 1 else torch.zeros(())
    want = (q64 @ k64.mT / math.sqrt(q.shape[-1])).softmax(-1) * factor @ v64
    q, k, v = (x.clone().requires_grad_() for x in (q, k, identity))
    torch.manual_seed(7)
    out = coterie.attention(q, k, v, "full", dropout_p=p, backend="native")
    assert torch.equal(out != 0, want.float() != 0)
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(want, (q64, k64, v64), grad.double())
    for ours, theirs in zip(found, expected, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5 * max(scale, 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_small_groups_of_short_floats_are_widened_exactly(size, dtype):
    plan = small_groups(size, 40)
    q, k, v = tensors(1, 4, 97, dim=48, value_dim=32, key_heads=2, dtype=dtype)
    out = coterie.grouped_attention(q, k, v, plan).out
    assert torch.equal(out, coterie.grouped_attention(q.float(), k.float(), v.float(), plan).out.to(dtype))


def test_small_groups_give_the_same_bits_for_any_number_of_threads():
    """Few heads share out the groups of a round: those that share a range stay together, whoever takes them."""
    plan = small_groups(2, 30, heads=2, length=300)
    each = plan.rounds[0]
    shared = torch.arange(150) // 7 * 30
    each = replace(each, key_start=shared.int().expand(1, 2, -1), key_stop=(shared + 30).int().expand(1, 2, -1))
    q, k, v = tensors(1, 2, 300, dim=16, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(coterie.grouped_attention(q, k, v, replace(plan, rounds=(each,))).out)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


# --- processes and threads -------------------------------------------------------------------------------------------


def test_several_python_threads_at_once():
    q, k, v = tensors(1, 2, 200, dtype=torch.float32)
    want = results("smyrf:cluster_size=16", q, k, v)
    wrong: list[bool] = []

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
    parts = SMALL_ROUND | {name: index(values) for name, values in changes.items()}
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 5, 8)
    given = {"k": k, "v": k, "offset": torch.zeros(1, dtype=torch.int32)} | (tensors or {})
    extras = [[given[name]] if name in given else [] for name in ("bias", "skip", "counts")]
    layout = [len(extra) for extra in extras] + [0, 0, 0]
    lists = (list(parts.values()), *extras, list(query_means), list(key_means), layout)
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
        ({"key_stop": [2]}, r"rounds\[0\].key_stop: expected shape \(1, 1, 2\), got \(1, 1, 1\)"),
        ({"query_offsets": [0, 4]}, r"rounds\[0\].query_offsets: expected shape \(1, 1, 3\), got \(1, 1, 2\)"),
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
    with pytest.raises(ValueError, match=r"key_means.stop: expected shape \(1, 1, 1\), got \(1, 1, 2\)"):
        raw_call(key_means=[order, start, stop.repeat(1, 1, 2)])
    with pytest.raises(ValueError, match=r"key_means.order: expected shape \(1, 1, 2\), got \(1, 2, 2\)"):
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
        r"mask: expected shape \(2, 4, 5\), got \(2, 5\)\Z": lambda: planning.group_by_op(labels, real, 3),
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
        ("counts", torch.zeros(1, 1, 2, dtype=torch.int16), r"rounds\[0\].counts: expected 4 dimensions, got 3"),
        ("counts", torch.zeros(1, 1, 3, 2, dtype=torch.int16), r"counts: expected shape \(1, 1, 2, 2\)"),
        ("counts", torch.zeros(1, 1, 2, 2), r"counts: expected int16 or int32, got another dtype"),
        ("counts", torch.zeros(1, 1, 2, 1, dtype=torch.int16), r"counts: expected room for 2 keys, .* got 1"),
        ("counts", torch.zeros(1, 1, 2, 0, dtype=torch.int32), r"counts: expected room for 2 keys, .* got 0"),
        ("counts", torch.full((1, 1, 2, 2), -1, dtype=torch.int16), r"counts: expected no number below 0, got one"),
        ("counts", torch.full((1, 1, 2, 2), -1, dtype=torch.int32), r"counts: expected no number below 0, got one"),
    ],
)
def test_the_attend_op_refuses_tensors_that_do_not_fit_the_plan(name, value, message):
    with pytest.raises(ValueError, match=message):
        raw_call(tensors={name: value})


@pytest.mark.parametrize("side", ["query_means", "key_means"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_the_op_refuses_a_mask_of_pairs_where_rows_are_virtual(side, kind):
    """A mean has no row and no column in it: reading one would be reading behind the end."""
    order, start, stop = (torch.tensor(values, dtype=torch.int32)[None, None] for values in ([0, 1], [0], [2]))
    shape, axis = ((1, 1, 4, 1), 2) if side == "query_means" else ((1, 1, 1, 5), 3)
    mask = torch.ones(shape, dtype=kind)
    with pytest.raises(ValueError, match=rf"mask: expected 1 on axis {axis}, got {shape[axis]}"):
        raw_call(**{side: [order, start, stop]}, tensors={"mask": mask})
    raw_call(**{side: [order, start, stop]}, tensors={"mask": mask[..., :1, :1]})


def backward_arguments(self_keys=True, mask=None):
    """A well-formed call of attend_backward's kernel, by name."""
    plan = coterie.Smyrf(rounds=2, cluster_size=4).plan(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8))
    rounds = [
        x
        for each in plan.rounds
        for x in (each.query_order, each.query_offsets, each.key_order, each.key_start, each.key_stop)
    ]
    shapes = {"out": (1, 2, 9, 5), "lse": (1, 2, 9), "grad_out": (1, 2, 9, 5), "grad_lse": (1, 2, 9)}
    shapes |= {"grad_q": (1, 2, 9, 8), "grad_k": (1, 2, 9, 8), "grad_v": (1, 2, 9, 5)}
    tensors = {
        "q": torch.zeros(1, 2, 9, 8),
        "k": torch.zeros(1, 2, 9, 8),
        "v": torch.zeros(1, 2, 9, 5),
        "rounds": [x.contiguous() for x in rounds],
        "biases": [],
        "skips": [],
        "counts": [],
        "layout": [0, 0, 0, 0, 0, 0] * 2,
        "offset": plan.offset,
        "self_keys": torch.zeros(1, 9, dtype=torch.int32) if self_keys else None,
        "query_means": [],
        "key_means": [],
        "mask": mask,
        "key_mask": None,
        "query_mask": None,
    }
    results: dict[str, torch.Tensor | None] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    results |= {"alone": torch.zeros(1, 2, 9, dtype=torch.uint8) if self_keys else None, "grad_mask": None}
    settings = {"causal": False, "once": False, "scale": 1.0, "dropout_p": 0.0, "seed": 0, "threads": 1}
    return tensors, settings, results


def run_backward(tensors, settings, results):
    module = compiled.kernels()
    module.backward(module.Tensors(**tensors), module.Settings(**settings), **results)


@pytest.mark.parametrize(
    "name", ["out", "lse", "alone", "grad_out", "grad_lse", "grad_q", "grad_k", "grad_v", "grad_mask"]
)
@pytest.mark.parametrize("fault", ["short", "flat", "dtype", "strides"])
def test_backward_refuses_every_tensor_that_does_not_fit(name, fault):
    mask = torch.zeros(1, 1, 9, 9) if name == "grad_mask" else None
    tensors, settings, results = backward_arguments(mask=mask)
    if mask is not None:
        results["grad_mask"] = torch.zeros(1, 1, 9, 9)
    run_backward(tensors, settings, results)
    good = results[name]
    wide = torch.stack([good, good], -1).flatten(-2)
    results[name] = {
        "short": good[:, :, :3].contiguous(),
        "flat": good.flatten(),
        "dtype": good.to(torch.float64),
        "strides": wide[..., ::2],
    }[fault]
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        run_backward(tensors, settings, results)


def test_backward_refuses_what_is_missing_or_too_much():
    for self_keys, alone in ((True, None), (False, torch.zeros(1, 2, 9, dtype=torch.uint8))):
        tensors, settings, results = backward_arguments(self_keys)
        with pytest.raises(ValueError, match=r"alone: expected"):
            run_backward(tensors, settings, results | {"alone": alone})
    tensors, settings, results = backward_arguments()
    with pytest.raises(ValueError, match=r"grad_mask: expected nothing, as there is no float mask"):
        run_backward(tensors, settings, results | {"grad_mask": torch.zeros(1, 1, 9, 9)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("threads", 0, r"threads: expected at least 1, got 0"),
        ("threads", 10**6, r"threads: expected at most 1024"),
        ("scale", float("nan"), r"scale: expected a finite number"),
        ("dropout_p", 1.5, r"dropout_p: expected a probability"),
        ("dropout_p", float("nan"), r"dropout_p: expected a probability"),
        ("layout", [0, 0, 0], r"layout: expected 6 numbers a round, got 3"),
        ("layout", [1, 0, 0, 0, 0, 0] * 2, r"biases: expected 2 tensors, got 0"),
        ("layout", [0, 1, 0, 0, 0, 0] * 2, r"skips: expected 2 tensors, got 0"),
        ("layout", [0, 0, 1, 0, 0, 0] * 2, r"counts: expected 2 tensors, got 0"),
        ("layout", [0] * 6, r"rounds: expected 5 tensors, got 10"),
        ("q", torch.zeros(1, 2, 9, 8, dtype=torch.float64), r"q: expected float32, bfloat16 or float16"),
        ("q", torch.zeros(2, 9, 8), r"q: expected 4 dimensions, got 3"),
        ("q", torch.zeros(1, 1, 1, 8).expand(1, 2, 2**32, 8), r"q: expected at most 2147483647"),
        ("offset", torch.zeros(1, dtype=torch.int64), r"offset: expected int32"),
        ("key_mask", torch.ones(1, 9), r"key_mask: expected uint8"),
        ("mask", torch.ones(1, 1, 9, 9, dtype=torch.float64), r"mask: expected float32 or uint8"),
        ("key_means", [torch.zeros(1, 2, 1, dtype=torch.int32)], r"key_means: expected order, start, stop"),
    ],
)
def test_the_kernels_refuse_settings_and_inputs_out_of_range(name, value, message):
    tensors, settings, results = backward_arguments()
    (settings if name in settings else tensors)[name] = value
    with pytest.raises(ValueError, match=message):
        run_backward(tensors, settings, results)


def test_the_kernel_refuses_means_without_positions_in_a_windowed_plan():
    tensors, settings, results = backward_arguments()
    tensors["key_means"] = [torch.zeros(1, 2, 0, dtype=torch.int32) for _ in range(3)]
    tensors["layout"] = [0, 0, 0, 1, 0, 0] + [0] * 6
    with pytest.raises(ValueError, match=r"key_means: expected positions in a causal or windowed plan"):
        run_backward(tensors, settings, results)


def test_the_op_refuses_unsorted_skips():
    skip = torch.tensor([[3, 1]] * 4, dtype=torch.int32)[None, None]
    with pytest.raises(ValueError, match=r"skip: expected ascending key rows"):
        raw_call(tensors={"skip": skip})


def test_planning_kernels_refuse_outputs_that_do_not_fit():
    """The ops make their own; the module is checked all the same."""
    module, real = compiled.kernels(), torch.ones(1, 5, dtype=torch.uint8)
    x, double = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8, dtype=torch.float64)

    def long(*shape):
        return torch.zeros(shape, dtype=torch.int64)

    def short(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    parts = short(1, 5), short(1, 1), short(1, 1)
    clusters = [short(1, 2, 5), short(1, 2, 1), short(1, 2, 1)]
    near = (double.float(), x, clusters, short(1, 5, 1), short(1, 5), long(1, 5), long(1, 5) + 1, 1, 2, True, 2, 1)
    smyrf = (x, x, real, real, long(1), 1)
    for message, call in {
        "order: expected shape": lambda: module.order_by(torch.zeros(1, 5), real, short(1, 4), 1),
        "order: expected int32": lambda: module.order_by(torch.zeros(1, 5), real, long(1, 5), 1),
        "offsets: expected shape": lambda: module.group_by(long(1, 5), real, 2, short(1, 5), short(1, 2), 1),
        "groups: expected at most": lambda: module.group_by(long(1, 5), real, 2**62, short(1, 5), short(1, 2), 1),
        "query_order: expected": lambda: module.smyrf_orders(*smyrf, 0, False, 0, 0, 1, short(1, 2, 2, 5), short(1)),
        "key_order: expected": lambda: module.smyrf_orders(*smyrf, 0, False, 0, 0, 1, short(1, 2, 1, 5), short(1)),
        "transform: expected at most 4": lambda: module.smyrf_orders(*smyrf, 5, False, 0, 0, 1, short(1), short(1)),
        "labels: expected shape": lambda: module.kmeans(
            x, *parts, None, None, 2, 1, 0, False, True, 0, 0, 1, long(1, 2, 4), double[:, :, :2].contiguous()
        ),
        "centroids: expected shape": lambda: module.kmeans(
            x, *parts, None, None, 2, 1, 0, False, True, 0, 0, 1, long(1, 2, 5), double
        ),
        "clusters: expected at most": lambda: module.kmeans(
            x, *parts, None, None, 2**40, 1, 0, False, True, 0, 0, 1, long(1, 2, 5), double
        ),
        "bits: expected at most": lambda: module.hamming_kmeans(x, real, 2, 1, 2**40, 0, 0, 1, long(1, 2, 5)),
        r"clusters \* bits: expected": lambda: module.hamming_kmeans(x, real, 2**20, 1, 2**20, 0, 0, 1, long(1, 2, 5)),
        "means: expected shape": lambda: module.cluster_means(x, real, long(1, 2, 5), 2, 1, double),
        "top: expected shape": lambda: module.top_keys(double, x, real, None, 2, False, 1, long(1, 2, 5, 3)),
        "picks: expected shape": lambda: module.near_keys(*near, short(1, 2, 6), short(1, 2, 5, 2)),
        "left: expected int32": lambda: module.near_keys(*near, short(1, 2, 5), double),
        "left: expected int16": lambda: module.near_keys(*near[:9], False, *near[10:], short(1, 2, 5), double),
        "clusters: expected order": lambda: module.near_keys(
            *near[:2], [], *near[3:], short(1, 2, 5), short(1, 2, 5, 2)
        ),
        "columns: expected at most": lambda: module.cross_polytope(
            x, real, long(1) + 2**40, 2, 1, 0, 0, 1, long(1, 2, 1, 5)
        ),
        "columns: expected at least": lambda: module.cross_polytope(x, real, long(1) - 1, 2, 1, 0, 0, 1, long(1)),
        "buckets: expected shape": lambda: module.cross_polytope(x, real, long(1) + 2, 2, 1, 0, 0, 1, long(1)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


BOTH = ("native", "reference")


@pytest.mark.parametrize("dim", [3, 8, 19])
@pytest.mark.parametrize("name", ["improved", "near-far", "near-far-strict", "routing", "smyrf", "reformer", "topk"])
def test_products_beyond_float32_are_planned_as_in_float64(name, dim):
    """Found by the fuzzer under ASan: keys of 1e38 have products that float32 cannot hold, in no order there."""
    q, k, _ = tensors(2, 2, 70, dim=dim, dtype=torch.float32)
    huge = torch.rand(k.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    for big in (k.masked_fill(huge, 1e38), torch.where(huge, -3e38 * k.sign(), k)):
        for causal in (False, True) if name in CAUSAL else (False,):
            native_plan, plan = (MECHANISMS[name].plan(q, big, is_causal=causal, backend=b) for b in BOTH)
            if name.startswith("near-far"):  # whose distances float64 cannot hold, either; but it drops nothing
                met = native_plan.validate().to_dense().clamp(max=1)
                assert torch.equal(met, torch.ones_like(met).tril() if causal else torch.ones_like(met))
            else:
                assert torch.equal(native_plan.to_dense(), plan.to_dense())


# --- stopping half-way -----------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, threading, time
import torch, coterie
import torch._dynamo  # torch loads it at the first call of an op; it does not like to be interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
torch.set_num_threads({threads})
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, {heads}, {length}, 64, generator=generator) for _ in range(3))
plan = {mechanism}.plan(q, k)
small = [torch.randn(1, 2, 50, 8, requires_grad=True) for _ in range(3)]
out = coterie.attention(*small, coterie.Full())
torch.autograd.grad(out.sum(), small)
if {backward}:
    # Where the whole forward pass would take long: hand the gradient a result that nobody has computed.
    from coterie.engine import native
    rounds = [x for r in plan.rounds for x in (r.query_order, r.query_offsets, r.key_order, r.key_start, r.key_stop)]
    rest = (plan.offset, None, None, None, None, False, False, 0.125, 0.0)
    given = (q, k, v, None, rounds, [], [], [], [], [], [0] * 6 * (len(rounds) // 5), *rest)
    lse = torch.zeros(q.shape[:3])
    run = lambda: native.attend_backward_op(q, lse, q, lse, torch.zeros(0, dtype=torch.uint8), False, *given)
else:
    run = lambda: coterie.grouped_attention(q, k, v, plan)
sent = 0.0
def interrupt():
    global sent
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.3, interrupt).start()
try:
    run()
except KeyboardInterrupt:
    late = time.perf_counter() - sent
    print(f"stopped after {{late:.3f}} s")
    assert late < 5
else:
    raise SystemExit("it was not interrupted")
again = coterie.attention(*small, coterie.Full())
want = torch.nn.functional.scaled_dot_product_attention(*small)
torch.testing.assert_close(again, want)
for a, b in zip(torch.autograd.grad(again.sum(), small), torch.autograd.grad(want.sum(), small)):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("mechanism", "heads", "length", "backward"),
    [
        ("coterie.Full()", 2, 30_000, False),
        ("coterie.Full()", 2, 30_000, True),
        ("coterie.Full()", 1, 40_000, True),  # one head: its groups are shared out, and wait for each other
        ("coterie.Smyrf(rounds=32, cluster_size=512)", 2, 65_536, False),
    ],
    ids=["full", "full-backward", "one-head-backward", "smyrf"],
)
def test_ctrl_c_stops_a_long_call(mechanism, heads, length, backward, threads):
    """Each of these would run for ten seconds and more; the bound is generous, the figure is printed."""
    code = INTERRUPTED.format(mechanism=mechanism, heads=heads, length=length, backward=backward, threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())


PLANNED = """
import os, signal, threading
import torch, coterie
import torch._dynamo
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(2)
x = torch.randn(1, 2, 65_536, 64, generator=torch.Generator().manual_seed(0))
mechanisms = {
    "kmeans": coterie.Clustered(clusters=3000, iterations=60, space="euclidean"),
    "hamming_kmeans": coterie.Clustered(clusters=20_000, bits=511),
    "top_keys": coterie.TopK(k=32),
    "cross_polytope": coterie.Reformer(rounds=200, chunk_size=64),
    "smyrf_orders": coterie.Smyrf(rounds=500, cluster_size=64),
}
for name, mechanism in mechanisms.items():
    mechanism.plan(x[:, :, :100], x[:, :, :100])
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        mechanism.plan(x, x)
    except KeyboardInterrupt:
        continue
    raise SystemExit(f"{name} was not interrupted")
"""


def test_ctrl_c_stops_long_planning():
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_handler_may_call_the_engine():
    """It runs in the middle of a call, on the same thread."""
    code = """
import os, signal, threading
import torch, coterie
torch.set_num_threads(2)
q = torch.randn(1, 2, 8000, 64, generator=torch.Generator().manual_seed(0))
small = q[:, :, :100]
want, want_small = coterie.attention(q, q, q, "full"), coterie.attention(small, small, small, "smyrf:cluster_size=16")
found = []
def handle(*_):
    found.append(coterie.attention(small, small, small, "smyrf:cluster_size=16"))
signal.signal(signal.SIGUSR1, handle)
timers = [threading.Timer(0.05 * i, os.kill, (os.getpid(), signal.SIGUSR1)) for i in range(1, 5)]
for timer in timers: timer.start()
for _ in range(3):
    assert torch.equal(coterie.attention(q, q, q, "full"), want)
for timer in timers: timer.join()
assert found and all(torch.equal(x, want_small) for x in found)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
