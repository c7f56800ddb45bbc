"""Kernels compiled ahead of time, without a GPU: what each needs, and which instructions it uses.

The backend itself is run on tensors in the memory of the host, but where it would launch a kernel, the kernel is
compiled instead. So these are the variants that a call on a GPU would take.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Gpu(NamedTuple):
    """What a multiprocessor has room for, and what the data sheet says of the whole."""

    name: str
    capability: int
    registers: int  # of a multiprocessor
    shared: int  # bytes of it
    warps: int
    blocks: int
    bandwidth: float  # bytes a second
    flops: float  # a second, dense, in bfloat16


GPUS = (
    Gpu("A100", 80, 65_536, 164 * 1024, 64, 32, 2.039e12, 312e12),
    Gpu("H100", 90, 65_536, 228 * 1024, 64, 32, 3.35e12, 989e12),
)
_RESERVED = 1024  # bytes of shared memory that CUDA takes for itself, a block


class Compiled(NamedTuple):
    """One kernel for one GPU."""

    kernel: str
    constants: dict[str, Any]
    features: tuple[str, ...]
    warps: int
    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    mma: int  # instructions of Ampere's tensor cores in the listing
    wgmma: int  # of Hopper's

    def blocks(self, gpu: Gpu) -> int:
        """How many fit into a multiprocessor at a time."""
        rounded = -(-self.registers // 8) * 8 * 32 * self.warps
        limits = (gpu.registers // rounded, gpu.shared // (self.shared + _RESERVED), gpu.warps // self.warps)
        return min(gpu.blocks, *limits)


class _Driver:
    """A GPU that is not there: Triton asks it what to compile for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(gpu: Gpu, *, small: bool = True) -> Iterator[list[Compiled]]:
    """Kernels that are launched inside are compiled for this GPU, once each, and do not run.

    Without the `small` ones, which move and add rows, those that multiply are left: their names begin with "round".
    """
    found: list[Compiled] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        if not (small or self.fn.__name__.startswith("round")):
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            found.append(_look_at(kernel, args, settings))
        return kernel

    triton.runtime.driver.set_active(_Driver(gpu.capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        triton.runtime.driver.set_active(None)


def _look_at(kernel: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Compiled:
    usage = _resources(kernel.asm["cubin"])
    listing = kernel.asm["ptx"]
    return Compiled(
        kernel=kernel.metadata.name,
        constants={name: value for name, value in settings.items() if name.isupper()},
        features=tuple(_features(args)),
        warps=kernel.metadata.num_warps,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=kernel.metadata.shared,
        mma=len(re.findall(r"\bmma\.sync", listing)),
        wgmma=len(re.findall(r"wgmma\.mma_async", listing)),
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


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
