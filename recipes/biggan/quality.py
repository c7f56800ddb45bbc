"""How good generated images are, in the features of a small network that was trained on the same images.

This is no FID: that is measured in the features of Inception, trained on ImageNet (`inception.py`). Figures of two
studies compare only if the images, the network's seed and the number of images are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.biggan.draws import Order
from recipes.biggan.images import Images
from recipes.common.draws import begin_step

FEATURES = 48
_NEAR = 3  # neighbours that a ball around an image reaches (Kynkäänniemi et al. 2019)
_BATCH = 64
_DAMAGES = 5  # none among them
_Tick = Callable[[], None]


class Quality(NamedTuple):
    """Of generated images beside real ones that no network was trained on."""

    distance: float  # Fréchet distance of the features, each scaled to a variance of 1 over real images
    precision: float  # share of generated images that lie among real ones
    recall: float  # share of real images that lie among generated ones


class Features(nn.Module):
    """An encoder whose code is the features: it must give the image back, which takes what is in it, and say how the
    image was damaged if it was, which takes how it looks. It looks at images at 32², whatever they come in."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96)
        down: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            down += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.ReLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(widths[-1] * 16, FEATURES))
        up: list[nn.Module] = [nn.Linear(FEATURES, widths[-1] * 16), nn.ReLU(), nn.Unflatten(1, (widths[-1], 4, 4))]
        for inputs, outputs in pairwise(widths[::-1]):
            up += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.ReLU()]
        self.decoder = nn.Sequential(*up[:-1])
        self.damage = nn.Linear(FEATURES, _DAMAGES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("std", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """Images in [−1, 1] → (count, 48)."""
        return (self.encoder(_small(x)) - self.mean) / self.std


def damaged(x: Tensor, how: Tensor) -> Tensor:
    """Images (count, 3, 32, 32), each as it is (0), noisy (1), blurred (2), of coarse pixels (3), or its quarters in
    another order (4)."""
    blurred = F.avg_pool2d(F.pad(x, (2, 2, 2, 2), mode="replicate"), 5, 1)
    coarse = F.interpolate(F.avg_pool2d(x, 4), scale_factor=4, mode="nearest")
    quarters = torch.cat([x[..., 16:, :], x[..., :16, :]], -2)
    quarters = torch.cat([quarters[..., 16:], quarters[..., :16]], -1)
    every = torch.stack([x, x + 0.3 * torch.randn_like(x), blurred, coarse, quarters])
    return every[how, torch.arange(len(x))]


def train(images: Images, steps: int, seed: int = 0, tick: _Tick = lambda: None) -> Features:
    """Such a network."""
    begin_step(seed, -1)
    network = Features()
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    order = Order(len(images), seed)
    for step in range(steps):
        how = torch.randint(_DAMAGES, (_BATCH,))
        x = damaged(_small(images.at(order.take(step * _BATCH, _BATCH))[0]), how)
        code = network.encoder(x)
        loss = F.mse_loss(network.decoder(code), x) + 0.1 * F.cross_entropy(network.damage(code), how)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        tick()
    network.eval().requires_grad_(False)
    found = describe(network, images)
    network.mean.copy_(found.mean(0))
    network.std.copy_(found.std(0).clamp(min=1e-6))
    return network


@torch.no_grad()
def describe(network: nn.Module, images: Images) -> Tensor:
    """The features of all images, (count, 48)."""
    rows = torch.arange(len(images)).split(256)
    return torch.cat([network(images.at(some)[0]) for some in rows])


def judge(real: Tensor, fake: Tensor) -> Quality:
    """From the features of real and generated images."""
    return Quality(frechet(real, fake), *precision_recall(real, fake))


def frechet(a: Tensor, b: Tensor) -> float:
    """‖μ_a − μ_b‖² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½), between normal distributions with these means and covariances.

    >>> x = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet(x, x + 2), 6)
    12.0
    """
    x, y = (np.asarray(each.double().numpy()) for each in (a, b))
    apart = x.mean(0) - y.mean(0)
    one, two = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    # tr (Σ_a Σ_b)^½ is the sum of the roots of the eigenvalues of S Σ_b S, where S² = Σ_a: all are real and ≥ 0.
    values, vectors = np.linalg.eigh(one)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    between = np.sqrt(np.linalg.eigvalsh(root @ two @ root).clip(min=0)).sum()
    return float(apart @ apart + np.trace(one) + np.trace(two) - 2 * between)


def precision_recall(real: Tensor, fake: Tensor, near: int = _NEAR) -> tuple[float, float]:
    """How many generated images lie within some real image's distance to its 3rd neighbour, and the other way round.

    >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    >>> precision_recall(x, x), precision_recall(x, x + 100)
    ((1.0, 1.0), (0.0, 0.0))
    """
    return _inside(fake, real, near), _inside(real, fake, near)


def _inside(points: Tensor, centres: Tensor, near: int) -> float:
    points, centres = points.double(), centres.double()  # cdist multiplies, and loses digits far from 0
    reach = torch.cdist(centres, centres).kthvalue(near + 1, 1).values  # the nearest of all is itself
    return float((torch.cdist(points, centres) <= reach).any(1).double().mean())


def _small(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 32 else F.interpolate(x, (32, 32), mode="area")
