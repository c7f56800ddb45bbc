"""What `python -m benchmarks.gpu` prints on a GPU, made on the CPU in small: the rows, and when it refuses."""

from __future__ import annotations

import pytest
import torch
from benchmarks import gpu, on_gpu
from benchmarks.on_gpu import HEAD, Place
from benchmarks.promises import GROWTHS, MEMORIES, PROMISES, Promise

import coterie

CPU = Place("cpu", torch.float32, "native", repeats=1)
SMALL = coterie.Smyrf(rounds=1, cluster_size=16)


def test_a_row_says_how_many_times_as_fast_as_flash_attention():
    promises = [Promise(SMALL, 64, 3), Promise(SMALL, 64, 3, causal=True, backward=True)]
    rows = list(on_gpu.promised(CPU, promises))
    assert [row[0] for row in rows] == [promise.name for promise in promises]
    for name, dense, ours, ratio, wanted in rows:
        assert float(ratio) == pytest.approx(float(dense) / float(ours), abs=0.02, rel=0.05), name
        assert wanted == "3"


def test_every_promise_has_its_row(monkeypatch):
    """The cases of the CPU, at every length and with their gradients; those of long calls are made shorter here."""
    monkeypatch.setattr(on_gpu, "PROMISES", [p._replace(length=128) for p in PROMISES])
    monkeypatch.setattr(on_gpu, "GROWTHS", [(m, 64, most) for m, _, most in GROWTHS])
    for name in ("growths", "memories"):
        one = getattr(on_gpu, name)
        monkeypatch.setattr(on_gpu, name, lambda place, cases, one=one: one(place, cases, 256))
    monkeypatch.setattr(on_gpu, "lengths", lambda place, one=on_gpu.lengths: one(place, (64,)))
    rows = list(on_gpu.rows(CPU))
    count = len(PROMISES) + len(GROWTHS) + len(MEMORIES) + 4
    assert len(rows) == count
    assert {len(row) for row in rows} == {len(HEAD)}
    assert sum(row[3] == "–" for row in rows) == len(MEMORIES)  # nobody counts bytes on the CPU
    assert any("forward + backward" in row[0] for row in rows)
    assert any("causal" in row[0] for row in rows)


def test_nothing_is_measured_where_the_kernels_are_wrong(monkeypatch):
    monkeypatch.setattr(on_gpu, "CHECKED", ((SMALL, False), (SMALL, True)))
    assert on_gpu.wrong(CPU, 40) == []
    attend = coterie.grouped_attention

    def wrong(q, k, v, plan, *, backend):
        out, lse = attend(q, k, v, plan, backend=backend)
        return coterie.engine.Attended(out * (1.1 if backend == "native" else 1.0), lse)

    monkeypatch.setattr(coterie, "grouped_attention", wrong)
    found = on_gpu.wrong(CPU, 40)
    assert len(found) == 8
    assert "causal: grad v is" in found[-1]
    monkeypatch.setattr(on_gpu, "wrong", lambda place: found)
    with pytest.raises(SystemExit, match=r"correctness is red:\n  .*out is 0\.1 away"):
        gpu.timed()
