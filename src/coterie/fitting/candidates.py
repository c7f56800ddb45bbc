"""What is tried in every attention module unless a user says otherwise."""

from __future__ import annotations

import re
from itertools import chain

from torch import nn

from coterie.hosts import HfHost, Host
from coterie.mechanisms import ImprovedClustered, Local, Longformer, Mechanism, NearFar, Smyrf

_POSITIONS = re.compile(r"(^|[._])(pos|positions?|positional|rope|rotary)([._]|$)", re.IGNORECASE)


def default_candidates(seed: int = 0, *, ordered: bool = True) -> list[Mechanism]:
    """Mechanisms of several sizes.

    Args:
        ordered: whether tokens that stand side by side belong together; windows are for them alone.
    """
    found: list[Mechanism] = [
        *(NearFar(near=near, seed=seed) for near in (16, 32, 64, 128, 256, 512, 1024)),
        *(NearFar(near=near, chunk=64, seed=seed) for near in (16, 48, 96)),
        Smyrf(rounds=1, cluster_size=32, seed=seed),
        *(Smyrf(rounds=rounds, cluster_size=64, seed=seed) for rounds in (2, 8)),
        ImprovedClustered(clusters=100, topk=64, space="euclidean", seed=seed),
    ]
    if ordered:
        found += [Local(window=window) for window in (64, 128, 256)]
        found += [Longformer(window=window, global_tokens=4) for window in (256, 512)]
    return found


def positions_matter(host: Host) -> bool:
    """Whether anything in a model says that the order of its tokens means something: it is Hugging Face's, or it has
    a table of positions or a rotary embedding by its name. A model over sets has none, and its rows come in any order.

    Example:
        >>> import torch
        >>> from coterie.fitting.candidates import positions_matter
        >>> from coterie.hosts import host_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        >>> positions_matter(host_of(model))
        False
        >>> model.pos_embed = torch.nn.Parameter(torch.zeros(1, 100, 8))
        >>> positions_matter(host_of(model))
        True
    """
    if isinstance(host, HfHost):
        return True
    model: nn.Module = host.model
    named = chain(model.named_parameters(), model.named_buffers(), model.named_modules())
    return any(_POSITIONS.search(name) for name, _ in named)
