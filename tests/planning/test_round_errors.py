"""Adaptive rounds: the estimate against loops, the plan that follows from it, and the schedule for training."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie import Smyrf
from coterie.mechanisms.base import Mechanism
from coterie.mechanisms.smyrf import rounds_taken
from coterie.planning.round_errors import RoundErrors, rounds_needed, sample_queries
from coterie.rounds_schedule import RoundsSchedule, _Probe
from tests.cases import close, fails, mistakes, padding, tensors

MOST = 4


class Caught(Mechanism):
    """Keeps the tokens that a mechanism would plan for."""

    def __init__(self, inner):
        self.inner = inner

    def build(self, tokens):
        self.tokens = tokens
        return self.inner.build(tokens)


def estimated(mechanism, q, k, rounds=MOST, **settings) -> tuple[RoundErrors, torch.Tensor, torch.Tensor]:
    probe, caught = _Probe(mechanism, rounds, []), Caught(Smyrf(rounds=1))
    probe.plan(q, k, **settings)
    caught.plan(q, k, **settings)
    return probe.found[0], *sample_queries(caught.tokens, 64, mechanism.seed)


# --- the estimate -----------------------------------------------------------------------------------------------------


def weighted(scores, counts):
    """Σ over keys of count · e^score, normalised by row."""
    powers = counts * np.exp(scores)
    return powers / powers.sum(-1, keepdims=True)


VARIANTS = {
    "count": Smyrf(cluster_size=8),
    "once": Smyrf(cluster_size=8, duplicates="once"),
    "e2lsh": Smyrf(cluster_size=11, transform="none", hash="e2lsh", seed=3),
    "cross-polytope": Smyrf(cluster_size=8, hash="cross-polytope"),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "causal-left-padded", "cross"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_errors_of_rounds_equal_plain_numpy(variant, case):
    """The counts come from the plan of so many rounds, the weights from the formula; GQA."""
    mechanism, causal = VARIANTS[variant], "causal" in case
    queries, keys = (70, 43) if case == "cross" else (71, 71)  # more than are looked at
    q, k, _ = tensors(2, 2, queries, keys, key_heads=1)
    mask = padding(2, keys, [keys, 35], "left" if "left" in case else "right") if "padded" in case else None
    settings: dict[str, Any] = {"key_mask": mask, "is_causal": causal, "scale": 0.8, "layer": 2}
    errors, rows, used = estimated(mechanism, q, k, **settings)
    real = torch.ones(2, keys, dtype=torch.bool) if mask is None else mask
    for b in (0, 1):
        looked = rows[b][used[b]]
        assert looked.tolist() == sorted(set(looked.tolist()))
        if queries == keys:
            assert real[b, looked].all()
            assert looked.numel() == min(64, int(real[b].sum()))
        seen = real[b].expand(queries, -1)
        if causal:
            seen = seen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        for h in (0, 1):
            scores = 0.8 * q[b, h].double().numpy()[looked] @ k[b, 0].double().numpy().T
            exact = weighted(scores, seen[looked].numpy())
            total = float((exact**2).sum())
            assert float(errors.total[b, h]) == pytest.approx(total, rel=1e-4)
            for r in range(MOST):
                fixed = coterie.as_mechanism({**mechanism.to_dict(), "rounds": r + 1})
                counts = fixed.plan(q, k, **settings).to_dense()[b, h]
                if mechanism.duplicates == "once":
                    counts = counts.clamp(max=1)
                missed = float(((weighted(scores, counts[looked].numpy()) - exact) ** 2).sum())
                assert float(errors.missed[r, b, h]) == pytest.approx(missed, rel=1e-4, abs=1e-6 * total)
                assert float(errors.per_head()[r, b, h]) == pytest.approx(math.sqrt(missed / total), rel=1e-3, abs=1e-3)


def test_queries_that_meet_hopeless_keys_alone_are_as_wrong_as_can_be():
    """Scores a thousand apart: exact weights underflow where the engine's do not."""
    q = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    q[..., 0] = 1000.0
    k = torch.zeros_like(q)
    k[:, :, ::2, 0] = torch.tensor([3.0, 2.0, 1.0, 0.5])
    errors, _, _ = estimated(Smyrf(cluster_size=2, duplicates="once"), q, k, rounds=1)
    assert errors.missed.isfinite().all()
    hopeless = 8 - 2  # two queries share a group with the best key
    assert hopeless <= float(errors.missed[0, 0, 0]) <= 2 * hopeless


def test_all_heads_pool_their_norms():
    errors = RoundErrors(torch.tensor([[[1.0, 3.0]], [[0.0, 1.0]]]), torch.tensor([[4.0, 0.0]]))
    assert errors.pooled().tolist() == [1.0, 0.5]
    assert errors.per_head()[:, 0].tolist() == [[0.5, 0.0], [0.0, 0.0]]


def test_a_bound_needs_the_first_number_of_rounds_within_it():
    needed = rounds_needed(torch.tensor([[0.5, 0.9, 0.1], [0.6, 0.4, 0.9], [0.2, 0.3, 0.9]]), 0.4)
    assert needed.rounds.tolist() == [3, 2, 1]
    assert needed.reached.all()
    assert rounds_needed(torch.tensor([[0.5]]), 0.4).reached.tolist() == [False]


def test_nobody_to_look_at():
    for queries, keys in ((0, 5), (5, 0), (1, 1)):
        q, k, v = tensors(1, 2, queries, keys)
        auto = Smyrf(rounds="auto", max_error=0.1)
        assert len(auto.plan(q, k).rounds) == 1
        close(coterie.attention(q, k, v, auto), coterie.attention(q, k, v, Smyrf(rounds=1)))


# --- the plan ---------------------------------------------------------------------------------------------------------


def peaked(batch=2, heads=3, length=150, dim=8, **options):
    """The first head attends to everybody, the last to few."""
    q, k, v = tensors(batch, heads, length, dim=dim, **options)
    k = q + 0.1 * k
    sharpness = torch.tensor([0.3, 2.0, 5.0], dtype=q.dtype)[:heads, None, None]
    return q * sharpness, k, v


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_each_head_takes_the_fewest_rounds_that_do(causal):
    q, k, v = peaked()
    mask = padding(2, 150, [150, 97])
    auto = Smyrf(rounds="auto", max_error=0.9, max_rounds=12, cluster_size=30)
    plan = auto.plan(q, k, key_mask=mask, is_causal=causal)
    taken = rounds_taken(plan)
    errors, _, _ = estimated(Smyrf(cluster_size=30), q, k, 12, key_mask=mask, is_causal=causal)
    for b in (0, 1):
        for h in range(3):
            enough = [r + 1 for r in range(12) if errors.per_head()[r, b, h] <= 0.9]
            assert int(taken[b, h]) == enough[0]
    assert len(plan.rounds) == int(taken.max())
    assert len(set(taken.flatten().tolist())) > 1
    # What a head takes is what it would get from a Smyrf of so many rounds.
    out = coterie.attention(q, k, v, auto, key_mask=mask, is_causal=causal)
    for rounds in set(taken.flatten().tolist()):
        fixed = coterie.attention(q, k, v, Smyrf(rounds=rounds, cluster_size=30), key_mask=mask, is_causal=causal)
        close(out[taken == rounds], fixed[taken == rounds])


def test_gradients_flow_as_with_fixed_rounds():
    q, k, v = (x.requires_grad_() for x in peaked(1, 3, 37, dim=3))
    auto = Smyrf(rounds="auto", max_error=1.1, max_rounds=16, cluster_size=9)
    plan = auto.plan(q, k)
    taken = rounds_taken(plan)
    assert len(set(taken.flatten().tolist())) > 1
    grads = torch.autograd.grad(coterie.attention(q, k, v, auto).square().sum(), (q, k, v))
    for rounds in set(taken.flatten().tolist()):
        fixed = coterie.attention(q, k, v, Smyrf(rounds=rounds, cluster_size=9))
        for found, want in zip(grads, torch.autograd.grad(fixed.square().sum(), (q, k, v)), strict=True):
            close(found[taken == rounds], want[taken == rounds])


def test_backends_take_the_same_rounds():
    q, k, v = peaked(dtype=torch.float32)
    auto = Smyrf(rounds="auto", max_error=0.8, max_rounds=16, cluster_size=30)
    taken = [rounds_taken(auto.plan(q, k, backend=backend)) for backend in ("native", "reference")]
    assert torch.equal(*taken)
    close(*(coterie.attention(q, k, v, auto, backend=backend) for backend in ("native", "reference")))


def test_a_sample_takes_the_rounds_that_it_would_take_alone():
    q, k, v = peaked()
    mask = padding(2, 150, [150, 97])
    auto = Smyrf(rounds="auto", max_error=0.8, max_rounds=14, cluster_size=30)
    together = coterie.attention(q, k, v, auto, key_mask=mask)
    for b, real in ((0, 150), (1, 97)):
        q_b, k_b, v_b = (x[b : b + 1, :, :real] for x in (q, k, v))
        close(together[b : b + 1, :, :real], coterie.attention(q_b, k_b, v_b, auto))
    assert torch.equal(together, coterie.attention(q, k, v, auto, key_mask=mask))


def test_sharper_attention_takes_fewer_rounds():
    q, k, _ = tensors(1, 4, 301, dim=16)
    k = q + 0.1 * k
    taken = []
    for sharpness in (0.1, 0.5, 4):
        auto = Smyrf(rounds="auto", max_error=0.8, max_rounds=30, cluster_size=50, duplicates="once")
        taken.append(float(rounds_taken(auto.plan(sharpness * q, k)).double().mean()))
    assert taken[0] >= 6  # everybody's (1 − 1/7)^rounds must fall below 0.4
    assert taken[2] < 2


def test_a_bound_that_is_not_reached_is_said():
    q, k, _ = tensors(1, 2, 101)
    auto = Smyrf(rounds="auto", max_error=0.001, max_rounds=3, cluster_size=10)
    with pytest.warns(UserWarning, match=r"some heads stay above max_error=0.001 with 3 rounds"):
        plan = auto.plan(q, k)
    assert rounds_taken(plan).tolist() == [[3, 3]]


def test_one_group_is_exact_in_one_round():
    q, k, v = tensors(1, 2, 50)
    auto = Smyrf(rounds="auto", max_error=1e-6, cluster_size=50)
    assert rounds_taken(auto.plan(q, k)).tolist() == [[1, 1]]
    close(coterie.attention(q, k, v, auto), coterie.attention(q, k, v, "full"))


def test_fresh_hashes_in_training_alone():
    q, k, v = peaked(1)
    auto = Smyrf(rounds="auto", max_error=0.9, max_rounds=14, cluster_size=30, resample=True)
    torch.manual_seed(1)
    first, second = (coterie.attention(q, k, v, auto) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, coterie.attention(q, k, v, auto))
    assert not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_refuses_and_a_broken_one_runs():
    torch._dynamo.reset()
    q, k, v = peaked(1, dtype=torch.float32)
    auto = Smyrf(rounds="auto", max_error=0.9, max_rounds=14, cluster_size=30)

    def run():
        return coterie.attention(q, k, v, auto)

    with pytest.raises(Exception, match="rounds"):
        torch.compile(run, fullgraph=True, backend="eager")()
    torch._dynamo.reset()
    close(torch.compile(run, backend="eager")(), run())


def test_strings_and_json_go_both_ways():
    auto = Smyrf(rounds="auto", max_error=0.05)
    assert str(auto) == "smyrf:rounds=auto,max_error=0.05"
    for spec in (str(auto), auto.to_json(), auto.to_dict(), "smyrf:rounds=auto,max_error=0.05"):
        assert coterie.as_mechanism(spec) == auto
    full = coterie.as_mechanism("smyrf:rounds=auto,max_error=1,max_rounds=32,cluster_size=16")
    assert coterie.as_mechanism(str(full)) == full
    assert json.loads(full.to_json())["max_rounds"] == 32
    assert "max_error=0.05" in repr(auto)
    assert "max" not in repr(Smyrf())
    old = {"mechanism": "smyrf", "rounds": 2, "cluster_size": 32}  # what was saved before there was "auto"
    assert coterie.as_mechanism(old) == Smyrf(rounds=2, cluster_size=32)


MISTAKES = {
    "word": (
        lambda: Smyrf(rounds="many"),
        TypeError,
        r"rounds: expected an int, got str 'many' .*the only word is 'auto'",
    ),
    "float": (lambda: Smyrf(rounds=2.0), TypeError, r"rounds: expected an int, got float"),  # type: ignore[arg-type]
    "zero": (lambda: Smyrf(rounds=0), ValueError, r"rounds: expected an int ≥ 1, got 0"),
    "no-bound": (lambda: Smyrf(rounds="auto"), TypeError, r"max_error: expected a number with rounds='auto'.*NoneType"),
    "bound": (lambda: Smyrf(rounds="auto", max_error=0), ValueError, r"max_error: expected a finite number > 0, got 0"),
    "nan": (lambda: Smyrf(rounds="auto", max_error=math.nan), ValueError, r"max_error: expected a finite number > 0"),
    "bool": (lambda: Smyrf(rounds="auto", max_error=True), TypeError, r"max_error: expected a number .* got bool"),
    "ignored": (lambda: Smyrf(rounds=4, max_error=0.1), ValueError, r"max_error: expected None where .* got 0.1"),
    "ignored-most": (lambda: Smyrf(max_rounds=4), ValueError, r"max_rounds: expected None where .* got 4"),
    "most": (
        lambda: Smyrf(rounds="auto", max_error=0.1, max_rounds=0),
        ValueError,
        r"max_rounds: expected an int ≥ 1, got 0",
    ),
    "model": (lambda: RoundsSchedule(3, max_error=0.1), TypeError, "model: expected a torch.nn.Module, got int"),  # type: ignore[arg-type]
    "model-dense": (
        lambda: RoundsSchedule(torch.nn.Linear(2, 2), max_error=0.1),
        ValueError,
        "model: expected a model with modules whose mechanism is a Smyrf .* got Linear",
    ),
    "model-auto": (
        lambda: RoundsSchedule(encoder("smyrf:rounds=auto,max_error=1"), max_error=0.1),
        ValueError,
        "model: expected .* fixed number of rounds, got smyrf:rounds=auto",
    ),
    "schedule-bound": (lambda: RoundsSchedule(encoder(), max_error=-1), ValueError, "max_error: expected a finite"),
    "schedule-type": (lambda: RoundsSchedule(encoder(), max_error="1"), TypeError, "max_error: expected a number"),  # type: ignore[arg-type]
    "every": (lambda: RoundsSchedule(encoder(), max_error=1, every=0), ValueError, "every: expected an int ≥ 1"),
    "most-rounds": (
        lambda: RoundsSchedule(encoder(), max_error=1, max_rounds=0),
        ValueError,
        "max_rounds: expected an int ≥ 1",
    ),
}


@mistakes(MISTAKES)
def test_mistakes_are_named(case):
    fails(case)


# --- the schedule -----------------------------------------------------------------------------------------------------


def encoder(mechanism="smyrf:rounds=3,cluster_size=16", layers=2):
    layer = torch.nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    coterie.nn.swap(model, mechanism)
    return model


def sharpen(model, sharpness):
    """Queries that are keys, so many times as long."""
    for layer in model.layers:
        weight = layer.self_attn.in_proj_weight
        with torch.no_grad():
            weight[24:48] = torch.eye(24)
            weight[:24] = sharpness * torch.eye(24)


def rounds_of(model):
    return [layer.self_attn.mechanism.rounds for layer in model.layers]


def test_rounds_fall_as_attention_gets_sparse():
    model, x = encoder(), torch.randn(2, 90, 24)
    schedule = RoundsSchedule(model, max_error=0.8, every=3, max_rounds=6)
    for step in range(1, 8):
        sharpen(model, 0.1 if step < 4 else 30)
        model(x)
        assert rounds_of(model) == ([3, 3] if step == 1 else [6, 6] if step <= 4 else rounds_of(model))
        schedule.step()
    names = ["layers.0.self_attn", "layers.1.self_attn"]
    assert [(c.step, c.module) for c in schedule.log] == [(s, n) for s in (1, 4, 7) for n in names]
    first, second = schedule.log[0], schedule.log[-1]
    assert first.rounds == 6
    assert first.error > 0.8  # the log does not hide it
    assert second.rounds < 6
    assert second.error <= 0.8
    assert rounds_of(model) == [schedule.log[-2].rounds, schedule.log[-1].rounds]


def test_the_estimate_is_that_of_the_call():
    """With padding and causality, in the module's own layer."""
    model, x = encoder(layers=1), torch.randn(2, 71, 24)
    attention = model.layers[0].self_attn
    hidden = ~padding(2, 71, [71, 40])
    schedule = RoundsSchedule(model, max_error=0.5, every=1, max_rounds=4)
    seen: list[coterie.Seen] = []
    with coterie.observing(seen.append):
        attention(x, x, x, key_padding_mask=hidden, is_causal=True)
    assert len(seen) == 1  # another observer still sees
    schedule.step()
    errors, _, _ = estimated(
        Smyrf(cluster_size=16), seen[0].q, seen[0].k, key_mask=~hidden, is_causal=True, causal_offset=0, layer=0
    )
    chosen = schedule.log[0]
    assert chosen.error == pytest.approx(float(errors.pooled()[chosen.rounds - 1]), rel=1e-6)
    assert chosen.rounds == int(rounds_needed(errors.pooled(), 0.5).rounds)


def test_looking_changes_nothing_but_rounds():
    torch.manual_seed(3)
    model, x = encoder("smyrf:rounds=3,cluster_size=16,resample=true"), torch.randn(2, 50, 24)
    torch.manual_seed(4)
    want, after = model(x), torch.rand(1)
    schedule = RoundsSchedule(model, max_error=0.8, every=1, max_rounds=3)
    torch.manual_seed(4)
    assert torch.equal(model(x), want)
    assert torch.equal(torch.rand(1), after)
    schedule.step()
    assert model.layers[0].self_attn.mechanism.resample
    schedule.close()
    model(x)
    with pytest.warns(UserWarning, match="no pass of layers.0.self_attn, layers.1.self_attn in training mode was seen"):
        schedule.step()
    assert len(schedule.log) == 2


def test_a_schedule_goes_on_where_another_was():
    x = torch.randn(1, 90, 24)

    def steps(model, schedule, numbers):
        for step in numbers:
            sharpen(model, 0.1 if step < 4 else 30)
            model(x)
            schedule.step()

    torch.manual_seed(1)
    whole, resumed = encoder(), encoder()
    resumed.load_state_dict(whole.state_dict())
    settings = {"max_error": 0.8, "every": 3, "max_rounds": 6}
    undisturbed = RoundsSchedule(whole, **settings)  # type: ignore[arg-type]
    steps(whole, undisturbed, range(1, 9))
    first = encoder()
    first.load_state_dict(whole.state_dict())
    before = RoundsSchedule(first, **settings)  # type: ignore[arg-type]
    steps(first, before, range(1, 6))
    after = RoundsSchedule(resumed, **settings)  # type: ignore[arg-type]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert rounds_of(resumed) == rounds_of(first)
    steps(resumed, after, range(6, 9))
    assert after.log == undisturbed.log
    assert rounds_of(resumed) == rounds_of(whole)
    other = RoundsSchedule(encoder(layers=1), max_error=0.8)
    with pytest.raises(ValueError, match=r"state: expected the rounds of layers\.0\.self_attn, got .*layers\.1"):
        other.load_state_dict(after.state_dict())


def test_any_module_with_a_mechanism_is_scheduled():
    class Own(torch.nn.Module):
        mechanism = Smyrf(rounds=2, cluster_size=8)

        def forward(self, x):
            return coterie.attention(x, x, x, self.mechanism, scale=1.0)

    own = Own()
    model = torch.nn.Sequential(own)
    schedule = RoundsSchedule(model, max_error=0.01, max_rounds=5)
    model(torch.randn(2, 1, 40, 6))
    schedule.step()
    assert [(c.module, c.rounds) for c in schedule.log] == [("0", 5)]
    assert own.mechanism.rounds == 5


def test_passes_in_eval_mode_do_not_count_and_errors_leave_no_observer():
    model, x = encoder(), torch.randn(1, 30, 24)
    schedule = RoundsSchedule(model, max_error=0.8)
    model.eval()(x)
    schedule.step()
    assert schedule.log == []
    model.train()
    with pytest.raises(ValueError, match="need_weights"):
        model.layers[0].self_attn(x, x, x, need_weights=True)
    assert coterie.observe.current() is None
    model(x)
    schedule.step()
    assert [c.step for c in schedule.log] == [2, 2]


def test_a_mask_of_pairs_is_warned_about():
    model, x = encoder(layers=1), torch.randn(1, 30, 24)
    schedule = RoundsSchedule(model, max_error=0.8)
    with pytest.warns(UserWarning, match=r"the estimate for 'layers.0.self_attn' leaves its attn_mask out"):
        model(x, mask=torch.rand(30, 30) < 0.3)
    schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, mask=torch.rand(30, 30) < 0.3)  # not looked at


def test_a_mask_of_keys_is_part_of_the_estimate_however_it_comes():
    model = encoder(layers=1)
    schedule, smyrf = RoundsSchedule(model, max_error=0.8), Smyrf(cluster_size=16)
    q, k, v = tensors(2, 3, 71, dtype=torch.float32)
    real = padding(2, 71, [71, 40])
    seen: list[coterie.Seen] = []
    with coterie.observing(seen.append):
        coterie.attention(q, k, v, smyrf, attn_mask=real[:, None, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = schedule._estimate("layers.0.self_attn", smyrf, seen[0])
    errors, _, _ = estimated(smyrf, q, k, schedule.max_rounds, key_mask=real)
    assert torch.equal(found.missed, errors.missed)


def test_recomputed_activations_are_looked_at_once():
    from torch.utils.checkpoint import checkpoint

    model, x = encoder(layers=1), torch.randn(1, 60, 24, requires_grad=True)
    schedule = RoundsSchedule(model, max_error=0.8, every=1, max_rounds=5)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    schedule.step()
    assert len(schedule.log) == 1
    assert x.grad is not None


def test_a_mechanism_that_was_replaced_is_named():
    model, x = encoder(layers=1), torch.randn(1, 60, 24)
    schedule = RoundsSchedule(model, max_error=0.8, every=1)
    model.layers[0].self_attn.mechanism = coterie.Full()
    with pytest.raises(TypeError, match="mechanism: expected the Smyrf that is scheduled, got Full"):
        model(x)
    schedule.close()
    model(x)
