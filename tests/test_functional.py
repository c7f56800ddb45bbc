"""The public calls: arguments, errors, varlen, dense_below, backends."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import coterie
from tests import cases
from tests.cases import CAUSAL, MECHANISMS, all_close, close, tensors

pytestmark = pytest.mark.usefixtures("backend")


def test_it_can_replace_a_call_of_sdpa():
    q, k, v = tensors(2, 4, 30, dim=8, key_heads=2)
    mask = (torch.rand(30, 30) < 0.9).fill_diagonal_(True)
    kwargs: dict[str, Any] = {"attn_mask": mask, "dropout_p": 0.0, "scale": 0.3, "enable_gqa": True}
    want = F.scaled_dot_product_attention(q, k, v, **kwargs)
    close(coterie.attention(q, k, v, coterie.Full(), **kwargs), want)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(coterie.attention(q, k, v, "full", is_causal=True, enable_gqa=True), causal)


def test_causal_offset_is_bottom_right_by_default_and_can_be_sdpas():
    q, k, v = tensors(2, 2, 5, 9)
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(coterie.attention(q, k, v, "full", is_causal=True, causal_offset=0), top_left)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)
    bottom_right = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    close(coterie.attention(q, k, v, "full", is_causal=True), bottom_right)
    each = coterie.attention(q, k, v, "full", is_causal=True, causal_offset=torch.tensor([0, 4]))
    close(each, torch.stack([top_left[0], bottom_right[1]]))


def test_an_offset_beyond_everything_hides_nothing_or_all():
    q, k, v = tensors(1, 1, 5)
    for far in (2**40, torch.tensor([2**40])):
        everything = coterie.attention(q, k, v, "full", is_causal=True, causal_offset=far)
        close(everything, F.scaled_dot_product_attention(q, k, v))
        assert (coterie.attention(q, k, v, "full", is_causal=True, causal_offset=-far) == 0).all()


def test_causal_and_a_mask_together():
    q, k, v = tensors(1, 2, 12)
    mask = torch.rand(12, 12) < 0.6
    mask.fill_diagonal_(True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril())
    close(coterie.attention(q, k, v, "full", is_causal=True, attn_mask=mask), want)
    # The fallback on oneself obeys the mask too.
    nobody = torch.zeros(12, 12, dtype=torch.bool)
    assert (coterie.attention(q, k, v, "smyrf:cluster_size=3", is_causal=True, attn_mask=nobody) == 0).all()


def test_dense_below_is_an_explicit_choice():
    q, k, v = tensors(1, 2, 100)
    sparse = coterie.attention(q, k, v, "smyrf:cluster_size=8")
    assert torch.equal(coterie.attention(q, k, v, "smyrf:cluster_size=8", dense_below=100), sparse)
    dense = coterie.attention(q, k, v, "smyrf:cluster_size=8", dense_below=101)
    close(dense, F.scaled_dot_product_attention(q, k, v))


def test_a_backend_that_is_not_there_says_so_in_one_sentence(monkeypatch):
    q, k, v = tensors(1, 1, 8, dtype=torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match=r"^backend='triton' is not available: [^.]*\.$"):
        coterie.attention(q, k, v, "full", backend="triton")
    with pytest.raises(
        RuntimeError, match=r"^backend='native' is not available: it takes .*, not torch.float64 on cpu\.$"
    ):
        coterie.attention(q.double(), k.double(), v.double(), "full", backend="native")
    monkeypatch.setattr(coterie.compiled, "_missing", "the C++ engine was not built (no compiler)")
    monkeypatch.setattr(coterie.compiled, "_native", None)
    with pytest.raises(
        RuntimeError, match=r"^backend='native' is not available: the C\+\+ engine was not built [^.]*\.$"
    ):
        coterie.attention(q, k, v, "full", backend="native")
    assert coterie.backends()["native"] == "the C++ engine was not built (no compiler)"
    assert coterie.attention(q, k, v, "full").isfinite().all(), "auto takes what is there"


def test_auto_and_reference_agree():
    q, k, v = tensors(1, 1, 30)
    auto, reference = (coterie.attention(q, k, v, "smyrf", backend=b) for b in ("auto", "reference"))
    close(auto, reference)


def good():
    q, k, v = tensors(2, 2, 6, 8, dtype=torch.float32)
    return {"q": q, "k": k, "v": v, "mechanism": "smyrf"}


def changed(**changes):
    return lambda: coterie.attention(**{**good(), **changes})


zeros = torch.zeros
BAD = [
    (changed(q=zeros(2, 6, 8)), ValueError, r"q: expected 4 dimensions .* got \(2, 6, 8\)"),
    (changed(k=zeros(2, 2, 8, 8, 1)), ValueError, r"k: expected 4 dimensions"),
    (changed(q=[1.0]), TypeError, r"q: expected a tensor, got list"),
    (changed(q=zeros(2, 2, 6, 8).int()), TypeError, r"q: expected a dtype of .* got torch.int32"),
    (changed(q=zeros(2, 2, 6, 8).to(torch.complex64)), TypeError, r"q: expected a dtype of .* got torch.complex64"),
    (
        changed(k=zeros(2, 2, 8, 8).to(cases.DTYPE)),
        TypeError,
        r"k: expected the dtype of q, torch.float32, got torch.float64",
    ),
    (changed(k=zeros(3, 2, 8, 8)), ValueError, r"k: expected the batch size of q, 2, got 3"),
    (changed(k=zeros(2, 2, 8, 4)), ValueError, r"k: expected the head dim of q, 8, got 4"),
    (changed(v=zeros(2, 2, 9, 8)), ValueError, r"v: expected the length of k, 8, got 9"),
    (changed(v=zeros(2, 1, 8, 8)), ValueError, r"v: expected the 2 heads of k, got 1"),
    (changed(q=zeros(2, 2, 6, 0), k=zeros(2, 2, 8, 0)), ValueError, r"q: expected a head dim ≥ 1"),
    (changed(k=zeros(2, 1, 8, 8), v=zeros(2, 1, 8, 8)), ValueError, r"fewer need enable_gqa=True\), got 1"),
    (
        changed(k=zeros(2, 3, 8, 8), v=zeros(2, 3, 8, 8), enable_gqa=True),
        ValueError,
        r"k: expected a number of heads that divides the 2 of q, got 3",
    ),
    (changed(k=zeros(2, 2, 8, 8, device="meta")), ValueError, r"k: expected the device of q, cpu, got meta"),
    (changed(mechanism="nope"), ValueError, r"mechanism: expected one of smyrf"),
    (changed(mechanism=None), TypeError, r"mechanism: expected a Mechanism, a string or a dict, got NoneType"),
    (changed(key_mask=torch.ones(2, 6).bool()), ValueError, r"key_mask: expected shape \(2, 8\), got \(2, 6\)"),
    (changed(key_mask=torch.ones(2, 8)), TypeError, r"key_mask: expected dtype torch.bool \(True = real token\)"),
    (changed(key_mask=[[True]]), TypeError, r"key_mask: expected a tensor, got list"),
    (changed(query_mask=torch.ones(2, 8).bool()), ValueError, r"query_mask: expected shape \(2, 6\), got \(2, 8\)"),
    (changed(key_mask=torch.ones(2, 8, device="meta").bool()), ValueError, r"key_mask: expected device cpu, got meta"),
    (
        changed(attn_mask=zeros(6, 9)),
        ValueError,
        r"attn_mask: expected \(2, 8\) or a shape that broadcasts .* \(6, 9\)",
    ),
    (
        changed(attn_mask=zeros(6, 8).half()),
        TypeError,
        r"attn_mask: expected torch.bool or torch.float32, got torch.float16",
    ),
    (
        changed(attn_mask=zeros(6, 8).int()),
        TypeError,
        r"attn_mask: expected torch.bool or torch.float32, got torch.int32",
    ),
    (changed(attn_mask=zeros(8)), ValueError, r"attn_mask: expected 2 to 4 dimensions, got \(8,\)"),
    (changed(attn_mask=zeros(1, 1, 1, 6, 8)), ValueError, r"attn_mask: expected 2 to 4 dimensions"),
    (changed(attn_mask=[0.0]), TypeError, r"attn_mask: expected a tensor, got list"),
    (changed(attn_mask=zeros(6, 8, device="meta")), ValueError, r"attn_mask: expected the device of q, cpu, got meta"),
    (changed(dropout_p=1.5), ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
    (changed(dropout_p=math.nan), ValueError, r"dropout_p: expected a probability in \[0, 1\], got nan"),
    (changed(dropout_p="0.1"), TypeError, r"dropout_p: expected a number, got str"),
    (changed(scale=math.inf), ValueError, r"scale: expected a finite number, got inf"),
    (changed(scale="1"), TypeError, r"scale: expected a number, got str"),
    (changed(is_causal=1), TypeError, r"is_causal: expected a bool, got int"),
    (changed(enable_gqa=None), TypeError, r"enable_gqa: expected a bool, got NoneType"),
    (changed(return_lse=0), TypeError, r"return_lse: expected a bool, got int"),
    (changed(causal_offset=1.0), TypeError, r"causal_offset: expected an int or an integer tensor, got float"),
    (changed(causal_offset=zeros(2)), TypeError, r"causal_offset: expected an integer dtype, got torch.float32"),
    (changed(causal_offset=zeros(3).int()), ValueError, r"causal_offset: expected shape \(\) or \(2,\), got \(3,\)"),
    (changed(layer=-1), ValueError, r"layer: expected an int ≥ 0, got -1"),
    (changed(layer=2**24), ValueError, r"layer: expected an int ≤ 16777215, got 16777216"),
    (changed(layer=1.5), TypeError, r"layer: expected an int, got float"),
    (changed(dense_below=-1), ValueError, r"dense_below: expected an int ≥ 0, got -1"),
    (changed(backend="cuda"), ValueError, r"backend: expected one of 'auto', .*'triton', got 'cuda'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m[:50] for *_, m in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_keyword_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        changed(dropout=0.1)()


def test_a_plan_for_another_batch_is_named_before_its_offset():
    q, k, v = tensors(2, 2, 20)
    plan = coterie.Local(window=5).plan(q, k, is_causal=True, causal_offset=2)
    with pytest.raises(ValueError, match="plan: expected a plan for"):
        coterie.attention(q[:1], k[:1], v[:1], None, plan=plan, is_causal=True, causal_offset=2)


def test_a_two_dimensional_mask_that_could_be_either_is_refused():
    q, k, v = tensors(6, 2, 6, 8)
    mask = torch.ones(6, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attn_mask: expected a shape that can be told apart, \(6, 1, 1, 8\)"):
        coterie.attention(q, k, v, "full", attn_mask=mask)


def test_nested_tensors_are_refused():
    nested = torch.nested.as_nested_tensor([torch.zeros(3, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match="q: expected a padded tensor, got a nested one"):
        coterie.attention(nested, nested, nested, "full")


# --- varlen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_each_alone(name, causal):
    causal = causal and name in CAUSAL
    query_lengths, key_lengths = [5, 0, 40, 1, 17], [9, 3, 40, 1, 0]
    starts_q, starts_k = (torch.tensor([0, *x]).cumsum(0) for x in (query_lengths, key_lengths))
    q, k, v = (
        x[0].transpose(0, 1).contiguous().requires_grad_() for x in tensors(1, 4, 63, 53, key_heads=2, value_dim=5)
    )
    kwargs = {"is_causal": causal, "enable_gqa": True, "return_lse": True}
    out, lse = coterie.attention_varlen(q, k, v, MECHANISMS[name], starts_q.int(), starts_k, **kwargs)
    assert out.shape == (63, 4, 5)
    assert lse.shape == (63, 4)
    total = torch.zeros(())
    for s in range(5):
        rows, keys = slice(starts_q[s], starts_q[s + 1]), slice(starts_k[s], starts_k[s + 1])
        a, b, c = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        out_s, lse_s = coterie.attention(a, b, c, MECHANISMS[name], **kwargs)
        close(out[rows], out_s[0].transpose(0, 1))
        close(lse[rows], lse_s[0].transpose(0, 1))
        total = total + out_s.square().sum()
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(total, (q, k, v))
    all_close(ours, theirs)


def test_packed_sequences_under_autocast():
    q, k, v = (x[0].transpose(0, 1).float() for x in tensors(1, 2, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for starts in (torch.tensor([0, 4, 10]), torch.tensor([0])):
            n = int(starts[-1])
            out = coterie.attention_varlen(q[:n].bfloat16(), k[:n], v[:n], "full", starts, starts)
            assert isinstance(out, torch.Tensor)
            assert out.dtype == torch.bfloat16


def test_packed_sequences_with_their_own_offsets():
    q, k, v = (x[0].transpose(0, 1) for x in tensors(1, 2, 10, 14))
    starts_q, starts_k = torch.tensor([0, 4, 10]), torch.tensor([0, 6, 14])
    out = coterie.attention_varlen(
        q, k, v, "full", starts_q, starts_k, is_causal=True, causal_offset=torch.tensor([0, 2])
    )
    assert isinstance(out, torch.Tensor)
    a, b, c = (x[None].transpose(1, 2) for x in (q[:4], k[:6], v[:6]))
    first = F.scaled_dot_product_attention(a, b, c, is_causal=True)
    close(out[:4], first[0].transpose(0, 1))


def test_no_sequence_at_all():
    x = torch.zeros(0, 2, 4, dtype=torch.float16)
    starts = torch.zeros(1, dtype=torch.int64)
    out, lse = coterie.attention_varlen(x, x, x, "full", starts, starts, return_lse=True)
    assert out.shape == (0, 2, 4)
    assert out.dtype == torch.float16
    assert lse.shape == (0, 2)


def packed(**changes):
    x, starts = torch.zeros(10, 2, 4), torch.tensor([0, 4, 10])
    call = {"q": x, "k": x, "v": x, "mechanism": "full", "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return lambda: coterie.attention_varlen(**{**call, **changes})


BAD_PACKED = [
    (packed(q=zeros(1, 10, 2, 4)), ValueError, r"q: expected 3 dimensions \(total, heads, dim\)"),
    (packed(k=None), TypeError, r"k: expected a tensor, got NoneType"),
    (packed(v=zeros(9, 2, 4)), ValueError, r"v: expected the 10 rows of k, got 9"),
    (packed(cu_seqlens_q=[0, 10]), TypeError, r"cu_seqlens_q: expected a tensor, got list"),
    (packed(cu_seqlens_q=torch.tensor([0.0, 10.0])), TypeError, r"cu_seqlens_q: expected dtype torch.int32 or"),
    (packed(cu_seqlens_q=torch.tensor([[0, 10]])), ValueError, r"cu_seqlens_q: expected shape \(sequences \+ 1,\)"),
    (packed(cu_seqlens_q=torch.tensor([0, 6, 4, 10])), ValueError, r"cu_seqlens_q: expected starts that ascend from 0"),
    (packed(cu_seqlens_q=torch.tensor([1, 4, 10])), ValueError, r"cu_seqlens_q: expected starts that ascend from 0"),
    (packed(cu_seqlens_k=torch.tensor([0, 4, 9])), ValueError, r"cu_seqlens_k: expected a last entry of 10"),
    (packed(cu_seqlens_k=torch.tensor([0, 10])), ValueError, r"cu_seqlens_k: expected 2 sequences, got 1"),
    (
        packed(causal_offset=torch.zeros(3).int()),
        ValueError,
        r"causal_offset: expected shape \(\) or \(2,\), got \(3,\)",
    ),
    (packed(scale="x"), TypeError, r"scale: expected a number"),
    (packed(dropout_p=2.0), ValueError, r"dropout_p: expected a probability"),
    (packed(backend="cuda"), ValueError, r"backend: expected one of"),
    (packed(mechanism="nope"), ValueError, r"mechanism: expected one of"),
    (packed(return_lse=1), TypeError, r"return_lse: expected a bool"),
    (packed(k=zeros(10, 1, 4), v=zeros(10, 1, 4)), ValueError, r"fewer need enable_gqa=True"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_PACKED, ids=[m[:50] for *_, m in BAD_PACKED])
def test_bad_packed_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- the package -----------------------------------------------------------------------------------------------------


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert coterie.__version__ == version("coterie")


def test_the_core_needs_torch_alone():
    """Nothing but torch, what it brings, and the standard library is imported."""
    code = (
        "import sys, torch; before = set(sys.modules); import coterie; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(sorted(new - {'torch', 'coterie', 'numpy'}))"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names_have_docstrings():
    for name in coterie.__all__:
        thing = getattr(coterie, name)
        assert getattr(thing, "__doc__", None), name
