"""Shared settings: few threads, fixed seeds, torch.empty poisoned with NaN."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

import coterie

torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)
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
