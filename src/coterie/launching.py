"""The one place where kernels for GPUs are launched: on the device where their tensors are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
if torch.version.hip is None:
    _OPTIONS["maxnreg"] = 255  # all there are: on its own, the assembler spills some to fit one block more


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel over a grid, if there is anything in it.

    Triton launches on the current device, whatever device its tensors are on; with several GPUs that may be another.
    """
    if 0 not in grid:
        with there(args[0]):
            kernel[grid](*args, **constants, **_OPTIONS)


def there(first: Any) -> AbstractContextManager[object]:
    """A context in which the device of a tensor, or of the tensor that a tuple begins with, is the current one."""
    x: Tensor = first if isinstance(first, Tensor) else first[0]
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
