"""The one place where kernels are launched."""

from __future__ import annotations

from typing import Any

import torch

_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
if torch.version.hip is None:
    _OPTIONS["maxnreg"] = 255  # all there are: on its own, the assembler spills some to fit one block more


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel over a grid, if there is anything in it."""
    if 0 not in grid:
        kernel[grid](*args, **constants, **_OPTIONS)


def precision(dtype: torch.dtype) -> str:
    """How float32 products are made: in full, unless `torch.set_float32_matmul_precision` allows TF32."""
    allowed = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "ieee"
