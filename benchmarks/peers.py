"""Public peers from PyPI, each as a call on (B, H, N, D) tensors; those that are not installed say so."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _local() -> Attend:
    module = import_module("local_attention").LocalAttention(
        dim=64, window_size=64, causal=False, look_backward=1, look_forward=1, use_rotary_pos_emb=False
    )
    return lambda q, k, v: module.eval()(q, k, v)


def _reformer() -> Attend:
    module = import_module("reformer_pytorch").LSHAttention(bucket_size=64, n_hashes=2, causal=False, dropout=0.0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # shares queries and keys
        out: Tensor = module.eval()(q.flatten(0, 1), v.flatten(0, 1))[0]
        return out.view_as(v)

    return attend


def _routing() -> Attend:
    attention = import_module("routing_transformer.routing_transformer").KmeansAttention
    modules: dict[int, torch.nn.Module] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, heads = q.shape[2], q.shape[1]
        if length not in modules:
            modules[length] = attention(length // 128, 128, heads, q.shape[-1], causal=False).eval()
        out: Tensor = modules[length](q, k, v)[0]
        return out

    return attend


PEERS: dict[str, Callable[[], Attend]] = {
    "local-attention (window 64 ± 64)": _local,
    "reformer-pytorch (2 × 64)": _reformer,
    "routing-transformer (windows of 128)": _routing,
}


def available() -> tuple[dict[str, Attend], dict[str, str]]:
    """The peers that can be imported, and why the others cannot."""
    found, missing = {}, {}
    for name, make in PEERS.items():
        try:
            found[name] = make()
        except (ImportError, AttributeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
