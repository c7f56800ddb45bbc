"""NearFar: the best keys of a group of queries exactly, all others through the means of their clusters."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.checks import check_flag, expect, expect_int, expect_seed
from coterie.mechanisms.base import Mechanism, StrictIfAsked, register
from coterie.mechanisms.near_far.causal import causal
from coterie.mechanisms.near_far.everyone import everyone
from coterie.mechanisms.near_far.search import Search
from coterie.mechanisms.near_far.whole import make, possible
from coterie.plan import Plan
from coterie.planning.tokens import Tokens


@register("near-far")
@dataclass(frozen=True)
class NearFar(Mechanism):
    """Near–far attention: similar queries in small groups, keys in k-means clusters. The mean query of a group picks
    the `near` keys that it likes best, and its queries meet them exactly; every other key is met through its cluster g,
    as one key with the cluster's mean key k̄_g and mean value v̄_g that counts for the n_g keys that were not picked:

        out_i = [Σ_{j∈near} e^{s_ij} v_j + Σ_g n_g e^{scale·q_i·k̄_g} v̄_g] / [the same sums without v]

    No key is dropped, and no training is needed. The gradient flows through q, k, v and the means. The mean of many
    queries is a bad judge for each of them: a group has about 4 queries if causal; otherwise there are √(57N) groups,
    of 3 queries at 512 tokens. What a mean query likes is a product of bytes: for ranking keys it is as good as one of
    floats. Groups look at all keys if there are at most 6,144, or 2,048 if not causal (or 24·near, if that is more).
    Where there are more, 8 groups that are alike search together: in the clusters whose mean or whose outlier (the key
    farthest from the mean) one of them likes best, until those hold so many keys. With "auto" there are √(2N) clusters,
    whose centroids are trained on at most 16 keys each; so it costs O(N·√N·D).

    Causal: keys are cut into chunks. A query meets its own and the previous chunk exactly, and the first `sinks` keys,
    which many heads lean on; of the others it meets the near keys that were picked for its group, and the rest through
    the means of about 32 keys inside each finished chunk. As chunks recede they are merged: after 32 chunks come 32
    blocks of 2 chunks with half as many means each, then 32 of 4 chunks with a quarter as many, and so on. A query
    meets at most about 4·chunk + near + sinks + 33·log₂(N/chunk) rows, so it costs O(N·log N·D). Chunks are counted in
    real keys, so padding changes nothing.

    Causality: `mask`, since queries are grouped with later ones of their chunk; with `strict=True` it is `strict`:
    queries join the group of the previous chunk that they are nearest to (of the one before that, if it has more). If
    that chunk has few queries in this call or none, as behind a cache, it has few groups, and the first queries of the
    chunk found the rest, each its own; later ones join the nearest. So what a query meets does not depend on what
    comes after it, but if queries come in several calls over a cache, on where those are cut.

    Args:
        near: keys that a query meets exactly (besides its own and the previous chunk and the sinks, if causal).
        query_clusters, key_clusters: how many groups and clusters, or "auto"; causal: in a chunk.
        iterations: of Lloyd's algorithm; at most one for the small groups of queries, if causal.
        chunk: keys of a chunk, if causal.
        strict: if causal, earlier outputs do not depend on later tokens in any way.
        seed: of the random draws.
        sinks: first keys that everybody meets exactly, if causal; they are in no mean.

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

    size_field = "near"
    search = Search()

    near: int = 64
    query_clusters: int | str = "auto"
    key_clusters: int | str = "auto"
    iterations: int = 2
    chunk: int = 128
    strict: bool = False
    seed: int = 0
    sinks: int = 4

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
        check_flag("strict", self.strict)
        expect_seed(self.seed)
        expect_int("sinks", self.sinks, at_least=0)

    def build(self, tokens: Tokens) -> Plan:
        if possible(self, tokens):
            return make(self, tokens)
        return causal(self, tokens) if tokens.causal else everyone(self, tokens)
