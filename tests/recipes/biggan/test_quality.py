"""How images are judged: against definitions, and on images that are made worse."""

import sys
import warnings

import numpy as np
import pytest
import torch
from recipes.biggan.images import Images

from coterie.cli.inputs import UserError
from recipes.biggan import inception, quality, tables
from tests.recipes.biggan.conftest import discs


def as_images(pixels):
    found = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
    return Images(found, torch.zeros(len(found), dtype=torch.long), ["image"])


def test_the_distance_is_that_of_two_normal_distributions():
    """With covariances that do not commute, against scipy's matrix square root."""
    from scipy.linalg import sqrtm

    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(300, 5)) @ draw.normal(size=(5, 5)) + draw.normal(size=5) for _ in range(2))
    one, two = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    apart = a.mean(0) - b.mean(0)
    want = apart @ apart + np.trace(one + two - 2 * sqrtm(one @ two).real)
    assert quality.frechet(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(want, rel=1e-6)
    assert quality.frechet(torch.from_numpy(a), torch.from_numpy(a)) == pytest.approx(0, abs=1e-8)


def test_precision_and_recall_against_loops():
    draw = np.random.default_rng(1)
    real, fake = draw.normal(size=(40, 3)), 0.5 * draw.normal(size=(31, 3))

    def share(points, centres):
        inside = 0
        for point in points:
            for centre in centres:
                others = sorted(np.linalg.norm(centre - other) for other in centres)
                inside += np.linalg.norm(point - centre) <= others[3]
                if np.linalg.norm(point - centre) <= others[3]:
                    break
        return inside / len(points)

    precision, recall = quality.precision_recall(torch.from_numpy(real), torch.from_numpy(fake))
    assert (precision, recall) == pytest.approx((share(fake, real), share(real, fake)))
    assert precision > recall  # it draws only what is common


def test_worse_images_are_further_away():
    train, test = as_images(discs(160, seed=0)), as_images(discs(64, seed=1))
    network = quality.train(train, 60)
    real = quality.describe(network, test)
    draw = np.random.default_rng(0)
    noisy = np.clip(discs(64, seed=2) + draw.normal(0, 60, (64, 32, 32, 3)), 0, 255).astype(np.uint8)
    few = np.repeat(discs(4, seed=3), 16, 0)
    good, noise, collapsed = (
        quality.judge(real, quality.describe(network, as_images(each))) for each in (discs(64, seed=4), noisy, few)
    )
    assert good.distance < noise.distance
    assert good.distance < collapsed.distance
    assert good.recall > collapsed.recall
    again = quality.train(train, 60)
    assert torch.equal(quality.describe(again, test), real)  # by seed
    large = as_images(discs(2, 64))
    assert quality.describe(network, large).shape == (2, quality.FEATURES)


# --- FID and KID ------------------------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """Called as Inception's file is."""

    def forward(self, x: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x.float() / 255, 2).flatten(1)


def test_fid_and_kid_by_torchmetrics(tmp_path):
    pytest.importorskip("torchmetrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Tiny()).save(str(tmp_path / "inception.pt"))
    real, same, dark = discs(40, seed=0), discs(40, seed=1), discs(40, seed=2) // 4
    near = inception.fid_and_kid(tmp_path / "inception.pt", as_images(real), as_images(same))
    far = inception.fid_and_kid(tmp_path / "inception.pt", as_images(real), as_images(dark))
    assert near["fid"] < far["fid"]
    assert near["kid"] < far["kid"]
    features = [Tiny()(as_images(each).pixels).double() for each in (real, dark)]
    assert far["fid"] == pytest.approx(quality.frechet(*features), rel=1e-3)


def test_what_fid_needs(tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"--inception .*x\.pt is not Inception as TorchScript"):
        inception.Inception(tmp_path / "x.pt")
    monkeypatch.setitem(sys.modules, "torchmetrics.image", None)
    with pytest.raises(UserError, match="pip install torchmetrics"):
        inception.fid_and_kid(tmp_path / "x.pt", as_images(discs(2)), as_images(discs(2)))


@pytest.mark.parametrize("measured", [False, True])
def test_fid_and_kid_are_in_the_table_where_they_were_measured(measured):
    judged = {"distance": 1.0, "precision": 0.5, "recall": 0.25} | ({"fid": 12.5, "kid": 0.75} if measured else {})
    result = {"trained": "dense", "seed": 0, "quality": {"dense": judged}, "pairs": 1.0, "seconds_per_step": 2.0}
    floor = {"distance": 0.1, "precision": 0.9, "recall": 0.8}
    _, columns, rows = tables.trained_with([{**result, "variety": [[0, 0.5]]}], floor)
    assert [len(row) for row in rows] == [len(columns)] * 2
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [row["least variety"] for row in found] == ["50%", "100%"]
    assert found[0].get("FID") == ("12.500" if measured else None)
    assert found[0].get("KID") == ("0.750" if measured else None)


def test_precision_far_from_zero():
    """Products of large numbers lose the digits that distances are made of."""
    real, fake = (each + 3000 for each in (torch.randn(60, 5), 1.3 * torch.randn(70, 5)))
    near = quality.precision_recall(real.double() - 3000, fake.double() - 3000)
    assert quality.precision_recall(real, fake) == near
