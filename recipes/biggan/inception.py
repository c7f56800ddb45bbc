"""FID and KID, by torchmetrics, if Inception's weights are at hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.cli.inputs import UserError
from recipes.biggan.images import Images

_BATCH = 32


class Inception(nn.Module):
    """The TorchScript file `inception-2015-12-05.pt` of StyleGAN's authors: images in uint8 → 2,048 features."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.network = torch.jit.load(str(file), map_location="cpu").eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"--inception {file} is not Inception as TorchScript (inception-2015-12-05.pt).") from error

    def forward(self, x: Tensor) -> Tensor:
        """As the file wants it called."""
        return self.network(x, return_features=True)


def fid_and_kid(file: Path, real: Images, fake: Images) -> dict[str, float]:
    """Both distances."""
    metrics = _torchmetrics()
    inception = Inception(file)
    fid = metrics.FrechetInceptionDistance(feature=inception)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that features take memory
        kid = metrics.KernelInceptionDistance(feature=inception, subset_size=min(1000, len(real), len(fake)))
    for images, is_real in ((real, True), (fake, False)):
        for some in images.pixels.split(_BATCH):
            fid.update(some, real=is_real)
            kid.update(some, real=is_real)
    torch.manual_seed(0)  # KID draws subsets
    return {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}


def _torchmetrics() -> Any:
    try:
        from torchmetrics.image import fid, kid
    except ImportError as error:
        raise UserError("--inception needs a package that is missing: pip install torchmetrics.") from error

    class Both:
        FrechetInceptionDistance = fid.FrechetInceptionDistance
        KernelInceptionDistance = kid.KernelInceptionDistance

    return Both
