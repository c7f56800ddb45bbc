"""Which backends can run here, and which one a call takes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from coterie import compiled
from coterie.checks import expect_choice

BACKENDS = ("auto", "reference", "native", "triton")
MOST_DIM = 256  # of a head in the Triton kernels: more would not fit into the registers of a tile
_OLDEST = (8, 0)  # compute capability: Ampere


def backends() -> dict[str, str]:
    """Each backend and whether it can run here; if not, why.

    >>> import coterie
    >>> coterie.backends()["reference"]
    'available'
    """
    return {
        "reference": "available",
        "native": compiled.why_not() or f"available ({compiled.instruction_set()})",
        "triton": _why_no_triton() or f"available ({_where_triton_runs()})",
    }


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU: slow, and what tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_no_triton(device: torch.device | None = None) -> str:
    """Why the kernels for GPUs cannot run here; empty if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'coterie[gpu]' installs it"
    if _interpreted():
        return ""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        return f"it needs a GPU of compute capability {needed} or newer, and this one has {found[0]}.{found[1]}"
    return ""


def _where_triton_runs() -> str:
    return "in its interpreter, on the CPU" if _interpreted() else torch.cuda.get_device_name()


def _no_triton_for(device: torch.device, dtype: torch.dtype, dim: int) -> str:
    """Why the kernels for GPUs cannot run this call; empty if they can."""
    place = "cpu" if _interpreted() else "cuda"  # as torch calls the GPUs of AMD, too
    if device.type != place or dtype == torch.float64:
        where = "the CPU, where its interpreter runs" if _interpreted() else "a GPU"
        return f"it takes float32, bfloat16 and float16 on {where}, not {dtype} on {device}"
    if dim > MOST_DIM:
        return f"it takes head dims up to {MOST_DIM}, not {dim}"
    return _why_no_triton(None if _interpreted() else device)


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, dim: int = 0) -> str:
    """The backend that runs; an explicit choice that cannot run is an error, never replaced by another.

    "auto" is native for float32, bfloat16 and float16 on the CPU where it was built, triton for the same on a GPU, and
    the reference elsewhere. On the meta device, where there is nothing to compute, the native ops say what the result
    would look like.

    Args:
        dim: the wider of the head dims of keys and values.
    """
    expect_choice("backend", backend, BACKENDS)
    if device.type == "meta":
        if backend not in ("auto", "native"):
            raise RuntimeError(f"backend={backend!r} is not available: it needs numbers, and meta tensors have none.")
        return "native"
    fits = device.type == "cpu" and dtype != torch.float64
    if backend == "auto":
        if fits and not compiled.why_not():
            return "native"
        return "triton" if device.type == "cuda" and not _no_triton_for(device, dtype, dim) else "reference"
    state = compiled.why_not() if backend == "native" else ""
    if backend == "triton":
        state = _why_no_triton() or _no_triton_for(device, dtype, dim)
    if state:
        raise RuntimeError(f"backend={backend!r} is not available: {state}.")
    if backend == "native" and not fits:
        raise RuntimeError(
            f"backend='native' is not available: it takes float32, bfloat16 and float16 on the CPU, "
            f"not {dtype} on {device}."
        )
    return backend
