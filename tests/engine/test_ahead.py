"""Kernels compiled ahead of time, for GPUs that are not here: nothing spills, two blocks fit, tensor cores are used.

`python -m benchmarks.gpu --ahead` compiles all that docs/gpu.md tells of, in an hour. These are a selection that
takes two minutes: every kind of call with the largest tiles, and those that need most registers at other widths.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from benchmarks.variants import PLANNING, VARIANTS

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
    ("gpu", "dtype", "dim", "group", "calls"),
    [
        ("A100", "bfloat16", 64, 64, list(VARIANTS)),
        ("H100", "bfloat16", 128, 64, list(VARIANTS)),
        ("H100", "bfloat16", 64, 32, HEAVIEST),
        ("A100", "bfloat16", 128, 64, HEAVIEST),
        ("H100", "bfloat16", 32, 64, HEAVIEST),
        ("A100", "bfloat16", 96, 16, HEAVIEST),
        ("A100", "float16", 128, 32, ["smyrf"]),
        ("H100", "tf32", 64, 64, ["smyrf"]),
        ("H100", "float32", 96, 16, ["near-far, causal, padding and dropout"]),
        ("A100", "float32", 32, 64, ["near-far, causal, padding and dropout", "full, a bias of keys"]),
        ("H100", "float32", 128, 64, ["full, a bias of keys"]),
    ],
    ids=lambda each: f"{len(each)} calls" if isinstance(each, list) else str(each),
)
def test_nothing_spills_and_two_blocks_fit(gpu, dtype, dim, group, calls, tmp_path):
    arguments = ("--gpus", gpu, "--dtypes", dtype, "--dims", str(dim), "--groups", str(group), "--jobs", "1")
    lines = compiled(tmp_path, *arguments, "--calls", *calls)
    kernels = {"round_forward", "round_queries", "round_keys"}
    assert {(line["call"], line["kernel"]) for line in lines} == set(itertools.product(calls, kernels))
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["blocks"] >= 2, line
        assert line["tensor"] > 0 or dtype == "float32", line


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_planning_does_not_spill(gpu, tmp_path):
    arguments = ("--dims", "64", "128", "--groups", "16", "32", "--jobs", "1")
    lines = compiled(tmp_path, "--gpus", gpu, *arguments, "--calls", *PLANNING)
    assert {(line["dim"], line["group"], line["kernel"]) for line in lines} >= {
        (64, 16, "nearest"),
        (64, 16, "cluster_parts"),
        (64, 32, "cluster_parts"),
        (128, 16, "nearest"),
        (128, 16, "cluster_parts"),
        (64, 16, "largest"),
        (64, 16, "best_keys"),
        (128, 16, "best_keys"),
    }
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["blocks"] >= 2, line
        assert line["tensor"] > 0 or line["kernel"] != "best_keys", line
