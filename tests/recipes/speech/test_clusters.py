"""Clusters of a recogniser's tokens, over layers and beside what is said when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes.speech.corpus import Utterance
from recipes.speech.digits import Digits, Range, by_speaker, string
from recipes.speech.network import Config, Recogniser

import coterie
from coterie.analysis import Segment, agreement, following
from coterie.cli.inputs import UserError
from recipes.speech import clusters, kept, loading
from tests.recipes.speech.conftest import write_an4

SPEC = "clustered:clusters=4"


@pytest.fixture
def corpus(recordings):
    return loading.load(str(recordings), first=Range(1, 2), last=Range(4, 7), held_out=[], spelled=False, tests=3)


@pytest.fixture
def model(corpus):
    torch.manual_seed(0)
    return Recogniser(Config(corpus.channels, len(corpus.symbols), layers=2, dim=32, heads=2)).eval()


def test_a_string_knows_where_its_digits_end(corpus):
    assert isinstance(corpus, Digits)
    mine = by_speaker(corpus.recordings)["ann"][:5]
    found = string("ann", mine)
    at = 0
    for recording, end in zip(mine[:-1], found.ends[:-1], strict=True):
        at += len(recording.samples)
        middles = [80 * frame + 100 for frame in range(len(found.features))]  # of windows of 200 samples
        assert end == next(frame for frame, middle in enumerate(middles) if middle >= at)
    assert found.ends[-1] == len(found.features)


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_segments_are_in_tokens(stride):
    utterance = Utterance("a", torch.randn(21, 3), "707", (7, 8, 21))
    found = clusters.segments(utterance, Config(3, 10, stride=stride))
    wanted = {1: [(0, 7), (7, 8), (8, 21)], 2: [(0, 4), (4, 11)], 4: [(0, 2), (2, 6)]}[stride]
    assert [(each.start, each.end) for each in found] == wanted  # one that has no token is not there
    assert [each.name for each in found] == (["7", "0", "7"] if stride == 1 else ["7", "7"])
    spelled = utterance._replace(text="SEVEN ZERO SEVEN")
    assert clusters.segments(spelled, Config(3, 10, stride=1))[1] == Segment(7, 8, "ZERO")
    assert clusters.segments(utterance._replace(ends=()), Config(3, 10)) == []


def test_clusters_are_those_of_the_plans_that_heads_would_make(corpus, model):
    utterance = corpus.test[0]
    seen: dict[str, Any] = {}
    batch = utterance.features[None], torch.tensor([len(utterance.features)])
    coterie.hosts.watch_dense(model, batch, seen.__setitem__)
    for (name, head), labels in clusters.groups(model, utterance, SPEC).items():
        call = seen[name]
        plan = coterie.as_mechanism(SPEC).plan(call.q, call.k, **call.planning())
        assert torch.equal(labels, coterie.analysis.groups_of(plan, head=head))


def test_tables_are_means_over_heads_and_utterances(corpus, model):
    labels = [clusters.groups(model, each, SPEC) for each in corpus.test]
    said = [clusters.segments(each, model.config) for each in corpus.test]
    rows = clusters.over_time(labels, said)[2]
    first = [
        sum(following(mine["layers.0.attention", head], parts).inside for head in range(2)) / 2
        for mine, parts in zip(labels, said, strict=True)
    ]
    assert rows[0][4].startswith(f"{sum(first) / 3:.2f} ± ")
    found = [agreement(each) for each in labels]
    mean = sum(each.between("layers.0.attention", "layers.1.attention") for each in found) / 3
    assert clusters.over_layers(found)[2][0][2].startswith(f"{mean:.2f} ± ")


def test_the_command_draws_what_it_says(corpus, model, recordings, tmp_path, capsys):
    kept.keep(model, tmp_path / "model.pt", corpus, "dense")
    arguments: Any = {"mechanism": SPEC, "utterances": 2, "digits": "4-7"}
    clusters.main(tmp_path / "model.pt", str(recordings), out=tmp_path / "out", **arguments)
    assert "2 utterances" in " ".join(capsys.readouterr().out.split())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["clusters-layers.png", "clusters-time.png"]
    with pytest.raises(UserError, match="AN4 is written in other symbols"):
        clusters.main(tmp_path / "model.pt", str(write_an4(tmp_path / "an4")), out=tmp_path / "other", **arguments)
    assert not (tmp_path / "other").exists()
