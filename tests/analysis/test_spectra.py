"""Spectra of attention maps against numpy's SVD of maps that are built with loops, or by the models themselves."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import coterie
from coterie.analysis import maps
from coterie.analysis.figures.spectra import SLOW, draw_spectra
from coterie.analysis.maps import head_maps
from coterie.analysis.spectra import HeadSpectrum, Spectra, decay, head_spectra, largest_values, spectra
from tests.cases import padding, tensors

pytest.importorskip("scipy", reason="the analysis needs SciPy")


def softmax_map(q, k, scale, sees, added=None):
    """One head's map with loops in float64: rows of zeros where nobody is seen."""
    found = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            if sees(i, j):
                score = scale * float(np.dot(q[i], k[j])) + (0.0 if added is None else float(added[i, j]))
                if score > -math.inf:
                    scores[j] = score
        if scores:
            top = max(scores.values())
            total = sum(math.exp(s - top) for s in scores.values())
            for j, s in scores.items():
                found[i, j] = math.exp(s - top) / total
    return found


def oracle(q, k, head, sample=0, scale=None, sees=lambda i, j: True, added=None):
    group = q.shape[1] // k.shape[1]
    a, b = q[sample, head].double().numpy(), k[sample, head // group].double().numpy()
    return softmax_map(a, b, scale or q.shape[-1] ** -0.5, sees, added)


def same_values(found: HeadSpectrum, want: np.ndarray) -> None:
    """Padded rows and columns only add zeros."""
    values = np.linalg.svd(want, compute_uv=False)
    count = len(found.values)
    np.testing.assert_allclose(found.values.numpy(), values[:count], atol=1e-12)
    np.testing.assert_allclose(values[min(found.shape) :], 0, atol=1e-12)
    assert found.energy == pytest.approx(float((want**2).sum()), rel=1e-12)


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1 << 22, 100], ids=["one-block", "many-blocks"])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(maps, "BLOCK", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(23, 23), (11, 37), (37, 11), (1, 5)])
def test_values_of_every_head_are_those_of_the_map_built_with_loops(queries, keys, causal):
    q, k, _ = tensors(heads=4, key_heads=2, queries=queries, keys=keys)
    found = head_spectra(q, k, is_causal=causal, scale=0.7)
    assert [(each.sample, each.head) for each in found] == [(b, h) for b in range(2) for h in range(4)]
    for each in found:
        sees = (lambda i, j: j <= i + keys - queries) if causal else (lambda i, j: True)
        same_values(each, oracle(q, k, each.head, each.sample, 0.7, sees))


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("side", ["left", "right", "scattered"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_is_left_out_whatever_it_holds(side, causal):
    q, k, _ = tensors(queries=29)
    mask = padding(2, 29, [17, 29], side)
    want = [
        oracle(q, k, 1, b, sees=lambda i, j, b=b: bool(mask[b, i] and mask[b, j]) and (j <= i or not causal))
        for b in range(2)
    ]
    q[~mask[:, None].expand(-1, 2, -1)] = math.nan
    k[~mask[:, None].expand(-1, 2, -1)] = math.inf
    found = [each for each in head_spectra(q, k, key_mask=mask, is_causal=causal) if each.head == 1]
    assert [each.shape for each in found] == [(17, 17), (29, 29)]
    for each in found:
        same_values(each, want[each.sample])


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("kind", ["bool", "float", "one-row", "keys"])
def test_masks_of_pairs_are_honoured(kind):
    q, k, _ = tensors(queries=19, keys=27)
    generator = torch.Generator().manual_seed(3)
    pairs = torch.rand(2, 2, 19, 27, generator=generator) < 0.5
    pairs[0, 0, 4] = False  # a query that sees nobody
    added = None
    if kind == "bool":
        mask = pairs
    elif kind == "float":
        mask = torch.randn(2, 2, 19, 27, generator=generator, dtype=torch.float64).masked_fill(~pairs, -math.inf)
        added = mask
    else:
        pairs = pairs[:, :, :1] if kind == "one-row" else pairs[:, :1, :1]
        mask, pairs = pairs, pairs.expand(2, 2, 19, 27)
    for each in head_spectra(q, k, attn_mask=mask):
        b, h = each.sample, each.head
        want = oracle(
            q,
            k,
            h,
            b,
            sees=lambda i, j, b=b, h=h: bool(pairs[b, h, i, j]),
            added=None if added is None else added[b, h],
        )
        same_values(each, want)


def test_offsets_of_each_sample_and_rows_before_all_keys():
    q, k, _ = tensors(queries=13, keys=9)
    offsets = torch.tensor([-3, 2])
    for each in head_spectra(q, k, is_causal=True, causal_offset=offsets):
        shift = int(offsets[each.sample])
        same_values(each, oracle(q, k, each.head, each.sample, sees=lambda i, j, shift=shift: j <= i + shift))


def test_a_map_of_nobody_is_zero_and_has_no_rank():
    q, k, _ = tensors(batch=1, heads=1, queries=5, keys=7)
    (found,) = head_spectra(q, k, is_causal=True, causal_offset=-20)
    assert found.energy == found.effective_rank == found.stable_rank == 0
    assert math.isnan(found.rate)
    assert not found.slow
    assert found.rank_90 == 1


@given(
    st.integers(1, 14),
    st.integers(1, 14),
    st.integers(1, 3),
    st.booleans(),
    st.integers(-3, 6),
    st.sampled_from([1 << 22, 30]),
    st.integers(0, 99),
)
def test_products_and_energy_are_those_of_the_map(queries, keys, columns, causal, offset, block, seed):
    q, k, _ = tensors(batch=1, heads=1, queries=queries, keys=keys, seed=seed)
    each = next(head_maps(q, k, is_causal=causal, causal_offset=offset))
    want = oracle(q, k, 0, sees=lambda i, j: j <= i + offset or not causal)
    x, y = torch.randn(keys, columns, dtype=torch.float64), torch.randn(queries, columns, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "BLOCK", block)
        np.testing.assert_allclose(each.times(x).numpy(), want @ x.numpy(), atol=1e-12)
        np.testing.assert_allclose(each.transposed_times(y).numpy(), want.T @ y.numpy(), atol=1e-12)
        np.testing.assert_allclose(each.dense().numpy(), want, atol=1e-12)
        assert each.energy() == pytest.approx((want**2).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_float64(dtype):
    q, k, _ = tensors(queries=21, dtype=dtype)
    for each in head_spectra(q, k):
        same_values(each, oracle(q, k, each.head, each.sample))


# --- numbers of a spectrum --------------------------------------------------------------------------------------------


def test_ranks_are_those_of_their_definitions():
    q, k, _ = tensors(heads=3, queries=31)
    for each in head_spectra(3 * q, k):
        sigma = np.linalg.svd(oracle(3 * q, k, each.head, each.sample), compute_uv=False)
        p = sigma / sigma.sum()
        assert each.complete
        assert each.effective_rank == pytest.approx(math.exp(-sum(x * math.log(x) for x in p)))
        assert each.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2)
        for share, found in ((0.9, each.rank_90), (0.99, each.rank_99)):
            count, held = 0, 0.0
            while held < share * (sigma**2).sum():
                held += sigma[count] ** 2
                count += 1
            assert found == count


def test_the_fit_is_the_least_squares_line_through_the_logarithms():
    q, k, _ = tensors(queries=33)
    for each in head_spectra(q, k):
        y = np.log(each.values.numpy()[:17])  # the larger half
        slope, intercept = np.polyfit(np.arange(len(y)), y, 1)
        rest = y - (slope * np.arange(len(y)) + intercept)
        assert each.rate == pytest.approx(-slope)
        assert each.r2 == pytest.approx(1 - rest.var() / y.var())
        assert each.slow == (-slope * 33 < math.log(100))


def test_the_fit_leaves_rounding_out():
    clean = torch.exp(-0.3 * torch.arange(30, dtype=torch.float64))
    noisy = torch.cat([clean, torch.full((20,), 1e-17, dtype=torch.float64)])
    assert decay(noisy, largest_side=50) == pytest.approx((0.3, 1.0))
    assert all(math.isnan(x) for x in decay(clean[:2], largest_side=2))


def test_a_head_that_attends_to_one_key_each_is_slow_and_an_even_one_is_not():
    """The identity has full rank, the even map has rank 1."""
    q = torch.zeros(1, 2, 40, 40)
    q[0, 0] = 60 * torch.eye(40)
    one, even = head_spectra(q, q)
    assert one.slow
    assert one.effective_rank == pytest.approx(40, rel=1e-3)
    assert not even.slow
    assert even.effective_rank == pytest.approx(1)
    assert even.rank_99 == 1


# --- large maps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("sharp", [0.5, 6.0], ids=["fast", "slow"])
def test_the_randomised_values_are_those_of_the_dense_map(causal, sharp, monkeypatch):
    monkeypatch.setattr(maps, "BLOCK", 20_000)
    q, k, _ = tensors(batch=1, heads=2, key_heads=1, queries=301, keys=257, dim=16)
    exact = head_spectra(sharp * q, k, is_causal=causal)
    found = head_spectra(sharp * q, k, is_causal=causal, values=9)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.values, b.values[:9], rtol=5e-3, atol=0)
        assert (a.values <= b.values[:9] * (1 + 1e-9)).all()  # a projection never gains
        assert a.energy == pytest.approx(b.energy)
        assert a.stable_rank == pytest.approx(b.stable_rank, rel=1e-2)
        assert not a.complete
        assert math.isnan(a.effective_rank)
        assert b.rank_99 is not None
        assert a.rank_99 == (b.rank_99 if b.rank_99 <= 9 else None)
        assert 0 <= a.change <= 1e-3


def test_a_map_above_the_size_gives_its_64_largest_and_below_it_all():
    q, k, _ = tensors(batch=1, heads=1, queries=203)
    large, small = head_spectra(q, k, dense_up_to=202)[0], head_spectra(q, k, dense_up_to=203)[0]
    assert (len(large.values), len(small.values)) == (64, 203)
    torch.testing.assert_close(large.values[:20], small.values[:20], rtol=1e-2, atol=0)


def test_values_below_rounding_settle():
    """Rank 1 to rounding: the iteration stops and gives 0 for the rest."""
    each = next(head_maps(*torch.zeros(2, 1, 1, 150, 4).unbind(0)))
    found, change = largest_values(each, 5)
    assert change <= 1e-4
    torch.testing.assert_close(found, torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64), rtol=0, atol=1e-12)


def test_one_head_at_8192_tokens_never_holds_the_map():
    """The map alone would be 512 MiB; 2 GiB is what is promised."""
    code = (
        "import resource, torch; from coterie.analysis.spectra import head_spectra; import scipy.stats\n"
        "torch.set_num_threads(2)\n"
        "q, k = torch.randn(2, 1, 1, 8192, 32).unbind(0)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found, = head_spectra(q, k, values=2, is_causal=True)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(found.values))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    kilobytes, values = map(int, done.stdout.split())
    assert values == 2
    assert kilobytes < 400 * 1024


# --- models -----------------------------------------------------------------------------------------------------------


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("error_of", ["output", "map", "frobenius"])
def test_the_heads_of_a_torch_model_and_their_errors(error_of, monkeypatch):
    monkeypatch.setattr(sys.modules["coterie.analysis.spectra"], "_COLUMNS", 2 * 3 * 35 * 8)  # not the function
    model, x = encoder(), torch.randn(2, 35, 24, dtype=torch.float64)
    seen: list[coterie.Seen] = []
    found = spectra(model, x, mechanism="local:window=6", error_of=error_of)
    with coterie.observing(seen.append), coterie.nn.swap(model, "full"), torch.no_grad():
        model(x)
    assert [(each.module, each.sample, each.head) for each in found.heads] == [
        (f"layers.{m}.self_attn", b, h) for m in range(2) for b in range(2) for h in range(3)
    ]
    for each in found.heads:
        call = seen[int(each.module.split(".")[1])]
        b, h = each.sample, each.head
        exact = oracle(call.q, call.k, h, b)
        near = oracle(call.q, call.k, h, b, sees=lambda i, j: abs(i - j) <= 3)
        same_values(each, exact)
        v = call.v[b, h].numpy() if error_of == "output" else np.eye(35)
        size = 1 if error_of == "frobenius" else np.linalg.norm(exact @ v)
        assert each.error == pytest.approx(np.linalg.norm((near - exact) @ v) / size)
    assert not isinstance(model.layers[0].self_attn, coterie.nn.MultiheadAttention)  # put back


def test_an_error_of_something_else_is_refused():
    with pytest.raises(ValueError, match="error_of: expected one of 'output', 'map', 'frobenius', got 'values'"):
        spectra(encoder(), torch.randn(1, 9, 24), error_of="values")


def test_spearman_is_the_correlation_of_the_ranks():
    found = spectra(encoder(), torch.randn(2, 35, 24, dtype=torch.float64), mechanism="smyrf:rounds=1,cluster_size=7")
    for measure in ("effective_rank", "stable_rank", "rate", "r2"):
        rows = found.table()
        place = np.array([np.argsort(np.argsort([row[name] for row in rows])) for name in (measure, "error")])
        got = found.correlation(measure)
        assert got.rho == pytest.approx(np.corrcoef(place)[0, 1])
        assert got.heads == 12
        assert f"{got.rho:+.3f}" in found.describe()
    assert "12 heads" in found.describe()
    alone = spectra(encoder(), torch.randn(1, 9, 24, dtype=torch.float64), mechanism=None)
    assert all(math.isnan(row["error"]) for row in alone.table())


SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
TINY = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_maps_are_those_that_hugging_face_gives(transformers):
    """GQA and causal with padding on the left: against the eager model's own attentions."""
    config = transformers.LlamaConfig(**TINY, num_hidden_layers=2, max_position_embeddings=64)
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).eval()
    batch = {"input_ids": torch.randint(50, (2, 27)), "attention_mask": padding(2, 27, [19, 27], "left").long()}
    found = spectra(model, batch, mechanism="smyrf:cluster_size=9")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**batch, output_attentions=True).attentions
    assert len(found.heads) == 2 * 2 * 4
    for index, each in enumerate(found.heads):
        real = batch["attention_mask"][each.sample].bool()
        want = wanted[index // 8][each.sample, each.head][real][:, real].double().numpy()
        np.testing.assert_allclose(each.values.numpy(), np.linalg.svd(want, compute_uv=False), atol=1e-5)
        assert 0 < each.error < 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_sliding_windows_are_named_and_a_refusal_leaves_the_model_as_it_was(transformers):
    config = transformers.MistralConfig(**TINY, num_hidden_layers=1, sliding_window=8)
    windowed = transformers.MistralModel(config).eval()
    batch = {"input_ids": torch.randint(50, (1, 27))}
    with pytest.raises(
        ValueError,
        match=r"model: expected dense attention over more than a few queries, got none; windows: layers.0.self_attn",
    ):
        spectra(windowed, batch)
    config.sliding_window = None
    model = transformers.MistralModel(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="is_causal: expected False for 'clustered'"):
        spectra(model, batch, mechanism="clustered")
    assert model.config._attn_implementation == before


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_refused():
    q, k, _ = tensors(queries=9)
    for name, value in (("q", math.nan), ("k", math.inf), ("q", 1e200)):
        broken = {"q": q.clone(), "k": k.clone()}
        broken[name][1, 0, 4, 2] = value
        with pytest.raises(ValueError, match=rf"{name}: expected finite numbers .* sample 1, head 0, row 4"):
            head_spectra(broken["q"], broken["k"])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="attn_mask: expected finite numbers or −inf, got NaN"):
            head_spectra(q, k, attn_mask=torch.full((9, 9), value, dtype=q.dtype))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"values": 0}, "values: expected an int ≥ 1, got 0"),
        ({"values": 2.0}, "values: expected an int, got float"),
        ({"dense_up_to": -1}, "dense_up_to: expected an int ≥ 0"),
        ({"seed": -1}, "seed: expected an int ≥ 0"),
        ({"slow_below": -1.0}, "slow_below: expected a number ≥ 0"),
        ({"slow_below": "log"}, "slow_below: expected a number, got str"),
        ({"is_causal": 1}, "is_causal: expected a bool"),
        ({"scale": math.inf}, "scale: expected a finite number"),
        ({"key_mask": torch.ones(2, 8, dtype=torch.bool)}, r"key_mask: expected shape \(2, 9\)"),
        ({"query_mask": torch.ones(2, 8, dtype=torch.bool)}, r"query_mask: expected shape \(2, 9\)"),
        ({"key_mask": padding(2, 9, [9, 0])}, "expected a real token in every sample, got none in sample 1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    q, k, _ = tensors(queries=9)
    with pytest.raises((ValueError, TypeError), match=message):
        head_spectra(q, k, **settings)


def some_heads(errors, *, values=3, shape=(3, 3)) -> tuple[HeadSpectrum, ...]:
    return tuple(
        HeadSpectrum(
            "m", 0, h, shape, torch.linspace(1, 1 / (h + 2), values).double(), 2.0, 0.1 * h, 0.9, h == 1, error
        )
        for h, error in enumerate(errors)
    )


def test_of_a_few_heads_all_orders_are_counted():
    heads = some_heads([0.1, 0.2, 0.3, 0.4])
    got = Spectra("smyrf", heads).correlation("rate")
    assert got.p_value >= 2 / math.factorial(4)  # no order of 4 is rarer than that


def test_a_correlation_that_cannot_be_is_refused():
    good = some_heads([0.1, 0.2, 0.4])
    with pytest.raises(ValueError, match="measure: expected one of 'effective_rank', 'stable_rank', 'rate', 'r2'"):
        Spectra("smyrf", good).correlation("entropy")
    with pytest.raises(
        ValueError, match=r"mechanism: expected one whose error was measured: spectra\(…, mechanism=…\)"
    ):
        Spectra("", good).correlation()
    with pytest.raises(ValueError, match=r"measure: expected heads with all singular values .* or 'stable_rank'"):
        Spectra("smyrf", some_heads([0.1, 0.2, 0.4], shape=(9, 9))).correlation()
    with pytest.raises(ValueError, match="heads: expected at least 3, not all alike, got 2"):
        Spectra("smyrf", good[:2]).correlation()
    with pytest.raises(ValueError, match="heads: expected at least 3, not all alike"):
        Spectra("smyrf", some_heads([0.1, 0.1, 0.1])).correlation()
    with pytest.raises(ValueError, match="share: expected a number between 0 and 1, got 1"):
        good[0].rank_holding(1)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_the_picture_shows_the_values_the_slow_heads_and_the_errors():
    found = Spectra("smyrf", some_heads([0.3, 0.2, 0.4]))
    values, scatter = draw_spectra(found, against="rate", title="three heads").axes
    drawn: dict[Any, list[list[float]]] = {line.get_color(): [] for line in values.lines}
    for line in values.lines:
        drawn[line.get_color()].append(np.asarray(line.get_ydata()).tolist())
    assert drawn[SLOW] == [found.heads[1].values.tolist()]
    assert sum(map(len, drawn.values())) == 3
    points = np.concatenate([np.asarray(part.get_offsets()) for part in scatter.collections])
    np.testing.assert_allclose(sorted(points.tolist()), sorted([each.rate, each.error] for each in found.heads))
    assert f"{found.correlation('rate').rho:+.2f}" in scatter.get_title()


def test_without_a_mechanism_there_is_one_picture_and_without_heads_none():
    assert len(draw_spectra(Spectra("", some_heads([math.nan] * 2))).axes) == 1
    with pytest.raises(ValueError, match="found: expected at least one head, got none"):
        draw_spectra(Spectra("smyrf", ()))


def test_errors_that_are_all_alike_are_said_to_be_so():
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    found = spectra(layer, torch.randn(1, 21, 32), mechanism="local:window=99")
    alike = replace(found, heads=tuple(replace(each, error=0.0) for each in found.heads))
    assert "the same in all heads, so nothing to compare" in alike.describe()
    assert len(draw_spectra(alike).axes) == 1
