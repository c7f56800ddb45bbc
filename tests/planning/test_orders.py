from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.planning import kmeans as clustering
from coterie.planning.orders import balanced_offsets, compact, group_by, order_by, top_indices
from tests.oracles import euclidean_lloyd, hamming_lloyd

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(floats, st.booleans()), min_size=1, max_size=30))
def test_order_by_is_a_stable_sort_with_padding_last(items):
    scores = torch.tensor([s for s, _ in items], dtype=torch.float64)
    mask = torch.tensor([m for _, m in items])
    expected = sorted(range(len(items)), key=lambda i: (not items[i][1], items[i][0] if items[i][1] else 0.0, i))
    assert order_by(scores, mask).tolist() == expected


@given(st.lists(floats, min_size=1, max_size=30), st.integers(1, 30))
def test_top_indices_are_best_first_and_ties_go_to_the_first(scores, count):
    count = min(count, len(scores))
    everyone = torch.ones(len(scores), dtype=torch.bool)
    found = top_indices(torch.tensor(scores, dtype=torch.float64), everyone, count).tolist()
    assert found == sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30))
def test_group_by(items):
    labels, mask = torch.tensor([x for x, _ in items]), torch.tensor([m for _, m in items])
    order, offsets = group_by(labels, mask, 5)
    for g in range(5):
        members = order[offsets[g] : offsets[g + 1]].tolist()
        assert members == [i for i, (x, m) in enumerate(items) if m and x == g]


@given(st.integers(0, 50), st.integers(1, 12), st.integers(0, 5))
def test_balanced_offsets(count, groups, spare):
    offsets = balanced_offsets(torch.tensor([count]), torch.tensor([groups]), groups + spare)[0].tolist()
    sizes = [b - a for a, b in pairwise(offsets)]
    assert offsets[0] == 0
    assert sum(sizes) == count
    assert max(sizes[:groups]) - min(sizes[:groups]) <= 1
    assert not any(sizes[groups:])


def test_compact():
    order, count = compact(torch.tensor([[False, True, False, True]]))
    assert order[0, :2].tolist() == [1, 3]
    assert count.tolist() == [2]


def test_starts_are_real_tokens_one_from_each_span():
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 7:31] = True
    mask[1, ::4] = True
    for b, row in enumerate(clustering.starts(mask, 3, 6, seed=1, layer=0)):
        real = mask[b].nonzero().squeeze(-1).tolist()
        for head in row.tolist():
            assert all(s in real for s in head)
            assert len(set(head)) == 6
    nobody = clustering.starts(torch.zeros(1, 5, dtype=torch.bool), 1, 3, seed=0, layer=0)
    assert nobody.shape == (1, 1, 3)


def test_euclidean_kmeans_is_lloyds_algorithm():
    x = torch.randint(-4, 5, (2, 2, 37, 3)).double()
    mask = torch.ones(2, 37, dtype=torch.bool)
    labels, _ = clustering.euclidean_kmeans(x, mask, 5, 4, seed=3, layer=1)
    starts = clustering.starts(mask, 2, 5, seed=3, layer=1)
    for b in range(2):
        for h in range(2):
            assert labels[b, h].tolist() == euclidean_lloyd(x[b, h], starts[b, h].tolist(), 4)


def test_hamming_kmeans_is_lloyds_algorithm_on_the_signs():
    from coterie import draws

    x = torch.randn(2, 2, 37, 6, dtype=torch.float64)
    mask = torch.ones(2, 37, dtype=torch.bool)
    labels = clustering.hamming_kmeans(x, mask, 5, 4, bits=9, seed=3, layer=1)
    starts = clustering.starts(mask, 2, 5, seed=3, layer=1)
    planes = draws.normal(draws.Stream.HYPERPLANE, (2, 9, 6), seed=3, layer=1, device=x.device)
    for b in range(2):
        for h in range(2):
            bits = [[1 if float(n @ plane) >= 0 else -1 for plane in planes[h]] for n in x[b, h]]
            assert labels[b, h].tolist() == hamming_lloyd(bits, starts[b, h].tolist(), 4)
