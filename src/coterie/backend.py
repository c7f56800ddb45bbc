"""Which backends can run here, and which one a call takes."""

from __future__ import annotations

import torch

from coterie import compiled
from coterie.checks import expect_choice

BACKENDS = ("auto", "reference", "native", "triton")


def backends() -> dict[str, str]:
    """Each backend and whether it can run here; if not, why.

    >>> import coterie
    >>> coterie.backends()["reference"]
    'available'
    """
    return {
        "reference": "available",
        "native": compiled.why_not() or f"available ({compiled.instruction_set()})",
        "triton": "the Triton kernels for GPUs are not part of this version of Coterie",
    }


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs; an explicit choice that cannot run is an error, never replaced by another.

    "auto" is native for float32, bfloat16 and float16 on the CPU where it was built, and the reference elsewhere. On
    the meta device, where there is nothing to compute, the native ops say what the result would look like.
    """
    expect_choice("backend", backend, BACKENDS)
    if device.type == "meta":
        if backend not in ("auto", "native"):
            raise RuntimeError(f"backend={backend!r} is not available: it needs numbers, and meta tensors have none.")
        return "native"
    fits = device.type == "cpu" and dtype != torch.float64
    if backend == "auto":
        return "native" if fits and not compiled.why_not() else "reference"
    state = backends()[backend]
    if not state.startswith("available"):
        raise RuntimeError(f"backend={backend!r} is not available: {state}.")
    if backend == "native" and not fits:
        raise RuntimeError(
            f"backend='native' is not available: it takes float32, bfloat16 and float16 on the CPU, "
            f"not {dtype} on {device}."
        )
    return backend
