"""Kernels compiled ahead of time, without a GPU: what each needs, and which instructions it uses.

The backend itself is run on tensors in the memory of the host, but where it would launch a kernel, the kernel is
compiled instead. So these are the variants that a call on a GPU would take. One thing is made more general: lengths
and counts may be any number here. On a GPU, Triton compiles once more for those that 16 divides or that are 1, and has
less to compute then.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.jit import JITFunction

from coterie.engine.kernels.arguments import Rows


class Gpu(NamedTuple):
    """What a multiprocessor has room for, and what the data sheet says of the whole."""

    name: str
    target: GPUTarget
    registers: int  # of a multiprocessor
    shared: int  # bytes of it
    reserved: int  # bytes of it that a block takes for the driver
    warps: int
    blocks: int
    bandwidth: float  # bytes a second
    flops: float  # a second, dense, in bfloat16


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", GPUTarget("cuda", 80, 32), 65_536, 164 * 1024, 1024, 64, 32, 2.039e12, 312e12),
        Gpu("H100", GPUTarget("cuda", 90, 32), 65_536, 228 * 1024, 1024, 64, 32, 3.35e12, 989e12),
        Gpu("B200", GPUTarget("cuda", 100, 32), 65_536, 228 * 1024, 1024, 64, 32, 8e12, 2250e12),
        Gpu("MI300X", GPUTarget("hip", "gfx942", 64), 131_072, 64 * 1024, 0, 32, 32, 5.3e12, 1307e12),
    )
}


_LARGE = {"round_forward", "round_queries", "round_keys", "nearest", "cluster_parts", "largest", "best_keys"}


class Compiled(NamedTuple):
    """One kernel for one GPU."""

    key: str  # of what is compiled: code, constants, types, target
    kernel: str
    constants: dict[str, Any]
    features: tuple[str, ...]
    warps: int
    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    tensor: int  # instructions of tensor cores in the listing

    def blocks(self, gpu: Gpu) -> int:
        """How many fit into a multiprocessor at a time."""
        registers = -(-self.registers // 8) * 8 * gpu.target.warp_size * self.warps
        shared = max(1, self.shared + gpu.reserved)
        return min(gpu.blocks, gpu.registers // registers, gpu.shared // shared, gpu.warps // self.warps)


class _Driver:
    """A GPU that is not there: Triton asks it what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int | str:
        arch: int | str = self.target.arch
        return arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(gpu: Gpu, *, small: bool = True) -> Iterator[list[Compiled]]:
    """Kernels that are launched inside are compiled for this GPU, once each, and do not run.

    Without the `small` ones, which move and add rows, those that multiply or pick are left.
    """
    found: list[Compiled] = []
    seen: set[str] = set()
    run, specialize = JITFunction.run, jit.native_specialize_impl

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        if not (small or self.fn.__name__ in _LARGE):
            return None
        if gpu.target.backend == "hip":
            settings.pop("maxnreg", None)  # an option of NVIDIA's assembler
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            found.append(_look_at(kernel, args, settings))
        return kernel

    triton.runtime.driver.set_active(_Driver(gpu.target))
    JITFunction.run, jit.native_specialize_impl = compile_only, _of_any_number(specialize)
    try:
        yield found
    finally:
        JITFunction.run, jit.native_specialize_impl = run, specialize
        triton.runtime.driver.set_active(None)


def _of_any_number(specialize: Callable[..., Any]) -> Callable[..., Any]:
    """Types and constants of an argument; a number in a tuple is no constant, unless it is a stride of rows."""

    def kind(backend: Any, each: Any, is_const: bool, numbers: bool, align: bool) -> Any:
        if not isinstance(each, tuple) or isinstance(each, Rows) or not each:
            return specialize(backend, each, is_const, numbers, align)
        parts = zip(*(kind(backend, x, is_const, False, align) for x in each), strict=True)
        return tuple(type(each)(*x) if hasattr(each, "_fields") else x for x in parts)

    return kind


def _look_at(kernel: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Compiled:
    registers, spilled = _amd_resources(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else _resources(kernel.asm)
    listing = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    return Compiled(
        key=kernel.hash,
        kernel=kernel.metadata.name,
        constants={name: value for name, value in settings.items() if name.isupper()},
        features=tuple(_features(args)),
        warps=kernel.metadata.num_warps,
        registers=registers,
        spilled=spilled,
        shared=kernel.metadata.shared,
        tensor=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_)", listing)),
    )


def _features(args: tuple[Any, ...]) -> Iterator[str]:
    """What the call and its round have that a kernel has code for."""
    names = ("causal", "bias", "counts", "skip", "low", "mask", "key_mask", "seed")
    for each in args:
        for name in names:
            if hasattr(each, "_fields") and getattr(each, name, None) is not None:
                yield "window" if name == "low" else "dropout" if name == "seed" else name.replace("_", " ")
        if isinstance(each, tuple) and each and hasattr(each[0], "listed"):
            yield "once"


def _resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as NVIDIA's own tool reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_resources(listing: str) -> tuple[int, int]:
    """The same, as the compiler's listing says of itself."""
    found = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", listing)
    }
    return found["vgpr_count"], found["private_segment_fixed_size"]
