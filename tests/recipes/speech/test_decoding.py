"""Decoding and CTC's loss against brute force: the sum over every path."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.speech.batches import Batch
from recipes.speech.decoding import collapsed, greedy, prefix_beam, tokens_needed
from recipes.speech.network import Heard
from recipes.speech.training import ctc_loss


def merged(path):
    """A path's labelling, by its definition."""
    return tuple(s for i, s in enumerate(path) if s != 0 and (i == 0 or path[i - 1] != s))


def every_labelling(probabilities):
    """The probability of each labelling: of every path one by one."""
    found: dict[tuple[int, ...], float] = {}
    symbols = range(len(probabilities[0]))
    for path in product(symbols, repeat=len(probabilities)):
        p = math.prod(row[symbol] for row, symbol in zip(probabilities, path, strict=True))
        found[merged(path)] = found.get(merged(path), 0.0) + p
    return found


def random_rows(tokens, symbols, seed, sharp=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(tokens, symbols, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize(("tokens", "symbols"), [(1, 2), (2, 3), (5, 3), (6, 3), (4, 4), (7, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_endless_beam_is_the_exact_sum(tokens, symbols, seed):
    rows = random_rows(tokens, symbols, seed)
    expected = every_labelling(rows.tolist())
    found = {each.labels: math.exp(each.log_probability) for each in prefix_beam(rows.log())}
    assert sum(found.values()) == pytest.approx(1)
    for labels, p in expected.items():
        assert found.get(labels, 0.0) == pytest.approx(p, abs=1e-12)
    assert all(found[labels] == 0 for labels in found.keys() - expected.keys())  # longer than any path
    order = [each.log_probability for each in prefix_beam(rows.log())]
    assert order == sorted(order, reverse=True)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_beam_never_claims_more_than_the_sum(tokens, symbols, width, seed):
    rows = random_rows(tokens, symbols, seed, sharp=2.0)
    exact = {each.labels: each.log_probability for each in prefix_beam(rows.log())}
    beam = prefix_beam(rows.log(), width)
    assert len(beam) <= width
    for labels, log_probability in beam:
        assert log_probability <= exact[labels] + 1e-9
    best = max(exact, key=exact.__getitem__)
    if width >= len(exact):
        assert beam[0].labels == best


def test_sums_find_what_the_best_path_does_not():
    rows = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert greedy(rows) == ()
    assert prefix_beam(rows, 2)[0].labels == (1,)


def test_greedy_is_the_best_path():
    for seed in range(20):
        rows = random_rows(5, 3, seed)
        best = max(
            product(range(3), repeat=5),
            key=lambda path: math.prod(r[s] for r, s in zip(rows.tolist(), path, strict=True)),
        )
        assert greedy(rows.log()) == merged(best) == collapsed(best)


def test_certain_probabilities_and_a_floor():
    certain = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).log()
    assert prefix_beam(certain, 4)[0] == ((1, 1), 0.0)
    rows = random_rows(5, 3, 0)
    (silent,) = prefix_beam(rows.log(), floor=0.999)
    assert silent.labels == ()
    assert silent.log_probability == pytest.approx(float(rows[:, 0].log().sum()))
    assert prefix_beam(torch.zeros(0, 3)) == [((), 0.0)]
    with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
        prefix_beam(rows.log(), 0)


@given(st.lists(st.integers(1, 2), max_size=4))
@settings(deadline=None)
def test_tokens_that_labels_need(labels):
    lengths = (n for n in range(9) if any(merged(path) == tuple(labels) for path in product(range(3), repeat=n)))
    assert tokens_needed(labels) == next(lengths)


def test_the_loss_is_that_of_all_paths_with_its_gradient():
    """Two utterances of different lengths in one batch; the gradient by differences."""
    scores = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths, labels = [5, 3], [(1, 1), (2,)]
    batch = Batch(torch.empty(0), torch.empty(0), torch.tensor([1, 1, 2]), torch.tensor([2, 1]))

    def brute_force(scores):
        total = 0.0
        for row, length, said in zip(scores.softmax(-1), lengths, labels, strict=True):
            total -= math.log(every_labelling(row[:length].tolist())[said])
        return total / 3  # labels

    scores.requires_grad_(True)
    loss = ctc_loss(Heard(scores.log_softmax(-1), torch.tensor(lengths)), batch)
    assert loss.item() == pytest.approx(brute_force(scores.detach()), rel=1e-9)
    loss.backward()
    assert scores.grad is not None
    for at in product(range(2), range(5), range(3)):
        moved = scores.detach().clone()
        moved[at] += 1e-5
        above = brute_force(moved)
        moved[at] -= 2e-5
        assert scores.grad[at].item() == pytest.approx((above - brute_force(moved)) / 2e-5, abs=1e-8)
