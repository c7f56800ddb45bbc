"""Whether models are trained and tested in bfloat16."""

from __future__ import annotations

from typing import Any

import torch


def in_bf16(asked: bool | None) -> bool:
    """What was asked; by default whether this machine multiplies bfloat16 itself, since elsewhere it is slower."""
    if asked is not None:
        return asked
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def autocast(model: Any, bf16: bool) -> torch.autocast:
    """A forward in that precision; weights and their gradients stay in float32."""
    return torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=bf16)
