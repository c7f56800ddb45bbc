"""Models that call `torch.nn.functional.scaled_dot_product_attention`: their calls are caught, named and replaced."""

from coterie.sdpa.replacing import Replaced, replacing

__all__ = ["Replaced", "replacing"]
