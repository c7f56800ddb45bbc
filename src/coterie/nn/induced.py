"""Induced set attention: everybody meets a few learned points, and through them everybody else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.checks import check_flag, check_token_mask, expect, expect_int, expect_type
from coterie.nn.multihead import MultiheadAttention


class AttentionBlock(nn.Module):
    """The Set Transformer's MAB: LayerNorm(H + rFF(H)), with H = LayerNorm(X + Multihead(X, Y, Y))."""

    def __init__(self, width: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.attend = MultiheadAttention(width, heads, batch_first=True, mechanism="full")
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, feedforward), nn.Linear(feedforward, width)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor | None = None) -> Tensor:
        """Let x (B, N, D) attend to the rows of y (B, M, D) that are not padding."""
        h = self.norm1(x + self.attend(x, y, y, key_padding_mask=padding)[0])
        rows: Tensor = self.norm2(h + self.linear2(torch.relu(self.linear1(h))))
        return rows


class InducedSetAttention(nn.Module):
    """The induced set attention block of the Set Transformer (ISAB, Lee et al., 2019). `points` learned rows I attend
    to the sequence, and the sequence attends to what they found:

        ISAB(X) = MAB(X, MAB(I, X)),   MAB(X, Y) = LayerNorm(H + rFF(H)),   H = LayerNorm(X + Multihead(X, Y, Y))

    O(N·points). It is a module and no mechanism, as it has parameters: it stands in the place of a whole encoder layer,
    feed-forward and norms included. A row's answer does not depend on the order of the others.

    As in `torch.nn`, True in a `key_padding_mask` (B, N) is padding: such rows are never read and give 0. `is_causal`
    is refused: every point mixes the future in.

    Args:
        embed_dim: of the rows.
        num_heads: of both attentions.
        points: how many learned rows.
        dim_feedforward: inner width of rFF; `embed_dim` by default.

    Example:
        >>> import coterie, torch
        >>> block = coterie.nn.InducedSetAttention(64, 4, points=16)
        >>> block(torch.randn(2, 300, 64)).shape
        torch.Size([2, 300, 64])
    """

    def __init__(self, embed_dim: int, num_heads: int, points: int = 32, dim_feedforward: int | None = None) -> None:
        super().__init__()
        feedforward = embed_dim if dim_feedforward is None else dim_feedforward
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "points": points, "dim_feedforward": feedforward}
        for name, size in sizes.items():
            expect_int(name, size, at_least=1)
        expect(embed_dim % num_heads == 0, "num_heads", f"a divisor of embed_dim, {embed_dim}", num_heads)
        self.points = nn.Parameter(torch.empty(points, embed_dim))
        nn.init.xavier_uniform_(self.points)
        self.gather = AttentionBlock(embed_dim, num_heads, feedforward)
        self.spread = AttentionBlock(embed_dim, num_heads, feedforward)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Rows (B, N, D) to rows of the same shape."""
        check_flag("is_causal", is_causal)
        expect(not is_causal, "is_causal", "False for induced points, which would mix the future in", True)
        expect_type(isinstance(x, Tensor), "x", "a tensor", type(x).__name__)
        width = self.points.shape[1]
        expect(x.ndim == 3 and x.shape[-1] == width, "x", f"shape (batch, length, {width})", tuple(x.shape))
        points = self.points.expand(x.shape[0], -1, -1)
        if key_padding_mask is None:
            rows: Tensor = self.spread(x, self.gather(points, x))
            return rows
        check_token_mask("key_padding_mask", key_padding_mask, (x.shape[0], x.shape[1]), x.device, real=False)
        padding = key_padding_mask[..., None]
        x = x.masked_fill(padding, 0)  # what stands there may be anything
        rows = self.spread(x, self.gather(points, x, key_padding_mask))
        return rows.masked_fill(padding, 0)
