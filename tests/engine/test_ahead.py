"""Kernels compiled ahead of time, for GPUs that are not here: nothing spills, and tensor cores are used.

`python -m benchmarks.gpu --ahead` compiles all that docs/gpu.md tells of; these are the ones that everybody runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def compiled(folder, *arguments):
    """The lines of the benchmark's table, from a process that does not interpret kernels."""
    out = folder / "lines.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--ahead", "--json", str(out), *arguments]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("call", "dims"),
    [("smyrf, groups of 64", (32, 64, 96, 128)), ("near-far, causal", (64, 128))],
    ids=["smyrf", "near-far"],
)
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_nothing_spills_and_two_blocks_fit(call, dims, gpu, tmp_path):
    lines = compiled(tmp_path, "--variants", call, "--gpus", gpu, "--dims", *map(str, dims))
    assert {(line["dim"], line["kernel"]) for line in lines} == {
        (dim, kernel) for dim in dims for kernel in ("round_forward", "round_queries", "round_keys")
    }
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["blocks"] >= 2, line
        assert line["mma"] + line["wgmma"] > 0, line
