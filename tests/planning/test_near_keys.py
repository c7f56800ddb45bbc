"""Near keys: rows in bytes, and the same picks in both backends and by loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.call import Call
from coterie.plan import Means
from coterie.planning import native, reference
from coterie.planning.bytes import Bytes
from coterie.planning.steps import NearSearch, Seen
from coterie.planning.tokens import Tokens
from tests.oracles import byte_product, in_bytes

WILD = (float("inf"), -float("inf"), float("nan"), 1e38, 1e-42)


@settings(max_examples=50)
@given(st.integers(1, 70), st.integers(-20, 20), st.integers(0, 10**6))
def test_products_of_bytes_are_as_near_as_their_steps_allow(dim, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, dim, generator=generator, dtype=torch.float64) * 10.0**exponent
    queries, keys = Bytes.of_queries(q), Bytes.of_keys(k)
    found = queries.products(keys).double() * queries.scale[:, None].double()
    left, right = (x.abs().amax(-1) / most / 2 for x, most in ((q, 63), (k, 127)))  # half a step of each row
    worst = left[:, None] * k.abs().sum(-1) + right * q.abs().sum(-1)[:, None] + left[:, None] * right * dim
    assert ((found - q @ k.mT).abs() <= worst * 1.001).all()


def test_bytes_of_zeros_and_of_wild_numbers():
    x = torch.tensor([[0.0, 0.0], [1e300, -1e300], [float("nan"), 1.0], [1e-45, 0.0]], dtype=torch.float64)
    found = Bytes.of_keys(x)
    assert found.whole.tolist() == [[0, 0], [127, -127], [127, 0], [127, 0]]
    assert found.scale.tolist() == torch.tensor([1e-30, 1e28, 1e28, 1e-30]).tolist()
    assert found.products(found).isfinite().all()
    assert Bytes.of_keys(torch.zeros(3, 0)).products(Bytes.of_keys(torch.zeros(2, 0))).tolist() == [[0.0, 0.0]] * 3


class Case:
    """Clusters one behind the other, of which the groups of two chunks see some."""

    def __init__(self, seed, *, keys, heads=4, key_heads=2, dim=8, groups=5, whole=False, wild=False):
        generator = torch.Generator().manual_seed(seed)

        def below(high, *shape):
            return torch.randint(0, high, shape, generator=generator)

        def draw(*shape):
            x = torch.randn(shape, generator=generator)
            return (2 * x).round() if whole else x

        k = draw(2, key_heads, keys, dim)
        if wild:
            k.view(-1)[below(k.numel(), len(WILD))] = torch.tensor(WILD)
        call = Call.of(draw(2, heads, 3, dim), k, runs=False)
        self.tokens = Tokens(call, call.real_queries, call.real_keys)
        self.queries = draw(2, heads, 2 * groups, dim)
        edges = below(keys + 1, 2, key_heads, 10).sort(-1).values.int()
        order = torch.rand(2, key_heads, keys, generator=generator).argsort(-1).int()
        self.clusters = Means(order, edges[..., :-1].contiguous(), edges[..., 1:].contiguous())
        visible = torch.rand(2, 2, 9, generator=generator).argsort(-1)[..., :7].sort(-1).values
        self.seen = Seen(visible, below(8, 2, 2), below(groups + 1, 2, 2), below(4, 2, 2) + 1, 8)

    def seeing_all(self, keys):
        """The same, but all groups exist, and see all keys in two clusters."""
        edges = torch.tensor([0, keys // 3, keys], dtype=torch.int32).expand(2, self.clusters.order.shape[1], 3)
        self.clusters = Means(self.clusters.order, edges[..., :-1].contiguous(), edges[..., 1:].contiguous())
        visible, groups = torch.tensor([0, 1]).expand(2, 2, 2), self.queries.shape[2] // 2
        together = torch.tensor([[8, 8], [groups, 1]])
        self.seen = Seen(visible, torch.full((2, 2), 2), torch.full((2, 2), groups), together, 3)
        return self

    def run(self, steps, search):
        """The picks of each group, in order, and what is left."""
        picks, left = steps.near_keys(self.tokens, self.queries, self.clusters, self.seen, search)
        return picks.unflatten(2, (-1, search.near)).sort(-1).values if search.near else picks, left


@settings(max_examples=80)
@given(
    st.integers(0, 90),
    st.sampled_from([1, 5, 16, 24]),
    st.integers(0, 12),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_near_keys_are_the_same_in_both_backends(keys, dim, near, more, whole, wild, seed):
    case = Case(seed, keys=keys, dim=dim, whole=whole, wild=wild and keys > 0)
    search = NearSearch(min(near, keys), max(1, near, more), False)
    for found, want in zip(case.run(native, search), case.run(reference, search), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("keys", [40, 200])
@pytest.mark.parametrize("missing", [0, 1, 4, 30])
@pytest.mark.parametrize("whole", [False, True])
def test_picks_do_not_depend_on_those_before(keys, missing, whole):
    """Many groups one after the other, most of which pick nearly all that they see."""
    case = Case(missing, keys=keys, groups=150, whole=whole)
    case = case.seeing_all(keys)
    search = NearSearch(keys - missing, keys, False)
    for found, want in zip(case.run(native, search), case.run(reference, search), strict=True):
        assert torch.equal(found, want)


def mean_of(rows):
    return torch.stack(rows).double().mean(0)


def liked(query, k, members):
    """By the product with the mean or the outlier of a cluster, in the scale of queries."""
    mean = mean_of([k[j] for j in members])
    far = [float((k[j].double() - mean).square().sum().float()) for j in members]
    outlier = k[members[far.index(max(far))]]
    return max(byte_product(query, mean.float()), byte_product(query, outlier))


@pytest.mark.parametrize("reach", [1, 15, 100])
@pytest.mark.parametrize("seed", range(4))
def test_near_keys_by_loops(reach, seed):
    case, near = Case(seed, keys=40, heads=2, key_heads=1, dim=6), 4
    picks, left = case.run(reference, NearSearch(near, max(near, reach), False))
    seen, (order, start, stop) = case.seen, (case.clusters.order, case.clusters.start, case.clusters.stop)
    for b in range(2):
        k = case.tokens.raw_k[b, 0]
        clusters = [order[b, 0, i:j].tolist() for i, j in zip(start[b, 0].tolist(), stop[b, 0].tolist(), strict=True)]
        for h, chunk in ((h, c) for h in range(2) for c in range(2)):
            shown = [clusters[c] for c in seen.clusters[b, chunk, : int(seen.shown[b, chunk])].tolist()]
            exist, together = int(seen.groups[b, chunk]), int(seen.together[b, chunk])
            queries = case.queries[b, h, 5 * chunk : 5 * chunk + exist]
            likes = [[liked(q, k, members) if members else None for members in shown] for q in queries]
            for g in range(exist):
                party = range(g // together * together, min(exist, (g // together + 1) * together))
                rank = {}
                for i, members in enumerate(shown):
                    if members:
                        best = [max(x for x in likes[p] if x is not None) for p in party]
                        scale = [in_bytes(queries[p], 63)[1] for p in party]
                        rank[i] = max((likes[p][i] - t) * s for p, t, s in zip(party, best, scale, strict=True))
                searched: list[int] = []
                for i in sorted(rank, key=lambda i: (-rank[i], i)):
                    if len(searched) < max(near, reach):
                        searched += shown[i]
                chosen = sorted(searched, key=lambda j: (-byte_product(queries[g], k[j]), j))[:near]
                at = 5 * chunk + g
                assert picks[b, h, at].tolist() == sorted(chosen + [0] * (near - len(chosen)))
                rest = [len([j for j in members if j not in chosen]) for members in shown]
                assert left[b, h, at].tolist() == rest + [1] * (8 - len(rest))
