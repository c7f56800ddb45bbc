import math

import pytest
import torch

from coterie import draws
from coterie.draws import Stream

CPU = torch.device("cpu")


def words(*values):
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of the Random123 distribution for philox4x32-10.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    found = draws.philox(words(*counter), seed=key[0] | (key[1] << 32))
    assert tuple(word.item() for word in found) == expected


def test_a_seed_may_be_a_tensor():
    plain = draws.normal(Stream.PROJECTION, (3, 4), seed=12345678901, device=CPU)
    tensor = draws.normal(Stream.PROJECTION, (3, 4), seed=torch.tensor(12345678901), device=CPU)
    assert torch.equal(plain, tensor)


def test_a_smaller_shape_is_a_corner_of_a_larger_one():
    large = draws.normal(Stream.ROTATION, (4, 5, 6), seed=3, layer=2, device=CPU)
    small = draws.normal(Stream.ROTATION, (2, 5, 3), seed=3, layer=2, device=CPU)
    assert torch.equal(large[:2, :, :3], small)


def test_streams_layers_and_seeds_differ():
    base = draws.normal(Stream.PROJECTION, (100,), seed=0, device=CPU)
    others = [
        draws.normal(Stream.ROTATION, (100,), seed=0, device=CPU),
        draws.normal(Stream.PROJECTION, (100,), seed=1, device=CPU),
        draws.normal(Stream.PROJECTION, (100,), seed=2**33, device=CPU),
        draws.normal(Stream.PROJECTION, (100,), seed=0, layer=1, device=CPU),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.3


def test_moments():
    normal = draws.normal(Stream.PROJECTION, (200_000,), seed=7, device=CPU)
    uniform = draws.uniform(Stream.STARTS, (200_000,), seed=7, device=CPU)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1) < 0.02
    assert abs((normal**4).mean() - 3) < 0.1
    assert uniform.min() > 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(uniform.var() - 1 / 12) < 0.002
    assert math.isfinite(float(normal.abs().max()))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
def test_dropout_keeps_its_share(p):
    index = torch.arange(300)
    seed = torch.tensor(5)
    kept = draws.keep_pairs(torch.zeros(()).long(), index[:, None], index[None, :], dropout_p=p, seed=seed)
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.005
