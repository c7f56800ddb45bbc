"""How alike the clusters of two heads are, over the heads and layers of a model.

The adjusted Rand index of two clusterings (Hubert and Arabie, 1985) counts the pairs of tokens that both put together:

    ARI = (T − E) / ((A + B) / 2 − E),   E = A · B / P

where A and B are the pairs that the one and the other put together, T those that both do, and P all pairs. It is 1 for
the same clusters whatever they are called, and 0 on average for clusters that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coterie.analysis.memberships import groups_of
from coterie.checks import expect, expect_type
from coterie.hosts import watch_dense
from coterie.mechanisms import AtLeast, Fixed, Full, Local, Longformer, Strided, TopK, as_mechanism
from coterie.observe import Seen
from coterie.tables import Table, output, paragraph

Head = tuple[str, int]  # an attention module, and which of its heads
_PLACED = (Fixed, Full, Local, Longformer, Strided, TopK)  # groups of theirs are places, all, or one query each


def head_groups(
    model: Any, batch: Any, mechanism: Any, *, within: str = "", round: int = 0, sample: int = 0
) -> dict[Head, Tensor]:
    """The group of each query in every head of a model, while it attends densely: (N,) int64, −1 for none.

    Args:
        model, batch: as in `coterie.fit`.
        mechanism: whose groups; one that groups queries by what they are, and not by where.
        within: only modules below this name, such as "encoder".
        round, sample: which.

    Example:
        >>> import torch
        >>> from coterie.analysis import head_groups
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> found = head_groups(model, torch.randn(1, 50, 32), "clustered:clusters=5")
        >>> len(found), found["layers.1.self_attn", 3].shape
        (8, torch.Size([50]))
    """
    chosen, found = as_mechanism(mechanism), dict[Head, Tensor]()
    grouping = not isinstance(chosen.inner if isinstance(chosen, AtLeast) else chosen, _PLACED)
    expect(grouping, "mechanism", "one that groups queries by what they are", chosen)
    known: list[str] = []

    def look(name: str, seen: Seen) -> None:
        known.append(name)
        if within and not f"{name}.".startswith(f"{within}."):
            return
        plan = chosen.plan(seen.q, seen.k, **seen.planning())
        for head in range(plan.heads):
            found[name, head] = groups_of(plan, round=round, head=head, sample=sample)

    watch_dense(model, batch, look)
    expect(bool(found), "within", f"a name that begins one of {', '.join(known)}", repr(within))
    return found


def adjusted_rand(first: Tensor, second: Tensor) -> float:
    """The adjusted Rand index of two clusterings of the same tokens; those that either leaves out do not count.

    NaN if fewer than two tokens are left.

    Example:
        >>> import torch
        >>> from coterie.analysis import adjusted_rand
        >>> adjusted_rand(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 3, 3]))
        1.0
    """
    for name, labels in (("first", first), ("second", second)):
        expect_type(isinstance(labels, Tensor), name, "a tensor", type(labels).__name__)
        expect(labels.ndim == 1, name, "one group for each token, (N,)", tuple(labels.shape))
    expect(len(first) == len(second), "second", f"a group for each of the {len(first)} tokens", len(second))
    from sklearn.metrics import adjusted_rand_score

    both = (first >= 0) & (second >= 0)
    if int(both.sum()) < 2:
        return float("nan")
    return float(adjusted_rand_score(first[both].cpu().numpy(), second[both].cpu().numpy()))


@dataclass(frozen=True)
class Agreement:
    """The adjusted Rand index of every two heads.

    Attributes:
        heads: module and head, layer by layer.
        index: (heads, heads) float64, 1 on the diagonal.
    """

    heads: tuple[Head, ...]
    index: Tensor

    @property
    def modules(self) -> tuple[str, ...]:
        """Each once, in their order."""
        return tuple(dict.fromkeys(module for module, _ in self.heads))

    def between(self, first: str, second: str) -> float:
        """The mean over the heads of two modules; of a module with itself, over every two different heads. Heads that
        group nobody do not count."""
        pairs = [
            float(self.index[i, j])
            for i, (a, _) in enumerate(self.heads)
            for j, (b, _) in enumerate(self.heads)
            if (a, b) == (first, second) and i != j and not self.index[i, j].isnan()
        ]
        return sum(pairs) / len(pairs) if pairs else float("nan")

    def layers(self) -> Tensor:
        """`between` of every two modules, (modules, modules)."""
        names = self.modules
        return torch.tensor([[self.between(a, b) for b in names] for a in names], dtype=torch.float64)

    def of(self, module: str) -> Tensor:
        """The part of one module: its heads among each other."""
        expect(module in self.modules, "module", f"one of {', '.join(self.modules)}", repr(module))
        mine = [i for i, (name, _) in enumerate(self.heads) if name == module]
        return self.index[mine][:, mine]

    def closest(self, count: int = 5) -> list[tuple[Head, Head, float]]:
        """The pairs of different heads that agree most."""
        rows = range(len(self.heads))
        pairs = [(float(self.index[i, j]), i, j) for i in rows for j in rows if i < j]
        known = sorted((pair for pair in pairs if pair[0] == pair[0]), key=lambda pair: -pair[0])
        return [(self.heads[i], self.heads[j], value) for value, i, j in known[:count]]

    def describe(self) -> str:
        """In a few lines: within layers, from a layer to the next, and between layers that are further apart."""
        names, layers = self.modules, self.layers()
        inside = [float(layers[i, i]) for i in range(len(names))]
        following = [float(layers[i, j]) for i, j in pairwise(range(len(names)))]
        apart = [float(layers[i, j]) for i in range(len(names)) for j in range(i + 2, len(names))]
        lines = [f"{len(self.heads)} heads of {len(names)} layers; mean adjusted Rand index of two heads"]
        for words, values in (
            ("of one layer", inside),
            ("of a layer and the next", following),
            ("of layers further apart", apart),
        ):
            known = [value for value in values if value == value]  # a layer of one head has no pairs
            if known:
                lines.append(f"  {words}: {sum(known) / len(known):.3f}")
        for (a, i), (b, j), value in self.closest(3):
            lines.append(f"  most alike: {a} head {i} and {b} head {j}, {value:.3f}")
        return "\n".join(lines)

    def table(self) -> Table:
        """Layers against layers."""
        names, layers = self.modules, self.layers().tolist()
        rows = [[name, *(f"{value:.3f}" for value in row)] for name, row in zip(names, layers, strict=True)]
        return Table(["layer", *map(str, range(len(names)))], rows)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return output(self.table().html(), *map(paragraph, self.describe().splitlines()))


def agreement(labels: Mapping[Head, Tensor]) -> Agreement:
    """The adjusted Rand index of every two heads of a model.

    Args:
        labels: what `head_groups` found; all must have as many tokens.

    Example:
        >>> import torch
        >>> from coterie.analysis import agreement
        >>> same = torch.tensor([0, 0, 1, 1, 2, 2])
        >>> found = agreement({("one", 0): same, ("one", 1): same, ("two", 0): same % 2})
        >>> found.between("one", "one"), round(found.between("one", "two"), 3)
        (1.0, 0.444)
    """
    expect(len(labels) > 0, "labels", "at least one head", "none")
    lengths = sorted({len(each) for each in labels.values()})
    expect(len(lengths) == 1, "labels", "as many tokens in every head (choose modules by within=)", lengths)
    each = list(labels.values())
    index = torch.eye(len(each), dtype=torch.float64)
    for i in range(len(each)):
        for j in range(i):
            index[i, j] = index[j, i] = adjusted_rand(each[i], each[j])
    return Agreement(tuple(labels), index)


# --- along time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Tokens from `start` up to, but not with, `end`, and what they are: a word, a phone."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Following:
    """How clusters follow segments, over the tokens that are in a segment and in a cluster.

    Attributes:
        agreement: the adjusted Rand index of clusters and segments: 1 if each segment is a cluster of its own.
        by_name: the same, segments of one name taken together: 1 if clusters are names, wherever in time.
        at_boundaries: how often the cluster changes from a segment's last token to the next one's first.
        inside: how often it changes between neighbours inside a segment.
    """

    agreement: float
    by_name: float
    at_boundaries: float
    inside: float


def following(labels: Tensor, segments: Sequence[Segment]) -> Following:
    """How the clusters of one head follow segments in time.

    Args:
        labels: the group of each token, −1 for none; see `groups_of`.
        segments: in their order, none of which overlap.

    Example:
        >>> import torch
        >>> from coterie.analysis import Segment, following
        >>> words = [Segment(0, 3, "to"), Segment(3, 5, "be"), Segment(5, 7, "to")]
        >>> following(torch.tensor([0, 0, 0, 1, 1, 0, 0]), words)
        Following(agreement=0.442..., by_name=1.0, at_boundaries=1.0, inside=0.0)
    """
    check_segments(segments, len(labels))
    names = {name: number for number, name in enumerate(dict.fromkeys(each.name for each in segments))}
    which, called = torch.full((2, len(labels)), -1)
    for number, each in enumerate(segments):
        which[each.start : each.end] = number
        called[each.start : each.end] = names[each.name]
    which, called, labels = which.cpu(), called.cpu(), labels.cpu()
    known = (labels >= 0) & (which >= 0)
    pairs = known[1:] & known[:-1]
    changes, borders = labels[1:] != labels[:-1], which[1:] != which[:-1]
    return Following(
        adjusted_rand(labels, which),
        adjusted_rand(labels, called),
        _share(changes, pairs & borders),
        _share(changes, pairs & ~borders),
    )


def check_segments(segments: Sequence[Segment], tokens: int) -> None:
    """They must lie in order within the tokens.

    >>> check_segments([Segment(0, 4, "a"), Segment(3, 9, "b")], 9)
    Traceback (most recent call last):
    ValueError: segments: expected each to begin where the one before ends, or later, got 'b' from 3 to 9 after 4
    """
    expect(len(segments) > 0, "segments", "at least one", "none")
    end = 0
    for each in segments:
        where = f"{each.name!r} from {each.start} to {each.end}"
        expect(
            each.start >= end, "segments", "each to begin where the one before ends, or later", f"{where} after {end}"
        )
        expect(each.start < each.end <= tokens, "segments", f"some of the {tokens} tokens in each", where)
        end = each.end


def _share(of: Tensor, among: Tensor) -> float:
    return float(of[among].double().mean()) if bool(among.any()) else float("nan")


__all__ = [
    "Agreement",
    "Following",
    "Head",
    "Segment",
    "adjusted_rand",
    "agreement",
    "check_segments",
    "following",
    "head_groups",
]
