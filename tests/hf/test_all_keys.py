"""New tokens over all keys of a cache: the kernel against loops in float64, and models against SDPA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie.hf  # noqa: E402
from coterie.compiled import kernels, why_not  # noqa: E402
from coterie.hf import all_keys  # noqa: E402
from coterie.hf.asked import Asked  # noqa: E402
from tests.hf.families import _tokens  # noqa: E402
from tests.hf.test_cache import WAYS, generate, prompt, writer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.skipif(bool(why_not()), reason="needs the compiled kernels"),
]


def step(
    length: int, share: int = 3, queries: int = 1, dim: int = 20, values: int = 21, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length + share)
    q, k = torch.randn(2, 2 * share, queries, dim) * 2, torch.randn(2, 2, length + 5, dim)
    v = torch.randn(2, 2, length + 5, values)
    return q.to(dtype), k.to(dtype)[:, :, :length], v.to(dtype)[:, :, :length]  # there is room behind them


def given(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, seen: Tensor, scale: float | None = None) -> Tensor:
    return all_keys.answer(Asked(None, q, k, v, scale, 0.0), all_keys.Visible(real, seen, False))


def oracle(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, seen: Tensor, scale: float) -> Tensor:
    """Query by query, key by key."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        head = h // (q.shape[1] // k.shape[1])
        met = [j for j in range(int(seen[b, i])) if real is None or real[b, j]]
        if met:
            scores = torch.stack([scale * (q[b, h, i].double() @ k[b, head, j].double()) for j in met])
            out[b, h, i] = scores.softmax(0) @ v[b, head, met].double()
    return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("length", "share", "queries", "dim"),
    [(1, 1, 1, 16), (63, 1, 2, 7), (64, 3, 1, 64), (513, 2, 3, 80), (700, 5, 1, 33), (1100, 4, 2, 20)],
)
def test_a_token_gets_what_the_formula_says(length: int, share: int, queries: int, dim: int, padded: bool):
    q, k, v = step(length, share, queries, dim, dim + 1)
    real = (torch.rand(2, length) < 0.7).to(torch.uint8) if padded else None
    if real is not None:
        k, v = (x.masked_fill(~real.bool()[:, None, :, None], float("nan")) for x in (k, v))  # nobody reads padding
    seen = torch.randint(0, length + 1, (2, queries), dtype=torch.int32)
    seen[0, -1] = length
    found = given(q, k, v, real, seen, 0.3)
    torch.testing.assert_close(found.double(), oracle(q, k, v, real, seen, 0.3), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_and_rounded_once(dtype: torch.dtype):
    q, k, v = step(600, dtype=dtype)
    seen = torch.full((2, 1), 600, dtype=torch.int32)
    want = oracle(q, k, v, None, seen, 1 / math.sqrt(20))
    found = given(q, k, v, None, seen)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=0.6 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_token_that_sees_nobody_gets_nothing():
    q, k, v = step(70)
    nobody = torch.zeros(2, 70, dtype=torch.uint8)
    assert not given(q, k, v, nobody, torch.full((2, 1), 70, dtype=torch.int32)).any()
    assert not given(q, k, v, None, torch.zeros(2, 1, dtype=torch.int32)).any()


def test_scores_of_any_size_are_weighed():
    q, k, v = step(1200)
    k[:, :, 3], k[:, :, 900] = 3e4 * q[:, ::3, 0], -3e4 * q[:, ::3, 0]
    seen = torch.full((2, 1), 1200, dtype=torch.int32)
    torch.testing.assert_close(
        given(q, k, v, None, seen).double(), oracle(q, k, v, None, seen, 1 / math.sqrt(20)), rtol=1e-5, atol=2e-6
    )
    k[:, :, 700] = float("nan")  # of a real key, it is seen
    assert given(q, k, v, None, seen).isnan().all()


def test_the_number_of_threads_changes_no_bit():
    q, k, v = step(9000, share=4)
    seen, out = torch.full((2, 1), 8999, dtype=torch.int32), torch.empty(3, *q.shape[:3], v.shape[3])
    for threads in (1, 2, 3):
        kernels().decode_all(q, k, v, None, seen, 0.2, threads, out[threads - 1])
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


def test_the_kernel_refuses_what_it_cannot_read():
    q, k, v = step(9)
    seen, out = torch.full((2, 1), 9, dtype=torch.int32), torch.empty(2, 6, 1, 21)
    run = kernels().decode_all
    with pytest.raises(ValueError, match="seen: expected at most 9, got 10"):
        run(q, k, v, None, seen + 1, 1.0, 1, out)
    with pytest.raises(ValueError, match="seen: expected at least 0, got -1"):
        run(q, k, v, None, seen - 10, 1.0, 1, out)
    with pytest.raises(ValueError, match=r"real: expected shape \(2, 9\)"):
        run(q, k, v, torch.ones(2, 8, dtype=torch.uint8), seen, 1.0, 1, out)
    with pytest.raises(ValueError, match="q: expected a multiple of the 2 key heads, got 5"):
        run(q[:, :5], k, v, None, seen, 1.0, 1, out[:, :5])
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 6, 1, 21\)"):
        run(q, k, v, None, seen, 1.0, 1, out[..., :20].contiguous())
    with pytest.raises(ValueError, match=r"v: expected shape \(2, 2, 9, 21\)"):
        run(q, k, v[:, :, :8], None, seen, 1.0, 1, out)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of the kernel had."""
    found: list[int] = []
    before = all_keys.answer

    def count(call: Asked, visible: all_keys.Visible) -> Tensor:
        found.append(call.q.shape[2])
        return before(call, visible)

    monkeypatch.setattr(all_keys, "answer", count)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2", "bart", "whisper"])
def test_tokens_are_those_of_sdpa_over_the_dynamic_cache(name: str, way: str, asked: list[int]):
    want = generate(writer(name), prompt(name), None, **WAYS[way])
    model = coterie.hf.use(writer(name), "dense")
    assert torch.equal(generate(model, prompt(name), coterie.hf.Cache(model), **WAYS[way]), want)
    assert torch.equal(generate(model, prompt(name), None, **WAYS[way]), want)
    assert len(asked) >= 24


def test_so_are_those_of_assistants_chunks_and_conversations(asked: list[int]):
    dense, model = writer("llama"), coterie.hf.use(writer("llama"), "dense")
    inputs = {key: x[1:] for key, x in prompt("llama").items()}
    want = generate(dense, inputs, None)
    settings: dict[str, Any]
    for settings in ({"assistant_model": writer("llama", num_hidden_layers=1)}, {"prefill_chunk_size": 8}):
        assert torch.equal(generate(model, inputs, coterie.hf.Cache(model), **settings), want)
    assert max(asked) > 1
    cache = coterie.hf.Cache(model)
    longer = torch.cat([generate(model, inputs, cache), _tokens(1, 5, seed=3)], 1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert torch.equal(generate(model, inputs, cache), generate(dense, inputs, None))


def test_sdpa_takes_what_the_kernel_does_not(asked: list[int]):
    for dtype, grad in ((torch.float64, False), (torch.float32, True)):
        dense, model = writer("llama").to(dtype), coterie.hf.use(writer("llama").to(dtype), "dense")
        ids, found = _tokens(2, 20), []
        for each in (dense, model):
            with torch.set_grad_enabled(grad):
                cache = coterie.hf.Cache(each)
                each(ids[:, :17], past_key_values=cache)
                found += [each(ids[:, i : i + 1], past_key_values=cache).logits for i in range(17, 20)]
        for mine, want in zip(found[3:], found[:3], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)
    assert not asked
    keys = torch.zeros(1, 1, 99, 4)
    many = Asked(None, torch.zeros(1, 8, 16, 4), keys, keys, None, 0.0)
    assert not all_keys.answers(many)
    assert all_keys.answers(many._replace(q=many.q[:, :, :3]))
