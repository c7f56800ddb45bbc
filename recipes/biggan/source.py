"""Where a generator comes from: a folder of ours, of BigGAN-PyTorch's, or of pytorch-pretrained-biggan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.cli.inputs import UserError
from recipes.biggan import deep_weights, pretrained, published
from recipes.biggan.attention import attend_by
from recipes.biggan.published import Checkpoint


def load(folder: Path, suffix: str = "") -> Checkpoint:
    """What a folder holds, whichever form it has.

    Args:
        suffix: of BigGAN-PyTorch's files.
    """
    if pretrained.is_here(folder):
        return Checkpoint(pretrained.from_pretrained(folder), pretrained.discriminator_of(folder))
    if (folder / "pytorch_model.bin").exists():
        return Checkpoint(deep_weights.load(folder))  # type: ignore[arg-type]
    if any(folder.glob("G*.pth")):
        return published.load(folder, suffix)
    raise UserError(
        f"{folder} holds no generator: expected model.safetensors, G.pth (BigGAN-PyTorch), or pytorch_model.bin "
        "(pytorch-pretrained-biggan)."
    )


def generator(folder: Path, mechanism: str | None, suffix: str = "") -> Any:
    """The generator to look at, in eval mode: the moving average if there is one.

    Args:
        mechanism: what its attention runs; what it was stored with by default.
    """
    found = load(folder, suffix)
    model = (found.ema or found.g).eval()
    return model if mechanism is None else attend_by(model, mechanism)
