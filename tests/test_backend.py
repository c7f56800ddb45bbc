"""Which backend a call takes, and what is said where one cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import coterie
from coterie import backend
from coterie.backend import choose_backend
from tests.cases import tensors

GPU = torch.device("cuda")


@pytest.fixture
def a_gpu(monkeypatch):
    """As on a machine with a GPU of this capability."""

    def there(*capability):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")

    return there


def test_auto_takes_the_kernels_on_a_gpu(a_gpu):
    a_gpu(9, 0)
    assert coterie.backends()["triton"] == "available (A GPU)"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose_backend("auto", GPU, dtype, 64) == choose_backend("triton", GPU, dtype, 256) == "triton"
    assert choose_backend("auto", GPU, torch.float64, 64) == "reference"
    assert choose_backend("auto", GPU, torch.float32, 257) == "reference"
    assert choose_backend("auto", torch.device("cpu"), torch.float32, 64) == "native"


def test_auto_takes_the_reference_on_a_gpu_that_the_kernels_cannot_use(a_gpu, monkeypatch):
    a_gpu(7, 5)
    assert choose_backend("auto", GPU, torch.float32, 64) == "reference"
    a_gpu(8, 0)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert choose_backend("auto", GPU, torch.float32, 64) == "reference"


def test_gpus_of_amd_are_not_asked_for_their_capability(a_gpu, monkeypatch):
    a_gpu(6, 0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert choose_backend("auto", GPU, torch.float32, 64) == "triton"


def refused(*call):
    with pytest.raises(RuntimeError) as error:
        choose_backend("triton", *call)
    return str(error.value).removeprefix("backend='triton' is not available: ")


def test_what_is_said_where_the_kernels_cannot_run(a_gpu, monkeypatch):
    a_gpu(8, 0)
    only = "it takes float32, bfloat16 and float16 on a GPU, not {} on {}."
    assert refused(GPU, torch.float64, 64) == only.format("torch.float64", "cuda")
    assert refused(torch.device("cpu"), torch.float32, 64) == only.format("torch.float32", "cpu")
    assert refused(GPU, torch.float32, 300) == "it takes head dims up to 256, not 300."
    a_gpu(7, 5)
    said = "it needs a GPU of compute capability 8.0 or newer, and this one has 7.5"
    assert refused(GPU, torch.float32, 64) == said + "."
    assert coterie.backends()["triton"] == said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(GPU, torch.float32, 64) == "torch finds no GPU."
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert refused(GPU, torch.float32, 64) == "Triton is not installed; pip install 'coterie[gpu]' installs it."


def test_an_explicit_choice_is_never_replaced():
    q, k, v = tensors(1, 1, 5, dim=257, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"^backend='triton' is not available: it takes head dims up to 256, not"):
        coterie.attention(q, k, v, "full", backend="triton")
    with pytest.raises(RuntimeError, match=r"on the CPU, where its interpreter runs, not torch.float64 on cpu\.$"):
        coterie.attention(q.double(), k.double(), v.double(), "full", backend="triton")


def test_importing_coterie_does_not_import_triton():
    script = "import sys, coterie; coterie.backends(); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_everything_is_collected_without_triton():
    """Doctests of modules that need it are left out; all others are there."""
    script = (
        "import sys, pytest; sys.modules['triton'] = None; "
        "sys.exit(pytest.main(['--collect-only', '-q', 'src/coterie/engine', 'src/coterie/planning', 'tests/engine']))"
    )
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "engine/kernels" not in found.stdout
    assert "test_engine.py" in found.stdout
