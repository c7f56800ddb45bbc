"""Modules that look like attention: what to say when none of them calls SDPA."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

_LIKE = re.compile(r"attention|attn", re.IGNORECASE)


def looks_like_attention(module: nn.Module | None) -> bool:
    """Whether a module's class is called so."""
    return module is not None and _LIKE.search(type(module).__name__) is not None


def never_called(who: str, like: Mapping[str, str]) -> str:
    """What is said of a model that calls no SDPA; `like` has the classes of modules that look like attention, by name.

    >>> from coterie.sdpa.looks import never_called
    >>> print(never_called("model", {"blocks.0.attn": "MyAttention"}))
    model never calls scaled_dot_product_attention: there is nothing to replace. What looks like attention:
    blocks.0.attn (MyAttention); coterie.nn.adapter teaches coterie.nn.swap how such a module attends.
    """
    said = f"{who} never calls scaled_dot_product_attention: there is nothing to replace. "
    if not like:
        return said + "No module looks like attention."
    listed = ", ".join(f"{name or 'the model itself'} ({kind})" for name, kind in like.items())
    return (
        f"{said}What looks like attention: {listed}; "
        "coterie.nn.adapter teaches coterie.nn.swap how such a module attends."
    )
