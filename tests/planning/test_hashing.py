import math

import pytest
import torch

from coterie.planning import hashing
from coterie.planning.hashing import transform


def everyone(x):
    return torch.ones(x.shape[:-1], dtype=torch.bool)


def squared_distance(name, q, k, i, j):
    f, g = transform(name, q, k, everyone(q), everyone(k))
    return sum((float(a) - float(b)) ** 2 for a, b in zip(f[i], g[j], strict=True))


def test_smyrf_distance_is_a_function_of_the_inner_product_alone():
    q, k = torch.randn(11, 5, dtype=torch.float64) * 3, torch.randn(7, 5, dtype=torch.float64)
    bound = max(float(x @ x) for x in q) + max(float(x @ x) for x in k)
    for i in range(11):
        for j in range(7):
            expected = 2 * (bound - float(q[i] @ k[j]))  # Eq. 12
            assert math.isclose(squared_distance("smyrf", q, k, i, j), expected, rel_tol=1e-12)


def test_older_transforms_break_that_identity():
    # Two queries of different norm with the same, non-zero inner product with the key.
    q = torch.tensor([[1.0, 0.0], [1.0, 5.0]], dtype=torch.float64)
    k = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert q[0] @ k[0] == q[1] @ k[0] == 2.0
    smyrf = [squared_distance("smyrf", q, k, i, 0) for i in (0, 1)]
    assert math.isclose(*smyrf, rel_tol=1e-12)
    for name in ("l2-alsh", "xbox", "simple"):
        near, far = (squared_distance(name, q, k, i, 0) for i in (0, 1))
        assert not math.isclose(near, far, rel_tol=1e-3), name


def test_older_transforms_have_the_distances_of_the_supplement():
    q, k = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    longest = max(float(x.norm()) for x in k)
    shrink, m = 0.83 / longest, 3
    for i in range(6):
        for j in range(5):
            dot, qq = float(q[i] @ k[j]), float(q[i] @ q[i])
            uk = shrink * float(k[j].norm())
            assert math.isclose(
                squared_distance("l2-alsh", q, k, i, j), qq + m / 4 - 2 * shrink * dot + uk ** (2 ** (m + 1))
            )
            assert math.isclose(squared_distance("xbox", q, k, i, j), qq + longest**2 - 2 * dot)
            assert math.isclose(
                squared_distance("simple", q, k, i, j), 2 * longest**2 - 2 * longest / math.sqrt(qq) * dot
            )
            assert math.isclose(squared_distance("none", q, k, i, j), float((q[i] - k[j]).norm()) ** 2)


@pytest.mark.parametrize("name", hashing.TRANSFORMS)
def test_zero_vectors_and_padding(name):
    q, k = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    f, g = transform(name, q, k, everyone(q), everyone(k))
    assert f.isfinite().all()
    assert g.isfinite().all()
    # A padded key is no measure of the others.
    k = torch.randn(5, 4, dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    long = k.clone()
    long[4] *= 1000
    for a, b in zip(transform(name, q, k, everyone(q), mask), transform(name, q, long, everyone(q), mask), strict=True):
        assert torch.equal(a[:4], b[:4])


def test_unknown_transform():
    x = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"transform: expected one of 'smyrf', .* got 'nope'"):
        transform("nope", x, x, everyone(x), everyone(x))


def test_cross_polytope_is_the_nearest_axis():
    x = torch.randn(2, 3, 9, 5, dtype=torch.float64)
    rotations = torch.randn(3, 5, 4, dtype=torch.float64)
    columns = torch.tensor([4, 2])
    buckets = hashing.cross_polytope(x, rotations, columns)
    for b in range(2):
        for h in range(3):
            for n in range(9):
                axes = []
                for c in range(int(columns[b])):
                    value = float(x[b, h, n] @ rotations[h, :, c])
                    axes += [value, -value]
                assert int(buckets[b, h, n]) == axes.index(max(axes))
