"""k-means: the native one looks for the nearest centroid in bytes or in float32 first, and finds what float64 finds."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coterie.planning import native, reference
from coterie.planning.orders import Parts

KINDS = ("normal", "far off", "close", "twice", "large", "small", "tiny", "wild", "zero")


def rows(kind, count, dim, seed):
    """(2, 2, count, dim) rows of a kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, count, dim, generator=generator)
    if kind == "far off":  # a mean much longer than what differs
        return x + 300
    if kind == "close":  # distances that float32 can hardly tell apart
        return 1 + 1e-5 * x
    if kind == "twice":  # equal rows: ties
        return x[:, :, torch.arange(count) // 2]
    if kind == "large":
        return x * 1e30
    if kind == "small":  # products are 0 in float32, and centroids too short for whole numbers
        return x * 1e-30
    if kind == "tiny":
        return x * 1e-36
    if kind == "wild":
        x[:, :, ::7, 0] = torch.inf
        x[:, :, 3::11, -1] = torch.nan
        return x
    return torch.zeros_like(x) if kind == "zero" else x


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 300),
    clusters=st.sampled_from([1, 5, 17, 33, 64, 100]),
    dim=st.sampled_from([1, 7, 16, 20, 64, 80]),
    iterations=st.integers(0, 3),
    sample=st.sampled_from([0, 2]),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
@example("normal", 300, 100, 64, 2, 0, False, 0)
@example("far off", 300, 100, 64, 2, 0, False, 0)
@example("close", 300, 100, 64, 2, 0, False, 0)
@example("twice", 300, 100, 20, 2, 2, True, 0)
@example("small", 111, 64, 16, 3, 0, False, 0)
def test_labels_and_centroids_are_the_references(kind, count, clusters, dim, iterations, sample, half, seed):
    x = rows(kind, count, dim, seed)
    x = x.to(torch.bfloat16) if half else x
    parts = Parts.whole(torch.ones(2, count, dtype=torch.bool))
    found = [
        steps.kmeans(x, parts, clusters, iterations, sample=sample, seed=seed, layer=1, per_head=True)
        for steps in (native, reference)
    ]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("clusters", [3, 70])
def test_labels_by_loops(clusters):
    x = rows("normal", 150, 33, 5)
    parts = Parts.whole(torch.ones(2, 150, dtype=torch.bool))
    labels, centroids = native.kmeans(x, parts, clusters, 2, seed=0, layer=0, per_head=True)
    wide = x.double()
    for b in range(2):
        for h in range(2):
            for i in range(150):
                far = [float((wide[b, h, i] - centroids[b, h, c]).square().sum()) for c in range(clusters)]
                assert far[int(labels[b, h, i])] <= min(far) * (1 + 1e-6)
