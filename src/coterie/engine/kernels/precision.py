"""How float32 products are made."""

from __future__ import annotations

import torch


def precision(dtype: torch.dtype) -> str:
    """In full, unless PyTorch was told that its own may be TF32."""
    return "tf32" if dtype == torch.float32 and _allows_tf32() else "ieee"


def _allows_tf32() -> bool:
    """Whoever has set `fp32_precision`, the newer way, may not ask `torch.get_float32_matmul_precision` any more."""
    matmul = torch.backends.cuda.matmul
    kind = getattr(matmul, "fp32_precision", None)  # since torch 2.9; it knows what was set in the older ways, too
    return bool(matmul.allow_tf32) if kind is None else kind == "tf32"
