"""Question answering: SQuAD's files, scores with known answers, windows, what is refused, and the whole command."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, strategies
from recipes.common.models import load_tokenizer
from recipes.qa import squad, windows
from recipes.qa.answers import exact_match, f1, normalized
from recipes.qa.squad import Answer, Question
from recipes.qa.tuning import judged, taught
from transformers import BertConfig, FNetConfig, FNetForQuestionAnswering

from coterie.cli.inputs import UserError
from tests.command import recipe
from tests.recipes.conftest import WORDS


def paragraph(seed, words=20, questions=2):
    """A paragraph whose questions name the word before the answer."""
    draw = random.Random(seed)
    text = draw.choices(WORDS, k=words)
    qas = []
    for i in range(questions):
        at = draw.choice([i for i in range(1, words) if normalized(text[i])])  # articles have no F1
        start = len(" ".join(text[:at])) + 1
        answer = {"text": text[at], "answer_start": start}
        qas.append({"id": f"{seed}-{i}", "question": f"{text[at - 1]}?", "answers": [answer]})
    return {"context": " ".join(text), "qas": qas}


def write(file, paragraphs):
    file.parent.mkdir(parents=True, exist_ok=True)
    articles = [{"title": "t", "paragraphs": [each]} for each in paragraphs]
    file.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return file


@pytest.fixture
def xquad(tmp_path):
    """One file of ten paragraphs; the last is longer than a window."""
    return write(tmp_path / "data" / "xquad.json", [*(paragraph(i) for i in range(9)), paragraph(9, words=90)])


@pytest.mark.parametrize(
    ("answer", "truths", "exact", "overlap"),
    [
        ("the cat", ["The Cat!"], 1, 1),
        ("Cat.", ["a cat", "dog"], 1, 1),
        ("black cat", ["the cat"], 0, 2 / 3),  # precision 1/2, recall 1
        ("cat cat", ["cat"], 0, 2 / 3),  # a word counts as often as both have it
        ("cat", ["cat cat cat dog"], 0, 2 * 1 * 0.25 / 1.25),
        ("dog", ["cat"], 0, 0),
        ("red cat", ["red dog", "red cat sat"], 0, 0.8),  # the better one of 0.5 and 0.8
        ("theatre", ["atre"], 0, 0),  # an article is a word of its own
        ("10–12", ["1012"], 0, 0),  # a dash that is not ASCII's stays
        ("10-12", ["1012"], 1, 1),  # ASCII's is punctuation
        ("", ["cat"], 0, 0),
        ("The", ["the"], 1, 0),  # no word is left: equal, but no words in common
    ],
)
def test_scores_are_the_official_ones(answer, truths, exact, overlap):
    assert exact_match(answer, truths) == exact
    assert f1(answer, truths) == pytest.approx(overlap)


def test_texts_are_normalised_in_the_official_order():
    assert normalized("  A an\tAND the.  “The”\n") == "and “ ”"  # only ASCII's punctuation goes
    assert normalized("a.b") == "ab"  # punctuation goes before articles: no article is left


def test_files_folders_and_their_parts(xquad, tmp_path):
    found = squad.load(str(xquad))
    assert (len(found.train), found.dev) == (20, [])
    first = paragraph(0)
    asked = first["qas"][1]
    assert found.train[1] == Question(asked["question"], first["context"], [Answer(*asked["answers"][0].values())])
    assert squad.load(str(xquad.parent)) == found  # a folder with one file alone
    write(tmp_path / "both" / "train-v1.1.json", [paragraph(0), paragraph(1)])
    write(tmp_path / "both" / "dev-v1.1.json", [paragraph(2)])
    both = squad.load(str(tmp_path / "both"))
    assert (len(both.train), len(both.dev)) == (4, 2)
    assert both.parts(5, None, 1) == (both.train, both.dev[:1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_paragraph_is_in_both_parts(xquad, seed):
    found = squad.load(str(xquad))
    train, test = found.parts(seed, None, None)
    assert sorted(train + test) == sorted(found.train)
    assert not {q.context for q in train} & {q.context for q in test}
    assert len({q.context for q in test}) == 2  # a quarter of ten
    assert found.parts(seed, None, None) == (train, test)
    few, some = found.parts(seed, 3, 1)
    assert (len(few), len(some)) == (3, 1)
    assert {q.context for q in few} <= {q.context for q in train}


def test_seeds_draw_other_parts(xquad):
    found = squad.load(str(xquad))
    assert len({tuple(q.context for q in found.parts(seed, None, None)[1]) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", r"bad\.json is not JSON\.$"),
        ("[1]", r"bad\.json: expected a list 'data'"),
        ({"data": [{}]}, r"bad\.json, data\[0\]: expected a list 'paragraphs'"),
        ({"data": []}, r"bad\.json has no paragraphs with questions"),
        ({"data": [{"paragraphs": []}]}, r"bad\.json has no paragraphs with questions"),
        (
            {"data": [{"paragraphs": [{"qas": []}]}]},
            r"bad\.json, data\[0\]\.paragraphs\[0\]: expected a text 'context'",
        ),
        ({"data": [{"paragraphs": [{"context": "a"}]}]}, r"paragraphs\[0\]: expected a list 'qas'"),
    ],
)
def test_files_that_are_not_squads_are_refused(tmp_path, content, sentence):
    file = tmp_path / "bad.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=sentence):
        squad.load(str(file))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"question": None}, r"bad\.json, data\[0\]\.paragraphs\[0\]\.qas\[0\]: expected a text 'question'"),
        ({"answers": {}}, r"qas\[0\]: expected a list 'answers'"),
        ({"answers": [{"text": "cat"}]}, r"qas\[0\]: expected a number 'answer_start'"),
        ({"answers": [{"text": "cat", "answer_start": 3}]}, r"bad\.json.*'cat' is not at answer_start 3.*' ca'"),
        ({"answers": [{"text": "cat", "answer_start": -3}]}, r"'cat' is not at answer_start -3"),
        ({"answers": [{"text": "cat", "answer_start": 99}]}, r"'cat' is not at answer_start 99"),
        ({"answers": [{"text": "", "answer_start": 0}]}, r"the answer '' is not at"),
        ({"answers": []}, r"bad\.json, .*qas\[0\]: the question has no answer .*expected SQuAD v1\.1"),
        ({"is_impossible": True}, r"qas\[0\]: the question has no answer \(SQuAD v2's is_impossible\)"),
    ],
)
def test_questions_that_cannot_be_used_are_refused_with_their_place(tmp_path, change, sentence):
    asked = {"question": "who?", "answers": [{"text": "cat", "answer_start": 4}], **change}
    file = write(tmp_path / "bad.json", [{"context": "the cat", "qas": [asked]}])
    with pytest.raises(UserError, match=sentence):
        squad.load(str(file))


def test_squad_v2s_questions_with_answers_are_taken(tmp_path):
    asked = {"question": "who?", "answers": [{"text": "cat", "answer_start": 4}], "is_impossible": False}
    file = write(tmp_path / "v2.json", [{"context": "the cat", "qas": [asked]}])
    assert squad.load(str(file)).train == [Question("who?", "the cat", [Answer("cat", 4)])]


def test_data_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.json cannot be read: No such file"):
        squad.load(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match=r"there are no data at .*nowhere"):
        squad.load(str(tmp_path / "nowhere"))
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", [paragraph(0)])
    with pytest.raises(UserError, match=r"expected one train\*\.json and one dev\*\.json.*got a\.json, b\.json"):
        squad.load(str(tmp_path))
    with pytest.raises(UserError, match="one paragraph alone"):
        squad.load(str(tmp_path / "a.json")).parts(0, None, None)


@pytest.fixture(scope="session")
def tokenizer(tiny_bert):
    return load_tokenizer(str(tiny_bert))


TEXT = strategies.text(alphabet="abcxyz é½\n.,?!漢\u200b\t-“", max_size=400)


@given(
    words=strategies.lists(strategies.sampled_from([*WORDS, "Zürich", "x.y", "6½", "don't"]), min_size=1, max_size=150),
    ends=strategies.tuples(strategies.floats(0, 1), strategies.integers(0, 7)),
    gap=strategies.sampled_from([" ", "  ", "\n"]),
)
def test_answers_of_whole_words_come_back_character_for_character(tokenizer, words, ends, gap):
    context = gap.join(words)
    first = int(ends[0] * (len(words) - 1))
    answer = Answer(gap.join(words[first : first + 1 + ends[1]]), len(gap.join([*words[:first], ""])))
    asked = Question("the cat?", context, [answer])
    cut = windows.cut(tokenizer, [asked], 64, 30)
    found = [windows.find(window, answer) for window in cut]
    spans = [windows.text_of(w, context, *at) for w, at in zip(cut, found, strict=True) if at != (0, 0)]
    assert set(spans) <= {answer.text}
    if len(tokenizer(answer.text, add_special_tokens=False)["input_ids"]) <= 30:  # windows share so many
        assert spans


@given(context=TEXT, ends=strategies.tuples(strategies.floats(0, 1), strategies.integers(1, 40)))
def test_any_answer_is_inside_the_tokens_that_are_taught(tokenizer, context, ends):
    start = int(ends[0] * max(0, len(context) - 1))
    answer = Answer(context[start : start + ends[1]], start)
    if not answer.text.strip():
        return
    for window in windows.cut(tokenizer, [Question("a?", context, [answer])], 64, 30):
        first, last = windows.find(window, answer)
        if (first, last) == (windows.NOWHERE, windows.NOWHERE):
            continue
        assert window.first <= first <= last < len(window.inputs["input_ids"]) - 1
        inner = window.characters[first - window.first + 1 : last - window.first]
        stop = start + len(answer.text)
        assert all(start <= begin and end <= stop for begin, end in inner)  # no token more than it needs
        seen = answer.text.strip(" \n\t\u200b")  # at its ends, what no token covers is not found again
        assert seen in windows.text_of(window, context, first, last)


def test_windows_overlap_by_the_stride_and_cover_the_paragraph(tokenizer):
    context = " ".join(random.Random(0).choices(WORDS, k=150))
    cut = windows.cut(tokenizer, [Question("a cat?", context, [Answer("x", 0)])], 64, 16)
    assert len(cut) > 2
    for before, after in itertools.pairwise(cut):
        assert before.characters[-16:] == after.characters[:16]
    assert {at for window in cut for at in window.characters} >= {(0, len(context.split()[0]))}
    assert cut[-1].characters[-1][1] == len(context)
    assert all(len(window.inputs["input_ids"]) <= 64 for window in cut)


def test_long_questions_are_cut_and_strides_that_leave_no_room_refused(tokenizer):
    asked = Question("cat " * 500, "the dog ran", [Answer("dog", 4)])
    window = windows.cut(tokenizer, [asked], 64, 16)[0]
    assert len(window.inputs["input_ids"]) == 21 + 3 + 3
    assert windows.text_of(window, asked.context, *windows.find(window, asked.answers[0])) == "dog"
    with pytest.raises(UserError, match=r"--stride 40 is too much: a window of --length 64 has room for 40 tokens"):
        windows.cut(tokenizer, [asked], 64, 40)


def test_the_best_span_is_that_of_all_pairs(tokenizer):
    context = " ".join(random.Random(0).choices(WORDS, k=60))
    window = windows.cut(tokenizer, [Question("a?", context, [Answer("x", 0)])], 128, 16)[0]
    draw = np.random.default_rng(0)
    for _ in range(20):
        starts, ends = draw.normal(size=(2, len(window.inputs["input_ids"])))
        starts[0] = ends[0] = ends[-1] = 9.0  # outside of the paragraph
        inside = range(window.first, window.first + len(window.characters))
        pairs = [(starts[i] + ends[j], i, j) for i in inside for j in inside if i <= j < i + 30]
        assert windows.best_span(window, starts, ends) == max(pairs)


def test_the_taught_answer_is_what_sure_logits_say(tokenizer):
    """What is taught, given back as logits, gets full marks: of all windows the surest one answers."""
    questions = [q for i in range(4) for q in squad._questions(paragraph(i, words=100), "here")]
    cut = windows.cut(tokenizer, questions, 64, 16)
    starts, ends = np.full((2, len(cut), 64), -9.0)
    for i, window in enumerate(cut):
        labels = taught(window, questions)
        starts[i, labels["start_positions"]] = ends[i, labels["end_positions"]] = 9.0
    answers = judged(cut, questions, (starts, ends), None)
    assert answers.examples == len(questions)
    assert answers.score(range(answers.examples)) == 1
    assert answers.also == {"exact match": 1}
    lost = judged(cut, questions, (-starts, -ends), None)
    assert lost.score([0, 0]) <= lost.score(range(1)) + 1e-9 < 1


def test_the_command_trains_keeps_the_model_and_goes_on(xquad, tiny_bert, tmp_path):
    options = ["--data", xquad, "--model", tiny_bert, "--length", 64, "--stride", 16, "--epochs", 1, "--batch", 4]
    options += ["--mechanism", "smyrf:rounds=1,cluster_size=8", "--examples", 8, "--out", tmp_path / "study"]
    said = recipe("qa", *options)
    assert "exact match" in said
    assert "clustered → dense" in said
    found = json.loads((tmp_path / "study" / "results.json").read_text())
    assert [(r["trained"], r["seed"]) for r in found["results"]][:2] == [
        ("dense", 0),
        ("smyrf:rounds=1,cluster_size=8", 0),
    ]
    assert set(found["results"][0]["scores"]) == {"dense", "smyrf:rounds=1,cluster_size=8"}
    assert (tmp_path / "study" / "results.png").exists()
    folder = tmp_path / "study" / "models" / "smyrf-rounds-1-cluster_size-8-0"
    config = BertConfig.from_pretrained(folder)
    assert (config.architectures, hasattr(config, "coterie")) == (["BertForQuestionAnswering"], False)
    assert json.loads((folder / "fine_tuned.json").read_text())["seed"] == 0
    (tmp_path / "study" / "runs" / "costs.json").unlink()
    recipe("qa", *options)  # the runs that are done are read, what is missing is made
    again = json.loads((tmp_path / "study" / "results.json").read_text())
    assert again["results"] == found["results"]


def test_the_command_refuses_in_one_sentence_and_writes_nothing(xquad, tiny_bert, tmp_path, tokenizer):
    out = tmp_path / "study"

    def refused(*options):
        said = recipe("qa", *options, "--out", out, fails=1)
        assert said.startswith("error: ")
        assert not out.exists()
        return " ".join(said.split())

    assert "none.json cannot be read" in refused("--data", tmp_path / "none.json", "--model", tiny_bert)
    assert "has 128 positions, so that --length 380" in refused("--data", xquad, "--model", tiny_bert)
    assert "there is no model at" in refused("--data", xquad, "--model", tmp_path / "no-model")
    assert "--mechanism nonsense" in refused("--data", xquad, "--model", tiny_bert, "--mechanism", "nonsense")
    config = FNetConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    FNetForQuestionAnswering(config).save_pretrained(tmp_path / "fnet")
    tokenizer.save_pretrained(tmp_path / "fnet")
    said = refused("--data", xquad, "--model", tmp_path / "fnet", "--length", 64)
    assert "FNetForQuestionAnswering has attention of its own" in said
