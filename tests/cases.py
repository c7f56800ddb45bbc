"""Mechanisms and tensors that many tests run over: one list, a new mechanism is one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import coterie

DTYPE = torch.float64  # the `backend` fixture makes it float32, which the native engine takes


def close(found: Tensor, want: Tensor, *, loose: float = 1.0) -> None:
    """Equal to the rounding of the backend under test."""
    rtol, atol = (1e-9, 1e-11) if found.dtype == torch.float64 else (1e-4 * loose, 2e-5 * loose)
    torch.testing.assert_close(found.double(), want.double(), rtol=rtol, atol=atol)


def check_gradients(run: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
    """In float64 by finite differences; in float32 against the reference backend in float64."""
    if inputs[0].dtype == torch.float64:
        assert torch.autograd.gradcheck(run, tuple(inputs))
        return
    found = []
    for dtype in (torch.float32, torch.float64):
        copies = [x.detach().to(dtype).requires_grad_() for x in inputs]
        outputs = run(*copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
        total = torch.stack([(x.double() * weight).sum() for x, weight in zip(outputs, weights, strict=True)]).sum()
        found.append((*outputs, *torch.autograd.grad(total, copies)))
    all_close(*found)


def all_close(found: Sequence[Tensor], want: Sequence[Tensor], *, loose: float = 1.0) -> None:
    """`close` for each of several."""
    for a, b in zip(found, want, strict=True):
        close(a, b, loose=loose)


Mistake = tuple[Callable[[], object], type[Exception], str]  # a call that must fail, the kind of error, its message


def mistakes(cases: dict[str, Mistake] | list[Mistake]) -> pytest.MarkDecorator:
    """Parametrize a test over mistakes, each a `case` for `fails`; those of a list go by their messages."""
    named = cases if isinstance(cases, dict) else {f"{n}-{m[2][:40]}": m for n, m in enumerate(cases)}
    return pytest.mark.parametrize("case", named.values(), ids=list(named))


def fails(case: Mistake) -> None:
    """The call raises this kind of error, with a message that matches."""
    call, kind, message = case
    with pytest.raises(kind, match=message):
        call()


MECHANISMS: dict[str, coterie.Mechanism] = {
    "smyrf": coterie.Smyrf(rounds=3, cluster_size=16),
    "smyrf-once": coterie.Smyrf(rounds=3, cluster_size=16, duplicates="once"),
    "smyrf-none-e2lsh": coterie.Smyrf(rounds=2, cluster_size=16, transform="none", hash="e2lsh"),
    "smyrf-l2-alsh": coterie.Smyrf(rounds=2, cluster_size=16, transform="l2-alsh"),
    "smyrf-xbox-polytope": coterie.Smyrf(rounds=2, cluster_size=16, transform="xbox", hash="cross-polytope"),
    "smyrf-simple": coterie.Smyrf(rounds=2, cluster_size=16, transform="simple"),
    "clustered": coterie.Clustered(clusters=7, iterations=3),
    "clustered-euclidean": coterie.Clustered(clusters=7, iterations=3, space="euclidean"),
    "improved": coterie.ImprovedClustered(clusters=7, topk=9, iterations=3),
    "improved-euclidean": coterie.ImprovedClustered(clusters=7, topk=9, iterations=3, space="euclidean"),
    "near-far": coterie.NearFar(near=9, chunk=16),
    "near-far-strict": coterie.NearFar(near=5, query_clusters=3, key_clusters=6, chunk=8, strict=True),
    "reformer": coterie.Reformer(rounds=2, chunk_size=16),
    "reformer-strict": coterie.Reformer(rounds=2, chunk_size=16, strict=True),
    "routing": coterie.Routing(clusters=5, window=20, iterations=3),
    "local": coterie.Local(window=15),
    "longformer": coterie.Longformer(window=15, global_tokens=2),
    "topk": coterie.TopK(k=9),
    "full": coterie.Full(),
    "strided": coterie.Strided(stride=7),
    "strided-heads": coterie.Strided(stride=7, factors="heads"),
    "fixed": coterie.Fixed(stride=9, summary=2),
}
CAUSAL = {name: m for name, m in MECHANISMS.items() if m.causality != "none"}
STRICT = {
    name: m
    for name, m in MECHANISMS.items()
    if name in ("near-far-strict", "reformer-strict", "topk", "full")
    or name.startswith(("local", "longformer", "strided", "fixed"))
}
# These count positions: a hole inside a sequence is a distance.
POSITIONAL = [name for name in MECHANISMS if name.startswith(("local", "longformer", "strided"))]
MEANS = {name: m for name, m in MECHANISMS.items() if name.startswith(("clustered", "improved", "near-far"))}


def tensors(
    batch: int = 2,
    heads: int = 2,
    queries: int = 63,
    keys: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    key_heads: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v, with keys that resemble queries so that grouping has something to find."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype or DTYPE)

    q = draw(batch, heads, queries, dim)
    k = draw(batch, key_heads, keys, dim)
    v = draw(batch, key_heads, keys, value_dim or dim)
    return q, k, v


def padding(batch: int, length: int, lengths: list[int], side: str = "right") -> Tensor:
    """(batch, length) masks with `lengths` real tokens on the other side of the padding, or scattered."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for b, real in enumerate(lengths):
        if side == "right":
            mask[b, :real] = True
        elif side == "left":
            mask[b, length - real :] = True
        else:
            chosen = torch.randperm(length, generator=torch.Generator().manual_seed(b))[:real]
            mask[b, chosen] = True
    return mask


def index(values: list[int] | list[list[int]]) -> Tensor:
    """An index of one sample and one head, (1, 1, N) int32; for `skip` of a list for each query, (1, 1, N, S)."""
    return torch.tensor(values, dtype=torch.int32)[None, None]


# Two groups over four queries and five keys, one head.
SMALL_ROUND = {
    "query_order": index([2, 0, 3, 1]),
    "query_offsets": index([0, 1, 4]),
    "key_order": index([4, 1, 0]),
    "key_start": index([0, 1]),
    "key_stop": index([2, 3]),
}
