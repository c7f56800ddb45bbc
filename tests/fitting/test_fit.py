"""`coterie.fit` on small models: the search, the promise, and what it says when nothing pays."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.fitting.candidates import positions_matter
from coterie.fitting.dense import dense
from coterie.fitting.measures import Fidelity
from coterie.fitting.profile import Profile, Profiled, Shape, Tried, profile
from coterie.fitting.result import Fit
from coterie.fitting.search import Cost, alike, border, cheapest, cost_of, path, search
from coterie.fitting.tables import choices_table
from coterie.fitting.task import Task
from coterie.hosts import DENSE, host_of
from coterie.progress import ESTIMATE


def encoder(layers: int = 2) -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def batches(count: int = 3, length: int = 80) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, 32, generator=generator) for _ in range(count)]


# --- the path of plans ------------------------------------------------------------------------------------------------

numbers = st.floats(0.001, 10.0)
candidates = st.lists(st.tuples(numbers, st.floats(0.0, 2.0)), min_size=0, max_size=5)


@given(st.lists(st.tuples(numbers, candidates), min_size=1, max_size=4))
def test_a_path_leads_from_the_fastest_to_dense_and_never_gets_worse(modules):
    table = []
    for index, (whole, others) in enumerate(modules):
        table.append(Tried(f"m{index}", DENSE, 0.0, whole))
        table += [Tried(f"m{index}", f"c{i}", error, seconds) for i, (seconds, error) in enumerate(others)]
    known = {(row.module, row.mechanism): row for row in table}
    plans = path(table)
    seconds = [sum(known[item].seconds for item in plan.items()) for plan in plans]
    errors = [sum(known[item].error ** 2 for item in plan.items()) for plan in plans]
    assert all(a <= b + 1e-9 for a, b in pairwise(seconds))
    assert all(a >= b - 1e-9 for a, b in pairwise(errors))
    assert errors[-1] == 0
    best = sum(min(row.seconds for row in table if row.module == f"m{i}") for i in range(len(modules)))
    assert seconds[0] == pytest.approx(best)


def test_candidates_that_were_refused_are_no_candidates():
    table = [Tried("m", DENSE, 0.0, 1.0), Tried("m", "x", math.nan, math.nan, "refused")]
    assert path(table) == [{"m": DENSE}]


@given(st.integers(1, 40), st.integers(0, 60))
def test_halving_finds_the_first_plan_that_holds(count, first):
    plans = [{"m": str(index)} for index in range(count)]
    found = cheapest(plans, lambda plan: int(plan["m"]) >= first, lambda: False)
    assert found == min(first, count - 1)


# --- fit --------------------------------------------------------------------------------------------------------------


def test_the_promise_is_checked_on_held_out_batches_and_the_model_is_left_alone():
    model, data = encoder(), batches()
    with torch.no_grad():
        before = model(data[0])
    told = []
    found = coterie.fit(
        model, data, 0.9, candidates=["local:window=33", "near-far:near=16"], progress=lambda *a: told.append(a)
    )
    with torch.no_grad():
        assert torch.equal(model(data[0]), before)
        assert isinstance(model.layers[0].self_attn, torch.nn.MultiheadAttention)
        assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
        swapped = found.apply(model)
        after = model(data[2])
        if not found.all_dense:
            swapped.undo()
        cosine = float(torch.cosine_similarity(after.double(), model(data[2]).double(), dim=-1).mean())
    assert found.held_out == pytest.approx(cosine, abs=1e-6)
    assert found.holds
    assert {what for what, _, _ in told} >= {"candidates", "dense answers", "timing"}
    assert {row.mechanism for row in found.table} == {DENSE, "local:window=33", "near-far:near=16"}


def test_where_nothing_pays_it_is_dense_and_says_so():
    found = coterie.fit(encoder(), batches(length=16), candidates=["near-far"])
    assert found.all_dense
    assert found.held_out == 1.0
    assert found.notes == ["Nothing pays at 16 tokens: dense attention is kept everywhere."]
    assert found.speedups == (1.0, 1.0)


def test_every_fidelity_is_kept_and_all_of_it_means_dense():
    windows = ["local:window=9", "local:window=65", "local:window=257"]
    for fidelity in (0.5, 0.99, 1.0):
        found = coterie.fit(encoder(), batches(3, 300), fidelity, candidates=windows)
        assert found.held_out >= fidelity
    assert found.all_dense


def test_a_callable_measure_and_a_time_budget():
    def score(model, batch):
        return float(model(batch).mean() + 10)

    found = coterie.fit(encoder(), batches(), 0.9, measure=score, candidates=["local:window=33"], seconds=0.0)
    assert found.measure == "score"
    assert found.notes == ["The time budget was over before anything could be tried: all attention stays dense."]
    assert found.all_dense
    assert found.holds
    assert "the whole model 1.00×" in str(found)


def test_saving_and_loading_gives_the_same(tmp_path):
    found = coterie.fit(encoder(), batches(), 0.9, candidates=["local:window=33", "clustered:clusters=9"])
    found.save(tmp_path / "deep" / "fit.json")
    again = coterie.Fit.load(tmp_path / "deep" / "fit.json")
    assert str(again) == str(found)
    assert again.choices == found.choices
    assert json.loads((tmp_path / "deep" / "fit.json").read_text())["modules"] == found.choices
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["fit.json"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"path: expected a file that Fit.save wrote"):
        coterie.Fit.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coterie.fit(encoder(), batches(), 0.0), r"fidelity: expected a number in \(0, 1\], got 0"),
        (lambda: coterie.fit(encoder(), batches(), 1.5), r"fidelity: expected a number in \(0, 1\], got 1.5"),
        (lambda: coterie.fit(encoder(), batches(1)), "batches: expected at least 2, as some are held out, got 1"),
        (lambda: coterie.fit(encoder(), [], held_out=batches(1)), "batches, held_out: expected at least one of each"),
        (
            lambda: coterie.fit(encoder(), batches(), measure="speed"),
            "measure: expected 'outputs', 'loss' or a callable",
        ),
        (lambda: coterie.fit(encoder(), batches(), measure="loss"), "as the model predicts no next token"),
        (lambda: coterie.fit(encoder(), batches(), candidates=["nearest"]), "mechanism: expected one of"),
        (lambda: coterie.fit(torch.nn.Linear(2, 2), batches()), "model: expected a model that contains attention"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_swap_by_name_leaves_the_others():
    model = encoder()
    swapped = coterie.nn.swap(model, {"layers.1.self_attn": "local:window=9"})
    assert swapped.replaced == ["layers.1.self_attn"]
    assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
    swapped.undo()
    with pytest.raises(ValueError, match=r"mechanism: expected names among .*, got \['layers.7'\]"):
        coterie.nn.swap(model, {"layers.7": "local"})


def test_observing_sees_calls_and_not_its_own():
    seen = []

    def look(call):
        seen.append(call)
        call.attend("local:window=3")

    q = torch.randn(1, 2, 20, 8)
    with coterie.observing(look):
        coterie.attention(q, q, q, "full", is_causal=True)
    coterie.attention(q, q, q, "full")
    assert len(seen) == 1
    assert seen[0].settings["is_causal"] is True


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_fits_a_language_model_by_its_loss_and_stores_the_choice(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from tests.hf.families import BY_NAME, Family

    family = Family(**(vars(BY_NAME["llama"]) | {"model": "LlamaForCausalLM"}))
    model = family.build()
    data = [{"input_ids": torch.randint(3, 99, (1, 150))} for _ in range(3)]
    found = coterie.fit(model, data, 0.95, candidates=["local:window=33"])
    assert found.measure == "loss"
    assert found.holds
    assert list(found.choices) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert model.config._attn_implementation == "eager"
    found.save(tmp_path / "fit.json")
    loaded = transformers.LlamaForCausalLM(model.config).eval()
    coterie.hf.load(loaded, tmp_path / "fit.json")
    assert loaded.config.coterie["modules"] == found.choices


def test_a_candidate_that_pays_only_for_long_inputs_is_dense_below():
    short, long = (Shape((1, 2, n, 8), (1, 2, n, 8), False) for n in (100, 900))
    profile = Profile(
        errors={
            ("a", "local"): {short: [9.0], long: [0.02, 0.04]},
            ("a", "smyrf"): {short: [1.0], long: [1.0]},
            ("a", "strided"): {long: [0.5]},
        },
        times={
            (short, "dense"): [1.0],
            (long, "dense"): [10.0],
            (short, "local"): [2.0, 3.0, 4.0],
            (long, "local"): [5.0],
            (short, "smyrf"): [3.0],
            (long, "smyrf"): [20.0, 21.0, 22.0],
            (long, "strided"): [4.0],
        },
        shapes={"a": [short, long]},
        refused={("a", "topk"): "why"},
        beaten={("a", "full"): "slower than dense on 2 of 12 heads"},
    )
    tried = [coterie.Local(), coterie.Smyrf(), coterie.TopK(), coterie.Strided(), coterie.Full(), coterie.Fixed()]
    dense, local, slow, odd, long_alone, beaten, untried = profile.table(tried)
    assert (dense.error, dense.seconds) == (0.0, 11.0)
    assert (local.mechanism, local.seconds) == ("local@900", 6.0)
    assert local.error == pytest.approx((0.03 / 2) ** 0.5)
    assert (slow.mechanism, slow.seconds, slow.note) == ("smyrf", 23.0, "slower than dense")
    assert odd.note == "why"
    assert math.isnan(odd.seconds)
    assert (long_alone.mechanism, long_alone.seconds) == ("strided@900", 5.0)  # the time was up before the short ones
    assert beaten.note == "slower than dense on 2 of 12 heads"
    assert untried.note == "not tried: the time was up"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_short_inputs_of_a_hugging_face_model_run_its_own_attention():
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    import coterie.hf
    from tests.hf.families import BY_NAME

    model = BY_NAME["bert"].build()
    seen: list[coterie.Seen] = []
    coterie.hf.use(model, "local:window=9@70")
    with coterie.observing(seen.append), torch.no_grad():
        for length in (69, 70):
            model(input_ids=torch.randint(3, 99, (1, length)))
    assert [call.q.shape[2] for call in seen] == [70] * len(coterie.hf.attention_modules(model))
    assert "local:window=9@70" in str(model.config.coterie)


@pytest.mark.parametrize(
    ("dense", "found", "fidelity"),
    [
        ([4.0], [3.0], 0.75),
        ([4.0], [5.0], 1.25),
        ([-2.0], [-2.2], 0.9),
        ([-2.0], [-1.0], 1.5),
        ([0.0, 4.0], [0.0, 3.0], 0.75),  # a batch may score 0
        ([0.0, 4.0], [1.0, 3.0], 1.0),
        ([1.0], [math.nan], math.nan),  # which is no fidelity that was asked for
    ],
)
def test_scores_of_any_sign(dense, found, fidelity):
    said = iter([*dense, *found])
    scale = Fidelity(host_of(encoder()), lambda model, batch: next(said), batches(len(dense)))
    for index in range(len(dense)):
        scale.remember(index)
    scale.expect_worth()
    scores = [scale.score(index) for index in range(len(dense))]
    assert statistics.fmean(scores) == pytest.approx(fidelity, nan_ok=True)


@pytest.mark.parametrize(("always", "size"), [(0.0, "0"), (math.nan, "nan"), (-math.inf, "inf")])
def test_a_dense_model_that_never_scores_has_nothing_to_keep(always, size):
    with pytest.raises(ValueError, match=f"measure: expected scores .* not all 0, got a mean size of {size} at 40 tok"):
        coterie.fit(encoder(1), batches(3, 40), 0.9, measure=lambda model, batch: always)


def test_a_score_that_is_not_a_number_holds_nothing():
    def score(model, batch):
        return math.nan if isinstance(model.layers[0].self_attn, coterie.nn.MultiheadAttention) else 1.0

    found = coterie.fit(encoder(1), batches(), 0.9, measure=score, candidates=["local:window=9"])
    assert found.all_dense
    assert found.held_out == 1.0


# --- what a reviewer found --------------------------------------------------------------------------------------------


def test_a_path_ends_in_dense_even_if_a_candidate_was_exact_here():
    table = [Tried("a", DENSE, 0.0, 2.0), Tried("a", "local", 0.0, 1.0)]
    assert path(table) == [{"a": "local"}, {"a": DENSE}]


def test_padding_of_a_torch_model_does_not_count():
    padding = torch.zeros(2, 60, dtype=torch.bool)
    padding[1, 30:] = True
    data = [{"src": torch.randn(2, 60, 32), "src_key_padding_mask": padding} for _ in range(3)]
    scale = Fidelity(host_of(encoder()), "hidden", data)
    dense, other = torch.randn(2, 60, 8), torch.randn(2, 60, 8)
    other[~padding] = dense[~padding]
    assert scale._compare(dense, other, data[0]) == pytest.approx(1.0)


def test_each_length_is_held_out():
    data = [torch.randn(1, n, 32) for n in (40, 40, 40, 90, 90, 90)]
    found = coterie.fit(encoder(1), data, 0.9, candidates=["local:window=9"])
    assert sorted(at.tokens for at in found.lengths) == [40, 90]
    with pytest.raises(ValueError, match="at least 2 of each length, as some are held out, got 1 of 90 tokens"):
        coterie.fit(encoder(1), data[:4], 0.9)


@pytest.mark.parametrize("batch", [torch.zeros(1, 30, dtype=torch.long), (torch.zeros(1, 30, dtype=torch.long),)])
def test_a_hugging_face_model_takes_its_batches_as_dicts(batch):
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from tests.hf.families import BY_NAME

    model = BY_NAME["bert"].build()
    wanted = rf"batches: expected dicts of what the model takes, such as .*, got {type(batch).__name__}"
    with pytest.raises(TypeError, match=wanted):
        coterie.fit(model, [batch] * 3)


def test_the_model_is_left_as_it_was():
    model = encoder()
    model.train()
    model.layers[0].eval()
    coterie.fit(model, batches(), 0.9, candidates=["local:window=9"])
    assert [layer.training for layer in model.layers] == [False, True]


def test_a_budget_names_the_lengths_that_were_tried(monkeypatch):
    monkeypatch.setattr("coterie.fitting.profile.PROFILE", -1.0)  # the time for that is always over
    data = [torch.randn(1, n, 32) for n in (40, 40, 90, 90)]
    found = coterie.fit(encoder(1), data, 0.9, candidates=["local:window=9"], seconds=60.0)
    assert any("1 of 2 batches: candidates were tried at 90 tokens." in note for note in found.notes)
    assert not any("Nothing pays" in note for note in found.notes)


def test_a_candidate_that_starts_somewhere_starts_no_earlier():
    short, long = (Shape((1, 2, n, 8), (1, 2, n, 8), False) for n in (100, 900))
    for own, label in ((50, "local@900"), (1000, "local@1000")):
        name = f"local@{own}"
        profile = Profile(
            errors={("a", name): {short: [0.0], long: [0.5]}},
            times={(short, DENSE): [1.0], (long, DENSE): [9.0], (short, name): [2.0], (long, name): [3.0]},
            shapes={"a": [short, long]},
        )
        assert profile.table([coterie.as_mechanism(name)])[1].mechanism == label


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_loss_is_the_models_own_and_a_choice_comes_back():
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from transformers import CohereConfig, CohereForCausalLM

    import coterie.hf

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = CohereForCausalLM(CohereConfig(vocab_size=99, intermediate_size=32, logit_scale=0.25, **small)).eval()
    ids = torch.randint(3, 99, (1, 50))
    scale = Fidelity(host_of(model), "loss", [{"input_ids": ids}])
    theirs = float(model(input_ids=ids, labels=ids).loss)
    assert scale._answer({"input_ids": ids, "labels": ids}) == pytest.approx(theirs, rel=1e-4)
    coterie.hf.use(model, "local:window=5")
    before = dict(model.config.coterie["modules"])
    coterie.fit(model, [{"input_ids": ids, "labels": ids}] * 2, 0.5, candidates=["local:window=9"])
    assert model.config.coterie["modules"] == before
    assert model.config._attn_implementation == "coterie"


# --- sets -------------------------------------------------------------------------------------------------------------


class Positioned(torch.nn.Module):
    """An encoder that adds positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder(1)
        self.pos_embed = torch.nn.Parameter(torch.randn(1, 80, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x + self.pos_embed[:, : x.shape[1]])


def tried(**settings):
    found = coterie.fit(settings.pop("model", encoder(1)), batches(3, 40), 0.5, **settings)
    windows = {row.mechanism for row in found.table if row.mechanism.startswith(("local", "longformer"))}
    return bool(windows), any("Windows were not tried" in note for note in found.notes)


def test_windows_are_for_tokens_whose_order_means_something():
    assert tried() == (False, True)  # rows of a set: which are neighbours is nobody's choice
    assert tried(ordered=True) == (True, False)
    assert tried(ordered=False) == (False, False)
    assert tried(model=Positioned()) == (True, False)
    assert tried(candidates=["local:window=9"]) == (True, False)  # the user's word
    with pytest.raises(TypeError, match="ordered: expected True, False or None, got str"):
        tried(ordered="yes")


@pytest.mark.parametrize(
    ("name", "means"), [("rotary_emb", True), ("positional_encoding", True), ("composed", False), ("position", True)]
)
def test_names_that_speak_of_positions(name, means):
    model = encoder(1)
    model.register_buffer(name, torch.zeros(1))
    assert positions_matter(host_of(model)) is means


# --- what is not worth it ---------------------------------------------------------------------------------------------


def test_a_plan_that_slows_the_model_down_is_not_taken(monkeypatch):
    def seconds(best, task, first, scale, ways):
        best |= {(name, 700): {"dense": 1.0, "fitted": fitted}[name] for name in ways}

    fitted = 1.25

    def slow(seen):  # attention alone would gain much
        return dense(seen)._replace(seconds=1e3)

    monkeypatch.setattr("coterie.fitting.speed._time", seconds)
    monkeypatch.setattr("coterie.fitting.profile.dense", slow)
    found = coterie.fit(encoder(1), batches(4, 700), 0.1, candidates=["local:window=9"])
    assert found.all_dense
    assert found.certified
    assert found.speedups == (1.0, 1.0)
    assert "The plan that held makes the whole model 0.80× as fast: it is not taken." in found.notes
    assert "Dense attention is kept everywhere." in found.notes
    fitted = 0.5
    assert not coterie.fit(encoder(1), batches(4, 700), 0.1, candidates=["local:window=9"]).all_dense


def test_a_layer_with_a_window_of_its_own_is_called_so(tmp_path):
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from transformers import ModernBertConfig, ModernBertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    model = ModernBertModel(ModernBertConfig(vocab_size=99, pad_token_id=0, local_attention=16, **sizes)).eval()
    data = [{"input_ids": torch.randint(1, 99, (1, 60))} for _ in range(3)]
    found = coterie.fit(model, data, 0.9, candidates=["near-far:near=16"])
    assert found.windows == {"layers.1.attn": 16, "layers.2.attn": 16}
    runs = {row[0]: row[1] for row in choices_table(found).rows}
    assert runs["layers.1.attn"] == runs["layers.2.attn"] == "its own window (16)"
    assert runs["layers.0.attn"] in ("dense", "near-far:near=16")
    found.save(tmp_path / "fit.json")
    assert coterie.Fit.load(tmp_path / "fit.json").windows == found.windows


# --- the search -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30), st.floats(0.0, 1.2), st.floats(0.5, 2.0))
def test_guesses_find_what_halving_finds(steps, allowed, bend):
    """Whatever the losses do on the way, as long as they fall."""
    errors = [sum(steps[index:]) for index in range(len(steps) + 1)]
    costs = [Cost(float(index), error) for index, error in enumerate(errors)]
    losses = [(error / max(errors)) ** bend for error in errors]
    plans, target = [{"m": str(index)} for index in range(len(errors))], 1 - allowed
    scores = {len(plans) - 1: 1.0}

    def holds(plan):
        index = int(plan["m"])
        scores[index] = 1 - losses[index]
        return scores[index] >= target

    def probe(low, high):
        guess = border(costs, scores, target)
        return (low + high) // 2 if guess is None else min(max(guess, low), high - 1)

    found = cheapest(plans, holds, lambda: False, probe)
    assert found == cheapest(plans, holds, lambda: False)


def test_losses_in_proportion_to_squared_errors_need_few_plans():
    costs = [Cost(float(index), (60 - index) / 60) for index in range(61)]
    ran = []

    class Model:
        fitted, checked = (0,), (1,)

        def on_fitted(self, plan, target):
            ran.append(plan)
            return {9: 1 - 0.1 * cost_of(plan, table).error}

        def seconds(self, indices):
            return 0.0

    table = [Tried(f"m{n}", DENSE, 0.0, 2.0) for n in range(60)]
    table += [Tried(f"m{n}", "local", (1 / 60) ** 0.5 * (1 - n / 1e6), 1.0) for n in range(60)]
    host: Any = None
    task = Task(host, [], [], 0.97, 0.95, None, [], None, 0.0, 0.0, lambda *_: None)
    remembered: Any = Model()
    found = search(task, remembered, Profiled(table, [9], []))
    assert costs[found.chosen].error == pytest.approx(0.3, abs=0.02)
    assert len(ran) <= 4


def test_one_mechanism_everywhere_is_taken_if_it_is_as_fast_and_more_exact():
    table = [Tried(name, DENSE, 0.0, 9.0) for name in "ab"]
    table += [Tried("a", "local", 0.5, 1.0), Tried("b", "local", 0.1, 3.0)]
    table += [Tried("a", "smyrf", 0.2, 2.0), Tried("b", "smyrf", 0.2, 2.0)]
    mixed = {"a": "local", "b": "local"}
    assert alike(table, mixed, cost_of(mixed, table)) == {"a": "smyrf", "b": "smyrf"}
    better = {"a": "smyrf", "b": "local"}
    assert alike(table, better, cost_of(better, table)) is None  # slower, and more exact
    refused = [*table, Tried("a", "topk", 0.0, 1.0), Tried("b", "topk", math.nan, math.nan, "why")]
    assert alike(refused, mixed, cost_of(mixed, refused)) == {"a": "smyrf", "b": "smyrf"}


# --- several fidelities, a budget, and impatience ---------------------------------------------------------------------


def test_several_fidelities_are_each_what_one_would_be_and_share_their_work():
    ran = []

    def score(model, batch):
        ran.append(1)
        return float(model(batch).abs().mean())

    windows = ["local:window=9", "local:window=65"]
    found = coterie.trade_off(encoder(), batches(6, 300), [0.9, 0.5, 0.99], measure=score, candidates=windows)
    together = len(ran)
    assert [each.fidelity for each in found] == [0.9, 0.5, 0.99]
    assert all(each.holds for each in found)
    assert all(each.table == found[0].table for each in found)
    ran.clear()
    for fidelity in (0.9, 0.5, 0.99):
        coterie.fit(encoder(), batches(6, 300), fidelity, measure=score, candidates=windows)
    assert together < len(ran)
    with pytest.raises(ValueError, match="fidelities: expected at least one, got none"):
        coterie.trade_off(encoder(), batches(), [])
    with pytest.raises(TypeError, match="fidelities: expected a list of numbers, got float"):
        coterie.trade_off(encoder(), batches(), 0.9)  # type: ignore[arg-type]


def test_a_budget_leaves_documents_out_and_says_so(monkeypatch):
    told = []
    data = batches(9, 300)

    def one_second(self, index):  # a dense pass takes that long
        remember(self, index)
        self.seconds[index] = 1.0

    remember = Fidelity.remember
    monkeypatch.setattr(Fidelity, "remember", one_second)
    found = coterie.fit(
        *(encoder(), data[:3], 0.9),
        held_out=data[3:],
        candidates=["local:window=9"],
        seconds=11.0,  # 1 document to search on and 3 that certify take 3 + 6
        progress=lambda *said: told.append(said),
    )
    assert found.notes[0] == "The time that was left is enough for 4 of 9 batches."
    (estimate,) = (said for said in told if said[0] == ESTIMATE)
    assert estimate == (ESTIMATE, 0, 11)  # no longer than the budget
    short = coterie.fit(encoder(), data[:3], 0.9, held_out=data[3:], candidates=["local:window=9"], seconds=5.0)
    (note,) = short.notes
    assert note.startswith("The time budget is too short: a fit takes 10 s at least")
    assert short.all_dense


def test_an_estimate_comes_after_the_first_batch():
    told = []
    coterie.fit(encoder(), batches(), 0.9, candidates=["local:window=9"], progress=lambda *said: told.append(said[0]))
    assert told[0] == ESTIMATE
    assert told.count(ESTIMATE) == 1


def test_whoever_interrupts_the_timing_keeps_the_plan(monkeypatch, tmp_path):
    def impatient(self, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.hosts.Host.attend", impatient)

    def slow(seen):
        return dense(seen)._replace(seconds=1e3)

    monkeypatch.setattr("coterie.fitting.profile.dense", slow)

    def score(model, batch):
        return 1.0 + float(model(batch).mean()) * 1e-6

    model = encoder(1)
    found = coterie.fit(model, batches(9, 300), 0.5, measure=score, candidates=["local:window=9"])
    assert found.choices == {"layers.0.self_attn": "local:window=9"}
    assert found.certified
    assert "the whole model was not timed" in str(found)
    assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
    found.save(tmp_path / "fit.json")
    assert str(coterie.Fit.load(tmp_path / "fit.json")) == str(found)


def test_before_there_is_a_plan_an_interrupt_is_one():
    def score(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coterie.fit(encoder(1), batches(), 0.5, measure=score, candidates=["local:window=9"])


# --- promises that would mean nothing ---------------------------------------------------------------------------------


def fast(monkeypatch):
    """Attention alone gains much, whatever this machine thinks of it, and the model as much."""

    def slow(seen):
        return dense(seen)._replace(seconds=1e3)

    def seconds(best, task, first, scale, ways):
        best |= {(name, tokens): {"dense": 1.0, "fitted": 0.5}[name] for name in ways for tokens in first}

    monkeypatch.setattr("coterie.fitting.profile.dense", slow)
    monkeypatch.setattr("coterie.fitting.speed._time", seconds)


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(1), torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_the_cosine_of_one_number_is_refused():
    with pytest.raises(ValueError, match=r"measure: expected a callable, as the cosine of a single number is a sign, "):
        coterie.fit(Mean().eval(), batches(3, 60), 0.9, candidates=["local:window=9"])


def test_a_model_that_writes_its_answers_into_the_same_memory_is_compared_with_what_it_said(monkeypatch):
    fast(monkeypatch)

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.kept = encoder(1), torch.zeros(1, 60, 32)

        def forward(self, x):
            return self.kept.copy_(self.encoder(x))

    found = coterie.fit(Reuses().eval(), batches(6, 60), 0.2, candidates=["local:window=1"])
    assert found.held_out < 1


def test_documents_that_are_the_same_certify_nothing(monkeypatch):
    fast(monkeypatch)
    (one, *others) = batches(5, 60)
    settings: dict[str, Any] = {"candidates": ["local:window=9"]}
    twice = coterie.fit(encoder(1), [one, one.clone(), one.clone()], 0.2, **settings)
    overlap = coterie.fit(encoder(1), [one], 0.2, held_out=[*others, one.clone()], **settings)
    apart = coterie.fit(encoder(1), [one], 0.2, held_out=others, **settings)
    for found in (twice, overlap):
        assert not found.certified
        assert any("some of the documents are the same" in note for note in found.notes)
    assert apart.certified


def test_a_length_that_nothing_certifies_is_not_promised(monkeypatch):
    fast(monkeypatch)
    data = [*batches(1, 60), *batches(1, 30)]
    found = coterie.fit(encoder(1), data, 0.2, held_out=batches(5, 60)[1:], candidates=["local:window=9"])
    assert not found.certified
    assert "Not certified: no held-out document has 30 tokens." in found.notes


def test_batches_of_a_users_own_class_have_their_own_lengths():
    @dataclass
    class Batch:
        x: torch.Tensor

    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder(1)

        def forward(self, batch):
            return self.encoder(batch.x)

    data = [Batch(torch.randn(1, n, 32)) for n in (60, 60, 60, 30, 30, 30)]
    found = coterie.fit(Takes().eval(), data, 0.2, candidates=["local:window=9"])
    assert [(at.tokens, at.documents) for at in found.lengths] == [(30, 2), (60, 2)]


def test_whoever_interrupts_several_keeps_those_that_are_done(monkeypatch):
    fast(monkeypatch)
    told = []

    def impatient(what, done, total):
        told.append(what)
        if told.count("certify") > 0 and what == "search":
            raise KeyboardInterrupt  # in the search for the second

    windows = ["local:window=5", "local:window=21", "local:window=45"]
    found = coterie.trade_off(encoder(2), batches(6, 60), [0.3, 0.9999], candidates=windows, progress=impatient)
    assert [each.fidelity for each in found] in ([0.9999], [0.3, 0.9999])  # the exact one first


def test_a_module_is_screened_where_it_meets_most_keys(monkeypatch):
    fast(monkeypatch)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(96, 12, batch_first=True)

        def forward(self, x):
            short = self.attention(x[:, :20], x[:, :20], x[:, :20], need_weights=False)[0]
            long = self.attention(x, x, x, need_weights=False)[0]
            return long + short.mean(1, keepdim=True)

    data = [torch.randn(1, 600, 96) for _ in range(3)]
    host = host_of(Twice().eval())
    task = Task(host, data, [], 0.5, 0.95, None, [coterie.Local(window=9)], None, 0.0, 0.0, lambda *_: None)
    scale = Fidelity(host, None, data)
    scale.remember(0)
    monkeypatch.undo()
    row = next(row for row in profile(task, scale.lengths).table if row.mechanism.startswith("local"))
    host.restore()
    assert row.mechanism in ("local:window=9@600", "local:window=9")
    assert math.isfinite(row.error)


@pytest.mark.parametrize(("seconds", "kind"), [("soon", TypeError), (-1.0, ValueError), (math.nan, ValueError)])
def test_a_budget_is_a_number(seconds, kind):
    with pytest.raises(kind, match="seconds: expected a number"):
        coterie.fit(encoder(1), batches(), seconds=seconds)


def test_no_confidence_is_rounded_up():
    found = Fit({"a": "local"}, "hidden", 0.9, 1.0, 1.0, [], (1.0, 1.0), [], 0, confidence=0.999, certified=True)
    assert found.promise.startswith("With 99.9% confidence: ")
