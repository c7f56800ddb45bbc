"""What a BigGAN is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from coterie.checks import expect, expect_int

# Channels between the blocks of a generator, in multiples of ch (BigGAN's appendix B; 32² as in its CIFAR model).
WIDTHS = {
    32: (4, 4, 4, 4),
    64: (16, 16, 8, 4, 2),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
    512: (16, 16, 8, 8, 4, 2, 1, 1),
}
RESOLUTIONS = tuple(WIDTHS)
BOTTOM = 4  # the first feature map is 4×4


@dataclass(frozen=True)
class Config:
    """A generator and its discriminator. The defaults are those of SMYRF's CelebA-HQ at 128².

    Args:
        resolution: of the images.
        ch: channels where the generator is narrowest.
        dim_z: numbers that an image is made of.
        classes: 1 if there are none.
        attention: resolutions in the generator with an attention block.
        d_attention: the same of the discriminator, which has none at full resolution.
        shared_dim: length of the class embedding that all batch norms share; 0 if each has its own.
        hierarchical: give each block its own part of z, which needs a shared embedding.
    """

    resolution: int = 128
    ch: int = 96
    dim_z: int = 120
    classes: int = 1
    attention: tuple[int, ...] = (128,)
    d_attention: tuple[int, ...] = ()
    shared_dim: int = 0
    hierarchical: bool = False

    def __post_init__(self) -> None:
        expect(self.resolution in RESOLUTIONS, "resolution", f"one of {_listed(RESOLUTIONS)}", self.resolution)
        for name in ("ch", "dim_z", "classes"):
            expect_int(name, getattr(self, name), at_least=1)
        expect_int("shared_dim", self.shared_dim, at_least=0)
        self._check_attention("attention", self.attention, self.up_resolutions, self.widths[1:])
        self._check_attention("d_attention", self.d_attention, self.down_resolutions, self.down_widths[1:])
        expect(
            not self.hierarchical or self.shared_dim > 0, "hierarchical", "False without shared_dim", self.hierarchical
        )
        divides = self.dim_z % self.slots == 0
        expect(divides, "dim_z", f"a multiple of {self.slots}, the parts of a hierarchical z", self.dim_z)

    def _check_attention(self, name: str, asked: tuple[int, ...], there: tuple[int, ...], widths: Any) -> None:
        for resolution in asked:
            expect(resolution in there, name, f"some of {_listed(sorted(set(there)))}", resolution)
            width = widths[there.index(resolution)]
            expect(width >= 8, name, f"at least 8 channels at {resolution}² (a larger ch)", f"{width} channels")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels into the first block of the generator, and out of each."""
        return tuple(self.ch * width for width in WIDTHS[self.resolution])

    @property
    def up_resolutions(self) -> tuple[int, ...]:
        """Of what comes out of each block of the generator."""
        return tuple(BOTTOM * 2 ** (i + 1) for i in range(len(self.widths) - 1))

    @property
    def down_widths(self) -> tuple[int, ...]:
        """Channels of the image, and out of each block of the discriminator."""
        if self.resolution == 32:
            return (3, *self.widths)
        up = self.widths[:0:-1]  # the generator's, the other way round
        return (3, self.ch, *up) if self.resolution == 64 else (3, *up, self.widths[0])

    @property
    def down_resolutions(self) -> tuple[int, ...]:
        """Of what comes out of each block of the discriminator; the last ones keep the size."""
        if self.resolution == 32:
            return (16, 8, 8, 8)
        halvings = [self.resolution // 2 ** (i + 1) for i in range(len(self.down_widths) - 2)]
        return (*halvings, halvings[-1])

    @property
    def slots(self) -> int:
        """How many parts z has."""
        return len(self.widths) if self.hierarchical else 1

    @property
    def chunk(self) -> int:
        """How many numbers of z each part has."""
        return self.dim_z // self.slots

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Config:
        """From what `to_dict` gave."""
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return Config(**settings)


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
