"""Approximation: standard errors against formulas, what the words say, what is refused, and the whole command."""

import json
import math
import random
import statistics

import numpy as np
import pytest
from datasets import Dataset
from recipes.approximate import tasks
from recipes.approximate.kept import Estimate, Kept, dense, kept, resampled
from recipes.approximate.words import words
from recipes.common import models
from recipes.common.classification import FineTuning, Task, _judged, outputs_of
from recipes.common.scores import accuracy
from recipes.common.templates import Point, points_of
from recipes.common.training import Schedule
from recipes.common.tuning import Answers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    FNetConfig,
    FNetForQuestionAnswering,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from coterie.cli.inputs import UserError, parse_numbers
from tests.command import recipe
from tests.recipes.conftest import WORDS
from tests.recipes.test_qa import paragraph
from tests.recipes.test_qa import write as write_squad

NAN = math.nan


def answers(right):
    """Answers that are right or wrong."""
    right = np.asarray(right, dtype=float)
    return Answers(len(right), lambda some: float(right[some].mean()), {})


def result(mechanism, seed, right):
    given = answers(right)
    score = given.score(range(given.examples))
    return {"mechanism": mechanism, "seed": seed, "score": score, "resampled": resampled(given)}


def test_the_bootstrap_finds_the_binomial_standard_error():
    draw = np.random.default_rng(0)
    right = draw.random(500) < 0.8
    found = dense([result("dense", 0, right)])
    assert found.value == pytest.approx(right.mean())
    assert found.over_examples == pytest.approx(math.sqrt(right.mean() * (1 - right.mean()) / 500), rel=0.1)
    assert math.isnan(found.over_seeds)
    assert found.error == found.over_examples


def test_what_examples_share_is_drawn_as_a_whole():
    """Ten questions a paragraph, all right or all wrong: 50 paragraphs are all that is known."""
    right = np.repeat(np.random.default_rng(0).random(50) < 0.6, 10)
    together = answers(right)._replace(drawn_together=np.repeat(np.arange(50), 10).tolist())
    share = right.mean()
    assert np.std(resampled(together)) == pytest.approx(math.sqrt(share * (1 - share) / 50), rel=0.15)
    assert np.std(resampled(answers(right))) == pytest.approx(math.sqrt(share * (1 - share) / 500), rel=0.15)


def test_the_difference_is_that_of_pairs():
    draw = np.random.default_rng(1)
    right = draw.random(400) < 0.7
    other = np.where(draw.random(400) < 0.05, ~right, right)  # nearly the same answers
    point = Point("near-far:near={clusters}", 5, "near-far:near=5")
    found = kept([result("dense", 0, right), result("near-far:near=5", 0, other)], [point])[0]
    apart = other.astype(float) - right
    assert found.difference.value == pytest.approx(apart.mean())
    assert found.difference.over_examples == pytest.approx(apart.std(ddof=1) / 20, rel=0.1)
    assert found.difference.over_examples < found.score.over_examples / 2
    same = kept([result("dense", 0, right), result("near-far:near=5", 0, right)], [point])[0]
    assert same.difference[:2] == (0, 0)
    assert same.within


def test_seeds_have_a_standard_error_of_their_own():
    draw = np.random.default_rng(2)
    runs = [result("dense", seed, draw.random(300) < share) for seed, share in enumerate((0.5, 0.6, 0.9))]
    found = dense(runs)
    scores = [run["score"] for run in runs]
    assert found.value == pytest.approx(statistics.fmean(scores))
    assert found.over_seeds == pytest.approx(statistics.stdev(scores) / math.sqrt(3))
    assert found.error == found.over_seeds  # the larger one


def sweep(template, differences, error=0.02):
    each = [(Point(template, c, template.replace("{clusters}", str(c))), d) for c, d in differences.items()]
    return [Kept(point, Estimate(0.8 + d, 0.02, NAN), Estimate(d, error, NAN)) for point, d in each]


def said(found, scores=lambda clusters: clusters, length=200, level=0.8, few=0.0, chance=0.0):
    costs = [
        {"mechanism": each.point.mechanism, "scores": scores(each.point.clusters), "dense_scores": length}
        for each in found
    ]
    return words(Estimate(level, 0.02, NAN), found, costs, few, chance)


def test_the_words_follow_from_the_figures():
    name = "clustered:clusters={clusters}"
    assert "keeps the dense score within one standard error at 25 clusters (-1.0 ± 2.0)" in said(
        sweep(name, {5: -0.3, 25: -0.01, 50: 0.01})
    )
    later = said(sweep(name, {5: 0.0, 25: -0.1, 50: -0.021, 100: -0.019}))
    assert "does not at 25 (-10.0 ± 2.0), but keeps the dense score within one standard error from 100" in later
    never = said(sweep(name, {5: 0.0, 25: -0.1, 50: -0.03}))  # not from 5 on, as 25 does not
    assert "does not keep the dense score within one standard error up to 50 clusters (-3.0 ± 2.0)" in never
    assert "keeps the dense score within one standard error from 10 clusters on" in said(sweep(name, {5: -1, 10: 0}))
    two = said(sweep(name, {25: -0.1}) + sweep("near-far:near={clusters}", {25: 0.0}))
    assert [line.split()[0] for line in two.splitlines()] == [name, "near-far:near={clusters}"]
    assert "learned nothing that could be kept" in said(sweep(name, {25: 0.0}), level=0.03)
    at_chance = said(sweep(name, {25: 0.0}), level=0.53, chance=0.5)
    assert "scores 53.0 ± 2.0, and one answer to everything 50.0: it has learned nothing" in at_chance


def test_the_words_say_where_texts_are_too_short():
    found = sweep("clustered:clusters={clusters}", {5: 0.0, 25: 0.0, 50: 0.0})
    assert "at most 50 scores of dense attention's 200" in said(found)
    short = said(found, scores=lambda clusters: min(clusters, 11), length=11)
    assert "From 25 clusters on a query computes 11 scores or more where dense attention computes 11" in short
    assert "80% of the test texts have at most 16 tokens and run densely" in said(found, few=0.8)
    assert "run densely" not in short


def test_templates_make_a_mechanism_of_each_number():
    found = points_of(["improved-clustered:clusters={clusters},topk=32", "smyrf:cluster_size={clusters}"], [5, 25])
    assert [point.clusters for point in found] == [5, 25, 5, 25]
    assert found[0].mechanism == "improved-clustered:clusters=5"  # 32 is what it has by default
    with pytest.raises(UserError, match=r"--mechanism clustered:clusters=5: expected \{clusters\} in it"):
        points_of(["clustered:clusters=5"], [5])
    with pytest.raises(UserError, match=r"--mechanism nonsense:x=\{clusters\} with 5: "):
        points_of(["nonsense:x={clusters}"], [5])
    for text in ("5,,6", "five", "", "0,5", "-1"):
        with pytest.raises(UserError, match=r"^--clusters must be "):
            parse_numbers("--clusters", text)


def test_tasks_have_their_own_recipes_settings(tmp_path):
    file = write_squad(tmp_path / "data.json", [paragraph(0), paragraph(1)])
    found = tasks.tuning("qa", str(file), "demo", epochs=None, batch=3)
    assert (found.schedule.epochs, found.schedule.batch) == (tasks.TASKS["qa"].default.epochs, 3)
    with pytest.raises(UserError, match=r"--task must be one of cola, .*qa, not 'poetry'"):
        tasks.tuning("poetry", str(file), "demo")


@pytest.fixture
def cola(tmp_path):
    """CoLA's files; a sentence with "good" in it is right."""
    draw = random.Random(0)
    for name, count in (("train", 64), ("dev", 24)):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 40))) for _ in range(count)]
        lines = [f"gj04\t{int('good' in text)}\t\t{text}\n" for text in texts]
        (tmp_path / "glue" / "CoLA").mkdir(parents=True, exist_ok=True)
        (tmp_path / "glue" / "CoLA" / f"{name}.tsv").write_text("".join(lines))
    return tmp_path / "glue"


def test_the_command_fine_tunes_and_sweeps_a_task_of_glue(cola, tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.approximate.kept._RESAMPLES", 40)  # scikit-learn takes a millisecond for each
    options = [
        "--task",
        "cola",
        "--data",
        cola,
        "--model",
        tiny_bert,
        "--clusters",
        "2,100",
        "--seeds",
        2,
        "--batch",
        32,
    ]
    options += ["--mechanism", "clustered:clusters={clusters}", "--mechanism", "near-far:near={clusters}"]
    options += ["--epochs", 1, "--out", tmp_path / "study"]
    printed = recipe("approximate", *options)
    assert "difference to dense" in printed
    found = json.loads((tmp_path / "study" / "results.json").read_text())
    assert len(found["results"]) == 2 * 5
    assert [each["clusters"] for each in found["kept"]] == [2, 100, 2, 100]
    by_name = {cost["mechanism"]: cost for cost in found["costs"]}
    assert 0 < found["share of short texts"] < 1
    few, everyone = by_name["clustered:clusters=2"], by_name["dense"]["dense_scores"]
    assert 2 < few["scores"] < everyone / 2  # 2 in long texts, all in short ones
    assert by_name["near-far:near=100"]["scores"] == pytest.approx(everyone)
    assert by_name["dense"]["scores"] == pytest.approx(everyone)
    exact = found["kept"][3]  # near-far with more near keys than there are tokens is dense attention
    assert (exact["difference"]["value"], exact["within one standard error"]) == (0, True)
    assert (tmp_path / "study" / "results.png").exists()
    assert (tmp_path / "study" / "models" / "dense-1" / "fine_tuned.json").exists()
    for file in (tmp_path / "study" / "runs").glob("near-far*"):
        file.unlink()
    recipe("approximate", *options)  # goes on: the models are not trained again
    assert json.loads((tmp_path / "study" / "results.json").read_text())["results"] == found["results"]


def test_a_model_of_the_qa_recipe_is_taken_as_it_is_with_its_own_test_set(tiny_bert, tmp_path):
    file = write_squad(tmp_path / "data.json", [paragraph(i) for i in range(8)])
    tiny = ["--data", file, "--length", 64]
    recipe("qa", *tiny, "--model", tiny_bert, "--epochs", 1, "--seeds", 2, "--out", tmp_path / "qa")
    trained = json.loads((tmp_path / "qa" / "results.json").read_text())["results"][1]
    model = tmp_path / "qa" / "models" / "dense-1"
    options = ["--task", "qa", *tiny, "--clusters", "3", "--mechanism", "clustered:clusters={clusters}"]
    recipe("approximate", *options, "--model", model, "--out", tmp_path / "study")
    found = json.loads((tmp_path / "study" / "results.json").read_text())
    base = found["results"][0]
    assert (base["mechanism"], base["seed"]) == ("dense", 1)  # the split that it was not trained on
    assert base["score"] == pytest.approx(trained["scores"]["dense"])
    assert base["also"] == trained["also"]["dense"]
    assert not (tmp_path / "study" / "models").exists()
    again = recipe("approximate", *options, "--model", model, "--seeds", 2, "--out", tmp_path / "other", fails=1)
    assert "is fine-tuned already, so --seeds 2 has nothing to train" in " ".join(again.split())


def test_the_command_refuses_in_one_sentence_and_writes_nothing(cola, tiny_bert, tmp_path):
    out = tmp_path / "study"

    def refused(*options):
        printed = recipe("approximate", *options, "--out", out, fails=1)
        assert printed.startswith("error: ")
        assert not out.exists()
        return " ".join(printed.split())

    usual = ["--task", "cola", "--data", cola, "--model", tiny_bert]
    assert "--task must be one of cola," in refused("--task", "poetry", "--data", cola)
    assert "expected {clusters} in it" in refused(*usual, "--mechanism", "near-far")
    assert "--clusters must be numbers" in refused(*usual, "--clusters", "many")
    assert "has no folder RTE" in refused("--task", "rte", "--data", cola, "--model", tiny_bert)
    assert "none.json cannot be read" in refused("--task", "qa", "--data", tmp_path / "none.json")
    three = BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16, num_labels=3)
    )
    three.save_pretrained(tmp_path / "three")
    assert "three was fine-tuned for 3 classes, and CoLA has 2" in refused(*usual[:4], "--model", tmp_path / "three")
    config = FNetConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    FNetForQuestionAnswering(config).save_pretrained(tmp_path / "fnet")
    file = write_squad(tmp_path / "data.json", [paragraph(0), paragraph(1)])
    said = refused("--task", "qa", "--data", file, "--model", tmp_path / "fnet", "--length", 64)
    assert "FNetForQuestionAnswering has attention of its own" in said


def test_a_model_is_not_tested_on_what_it_was_trained_on(tmp_path):
    """Where both parts are drawn from one list, other data or other numbers of them draw others."""

    def drawn(*parts):
        texts = [Dataset.from_dict({"text": [f"cat {i}" for i in part], "label": [0] * len(part)}) for part in parts]
        task = Task("IMDB", accuracy, ("neg", "pos"), texts[0], texts[1], drawn=True)
        return FineTuning(task, "demo", 128, Schedule(1, 8, 1e-3))

    tuning = drawn(range(4, 12), range(4))
    about = {"task": "IMDB", "seed": 0, "trained on": sorted(tuning.digests(0)[0])}
    (tmp_path / "fine_tuned.json").write_text(json.dumps(about))
    tuning.check_kept(str(tmp_path))
    drawn(range(20, 30), range(12, 20)).check_kept(str(tmp_path))
    with pytest.raises(UserError, match="was trained on 2 of the 6 texts that it would be tested on"):
        drawn(range(6, 12), range(6)).check_kept(str(tmp_path))
    (tmp_path / "fine_tuned.json").write_text('{"task": "RTE"}')
    with pytest.raises(UserError, match="was fine-tuned on RTE, and this is IMDB"):
        tuning.check_kept(str(tmp_path))


def test_questions_on_paragraphs_that_were_trained_on_are_refused(tmp_path):
    """A list without a part for tests is split anew if it has fewer paragraphs."""

    def asked(paragraphs):
        file = write_squad(tmp_path / "data.json", [paragraph(i) for i in range(paragraphs)])
        return tasks.tuning("qa", str(file), "demo")

    trained = asked(8)
    train, test = trained.digests(0)
    assert not train & test
    about = {"task": trained.name, "seed": 0, "trained on": sorted(train)}
    (tmp_path / "fine_tuned.json").write_text(json.dumps(about))
    trained.check_kept(str(tmp_path))
    fewer = next(each for each in map(asked, (7, 6, 5, 4)) if train & each.digests(0)[1])
    both = len(train & fewer.digests(0)[1])
    with pytest.raises(UserError, match=f"was trained on {both} of the {len(fewer.digests(0)[1])} texts"):
        fewer.check_kept(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "outputs"),
    [
        (["contradiction", "neutral", "entailment"], [2, 1, 0]),
        (["ENTAILMENT", "NEUTRAL", "CONTRADICTION"], [0, 1, 2]),
        (["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),
        (["0", "1", "2"], [0, 1, 2]),
    ],
)
def test_a_models_own_order_of_classes_is_followed(names, outputs):
    task = Task("MNLI", accuracy, ("entailment", "neutral", "contradiction"), None, None)
    tuning = FineTuning(task, "demo", 128, Schedule(1, 8, 1e-3))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(id2label=dict(enumerate(names)), **sizes))
    logits = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert tuning.said(model, logits).tolist() == logits[:, outputs].tolist()


def test_classes_with_other_names_are_refused():
    task = Task("SST-2", accuracy, ("negative", "positive"), None, None)
    assert outputs_of(task, ["POS", "NEG"]) == [1, 0]
    with pytest.raises(UserError, match=r"are called happy, sad, and those of SST-2 negative, positive: id2label"):
        outputs_of(task, ["happy", "sad"])
    assert outputs_of(Task("STS-B", accuracy, (), None, None), ["score"]) == [0]


def test_mechanisms_are_tried_before_anything_is_trained(tiny_bert):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64, pad_token_id=0)
    model = GPT2ForSequenceClassification(config)
    models.try_out(model, tokenizer, "gpt2", 32, ["dense", "smyrf:rounds=1,cluster_size=8"])
    with pytest.raises(UserError, match=r"clustered.* cannot run in gpt2: .*is_causal: expected False"):
        models.try_out(model, tokenizer, "gpt2", 32, ["clustered:clusters=5"])
    tokenizer.pad_token = None
    with pytest.raises(UserError, match="tokenizer of gpt2 has no token for padding"):
        models.try_out(model, tokenizer, "gpt2", 32, ["dense"])


def test_what_one_answer_to_everything_scores():
    task = Task("CoLA", accuracy, ("unacceptable", "acceptable"), None, None)
    judged = _judged(task, np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), np.array([1, 1, 0]))
    assert (judged.chance, judged.score(range(3))) == pytest.approx((2 / 3, 2 / 3))
