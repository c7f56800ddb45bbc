"""Long-document embeddings: sections, late chunking, nDCG, what is refused, and the whole command on a tiny model."""

import doctest
import importlib
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipes.embed import loading, measure, retrieval, stsb
from recipes.embed.late_chunking import JOINT, late_chunks, pool, read, token_spans
from recipes.embed.sections import Section, chapters, cut, pack, parse
from sklearn.metrics import ndcg_score

from coterie.cli.inputs import UserError
from tests.command import recipe
from tests.recipes.conftest import WORDS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def words(count, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.mark.parametrize("name", ["sections", "late_chunking", "retrieval"])
def test_the_examples_of_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"recipes.embed.{name}"))
    assert found.attempted
    assert not found.failed


# --- sections ---------------------------------------------------------------------------------------------------------


def test_sections_end_where_the_next_begins_a_nested_one_too():
    text = "before\n\nOne\n***\n\nFirst.\n\nMore of it.\n\nOne a\n-----\nNested.\n\nEmpty\n=====\n\nTwo\n===\nSecond.\n"
    assert parse(text) == [
        Section("One", "First.\n\nMore of it."),
        Section("One a", "Nested."),
        Section("Two", "Second."),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "no heading at all",
        "a long line of text\n---\nA line that is longer than what is below it is no heading.",
        "   Indented\n   ========\ntext",
        "+----+\n------\ntext",
        "Two\n==\nAn underline has three signs.",
        "",
    ],
)
def test_what_is_no_heading(text):
    assert parse(text) == []


def test_chapters_come_from_files_and_a_section_is_taken_once(tmp_path):
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    files[0].write_text("One\n===\nfirst\n\nTwo\n===\nsecond\n")
    files[1].write_text("Again\n=====\nfirst\n")  # quoted
    files[2].write_text("Three\n=====\nthird\n")
    found = chapters(files, 0)
    assert sorted([section.heading for section in chapter] for chapter in found) == [["One", "Two"], ["Three"]]
    assert found == chapters(files, 0)
    assert {str(chapters(files, seed)) for seed in range(8)} == {str(found), str(found[::-1])}


def test_pythons_documentation_has_sections_and_no_section_twice():
    found = [section for chapter in chapters([], 0) for section in chapter]
    assert len(found) > 100
    assert len({" ".join(section.text.split()) for section in found}) == len(found)
    assert not any(section.text.startswith(("===", "***", "---")) for section in found)


def test_too_few_sections_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("just text\n")
    with pytest.raises(UserError, match="fewer than two sections: expected headings that are underlined"):
        chapters([tmp_path / "a.txt"], 0)
    with pytest.raises(UserError, match=r"none\.txt cannot be read: No such file"):
        chapters([tmp_path / "none.txt"], 0)


def test_long_sections_are_cut_and_what_is_cut_off_is_kept(tiny):
    long, short = Section("long", words(40, 0)), Section("short", words(5, 1))
    found = cut([long, short], tiny.tokenizer, 30)
    assert found.sections[0].text.split() == long.text.split()[:30]
    assert found.rest.split() == long.text.split()[30:]
    assert found.sections[1] == short
    assert found.tokens == [30, 5]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 60))
def test_documents_hold_every_section_once_and_are_as_full_as_can_be(tokens, most):
    documents = pack(tokens, most)
    assert [i for document in documents for i in document] == list(range(len(tokens)))
    sizes = [sum(tokens[i] for i in document) + len(document) - 1 for document in documents]
    assert max(sizes) <= most
    for size, after in zip(sizes, documents[1:], strict=False):
        assert size + 1 + tokens[after[0]] > most


# --- late chunking ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_bert):
    return loading.load(str(tiny_bert), 128)


@given(st.data())
def test_spans_are_all_tokens_in_order_each_where_its_first_character_is(data):
    widths = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=5))
    specials = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    offsets, starts, owners, at = [], [], [], 0
    for section, tokens in enumerate(widths):
        starts.append(at)
        for width in tokens:
            offsets.append((at, at + width))
            owners.append(section)
            at += width + 1
        at += 1
    marked = [None] * specials[0] + offsets + [None] * specials[1]
    spans = token_spans(marked, starts)
    assert [i for span in spans for i in span] == list(range(len(marked)))
    for i, owner in enumerate(owners):
        assert i + specials[0] in spans[owner]


def test_a_section_without_a_token_is_named():
    with pytest.raises(ValueError, match="sections: expected a token in each, got none in section 1"):
        token_spans([(0, 2), (7, 9)], [0, 4, 6])


@pytest.mark.parametrize("count", [1, 7, 120])
def test_one_section_is_embedded_as_without_chunking(tiny, count):
    text = words(count, 3)
    want = tiny.encode([text], convert_to_tensor=True)
    torch.testing.assert_close(late_chunks(tiny, [text]), want, rtol=0, atol=1e-6)


def test_sections_are_means_of_their_own_tokens_in_context(tiny):
    sections = [words(9, 0), words(20, 1), words(3, 2)]
    states = tiny.encode(JOINT.join(sections), output_value="token_embeddings", convert_to_tensor=True)
    found = late_chunks(tiny, sections)
    # [CLS] is the first section's, [SEP] the last one's; every word of the tiny model is one token
    for row, (first, last) in enumerate([(0, 10), (10, 30), (30, 34)]):
        torch.testing.assert_close(found[row], states[first:last].mean(0), rtol=0, atol=1e-6)
    sizes = torch.tensor([10.0, 20.0, 4.0])
    torch.testing.assert_close((sizes @ found) / 34, states.mean(0), rtol=0, atol=1e-6)  # no token is lost
    alone = tiny.encode(sections, convert_to_tensor=True)
    assert (found - alone).abs().max() > 1e-3  # the others were seen


def test_what_stands_after_a_transformer_is_applied_to_each_section(tiny):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    model = SentenceTransformer(modules=[*tiny, Normalize()], device="cpu")
    states, spans = read(model, [words(9, 0), words(4, 1)])
    torch.testing.assert_close(pool(model, states, spans).norm(dim=-1), torch.ones(2))


def test_late_chunking_refuses_what_it_cannot_do(tiny, tiny_bert):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    with pytest.raises(ValueError, match="sections: expected a document of at most 128 tokens, got 202"):
        late_chunks(tiny, [words(100, 0), words(100, 1)])
    with pytest.raises(ValueError, match="sections: expected at least one, got 0"):
        late_chunks(tiny, [])
    with pytest.raises(ValueError, match="sections: expected a token in each, got none in section 1"):
        late_chunks(tiny, [words(3, 0), " ", words(3, 1)])
    first = SentenceTransformer(modules=[tiny[0], Pooling(32, pooling_mode="cls")], device="cpu")
    with pytest.raises(ValueError, match=r"model: expected one that takes the mean over tokens, .* got \['cls'\]"):
        late_chunks(first, ["a cat"])


# --- retrieval --------------------------------------------------------------------------------------------------------


def test_ndcg_and_recall_by_hand():
    similarity = np.zeros((4, 12))
    similarity[:, :] = -np.arange(12)  # the order of sections is their ranking
    relevant = np.zeros((4, 12), dtype=bool)
    relevant[0, 0] = relevant[1, 2] = relevant[2, 10] = True
    relevant[3, [1, 3]] = True
    found = retrieval.judge(similarity, relevant)
    both = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert found.ndcg == pytest.approx([1, 1 / math.log2(4), 0, both])
    assert found.recall_1 == [1, 0, 0, 0]
    assert found.recall_10 == [1, 1, 0, 1]


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_ndcg_is_scikit_learns(seed, sections):
    draw = np.random.default_rng(seed)
    similarity, relevant = draw.normal(size=(3, sections)), draw.random((3, sections)) < 0.2
    relevant[np.arange(3), draw.integers(sections, size=3)] = True
    want = [ndcg_score(relevant[i : i + 1], similarity[i : i + 1], k=10, ignore_ties=True) for i in range(3)]
    assert retrieval.judge(similarity, relevant).ndcg == pytest.approx(want)


def test_of_equal_sections_the_first_comes_first_and_equal_headings_are_all_relevant():
    assert retrieval.judge(np.ones((2, 3)), np.eye(3, dtype=bool)[[0, 2]]).recall_1 == [1, 0]
    assert retrieval.relevance(["Sets"], ["sets", "Dicts", "Sets"]).tolist() == [[True, False, True]]
    sections = [Section("Sets", "a"), Section("sets", "b"), Section("Dicts", "c")]
    assert len(measure.Material(sections, [range(3)], None).queries) == 2


# --- STS-B ------------------------------------------------------------------------------------------------------------

PAIR = ("main", "MSRvid", "2012", "0024", "2.5", "the cat sat", 'a "dog ran')


def write_pairs(folder, rows):
    (folder / stsb.FILE).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_pairs_are_read_and_quotes_belong_to_them(tmp_path):
    found = stsb.load(write_pairs(tmp_path, [PAIR, (*PAIR, "source", "source")]))
    assert found == (["the cat sat"] * 2, ['a "dog ran'] * 2, [2.5, 2.5])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, r"has no sts-test\.csv: expected the folder of the STS Benchmark"),
        ([PAIR, PAIR[:5]], r"line 2: expected 7 columns separated by tabs, got 5"),
        ([(*PAIR[:4], "much", *PAIR[5:])], r"line 1: expected a number, got 'much'"),
        ([PAIR], "has fewer than two pairs"),
    ],
)
def test_what_is_wrong_with_pairs_is_said_in_a_sentence(tmp_path, rows, said):
    if rows is not None:
        write_pairs(tmp_path, rows)
    with pytest.raises(UserError, match=said):
        stsb.load(tmp_path)


def test_pairs_that_are_no_text_or_no_file(tmp_path):
    (tmp_path / stsb.FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        stsb.load(tmp_path)
    (tmp_path / "x" / stsb.FILE).mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        stsb.load(tmp_path / "x")


# --- the whole command ------------------------------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path):
    """Eight sections of 20 to 110 words."""
    parts = [f"{name}\n{'=' * len(name)}\n\n{words(20 + 13 * i, i)}\n" for i, name in enumerate(WORDS[10:18])]
    (tmp_path / "book.txt").write_text("\n\n".join(parts))
    return tmp_path / "book.txt"


def settings(tiny_bert, book, out, *more):
    lengths = () if "--lengths" in more else ("--lengths", "48,160")
    return ("--model", tiny_bert, "--text", book, "--out", out, *lengths, "--mechanism", "near-far:near=8", *more)


def figures(out):
    """What must be equal in two runs: all but times, and what was fitted by them."""
    found = json.loads((out / "results.json").read_text())["found"]
    kept = ("alone", "late", "fidelity", "stsb")
    return {
        (length, name): {key: way[key] for key in kept} for length, ways in found.items() for name, way in ways.items()
    }


def test_the_command_prints_its_tables_and_goes_on_where_it_was(tiny_bert, book, tmp_path, monkeypatch):
    pairs = write_pairs(tmp_path, [(*PAIR[:4], str(i), words(4, i), words(5, i + 9)) for i in range(6)])
    out = tmp_path / "out"
    arguments = settings(tiny_bert, book, out, "--stsb", pairs, "--quick", "--fit", "0")
    said = recipe("embed", *arguments)
    assert "late chunking" in said
    assert "160*" in said  # positions were interpolated
    assert "The model has 128 positions, which were interpolated for 160 tokens" in " ".join(said.split())
    found = figures(out)
    assert set(found) == {(length, name) for length in ("48", "160") for name in ("dense", "near-far:near=8")}
    for (length, name), way in found.items():
        assert len(way["late"]["ndcg"]) == 8
        assert all(near == pytest.approx(1, abs=0.02) for near in way["fidelity"])
        assert way["stsb"] == pytest.approx(found[length, "dense"]["stsb"], abs=1e-6)  # far shorter than a cluster
        if name == "dense":
            assert way["fidelity"] == pytest.approx([1] * len(way["fidelity"]))
    assert len(found["160", "dense"]["fidelity"]) < len(found["48", "dense"]["fidelity"])
    assert (out / "results.png").stat().st_size > 1000
    assert not list((out / "work").iterdir())

    # killed while the second length was under way: what was embedded is not embedded again
    (out / "runs" / "length-160.json").unlink()
    made, embed = 0, measure.embed

    def counted(model, material, tick):
        nonlocal made
        made += 1
        if made == 2:
            raise KeyboardInterrupt
        return embed(model, material, tick)

    monkeypatch.setattr(measure, "embed", counted)
    recipe("embed", *arguments, fails=130)
    assert [file.name for file in (out / "work" / "length-160").iterdir()] == ["dense.pt"]
    recipe("embed", *arguments)
    assert made == 3  # dense, near-far when it was killed, near-far
    assert figures(out) == found


def test_a_fitted_model_is_one_more_row(tiny_bert, book, tmp_path):
    out = tmp_path / "out"
    more = ("--lengths", "24,64", "--fit", "0.9", "--fit-seconds", "2", "--quick")
    said = recipe("embed", *settings(tiny_bert, book, out, *more))
    assert "fitted at 64 tokens: " in said
    assert {name for _, name in figures(out)} == {"dense", "near-far:near=8", "fitted"}
    assert json.loads((out / "results.json").read_text())["fits"]["64"]["held_out"] >= 0.9


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--mechanism", "smurf"), "--mechanism smurf: "),
        (("--lengths", "many"), "--lengths must be numbers separated by commas, not 'many'"),
        (("--lengths", "2,64"), "--lengths must be more than the 2 special tokens of the model"),
        (("--lengths", "64,4096"), "needs 20,480 on which nothing is tested: give more text"),
        (("--stsb", "nowhere"), "--stsb nowhere has no sts-test.csv"),
        (("--text", "none.txt"), "none.txt cannot be read: No such file"),
        (("--model", "./none"), "there is no model at './none'"),
    ],
)
def test_refusals_leave_nothing_behind(tiny_bert, book, tmp_path, more, said):
    assert said in recipe("embed", *settings(tiny_bert, book, tmp_path / "out", *more), fails=1)
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_do_it_are_refused(tmp_path, tiny, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a GGUF file, which sentence-transformers does not read"):
        loading.load(str(tmp_path / "model.gguf"))
    monkeypatch.setattr(loading, "learned_positions", lambda model: None)
    with pytest.raises(UserError, match="x has 128 positions and no table of them to interpolate: ask for shorter"):
        loading.check("x", tiny, ["dense"], 200)


def test_a_model_that_takes_its_first_token_cannot_be_chunked_late(tiny, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    SentenceTransformer(modules=[tiny[0], Pooling(32, pooling_mode="cls")]).save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="cannot be chunked late: model: expected one that takes the mean over tokens"):
        loading.load(str(tmp_path))
