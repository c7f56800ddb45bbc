"""What the fuzzer and a hostile review found, one test each; and that the fuzzer finds what is wrong."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coterie
from coterie import Plan
from coterie.plan import Means, Round
from tests import cases
from tests.cases import close
from tests.fuzz import ops, oracle, plans


def index(values):
    return torch.tensor(values, dtype=torch.int32)[None, None]


def one_group(queries, keys, **rest):
    """A round in which all queries meet the listed keys."""
    return Round(index(list(range(queries))), index([0, queries]), index(keys), index([0]), index([len(keys)]), **rest)


def plan_of(*rounds, queries=2, keys=2, offset=0, **rest):
    return Plan(queries, keys, 1, rounds, torch.tensor([offset], dtype=torch.int32), **rest)


def agrees(plan, **masks):
    """(out, lse) of the backend under test, after a comparison with the oracle."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, 1, n, 4, generator=generator, dtype=torch.float64).to(cases.DTYPE)
        for n in (plan.num_queries, plan.num_keys, plan.num_keys)
    )
    found = coterie.grouped_attention(q, k, v, plan, scale=0.5, **masks)
    given = (masks.get("attn_mask"), masks.get("key_mask"), masks.get("query_mask"))
    for a, b in zip(found, oracle.attention(plan, q, k, v, 0.5, *given), strict=True):
        close(a, b.to(a.dtype))
    return found


# --- windows and positions at the ends of the numbers ----------------------------------------------------------------

ENDS = [-(2**63), -(2**62), -1, 0, 1, 2**62, 2**63 - 1]


@pytest.mark.parametrize("low", ENDS)
@pytest.mark.parametrize("high", ENDS)
def test_windows_of_any_width(low, high, backend):
    if low > high:
        return
    _, lse = agrees(plan_of(one_group(2, [0, 1], window=(low, high))))
    assert lse.isfinite().any(-1).item() == (low <= 1 and high >= -1)


@pytest.mark.parametrize("window", [(-(2**70), 0), (0, 2**63)])
def test_windows_beyond_64_bits_are_refused(window):
    with pytest.raises(ValueError, match=r"rounds\[0\].window: expected ints of 64 bits, got"):
        plan_of(one_group(2, [0, 1], window=window))


@pytest.mark.parametrize("offset", [-(2**31), 2**31 - 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (-(2**63), 2**63 - 1), (-(2**32), 0), (0, 2**32), (2**31 - 1, 2**31 + 1)])
def test_offsets_at_the_ends_of_int32(offset, causal, window, backend):
    agrees(plan_of(one_group(2, [0, 1], window=window), offset=offset, causal=causal))


@pytest.mark.parametrize("query", [-(2**31), 0, 2**31 - 1])
@pytest.mark.parametrize("key", [-(2**31), 0, 2**31 - 1])
@pytest.mark.parametrize("window", [None, (-1, 1), (1, 2**40), (-(2**40), -1)])
def test_means_at_the_ends_of_int32(query, key, window, backend):
    """The last key that can be must not be taken for one that lies behind it."""
    query_means, key_means = (Means(index([0, 1]), index([0]), index([2]), index([at])) for at in (query, key))
    meeting = Round(index([0, 1, 2]), index([0, 3]), index([0, 1, 2]), index([0]), index([3]), window=window)
    rest = {"query_means": query_means, "key_means": key_means, "answer": index([2, -1])}
    for offset in (0, 2**31 - 1):
        agrees(plan_of(meeting, offset=offset, causal=window is None, **rest))


# --- duplicates="once" -----------------------------------------------------------------------------------------------


def test_once_does_not_count_pairs_that_a_bias_hides(backend):
    bias = torch.tensor([[[0.5, -math.inf, 0.25]]])
    hidden = one_group(2, [0, 0, 1], bias=bias)
    _, lse = agrees(plan_of(hidden, one_group(2, [1]), duplicates="once"))
    _, same = agrees(plan_of(one_group(2, [0, 1], bias=bias[..., ::2].clone()), one_group(2, [1]), duplicates="once"))
    close(lse, same)


def test_once_with_hidden_pairs_of_every_kind(backend):
    """Masks hide a pair wherever it is met; skip, window and bias hide it in one round."""
    bias = torch.tensor([[[0.0, -math.inf, 1.0, 0.0]]])
    skip = torch.tensor([[[[0], [-1], [2]]]], dtype=torch.int32)
    rounds = (
        one_group(3, [0, 1, 2, 2], bias=bias),
        one_group(3, [2, 1, 0, 0], skip=skip),
        one_group(3, [0, 1, 2], window=(0, 1)),
    )
    plan = plan_of(*rounds, queries=3, keys=3, duplicates="once")
    agrees(plan)
    agrees(plan, key_mask=torch.tensor([[True, False, True]]))
    agrees(plan, query_mask=torch.tensor([[True, False, True]]))
    pairs = torch.tensor([[True, False, True], [True, True, False], [False, False, True]])[None, None]
    agrees(plan, attn_mask=pairs)
    agrees(plan, attn_mask=torch.where(pairs, 0.5, -math.inf).to(cases.DTYPE))


def test_once_falls_back_on_a_key_that_a_bias_hid(backend):
    """It was not met before, so nothing divides it."""
    hidden = one_group(2, [0, 1], bias=torch.full((1, 1, 2), -math.inf))
    agrees(plan_of(hidden, hidden, duplicates="once", self_keys=torch.tensor([[0, 1]], dtype=torch.int32)))


# --- borrowed answers ------------------------------------------------------------------------------------------------


def test_a_mass_of_nobody_and_a_mass_for_nobody(backend):
    """Row 2 is a mean that meets a key, row 3 one that meets nobody."""
    means = Means(index([0, 1]), index([0, 0]), index([2, 1]))
    meeting = Round(index([0, 2, 3, 1]), index([0, 2, 2]), index([0, 1]), index([0, 0]), index([2, 0]))
    for answer in ([-1, -1], [3, 3], [2, 2], [2, 3]):
        for mass in ([3, 3], [2, 2], [-1, 2], [2, 3]):
            out, lse = agrees(plan_of(meeting, query_means=means, answer=index(answer), mass=index(mass)))
            assert torch.equal(lse == -math.inf, (out == 0).all(-1))


def test_a_query_that_borrows_nothing_reads_no_other_row(backend):
    means = Means(index([0, 1]), index([0]), index([2]))
    meeting = Round(index([0, 1]), index([0, 1, 2]), index([0, 1]), index([0, 1]), index([1, 2]))
    plan = plan_of(meeting, query_means=means, answer=index([-1, -1]))
    q, v = torch.ones(1, 1, 2, 4, dtype=cases.DTYPE), torch.ones(1, 1, 2, 4, dtype=cases.DTYPE)
    v[0, 0, 0] = math.nan
    out, _ = coterie.grouped_attention(q, q, v, plan)
    assert out[0, 0, 1].tolist() == [1.0] * 4


# --- nothing at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["full", "smyrf", "near-far", "improved-clustered", "reformer", "routing"])
def test_an_empty_batch_of_any_strides(mechanism, backend):
    """As a transposed slice is: its last axis is not contiguous, and no copy makes it so."""
    q = torch.randn(3, 2, 8, 40, dtype=cases.DTYPE).mT[:0].requires_grad_()
    assert q.stride(-1) != 1
    out = coterie.attention(q, q, q, mechanism)
    assert out.shape == q.shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_no_keys_but_a_mask_of_them(backend):
    """Only a mean of nobody, which is 0."""
    means = Means(index([]), index([0]), index([0]))
    plan = plan_of(one_group(2, [0]), keys=0, key_means=means)
    agrees(plan, key_mask=torch.ones(1, 0, dtype=torch.bool))


def test_a_round_without_queries_and_pairs_met_once(backend):
    nobody = Round(index([]), index([0, 0]), index([0]), index([0]), index([1]), skip=index([]).view(1, 1, 0, 1))
    agrees(plan_of(one_group(2, [0, 1]), nobody, duplicates="once"))


# --- the fuzzer itself -----------------------------------------------------------------------------------------------


def test_a_share_of_the_fuzzed_plans():
    for seed in range(150):
        case = plans.draw(seed)
        plans.check(case, "auto")


def test_a_share_of_the_fuzzed_ops():
    accepted = sum(ops.check(seed) for seed in range(600))
    assert 100 < accepted < 500


def test_the_fuzzer_sees_a_wrong_answer(monkeypatch):
    """A thousandth of the answer is enough."""
    right = oracle.attention
    monkeypatch.setattr(oracle, "attention", lambda *given: (right(*given)[0] * 1.001, right(*given)[1]))

    def run():
        for seed in range(40):
            plans.check(plans.draw(seed), "auto")

    with pytest.raises(plans.MismatchError, match=r"out: .* times the tolerance"):
        run()


FUZZ = [sys.executable, "-m", "tests.fuzz"]
ROOT = Path(__file__).parents[2]


def test_the_fuzzer_counts_and_prints():
    done = subprocess.run([*FUZZ, "--isa", "portable", "--count", "30"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plans on portable:" in done.stdout
    assert "worst errors as shares" in done.stdout
    assert "none crashed" in done.stdout


def test_the_fuzzer_says_how_to_replay_a_crash(tmp_path):
    """A crash is what a segmentation fault is, not an exception."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if '--worker' in sys.argv:\n"
        "    import tests.fuzz.ops as ops\n"
        "    ops.check = lambda seed: seed == 7 and os.abort()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [*FUZZ, "--kind", "ops", "--isa", "portable", "--seed", "4", "--count", "9"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "replay: python -m tests.fuzz --kind ops --isa portable --seed 7 --count 1" in done.stdout
