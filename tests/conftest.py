"""Shared settings: few threads, fixed seeds, torch.empty poisoned with NaN."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

import coterie
from tests import interpreter

# Kernels for GPUs run in Triton's interpreter, which must be known before the first is imported. On a machine with a
# GPU, `TRITON_INTERPRET=0 pytest -m gpu` runs them there.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("COTERIE_GRAIN", "1")  # small calls on several threads, too
torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)
interpreter.speed_up()
hypothesis.settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("coterie")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_empty():
    """Memory that nobody wrote to must never matter."""
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["reference", "native"])
def backend(request, monkeypatch):
    """Run a test on both backends: the dtype decides which one `auto` takes."""
    from tests import cases

    monkeypatch.setattr(cases, "DTYPE", torch.float64 if request.param == "reference" else torch.float32)
    assert coterie.backends()["native"].startswith("available"), coterie.backends()["native"]
    return request.param


@pytest.fixture
def triton_backend(monkeypatch):
    """`auto` takes the Triton kernels for float32 and float16 on the CPU, where their interpreter runs."""
    from coterie.backend import choose_backend
    from tests import cases

    def choose(backend, device, dtype, dim=0):
        return choose_backend("triton" if backend == "auto" and dtype != torch.float64 else backend, device, dtype, dim)

    monkeypatch.setattr("coterie.call.choose_backend", choose)
    monkeypatch.setattr(cases, "DTYPE", torch.float32)
