"""Kernels compiled ahead of time, for GPUs that are not here: nothing spills, two blocks fit, tensor cores are used.

`python -m benchmarks.gpu --ahead` compiles all that docs/gpu.md tells of: every kind of call, for groups of 16, 32 and
64 queries. These are the largest tiles, which need the most registers.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from benchmarks.variants import VARIANTS

pytest.importorskip("triton")
HEAVIEST = ["smyrf", "near-far, causal, padding and dropout", "full, a mask of pairs"]


def compiled(folder, *arguments):
    """The lines of the benchmark's table, from a process that does not interpret kernels."""
    out = folder / "lines.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--ahead", "--json", str(out), *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("dim", "calls"),
    [(64, list(VARIANTS)), (128, list(VARIANTS)), (32, HEAVIEST), (96, HEAVIEST)],
    ids=["64", "128", "32", "96"],
)
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_nothing_spills_and_two_blocks_fit(gpu, dim, calls, tmp_path):
    arguments = ("--gpus", gpu, "--dims", str(dim), "--groups", "64", "--calls", *calls, "--jobs", "1")
    lines = compiled(tmp_path, *arguments)
    kernels = {"round_forward", "round_queries", "round_keys"}
    assert {(line["call"], line["kernel"]) for line in lines} == set(itertools.product(calls, kernels))
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["blocks"] >= 2, line
        assert line["tensor"] > 0, line


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_k_means_does_not_spill(gpu, tmp_path):
    arguments = ("--dims", "64", "128", "--groups", "16", "32", "--calls", "k-means", "--jobs", "1")
    lines = compiled(tmp_path, "--gpus", gpu, *arguments)
    assert {(line["dim"], line["group"], line["kernel"]) for line in lines} >= {
        (64, 16, "nearest"),
        (64, 16, "cluster_parts"),
        (64, 32, "cluster_parts"),
        (128, 16, "nearest"),
        (128, 16, "cluster_parts"),
    }
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["blocks"] >= 2, line
