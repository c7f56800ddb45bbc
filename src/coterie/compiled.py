"""The compiled module: whether it is there, and tensors in the form that it reads.

The kernels know nothing of torch: tensors reach them through DLPack.
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

INSTRUCTION_SETS = ("avx512", "avx2", "portable")  # of each there is a copy of the kernels; the best that runs is taken

# A set that this CPU lacks gives way to the best that it has; `instruction_set` tells.
if (_asked := os.environ.get("COTERIE_ISA")) and _asked not in INSTRUCTION_SETS:
    raise ValueError(f"COTERIE_ISA: expected one of {', '.join(INSTRUCTION_SETS)}, got {_asked!r}")

_native: ModuleType | None = None
_missing, _instruction_set = "", ""
try:
    _native = import_module("coterie._native")
    _instruction_set = _native.instruction_set()
except ImportError as error:
    _missing = f"the C++ engine was not built when Coterie was installed ({error})"


def _torchs_team() -> int:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if it is another kind of library."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    paths = {path for path in paths if "/torch/" in path or "/torch.libs/" in path} or paths
    if len(paths) != 1:
        return 0
    return ctypes.cast(ctypes.CDLL(paths.pop()).GOMP_parallel, ctypes.c_void_p).value or 0


if _native is not None:
    _native.adopt_team(_torchs_team())


def why_not() -> str:
    """Why the kernels cannot run here; empty if they can."""
    return _missing


def instruction_set() -> str:
    """Which copy of the kernels runs on this CPU: "avx512", "avx2" or "portable"."""
    return _instruction_set


class Regions(NamedTuple):
    """What the parallel parts of all native calls so far took, added up over their threads."""

    calls: int
    seconds: float  # of threads that were there to work
    idle: float  # seconds of those: a thread came late, or had nothing left to do and waited for the others


def regions() -> Regions:
    """How long threads were held by native calls, and how long of that they waited. With one thread there are none."""
    return Regions(*kernels().regions())


def kernels() -> Any:
    """The compiled module."""
    if _native is None:
        raise RuntimeError(f"backend='native' is not available: {_missing}.")
    return _native


def unwatched(*tensors: Tensor) -> bool:
    """Whether an op on these may be run as the function that it is: nobody traces, transforms or profiles it. What
    torch's dispatcher does for a custom op takes as long as a small kernel."""
    return (
        not torch.compiler.is_compiling()
        and all((type(x) is Tensor or type(x) is torch.nn.Parameter) and x.is_cpu for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
    )


def without_grad(x: Tensor) -> Tensor:
    """The tensor as the kernels take it: what requires no grad is handed over as it is."""
    return x.detach() if x.requires_grad else x


def last_contiguous(x: Tensor) -> Tensor:
    """The tensor as the kernels read it: any strides but the last."""
    x = without_grad(x)
    return x if x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as the kernels read it: a byte each."""
    return None if mask is None else mask.contiguous()
