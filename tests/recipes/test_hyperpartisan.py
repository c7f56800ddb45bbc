"""SemEval's XML files, entries with their own length, and the recipe from end to end."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from recipes.common.splits import Labelled
from recipes.common.training import Schedule
from recipes.hyperpartisan import articles
from recipes.hyperpartisan.entries import Entry, parse
from recipes.hyperpartisan.run import Comparison

from coterie.cli.inputs import UserError
from tests.command import recipe

HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
BOMB = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;&b;">]>'


def write(folder, texts, truth, head=HEAD, truth_head=HEAD):
    """Both files, from {id: inner XML} and {id: label}."""
    folder.mkdir(exist_ok=True)
    bodies = [f'\t<article id="{name}" title="T" published-at="2017-01-01">{text}</article>' for name, text in texts]
    labels = [f'\t<article hyperpartisan="{label}" id="{name}" labeled-by="article"/>' for name, label in truth]
    for name, lines, first in (("articles", bodies, head), ("ground-truth", labels, truth_head)):
        lines = [first, "<articles>", *lines, "</articles>"]
        (folder / f"{name}-training-byarticle-20181122.xml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def some(count):
    texts = [(f"{i:07}", f"<p>Article {i}, élan.</p>" * (i % 7 + 1)) for i in range(count)]
    return texts, [(f"{i:07}", "true" if i % 3 == 0 else "false") for i in range(count)]


def test_texts_without_markup_meet_their_labels(tmp_path):
    texts = [("a", 'One <a href="x">link</a>\n<p>two &amp;\tthree</p><p>four</p>'), ("b", "<p>Five</p>")]
    found = articles.load(str(write(tmp_path, texts, [("b", "true"), ("a", "false")])))
    assert found == [Labelled("One link two & three four", 0), Labelled("Five", 1)]


def test_from_the_hub(monkeypatch):
    parts = {
        "train": Dataset.from_dict({"text": ["a  b", "c"], "hyperpartisan": [True, False]}),
        "test": Dataset.from_dict({"text": ["d"], "label": [1]}),
    }
    monkeypatch.setattr(articles, "from_hub", lambda name: parts)
    assert articles.load("owner/name") == [Labelled("a b", 1), Labelled("c", 0), Labelled("d", 1)]
    for columns, words in (
        ({"text": ["a"]}, "owner/name, train: expected the columns 'text' and 'hyperpartisan' or 'label'"),
        ({"text": ["a"], "label": [2]}, "owner/name, train, article 1: expected 'label' to be 0 or 1: 2"),
        ({"text": [" "], "label": [1]}, "owner/name, train, article 1: it has no text"),
    ):
        parts["train"] = Dataset.from_dict(columns)
        with pytest.raises(UserError, match=words):
            articles.load("owner/name")


def test_refusals_of_folders(tmp_path):
    with pytest.raises(UserError, match="no data at 'nowhere'"):
        articles.load("nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is no folder"):
        articles.load(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"has 0 files articles\*\.xml: expected exactly one"):
        articles.load(str(tmp_path))
    write(tmp_path, *some(3))
    (tmp_path / "ground-truth-2.xml").touch()
    with pytest.raises(UserError, match=r"has 2 files ground-truth\*\.xml: expected exactly one"):
        articles.load(str(tmp_path))


@pytest.mark.parametrize(
    ("texts", "truth", "words"),
    [
        ([("a", "x"), ("b", "y")], [("a", "true")], r"ground-truth\S+\.xml has no article b"),
        ([("a", "x")], [("a", "true"), ("c", "true")], r"articles-\S+\.xml has no article c"),
        ([("a", "x"), ("a", "y")], [("a", "true")], r"articles-\S+\.xml: an article has the id a of another one"),
        ([("a", "x")], [("a", "maybe")], r"article a: expected hyperpartisan to be true or false, got 'maybe'"),
        ([("a", " <p> </p>")], [("a", "true")], r"articles-\S+\.xml, article a: it has no text"),
        ([], [], r"articles-\S+\.xml has no article\."),
        ([("a", "<p>x")], [("a", "true")], r"articles-\S+\.xml is no well-formed XML: mismatched tag: line 3"),
        ([("a", "&b;")], [("a", "true")], r"articles-\S+\.xml is no well-formed XML: undefined entity"),
    ],
)
def test_refusals_of_files(tmp_path, texts, truth, words):
    with pytest.raises(UserError, match=words):
        articles.load(str(write(tmp_path, texts, truth)))


def test_an_article_without_an_id(tmp_path):
    write(tmp_path, *some(2))
    file = next(tmp_path.glob("articles*"))
    file.write_text("<articles><article>x</article></articles>", encoding="utf-8")
    with pytest.raises(UserError, match=r"articles-\S+\.xml: an article has no id"):
        articles.load(str(tmp_path))


@pytest.mark.parametrize("head", [HEAD + BOMB, HEAD + '<!DOCTYPE a SYSTEM "file:///etc/passwd">'])
@pytest.mark.parametrize("which", ["head", "truth_head"])
def test_a_doctype_is_refused_before_it_is_read(tmp_path, head, which):
    write(tmp_path, [("a", "x" if which == "truth_head" else "&c;")], [("a", "true")], **{which: head})
    file = {"head": "articles", "truth_head": "ground-truth"}[which]
    with pytest.raises(UserError, match=rf"{file}-\S+\.xml has a DOCTYPE, which could declare entities"):
        articles.load(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_no_other_encoding_hides_anything(tmp_path, encoding):
    write(tmp_path, *some(2))
    file = next(tmp_path.glob("articles*"))
    hidden = f'<?xml version="1.0" encoding="{encoding}"?>{BOMB}<articles><article id="a">é&c;</article></articles>'
    file.write_bytes(hidden.encode(encoding))
    with pytest.raises(UserError, match=r"articles-\S+\.xml is (not UTF-8 text|no well-formed XML)"):
        articles.load(str(tmp_path))


def test_a_quoted_doctype_is_text(tmp_path):
    found = articles.load(str(write(tmp_path, [("a", "<![CDATA[<!DOCTYPE html>]]>")], [("a", "true")])))
    assert found == [Labelled("<!DOCTYPE html>", 1)]


def test_entries():
    found = parse(["4096=longformer:window=8,global_tokens=1", "512=dense", "512=full", "512=smyrf:rounds=4"])
    assert found == [Entry(512, "dense"), Entry(4096, "longformer:window=8"), Entry(512, "smyrf")]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("smyrf:rounds=4", "smyrf:rounds=4: expected LENGTH=MECHANISM"),
        ("512", "512: expected LENGTH=MECHANISM"),
        ("0=dense", "0=dense: expected LENGTH=MECHANISM"),
        ("512=guess", "--mechanism guess: "),
        ("64=longformer:window=8,global_tokens=0", "must be global: global_tokens=1"),
    ],
)
def test_refusals_of_entries(tmp_path, spec, words):
    said = recipe("hyperpartisan", "--data", tmp_path, "--mechanism", spec, "--out", tmp_path / "out", fails=1)
    assert said.startswith("error: ")
    assert words in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def test_a_batch_that_cannot_be_cut(tmp_path):
    said = recipe("hyperpartisan", "--data", tmp_path, "--batch", 4, "--at-once", 3, fails=1)
    assert "--batch 4 must be a multiple of --at-once 3" in said


def test_a_seed_has_its_own_split_at_every_length():
    rows = [Labelled(f"text {i}", int(i % 3 == 0)) for i in range(60)]
    compared = Comparison(rows, "rows", "demo", Schedule(1, 4, 1e-3))
    parts = {
        (length, seed): [set(part["text"]) for part in (task.train, task.test)]
        for length in (512, 4096)
        for seed in (0, 1)
        for task in [compared.tuning(length, seed).task]
    }
    for seed in (0, 1):
        train, test = parts[512, seed]
        assert parts[4096, seed] == [train, test]
        assert (len(train), len(test), len(train | test)) == (54, 6, 60)
    assert parts[512, 0] != parts[512, 1]


def test_end_to_end(tmp_path, tiny_bert):
    texts, truth = some(20)
    data = write(tmp_path / "data", [*texts, ("again", texts[1][1])], [*truth, ("again", "false")])
    specs = ["32=smyrf:rounds=2,cluster_size=8", "96=longformer:window=8,global_tokens=1"]
    arguments = ["--data", data, "--model", tiny_bert, "--seeds", 2, "--quick", "--out", tmp_path / "out"]
    arguments += [word for spec in specs for word in ("--mechanism", spec)]
    assert "20 of 21 articles" in recipe("hyperpartisan", *arguments)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    entries = [str(entry) for entry in parse(specs)]
    assert found["settings"]["entries"] == entries
    assert [row[0] for row in found["tables"][0]["rows"]] == [row["mechanism"] for row in found["costs"]] == entries
    assert sorted((r["trained"], r["seed"]) for r in found["results"]) == sorted(
        (entry, seed) for entry in entries for seed in (0, 1)
    )
    tokens = {row["mechanism"]: row["tokens"] for row in found["costs"]}
    assert [tokens[entry] for entry in entries] == [32, 32, 96]  # past the model's 64 positions
    for result in found["results"]:
        assert list(result["scores"]) == [result["trained"]]
        assert 0 <= result["scores"][result["trained"]] <= 1
    assert (tmp_path / "out" / "results.png").stat().st_size > 1000
