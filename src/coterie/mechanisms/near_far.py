"""NearFar: the best keys of a group of queries exactly, all others through the means of their clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.checks import expect, expect_int, expect_type
from coterie.mechanisms.base import Mechanism, StrictIfAsked, register
from coterie.plan import Means, Plan, Round
from coterie.planning.orders import Parts, ceil_div, compact
from coterie.planning.tokens import Tokens

_QUERIES, _KEYS = 4, 2  # "auto": √(4N) groups of queries, √(2N) clusters of keys
_SAMPLE = 16  # tokens a cluster that centroids are trained on
_REACH = 12  # the clusters that are searched hold so many times the keys that are wanted
_PER_GROUP = 12  # causal: queries of a chunk that share a group
_PER_MEAN = 32  # causal: keys of a finished chunk that share a mean
_LEVEL = 32  # causal: blocks of one size before blocks of twice the size follow


class Groups(NamedTuple):
    """Groups of queries, and what stands for each when near keys are picked."""

    order: Tensor  # (B, H, Nq) int32
    offsets: Tensor  # (B, H, G + 1) int32
    queries: Tensor  # (B, H, G, D) float64


class Far(NamedTuple):
    """Clusters of keys, and which of them the queries of a chunk see: the last `seen` (B, C) of `visible` (B, C, V).

    `keys` (B, C): how many keys these hold.
    """

    clusters: Means
    visible: Tensor
    seen: Tensor
    keys: Tensor


@register("near-far")
@dataclass(frozen=True)
class NearFar(Mechanism):
    """Near–far attention: queries in k-means groups, keys in k-means clusters. A group's mean query picks the `near`
    keys that it likes best, and its members meet them exactly; every other key is met through its cluster g, as one
    key with the cluster's mean key k̄_g and mean value v̄_g that counts for the n_g keys that were not picked:

        out_i = [Σ_{j∈near} e^{s_ij} v_j + Σ_g n_g e^{scale·q_i·k̄_g} v̄_g] / [the same sums without v]

    No key is dropped, and no training is needed. The gradient flows through q, k, v and the means. Centroids are
    trained on at most 16 tokens a cluster. With "auto" sizes, √(4N) groups and √(2N) clusters, it costs O(N·√N·D).

    Causal: keys are cut into chunks. A query meets its own and the previous chunk exactly; of the older ones it meets
    the near keys that were picked for its group (about 12 queries of its chunk), and the others through the means of
    about 32 keys inside each finished chunk. As chunks recede they are merged: after 32 chunks come 32 blocks of 2
    chunks with half as many means each, then 32 of 4 chunks with a quarter as many, and so on; at least one. Near keys
    are searched in the clusters whose mean or whose outlier (the key farthest from the mean) is liked best, until those
    hold 12·near keys. A query meets at most about 4·chunk + near + 33·log₂(N/chunk) rows, so it costs O(N·log N·D).
    Chunks are counted in real keys, so padding changes nothing.

    Causality: `mask`, since queries are grouped with later ones of their chunk; with `strict=True` it is `strict`:
    queries join the group of the previous chunk that they are nearest to (in the first chunk of a call there is one
    group, and its first query picks; so with a cache in front, results depend on which queries come together).

    Args:
        near: keys that a query meets exactly (besides its own and the previous chunk, if causal).
        query_clusters, key_clusters: how many, or "auto"; causal: in a chunk.
        iterations: of Lloyd's algorithm.
        chunk: keys of a chunk, if causal.
        strict: if causal, earlier outputs do not depend on later tokens in any way.
        seed: of the random draws.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> everyone_near = coterie.attention(q, k, v, coterie.NearFar(near=200))
        >>> torch.allclose(everyone_near, dense, atol=1e-5)
        True
        >>> coterie.attention(q, k, v, coterie.NearFar(near=16), is_causal=True).shape
        torch.Size([1, 4, 200, 16])
    """

    near: int = 64
    query_clusters: int | str = "auto"
    key_clusters: int | str = "auto"
    iterations: int = 3
    chunk: int = 128
    strict: bool = False
    seed: int = 0

    causality = StrictIfAsked()

    def check(self) -> None:
        expect_int("near", self.near, at_least=0)
        for name in ("query_clusters", "key_clusters"):
            value = getattr(self, name)
            if isinstance(value, str):
                expect(value == "auto", name, "an int ≥ 1 or 'auto'", repr(value))
            else:
                expect_int(name, value, at_least=1)
        expect_int("iterations", self.iterations, at_least=0)
        expect_int("chunk", self.chunk, at_least=1)
        expect_type(isinstance(self.strict, bool), "strict", "a bool", type(self.strict).__name__)
        expect_int("seed", self.seed, at_least=0, at_most=2**63 - 1)

    def build(self, tokens: Tokens) -> Plan:
        if tokens.causal:
            return self._causal(tokens)
        groups = self._query_groups(tokens)
        far, labels = self._key_clusters(tokens)
        met, bias = self._best_keys(tokens, groups, far, labels)
        return tokens.plan((self._meet(tokens, groups, far, met, bias),), key_means=far.clusters)

    # --- everybody sees everybody -------------------------------------------------------------------------------------

    def _query_groups(self, tokens: Tokens) -> Groups:
        labels, clusters = self._kmeans(tokens, tokens.raw_q, tokens.query_mask, self.query_clusters, _QUERIES)
        order, offsets = tokens.steps.group_by(labels, tokens.query_mask[:, None], clusters)
        return Groups(order, offsets, tokens.steps.cluster_means(tokens, labels, clusters).mul_(tokens.scale))

    def _key_clusters(self, tokens: Tokens) -> tuple[Far, Tensor]:
        labels, clusters = self._kmeans(tokens, tokens.raw_k, tokens.key_mask, self.key_clusters, _KEYS)
        order, offsets = tokens.steps.group_by(labels, tokens.key_mask[:, None], clusters)
        count = tokens.real_keys[1]
        used = self._count(self.key_clusters, count, _KEYS).clamp(max=clusters)
        visible = torch.arange(clusters, device=tokens.device) - (clusters - used)[:, None]
        means = Means(order, offsets[..., :-1], offsets[..., 1:])
        return Far(means, visible.clamp(min=0)[:, None], used[:, None], count[:, None]), labels

    def _best_keys(self, tokens: Tokens, groups: Groups, far: Far, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What each group meets, (B, H, G, V + near): all clusters, and its near keys; and their biases."""
        near, width = min(self.near, tokens.sizes.keys), far.visible.shape[-1]
        share = tokens.sizes.heads // tokens.sizes.key_heads
        picks = tokens.steps.top_keys(tokens, groups.queries, near)
        real = torch.arange(near, device=tokens.device) < far.keys[..., None, None]
        clusters = labels.repeat_interleave(share, 1)[:, :, None].expand(-1, -1, picks.shape[2], -1).gather(-1, picks)
        sizes = (far.clusters.stop - far.clusters.start).long().repeat_interleave(share, 1)[:, :, None]
        left = sizes.expand(-1, -1, picks.shape[2], -1).scatter_add(-1, clusters, -real.long().expand_as(clusters))
        shown = far.visible[:, None].expand(-1, left.shape[1], left.shape[2], width)
        met = torch.cat([shown + tokens.sizes.keys, picks], -1).to(torch.int32)
        bias = left.gather(-1, shown).double().log().to(torch.float32)
        return met, torch.nn.functional.pad(bias, (0, near))

    def _kmeans(self, tokens: Tokens, x: Tensor, mask: Tensor, wanted: int | str, share: int) -> tuple[Tensor, int]:
        """The cluster of each row, (B, heads, N), and how many there is room for."""
        clusters = max(1, math.ceil(math.sqrt(share * mask.shape[-1]))) if isinstance(wanted, str) else wanted
        counts = self._count(wanted, mask.sum(-1), share)[:, None]
        labels, _ = tokens.steps.kmeans(
            x,
            Parts.whole(mask),
            clusters,
            self.iterations,
            counts=counts,
            sample=_SAMPLE,
            **self._draws(tokens),
        )
        return labels, clusters

    def _draws(self, tokens: Tokens) -> dict[str, Any]:
        """Heads share their draws, so that heads with the same keys have the same clusters."""
        return {"seed": self.seed, "layer": tokens.layer, "per_head": False}

    @staticmethod
    def _count(wanted: int | str, length: Tensor, share: int) -> Tensor:
        """Clusters of sequences of these lengths: √(share·N), unless a number is wanted."""
        if isinstance(wanted, int):
            return torch.full_like(length, wanted)
        return (share * length.double()).sqrt().ceil().long().clamp(min=1)

    # --- the past alone -----------------------------------------------------------------------------------------------

    def _causal(self, tokens: Tokens) -> Plan:
        chunks = Chunks.of(tokens, self.chunk)
        stop = torch.minimum((chunks.place + 1) * self.chunk, chunks.num_keys[:, None])
        own = Round(
            query_order=tokens.per_head(chunks.order),
            query_offsets=tokens.per_head(chunks.offsets),
            key_order=tokens.per_head(chunks.keys),
            key_start=tokens.per_head(torch.minimum((chunks.place - 1).clamp(min=0) * self.chunk, stop)),
            key_stop=tokens.per_head(stop),
        )
        groups = self._groups_in_chunks(tokens, chunks)
        far = self._finished_chunks(tokens, chunks)
        near = min(self.near, tokens.sizes.keys)
        met, bias = tokens.steps.near_keys(
            tokens, groups.queries, far.clusters, far.visible.to(torch.int32), far.seen, near, max(1, near * _REACH)
        )
        return tokens.plan((own, self._meet(tokens, groups, far, met, bias)), key_means=far.clusters)

    def _in_chunk(self, wanted: int | str, each: int) -> int:
        """Clusters of a full chunk."""
        return ceil_div(self.chunk, each) if isinstance(wanted, str) else wanted

    def _groups_in_chunks(self, tokens: Tokens, chunks: Chunks) -> Groups:
        clusters = self._in_chunk(self.query_clusters, _PER_GROUP)
        if isinstance(self.query_clusters, str):  # a chunk may be longer than the sequence
            clusters = min(clusters, max(2, ceil_div(tokens.sizes.queries, _PER_GROUP)))
        parts = Parts(chunks.order, chunks.offsets[:, :-1], chunks.offsets[:, 1:])
        sizes = (parts.stop - parts.start).long()
        counts = (
            ((sizes + _PER_GROUP - 1) // _PER_GROUP).clamp(1, clusters)
            if isinstance(self.query_clusters, str)
            else torch.full_like(sizes, clusters)
        )
        labels, centroids = tokens.steps.kmeans(
            tokens.raw_q, parts, clusters, self.iterations, counts=counts, **self._draws(tokens)
        )
        total = parts.start.shape[1] * clusters
        if self.strict:  # what was learnt before stands for those that come after
            centroids, counts = self._before(tokens, chunks, centroids, counts, clusters)
            labels, _ = tokens.steps.kmeans(
                tokens.raw_q, parts, clusters, 0, counts=counts, centroids=centroids, **self._draws(tokens)
            )
        labels = labels + (chunks.of_query * clusters)[:, None]
        order, offsets = tokens.steps.group_by(labels, chunks.placed[:, None], total)
        if not self.strict:
            del centroids  # as large as the means
            labels = torch.where(chunks.placed[:, None], labels, 0)
            centroids = tokens.steps.cluster_means(tokens, labels, total, mask=chunks.placed)
        return Groups(order, offsets, centroids.mul_(tokens.scale))

    @staticmethod
    def _before(
        tokens: Tokens, chunks: Chunks, centroids: Tensor, counts: Tensor, clusters: int
    ) -> tuple[Tensor, Tensor]:
        """The centroids of the chunk before each; the first has none, and its first query stands for it."""
        if tokens.sizes.queries == 0:
            return centroids, counts
        shape = (*centroids.shape[:2], clusters, centroids.shape[-1])
        first = chunks.order[:, :1].long()[:, None, :, None].expand(-1, tokens.sizes.heads, -1, shape[-1])
        alone = tokens.raw_q.gather(2, first).to(torch.float64)
        alone = torch.where(alone.isfinite(), alone, 0).expand(shape)
        return (
            torch.cat([alone, centroids[:, :, :-clusters]], 2),
            torch.cat([torch.ones_like(counts[:, :1]), counts[:, :-1]], 1),
        )

    def _finished_chunks(self, tokens: Tokens, chunks: Chunks) -> Far:
        """The means of all finished blocks of chunks, and those that each chunk sees."""
        wanted, length = self._in_chunk(self.key_clusters, _PER_MEAN), tokens.sizes.keys
        total = max(2, ceil_div(length, self.chunk))  # 1 would be a graph of its own, here and below
        orders, edges, positions, visible, used = [], [], [], [], []
        older = chunks.older()
        stop, rows, level = older, 0, 0
        while True:
            size = 2**level
            blocks, clusters = ceil_div(total, size), ceil_div(wanted, size)
            if isinstance(self.key_clusters, str):  # a block may be longer than the sequence
                clusters = min(clusters, max(2, ceil_div(length * clusters, size * self.chunk)))
            order, offsets, last = self._blocks(tokens, chunks, size, blocks, clusters)
            orders.append(order)
            edges.append(offsets + level * length)
            positions.append(last)
            final = total <= _LEVEL * (2 * size - 1)
            # Where blocks of twice the size take over: a multiple of that size, _LEVEL blocks of each size away.
            begin = (older - _LEVEL * (2 * size - 1)).div(2 * size, rounding_mode="floor") * 2 * size
            begin = torch.zeros_like(stop) if final else begin.clamp(min=0)
            step = torch.arange(min(blocks, _LEVEL + 1), device=tokens.device)
            block = stop[..., None] // size - 1 - step
            inside = block * size >= begin[..., None]
            inside = inside & (block >= 0)
            each = torch.arange(clusters, device=tokens.device)
            visible.append((rows + block[..., None] * clusters + each).flatten(2))
            used.append(inside[..., None].expand(*inside.shape, clusters).flatten(2))
            rows += blocks * clusters
            stop, level = begin, level + 1
            if final:
                break
        ids, mask = torch.cat(visible, -1), torch.cat(used, -1)
        hidden_first = torch.argsort(mask.to(torch.uint8), dim=-1, stable=True)
        ids = torch.where(mask, ids, 0).gather(-1, hidden_first)
        means = Means(
            torch.cat(orders, -1),
            torch.cat([e[..., :-1] for e in edges], -1).to(torch.int32),
            torch.cat([e[..., 1:] for e in edges], -1).to(torch.int32),
            torch.cat(positions, -1),
        )
        return Far(means, ids, mask.sum(-1), older * self.chunk)

    def _blocks(
        self, tokens: Tokens, chunks: Chunks, size: int, blocks: int, clusters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k-means inside blocks of `size` chunks: members by cluster, their offsets, and the last position of each."""
        keys = size * self.chunk
        edges = torch.arange(blocks + 1, device=tokens.device) * keys
        edges = torch.minimum(edges, chunks.num_keys[:, None]).to(torch.int32)
        parts = Parts(chunks.keys, edges[:, :-1], edges[:, 1:])
        length = (parts.stop - parts.start).long()
        counts = torch.full_like(length, clusters)
        if isinstance(self.key_clusters, str):
            full = ceil_div(self._in_chunk(self.key_clusters, _PER_MEAN), size)
            counts = (length * full + keys - 1).div(keys, rounding_mode="floor").clamp(min=1)
        labels, _ = tokens.steps.kmeans(
            tokens.raw_k,
            parts,
            clusters,
            self.iterations,
            counts=counts,
            sample=_SAMPLE * _PER_MEAN,
            **self._draws(tokens),
        )
        block = chunks.rank_of_key.clamp(min=0) // keys
        order, offsets = tokens.steps.group_by(
            labels + (block * clusters)[:, None], tokens.key_mask[:, None], blocks * clusters
        )
        last = (parts.stop - 1).clamp(min=0).long()
        position = chunks.keys.gather(-1, last) if tokens.sizes.keys else last.to(torch.int32)
        position = position.repeat_interleave(clusters, 1)[:, None].expand(-1, tokens.sizes.key_heads, -1)
        return order, offsets, position

    # --- both ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def _meet(tokens: Tokens, groups: Groups, far: Far, met: Tensor, bias: Tensor) -> Round:
        """The round of groups that meet the clusters they see and their near keys."""
        count, width = groups.queries.shape[2], far.visible.shape[-1]
        near, share = met.shape[-1] - width, count // far.visible.shape[1]
        seen, keys = (x.repeat_interleave(share, 1) for x in (far.seen, far.keys))
        first = torch.arange(count, device=tokens.device) * met.shape[-1]
        return Round(
            query_order=groups.order,
            query_offsets=groups.offsets,
            key_order=met.flatten(2),
            key_start=tokens.per_head(first + width - seen),
            key_stop=tokens.per_head(first + width + keys.clamp(max=near)),
            bias=bias.flatten(2),
        )


class Chunks(NamedTuple):
    """Real keys cut into chunks, and the queries of each chunk.

    Chunk c of the queries is the one whose last visible key is in chunk `place` of the keys. A query that sees no key
    has no place.
    """

    keys: Tensor  # (B, Nk) int32, real keys in order
    num_keys: Tensor  # (B,)
    rank_of_key: Tensor  # (B, Nk): how many real keys come before
    order: Tensor  # (B, Nq) int32, queries that have a place, in order
    offsets: Tensor  # (B, chunks + 1) int32
    place: Tensor  # (B, chunks)
    of_query: Tensor  # (B, Nq): which of these chunks
    placed: Tensor  # (B, Nq) bool

    def older(self) -> Tensor:
        """(B, chunks): how many chunks come before the previous one; none where there is no query to see them."""
        return torch.where(self.offsets[:, 1:] > self.offsets[:, :-1], self.place - 1, 0).clamp(min=0)

    @staticmethod
    def of(tokens: Tokens, chunk: int) -> Chunks:
        """The chunks of these tokens."""
        keys, num_keys = tokens.real_keys
        upto = torch.nn.functional.pad(tokens.key_mask.cumsum(-1), (1, 0))
        last = (tokens.query_positions + 1).clamp(0, tokens.sizes.keys).long()
        rank = upto.gather(-1, last) - 1
        placed = tokens.query_mask & (rank >= 0)
        order, _ = compact(placed)
        capacity = ceil_div(tokens.sizes.queries, chunk) + 1
        absolute = rank.clamp(min=0) // chunk
        first = torch.where(placed, absolute, torch.iinfo(torch.int64).max)
        first = first.amin(-1, keepdim=True) if tokens.sizes.queries else absolute.new_zeros(tokens.sizes.batch, 1)
        first = torch.where(placed.any(-1, keepdim=True), first, 0)
        of_query = torch.where(placed, absolute - first, 0)
        counts = torch.zeros(tokens.sizes.batch, capacity, dtype=torch.int64, device=tokens.device)
        counts.scatter_add_(-1, of_query, placed.long())
        offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).to(torch.int32)
        place = first + torch.arange(capacity, device=tokens.device)
        return Chunks(keys, num_keys, upto[:, :-1], order, offsets, place, of_query, placed)
