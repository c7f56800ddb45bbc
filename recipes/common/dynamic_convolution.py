"""Dynamic convolution (Wu et al., 2019), to be compared with attention. It is none, so it is no part of the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.checks import check_token_mask, expect, expect_int


class DynamicConvolution(nn.Module):
    """A convolution whose kernel each position makes for itself, one for every head ("Pay Less Attention with
    Lightweight and Dynamic Convolutions"). With z = GLU(W_in·x) and w_i = softmax(W_k·z_i) over the taps of a head:

        out_i = W_out · Σ_{t=1}^{kernel} w_i[t] · z_{i + t − ⌈(kernel + 1)/2⌉}

    Causal, the last tap is at i: z_{i + t − kernel}. Positions outside, and padding, count as 0. O(N·kernel).

    Args:
        width: of the rows.
        heads: channels of a head share a kernel.
        kernel: taps.

    Example:
        >>> DynamicConvolution(16, 4, kernel=7)(torch.randn(2, 30, 16)).shape
        torch.Size([2, 30, 16])
    """

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        for name, size in (("width", width), ("heads", heads), ("kernel", kernel)):
            expect_int(name, size, at_least=1)
        expect(width % heads == 0, "heads", f"a divisor of the width, {width}", heads)
        self.heads, self.kernel = heads, kernel
        self.enter = nn.Linear(width, 2 * width)
        self.taps = nn.Linear(width, heads * kernel, bias=False)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Rows (B, N, width) to rows of the same shape; True in the mask (B, N) is padding, which gives 0."""
        expect(x.ndim == 3, "x", "shape (batch, length, width)", tuple(x.shape))
        batch, length = x.shape[:2]
        if key_padding_mask is not None:
            check_token_mask("key_padding_mask", key_padding_mask, (batch, length), x.device, real=False)
            x = x.masked_fill(key_padding_mask[..., None], 0)
        z = F.glu(self.enter(x))
        if key_padding_mask is not None:
            z = z.masked_fill(key_padding_mask[..., None], 0)
        weights = self.taps(z).unflatten(-1, (self.heads, 1, self.kernel)).softmax(-1)
        before = self.kernel - 1 if is_causal else self.kernel // 2  # ⌈(kernel + 1)/2⌉ − 1
        padded = F.pad(z, (0, 0, before, self.kernel - 1 - before)).unflatten(-1, (self.heads, -1))
        found = torch.zeros_like(z).unflatten(-1, (self.heads, -1))
        for tap in range(self.kernel):
            found = found + weights[..., tap] * padded[:, tap : tap + length]
        rows: Tensor = self.leave(found.flatten(2))
        return rows if key_padding_mask is None else rows.masked_fill(key_padding_mask[..., None], 0)


class DynamicConvolutionLayer(nn.Module):
    """An encoder layer with a dynamic convolution in the place of attention: norms first, as in our encoders."""

    def __init__(self, width: int, heads: int, feedforward: int, kernel: int) -> None:
        super().__init__()
        self.mix = DynamicConvolution(width, heads, kernel)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, feedforward), nn.Linear(feedforward, width)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Rows (B, N, width) to rows of the same shape."""
        x = x + self.mix(self.norm1(x), key_padding_mask, is_causal)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))
