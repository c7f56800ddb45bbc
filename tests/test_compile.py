"""torch.compile and torch.export with symbolic sizes, meta tensors, and the transforms that are refused."""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import coterie
import coterie.hf
from coterie.engine import native
from coterie.planning import native as planning
from tests.cases import CAUSAL, MECHANISMS, close, padding, tensors
from tests.hf.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals

LENGTHS = (37, 50, 3, 64, 71, 101, 130, 7)  # short and long, odd and even, one group and many
ONE_EACH = [next(n for n, m in MECHANISMS.items() if type(m) is each) for each in coterie.list_mechanisms().values()]


class Graphs:
    """A backend that counts the graphs with attention in them."""

    def __init__(self, inner: str) -> None:
        torch._dynamo.reset()
        self.inner, self.count = torch._dynamo.lookup_backend(inner), 0

    def __call__(self, graph, inputs):
        self.count += any("coterie.attend" in str(node.target) for node in graph.graph.nodes)
        return self.inner(graph, inputs)


def drawn(length, *, more_keys=0, seed=0):
    found = tensors(2, 4, length, length + more_keys, dim=8, key_heads=2, dtype=torch.float32, seed=seed)
    return [x.requires_grad_() for x in found]


def same_with_gradients(compiled, eager, inputs, mask):
    found, want = compiled(*inputs, mask), eager(*inputs, mask)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (found, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def check_lengths(name, *, causal, masked, cross, dynamic, lengths=LENGTHS, graphs=1):
    backend = Graphs("aot_eager")

    def run(q, k, v, mask):
        return coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask, is_causal=causal, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)
    for index, length in enumerate(lengths):
        more = 2 * index + 3 if cross else 0
        mask = padding(2, length + more, [length + more, 1 + length // 2]) if masked else None
        same_with_gradients(compiled, run, drawn(length, more_keys=more, seed=index), mask)
    assert backend.count == graphs


# --- one graph for every length ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_EACH)
def test_one_graph_for_all_lengths(name):
    """The guide: "lengths are symbols: one graph serves all of them"."""
    check_lengths(name, causal=name in CAUSAL, masked=True, cross=name in CAUSAL, dynamic=True)


@pytest.mark.parametrize("name", ["smyrf", "improved"])
def test_at_most_one_more_graph_by_default(name):
    """The guide: "by default the first length is compiled as a number, and the second as a symbol"."""
    check_lengths(name, causal=False, masked=False, cross=False, dynamic=None, graphs=2)


def test_causal_near_far_has_a_graph_for_each_number_of_levels():
    """The guide: "up to 32 chunks, 96, 224, and so on"; chunks of 16 keys here."""
    backend = Graphs("eager")

    def run(q, k, v):
        return coterie.attention(q, k, v, "near-far:near=4,chunk=16", is_causal=True)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for chunks, graphs in ((2, 1), (32, 1), (1, 1), (33, 2), (96, 2), (5, 2)):
        inputs = tensors(1, 1, 16 * chunks - 1, dim=4, dtype=torch.float32)
        torch.testing.assert_close(compiled(*inputs), run(*inputs), rtol=1e-6, atol=1e-6)
        assert backend.count == graphs, chunks


@pytest.mark.skipif(
    not os.environ.get("COTERIE_COMPILE_MATRIX"),
    reason="COTERIE_COMPILE_MATRIX=1 compiles every mechanism in every setting, which takes long",
)
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_one_graph_in_every_setting(name, masked, cross, dynamic):
    for causal in (False, True) if name in CAUSAL else (False,):
        graphs = 1 if dynamic else 2
        check_lengths(name, causal=causal, masked=masked, cross=cross, dynamic=dynamic, graphs=graphs)


def test_inductor_makes_one_graph_too():
    backend = Graphs("inductor")

    def run(q, k, v, mask):
        return coterie.attention(q, k, v, "near-far:near=4", key_mask=mask, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for length in (50, 37, 130):
        inputs = (*drawn(length), padding(2, length, [length, length // 2]))
        found, want = compiled(*inputs), run(*inputs)
        close(found, want)
    assert backend.count == 1


def test_a_float_mask_of_keys_compiles():
    """Whether it says more than which keys are real cannot be seen in a graph, so it is looked up at every pair."""
    q, k, v = drawn(20)
    mask = torch.zeros(2, 1, 1, 20).masked_fill(~padding(2, 20, [20, 11])[:, None, None], float("-inf"))

    def run(mask):
        return coterie.attention(q, k, v, "smyrf:cluster_size=8", attn_mask=mask, enable_gqa=True)

    compiled = torch.compile(run, fullgraph=True, backend=Graphs("aot_eager"))
    close(compiled(mask), run(mask))
    more = torch.randn_like(mask)
    close(compiled(more), run(more))


# --- mechanisms given as strings --------------------------------------------------------------------------------------

SPECS = (
    "topk:k=3",
    "smyrf:rounds=1,cluster_size=8,transform=xbox",
    "local:window=4@10",
    {"mechanism": "topk", "k": 6},
)


def test_a_string_compiles_and_each_has_its_own_graph():
    """The guide: "A mechanism given as a short string or as a dict compiles, too"."""
    backend = Graphs("eager")
    q, k, v = tensors(1, 2, 30, dtype=torch.float32)

    def run(q, spec):
        return coterie.attention(q, k, v, spec)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for spec in SPECS:
        torch.testing.assert_close(compiled(q, spec), run(q, spec), rtol=1e-6, atol=1e-6)
    assert backend.count == len(SPECS)


@pytest.mark.parametrize(
    "spec", ["nonsense", "topk:k=0", "topk:k=2,k=3", '{"mechanism": "full"}', "smyrf:rounds=auto,max_error=0.5"]
)
def test_what_is_refused_is_refused_by_name_in_a_graph(spec):
    q, k, v = tensors(1, 2, 30, dtype=torch.float32)
    wanted = "rounds" if "auto" in spec else "k: expected" if spec == "topk:k=0" else "mechanism: expected"
    with pytest.raises(Exception, match=wanted):
        torch.compile(lambda: coterie.attention(q, k, v, spec), fullgraph=True, backend=Graphs("eager"))()


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mechanism"), [("bert", "near-far:near=8"), ("llama", "smyrf:rounds=1,cluster_size=8")]
)
def test_a_hugging_face_model_is_one_graph_for_all_lengths(name, mechanism):
    family = next(f for f in FAMILIES if f.name == name)
    model = coterie.hf.use(family.build(num_hidden_layers=1), mechanism)
    backend = Graphs("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=None)
    settings = {"use_cache": False} if family.causal else {}
    weight = next(p for p in model.parameters() if p.ndim == 2)
    for length in (37, 50, 41, 61, 19, 44, 23, 53):
        ids = torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(length))
        mask = padding(2, length, [length, length - length // 3]).long()
        outs = [m(input_ids=ids, attention_mask=mask, **settings).last_hidden_state for m in (compiled, model)]
        torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), weight)[0] for x in outs))
    assert backend.count == 2  # one for the first length as a number, one for all


class Block(torch.nn.Module):
    def __init__(self, mechanism="smyrf:cluster_size=8"):
        super().__init__()
        self.attention = coterie.nn.MultiheadAttention(32, 4, batch_first=True, mechanism=mechanism)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_modules_are_one_graph_for_all_lengths():
    block, backend = Block().eval(), Graphs("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for length in (40, 7, 133):
        x = torch.randn(2, length, 32)
        close(compiled(x), block(x))
    assert backend.count == 1


@pytest.mark.parametrize("mechanism", ["smyrf:cluster_size=8", "near-far:near=4,query_clusters=9,key_clusters=5"])
@pytest.mark.parametrize("strict", [False, True])
def test_modules_export_for_any_length(strict, mechanism):
    """The guide: "torch.export takes lengths as `Dim`s"."""
    torch._dynamo.reset()
    block = Block(mechanism).eval()
    shapes = {"x": {1: torch.export.Dim("length", min=2, max=4096)}}
    exported = torch.export.export(block, (torch.randn(2, 40, 32),), dynamic_shapes=shapes, strict=strict).module()
    for length in (40, 7, 2, 133):
        x = torch.randn(2, length, 32)
        close(exported(x), block(x))


def test_compiled_dropout_and_resampling_follow_torchs_generator():
    q, k, v = tensors(1, 2, 64, dtype=torch.float32)
    fresh = coterie.Smyrf(rounds=1, cluster_size=8, resample=True)
    compiled = torch.compile(
        lambda: coterie.attention(q, k, v, fresh, dropout_p=0.2), fullgraph=True, backend=Graphs("aot_eager")
    )
    torch.manual_seed(1)
    first, second = compiled(), compiled()
    torch.manual_seed(1)
    assert torch.equal(first, compiled())
    assert not torch.equal(first, second)


# --- derivatives and transforms ---------------------------------------------------------------------------------------

FORWARD = "coterie.attention has no forward-mode derivative"
TRANSFORM = "coterie.attention takes no torch.func transform"
SECOND = "coterie.attention has no second derivative"


def dual(run, q):
    with forward_ad.dual_level():
        return run(forward_ad.make_dual(q, torch.ones_like(q)))


def batched_gradients(run, x):
    x = x.clone().requires_grad_()
    out = run(x)
    return torch.autograd.grad(out, x, torch.ones(2, *out.shape, dtype=out.dtype), is_grads_batched=True)


REFUSED = {
    "forward_ad": (dual, FORWARD),
    "jvp": (lambda run, q: torch.func.jvp(run, (q,), (torch.ones_like(q),)), FORWARD),
    "jacfwd": (lambda run, q: torch.func.jacfwd(run)(q), FORWARD),
    "grad": (lambda run, q: torch.func.grad(lambda x: run(x).sum())(q), TRANSFORM),
    "vjp": (lambda run, q: torch.func.vjp(lambda x: run(x).sum(), q)[1](torch.ones((), dtype=q.dtype)), TRANSFORM),
    "jacrev": (lambda run, q: torch.func.jacrev(run)(q), TRANSFORM),
    "hessian": (lambda run, q: torch.func.hessian(lambda x: run(x).sum())(q), "coterie.attention"),
    "vmap": (lambda run, q: torch.func.vmap(run)(torch.stack([q, q])), TRANSFORM),
    "is_grads_batched": (batched_gradients, TRANSFORM),
    "double backward": (
        lambda run, q: torch.autograd.functional.hessian(lambda x: run(x).square().sum(), q),
        SECOND,
    ),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
@pytest.mark.parametrize("mechanism", ["smyrf:rounds=1,cluster_size=4", "improved-clustered:clusters=3,topk=2"])
def test_what_has_no_derivative_says_so(how, which, mechanism, backend):
    """The guide: "no second derivatives and no `torch.func` transforms: each is refused by name"."""
    q, k, v = tensors(1, 2, 9, dim=4)
    given = {"q": q, "k": k, "v": v, "mask": torch.zeros(1, 1, 1, 9, dtype=q.dtype) + 0.1}

    def run(x):
        q, k, v, mask = (given | {which: x}).values()
        return coterie.attention(q, k, v, mechanism, attn_mask=mask, backend=backend)

    act, words = REFUSED[how]
    with pytest.raises(RuntimeError, match=words):
        act(run, given[which])


def test_grouped_attention_refuses_too_and_a_plan_of_a_dual_tensor_is_that_of_its_value(backend):
    q, k, v = tensors(1, 2, 9, dim=4)
    mechanism = coterie.Smyrf(rounds=1, cluster_size=4)
    with forward_ad.dual_level():
        both = forward_ad.make_dual(q, torch.ones_like(q))
        plan = mechanism.plan(both, k, backend=backend)
        with pytest.raises(RuntimeError, match=FORWARD):
            coterie.grouped_attention(both, k, v, plan, backend=backend)
        found = coterie.grouped_attention(q, k, v, plan, backend=backend).out
        assert forward_ad.unpack_dual(found).tangent is None  # and there is none: the plan is piecewise constant
    assert torch.equal(found, coterie.attention(q, k, v, mechanism, backend=backend))


def test_a_compiled_graph_refuses_forward_mode():
    q, k, v = tensors(1, 2, 9, dim=4, dtype=torch.float32)

    def run(q):
        return coterie.attention(q, k, v, "topk:k=3")

    compiled = torch.compile(run, fullgraph=True, backend=Graphs("aot_eager"))
    close(compiled(q), run(q))
    with pytest.raises(Exception, match=FORWARD):
        dual(compiled, q)
    with pytest.raises(Exception, match=FORWARD):
        torch.compile(lambda q: torch.func.jvp(run, (q,), (q,)), fullgraph=True, backend=Graphs("eager"))(q)


def test_what_works_with_the_first_derivative(backend):
    """The guide: "checkpointing, `functional_call` and `torch.autograd.functional.jacobian` work"."""
    q, k, v = tensors(1, 1, 5, dim=3)

    def run(q):
        return coterie.attention(q, k, v, "full", backend=backend)

    x = q.clone().requires_grad_()
    want = torch.func.jacrev(lambda q: torch.nn.functional.scaled_dot_product_attention(q, k, v))(q)
    close(torch.autograd.functional.jacobian(run, q), want)
    again = checkpoint(run, x, use_reentrant=False)
    close(torch.autograd.grad(again.sum(), x)[0], want.sum((0, 1, 2, 3)))
    block = Block().to(q.dtype)
    y = torch.randn(1, 9, 32, dtype=q.dtype)
    zeros = {name: torch.zeros_like(p) for name, p in block.named_parameters()}
    assert torch.func.functional_call(block, zeros, (y,)).abs().max() == 0


# --- meta tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_meta_tensors_give_the_shape_and_dtype_of_the_result(name, dtype):
    """The guide: "On meta tensors the result has a shape and a dtype but no numbers"."""
    shapes = (2, 4, 19, 8), (2, 2, 23, 8), (2, 2, 23, 5)
    results = []
    for device in ("meta", "cpu"):
        q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
        mask = torch.ones(2, 23, dtype=torch.bool, device=device)
        out, lse = coterie.attention(
            *(q, k, v, MECHANISMS[name]),
            key_mask=mask,
            is_causal=name in CAUSAL,
            enable_gqa=True,
            dropout_p=0.1,
            return_lse=True,
        )
        results.append([(x.shape, x.dtype) for x in (out, lse, *torch.autograd.grad(out.sum(), (q, k, v)))])
        assert out.device.type == device
    assert results[0] == results[1]


def test_meta_tensors_with_masks_and_plans():
    q, k, v = (x.to("meta") for x in tensors(2, 2, 9, dim=4, dtype=torch.float32))
    plan = coterie.Clustered(clusters=3).plan(q, k)
    mask = torch.ones(2, 9, dtype=torch.bool, device="meta")
    assert coterie.grouped_attention(q, k, v, plan, key_mask=mask, query_mask=mask).out.is_meta
    assert coterie.attention(q, k, v, None, plan=plan).is_meta
    assert coterie.attention(q, k, v, "local", attn_mask=torch.zeros(2, 1, 1, 9, device="meta")).is_meta
    with pytest.raises(RuntimeError, match="backend='reference' is not available: it needs numbers"):
        coterie.attention(q, k, v, "local", backend="reference")
    with pytest.raises(RuntimeError, match="backend='triton' is not available"):
        coterie.attention(q, k, v, "local", backend="triton")


# --- the ops themselves -----------------------------------------------------------------------------------------------


def ops():
    """Each op with inputs."""
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 20, dim=8, dtype=torch.float32))
    plan = coterie.Smyrf(rounds=2, cluster_size=4).plan(q, k, is_causal=True)
    rounds = [
        x
        for each in plan.rounds
        for x in (each.query_order, each.query_offsets, each.key_order, each.key_start, each.key_stop)
    ]
    mask = torch.randn(1, 1, 20, 1, requires_grad=True)  # a mean has no column of its own
    order = torch.arange(20, dtype=torch.int32).expand(1, 2, 20)
    start, stop = torch.zeros(1, 2, 1, dtype=torch.int32), torch.full((1, 2, 1), 7, dtype=torch.int32)
    nothing: list[torch.Tensor] = []
    counts = torch.full((1, 2, plan.rounds[0].groups, 4), 2, dtype=torch.int16)
    layout = [0] * 6 + [0, 0, 1, 0, 0, 0]
    lists = (rounds, nothing, nothing, [counts], nothing, [order, start, stop, stop], layout)
    yield (
        native.attend_op,
        (q, k, v, mask, *lists, plan.offset, plan.self_keys, None, None, None, True, False, 0.3, 0.0),
    )
    real = torch.ones(1, 20, dtype=torch.bool)
    seed, plain = torch.tensor(3), [x.detach() for x in (q, k)]
    yield planning.smyrf_orders_op, (*plain, real, real, torch.tensor([5]), seed, 2, 0, False, 0)
    yield planning.cross_polytope_op, (plain[0], real, torch.tensor([3]), seed, 2, 2, 0)
    yield planning.group_by_op, (torch.tensor([[2, 0, 1, 0]]), torch.ones(1, 4, dtype=torch.bool), 3)
    yield planning.hamming_kmeans_op, (plain[0], real, seed, 4, 2, 9, 0)
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ([list(range(20))], [[0, 7]], [[7, 20]])]
    yield planning.kmeans_op, (plain[0], *bounds, None, None, seed, 4, 2, 3, False, True, 0)
    yield planning.top_keys_op, (plain[0].double(), plain[1], real, None, 5, False)
    clusters = [
        order,
        torch.tensor([[[0, 7]] * 2], dtype=torch.int32),
        torch.tensor([[[7, 20]] * 2], dtype=torch.int32),
    ]
    visible = torch.tensor([[[0, 1]] * 5], dtype=torch.int32), torch.full((1, 5), 2, dtype=torch.int32)
    parties = (torch.full(visible[1].shape, 2),) * 2
    yield planning.near_keys_op, (plain[0], plain[1], clusters, *visible, *parties, 4, 9, False, 6)
    yield planning.order_by_op, (torch.randn(2, 9), torch.ones(2, 9, dtype=torch.bool))
    yield planning.cluster_means_op, (plain[0], real, torch.zeros(1, 2, 20, dtype=torch.int64), 3)


def test_opcheck():
    """Schema, autograd, fakes, and tracing with symbolic sizes."""
    for op, inputs in ops():
        found = opcheck(op, inputs)
        assert found["test_faketensor"] == found["test_aot_dispatch_dynamic"] == "SUCCESS"
