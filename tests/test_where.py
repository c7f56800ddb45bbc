"""Where time goes: what a plan takes is counted by loops here, and threads that wait are noticed."""

import math

import pytest
import torch
from benchmarks.where import Work, steps, waiting

import coterie
from coterie.compiled import regions


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["smyrf:rounds=2,cluster_size=16", "near-far:near=9,chunk=16", "local:window=8"])
def test_pairs_and_bytes_by_loops(spec, causal):
    q, k = torch.randn(2, 1, 1, 101, 16).unbind(0)
    plan = coterie.as_mechanism(spec).plan(q, k, is_causal=causal)
    pairs = moved = 0
    for each in plan.rounds:
        for g in range(each.groups):
            rows = each.query_order[0, 0, each.query_offsets[0, 0, g] : each.query_offsets[0, 0, g + 1]].tolist()
            keys = each.key_order[0, 0, each.key_start[0, 0, g] : each.key_stop[0, 0, g]].tolist()
            pairs += sum(not (causal and j < 101 and j > i) for i in rows for j in keys)
            moved += (3 * len(rows) + 2 * len(keys)) * 16 * 4
    assert Work.of(plan, 16) == (pairs, moved)


def test_steps_are_named():
    q, k = torch.randn(2, 1, 2, 200, 16).unbind(0)
    found = steps(lambda: coterie.NearFar(near=8).plan(q, k, backend="native"), 2)
    assert {"kmeans", "near_keys", "halve", "PyTorch"} <= set(found)
    assert all(taken > 0 for taken in found.values())


def test_threads_that_wait_are_counted():
    q, k, v = torch.randn(3, 1, 4, 300, 16).unbind(0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        before = regions()
        share = waiting(lambda: coterie.attention(q, k, v, "smyrf", backend="native"), 3)
        after = regions()
        assert 0 <= share <= 1
        assert after.calls > before.calls
        assert after.seconds - before.seconds >= after.idle - before.idle
        torch.set_num_threads(1)
        assert math.isnan(waiting(lambda: coterie.attention(q, k, v, "smyrf", backend="native"), 1))
    finally:
        torch.set_num_threads(threads)
