"""The recogniser: padding, mechanisms, gradients; batches by length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from recipes.speech.batches import by_frames, padded
from recipes.speech.corpus import Utterance, fixed
from recipes.speech.network import Config, Recogniser, attend_by, attentions

from coterie.cli.inputs import UserError
from recipes.speech import kept

SPECS = [
    "dense",
    "clustered:clusters=5",
    "improved-clustered:clusters=5,topk=4",
    "near-far:near=8",
    "reformer:rounds=2,chunk_size=8",
    "smyrf:rounds=2,cluster_size=8",
]


def recogniser(stride=2, **others):
    torch.manual_seed(0)
    return Recogniser(Config(7, 4, layers=2, dim=16, heads=2, stride=stride, **others))


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_a_row_of_a_batch_gets_what_it_would_get_alone(stride, spec):
    model = attend_by(recogniser(stride), spec).eval()
    torch.manual_seed(1)
    rows = [torch.randn(length, 7) for length in (41, 30, 7, 1)]
    features, lengths = padded([Utterance("", row, "") for row in rows])
    features = features + 100.0 * (torch.arange(41)[None, :, None] >= lengths[:, None, None])  # has no influence
    with torch.no_grad():
        together = model(features, lengths)
        for i, row in enumerate(rows):
            alone = model(row[None], torch.tensor([len(row)]))
            tokens = -(-len(row) // stride)
            assert together.lengths[i] == tokens == model.config.tokens(len(row)) == alone.log_probabilities.shape[1]
            torch.testing.assert_close(
                together.log_probabilities[i, :tokens], alone.log_probabilities[0], atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("spec", SPECS)
def test_every_weight_gets_a_gradient(spec):
    model = attend_by(recogniser(dropout=0.0), spec).train()
    heard = model(torch.randn(2, 33, 7), torch.tensor([33, 20]))
    heard.log_probabilities[0].square().sum().backward()
    for name, weight in model.named_parameters():
        if name.endswith("qkv.bias"):
            continue  # that of keys moves all scores alike, and has none
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0, name


def test_probabilities_and_mechanisms():
    model = recogniser().eval()
    features, lengths = torch.randn(1, 200, 7), torch.tensor([200])
    with torch.no_grad():
        dense = model(features, lengths).log_probabilities
        torch.testing.assert_close(dense.exp().sum(-1), torch.ones(1, 100))
        full = attend_by(model, "full")(features, lengths).log_probabilities
        local = attend_by(model, "local:window=4")(features, lengths).log_probabilities
        torch.testing.assert_close(full, dense, atol=1e-5, rtol=1e-4)
        assert (local - dense).abs().max() > 1e-3
        torch.testing.assert_close(attend_by(model, "dense")(features, lengths).log_probabilities, dense)
    assert [attention.index for attention in attentions(model)] == [0, 1]
    assert "mechanism='dense'" in repr(model)


def test_training_begins_at_random_positions():
    model = recogniser(dropout=0.0)
    features, lengths = torch.randn(1, 20, 7), torch.tensor([20])
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model.train()(features, lengths).log_probabilities)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("count", [1, 2, 57])
def test_batches(count):
    torch.manual_seed(0)
    lengths = torch.randint(5, 300, (count,)).tolist()
    orders = [by_frames(lengths, 1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (0, 1), (0, 2), (1, 1))]
    for order in orders:
        assert sorted(i for rows in order for i in rows) == list(range(count))
        for rows in order:
            room = len(rows) * max(lengths[i] for i in rows)
            assert room <= 1000 or len(rows) == 1
        rooms = [len(rows) * max(lengths[i] for i in rows) for rows in order]
        assert sum(lengths) >= 0.5 * sum(rooms)
    assert orders[1] == orders[2]
    if count > 2:
        assert orders[1] != orders[3] != orders[4]
        longest = [max(lengths[i] for i in rows) for rows in orders[0]]
        assert all(a <= 1.1 * b for a, b in pairwise(longest))  # the first epoch begins with the shortest
    assert by_frames([5000, 10, 10], 1000, 0, 1) in ([[0], [1, 2]], [[1, 2], [0]], [[0], [2, 1]], [[2, 1], [0]])


def test_a_recogniser_is_kept(tmp_path):
    model = attend_by(recogniser(), "local:window=4").eval()
    utterance = Utterance("a", torch.randn(30, 7), "ABCD")
    corpus = fixed("toy", [utterance], [utterance], [], 3)
    kept.keep(model, tmp_path / "models" / "a.pt", corpus, "local:window=4")
    again, about = kept.load(tmp_path / "models" / "a.pt")
    assert about == {"symbols": "ABCD", "unit": "character", "mechanism": "local:window=4"}
    features, lengths = padded([utterance])
    with torch.no_grad():
        assert torch.equal(again(features, lengths).log_probabilities, model(features, lengths).log_probabilities)
    torch.save({"weights": {}}, tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"b\.pt holds no recogniser"):
        kept.load(tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"there is no .*c\.pt"):
        kept.load(tmp_path / "c.pt")
