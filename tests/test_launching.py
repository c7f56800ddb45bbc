"""Where kernels for GPUs are launched, seen without a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coterie.launching import launch


class Kernel:
    """Remembers its launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((grid, constants))


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """With several GPUs, the current one may be another; Triton would launch there."""
    entered = []

    @contextmanager
    def device(which):
        entered.append((str(which), len(kernel.launches)))
        yield

    kernel = Kernel()
    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")
    launch(kernel, (2,), x, 5, ROWS=16)
    launch(kernel, (2,), (x, 5), ROWS=16)
    assert entered == [("cuda:1", 0), ("cuda:1", 1)]
    assert len(kernel.launches) == 2


def test_on_the_cpu_no_device_is_chosen_and_an_empty_grid_launches_nothing():
    kernel = Kernel()
    launch(kernel, (3, 0), torch.empty(3))
    assert kernel.launches == []
    launch(kernel, (3, 2), torch.empty(3), ROWS=16)
    ((grid, constants),) = kernel.launches
    assert (grid, constants["ROWS"]) == ((3, 2), 16)
