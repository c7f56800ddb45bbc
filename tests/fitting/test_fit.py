"""`coterie.fit` on small models: the promise, what it is made on, and what it says when nothing pays."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

import coterie
from coterie.fitting.candidates import positions_matter
from coterie.fitting.dense import dense
from coterie.fitting.measures import Fidelity
from coterie.fitting.profile import Profile, Shape, Tried
from coterie.fitting.search import path
from coterie.fitting.tables import choices_table, lengths_table
from coterie.hosts import DENSE, host_of
from tests.fitting.models import batches, encoder

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
    (note,) = found.notes
    assert note.startswith("The time budget is too short: it was over before anything could be tried.")
    assert found.all_dense
    assert found.holds
    assert "nothing was timed" in str(found)


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


def test_a_length_that_stays_dense_is_as_fast_as_before(monkeypatch):
    def seconds(best, task, first, scale, ways):  # below 500 tokens the same runs: what differs there is noise
        best |= {("dense", 60): 1.0, ("fitted", 60): 1.25, ("dense", 700): 4.0, ("fitted", 700): 2.0}

    def slow(seen):
        return dense(seen)._replace(seconds=1e3)

    monkeypatch.setattr("coterie.fitting.speed._time", seconds)
    monkeypatch.setattr("coterie.fitting.profile.dense", slow)
    data = [*batches(4, 60), *batches(4, 700)]
    found = coterie.fit(encoder(1), data, 0.1, candidates=["local:window=9@500"])
    assert [(at.tokens, at.dense_seconds, at.fitted_seconds) for at in found.lengths] == [(60, 1, 1), (700, 4, 2)]
    assert [row[-1] for row in lengths_table(found).rows] == ["the same", "2.00×"]


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
