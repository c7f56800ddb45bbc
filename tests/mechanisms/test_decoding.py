"""Near–far decoding against its formula, in loops and float64, and against itself however the tokens came."""

from __future__ import annotations

import math
from copy import copy
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import coterie
from coterie.compiled import kernels
from coterie.mechanisms.near_far import decoding, tree
from coterie.mechanisms.near_far import finished as finishing
from coterie.mechanisms.near_far import merged as merging
from coterie.mechanisms.near_far.decoding import Step, decode
from coterie.mechanisms.near_far.finished import Finished, Room
from coterie.mechanisms.near_far.merged import Merged
from coterie.mechanisms.near_far.search import Search

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HEADS, SHARE, DIM = 2, 3, 20  # a size that is no multiple of 16


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(finishing, "why_not", lambda: "not wanted here")
        monkeypatch.setattr(decoding, "why_not", lambda: "not wanted here")
    return str(request.param)


@pytest.fixture(params=[64, 1], ids=["recent", "merged"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a level that are seen before those of the next one follow."""
    monkeypatch.setattr(merging, "SHOWN", request.param)


def tokens(length: int, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    q = torch.randn(batch, HEADS * SHARE, length, DIM) * 2
    k, v = torch.randn(batch, HEADS, length, DIM), torch.randn(batch, HEADS, length, DIM + 1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def step(length: int, queries: int = 1, padding: tuple[int, ...] = (0, 0)) -> Step:
    """The last queries of samples of which the first tokens are padding."""
    real, rank = [], []
    for pad in padding:
        real.append([*range(pad, length), *[0] * pad])
        rank.append([max(-1, length - queries + i - pad) for i in range(queries)])
    return Step(torch.tensor(real, dtype=torch.int32), torch.tensor(rank, dtype=torch.int32))


def whole(row: Tensor, most: int) -> list[int]:
    """A row in bytes, as `coterie.planning.bytes` says."""
    row = row.to(torch.float32)
    return [int(x) for x in (row / row.abs().max() * most).round()]


def kept(mean: Tensor) -> Tensor:
    """A mean in 16 bits."""
    step = float(mean.abs().max().float() / 32767)
    return torch.tensor([round(float(x) / step) * step for x in mean], dtype=torch.float64)


def residual(row: Tensor) -> Tensor:
    """What is left of a key without its mean, in 4 bits."""
    row = row.float()
    most = float(row.abs().max())
    top = float(torch.tensor(most).bfloat16())
    if top < most:  # a bfloat16 is a float32 whose lower half is 0
        top = float((torch.tensor(top).view(torch.int32) + 2**16).view(torch.float32))
    return torch.tensor([(min(7, max(-8, round(float(x) / top * 7.5 - 0.5))) + 0.5) * top / 7.5 for x in row]).double()


class Node(NamedTuple):
    """A cluster, with its means and what it is made of."""

    keys: list[int]
    mean_key: Tensor
    mean_value: Tensor
    inside: list[Node]


def blocks_of(chunks: int) -> list[tuple[int, int]]:
    """The level and the number of each block of 4, 16, … of these chunks, in the order in which they are full."""
    found = []
    for chunk in range(1, chunks + 1):
        for level in range(1, 9):
            if chunk % 4**level == 0:
                found.append((level, chunk // 4**level - 1))
    return found


def node(finished: Finished, at: Step, k: Tensor, v: Tensor, level: int, block: int, which: int) -> Node:
    """A cluster of one key head: k, v are (N, D), and the tensors of `finished` those of this head."""
    room, merged, per = finished.room, finished.merged, finished.per
    assert room is not None
    assert merged is not None
    if level == 0:
        first, stop = room.offsets[block * per + which : block * per + which + 2].tolist()
        keys = [int(at.real[block * finished.options.chunk + int(x)]) for x in room.order[first:stop]]
        mean_key, mean_value = (kept(x[keys].mean(0)) if keys else x[0] * 0 for x in (k, v))
        return Node(keys, mean_key, mean_value, [])
    labels = merged.labels[blocks_of(4**level * (block + 1)).index((level, block))].tolist()
    below = [(level - 1, 4 * block + i // per, i % per) for i, label in enumerate(labels) if label == which]
    inside = [node(finished, at, k, v, *each) for each in below]
    keys = [key for each in inside for key in each.keys]
    sums = [torch.zeros(x.shape[1], dtype=torch.float64) for x in (k, v)]
    for each in inside:
        sums = [sums[0] + len(each.keys) * each.mean_key, sums[1] + len(each.keys) * each.mean_value]
    mean_key, mean_value = (kept(x / len(keys)) if keys else x for x in sums)
    return Node(keys, mean_key, mean_value, inside)


def seen_by(chunks: int) -> list[tuple[int, int]]:
    """The level and the number of each block that is seen behind so many finished chunks, the oldest ones first."""
    edges, hidden = [chunks], 0
    while edges[-1]:
        hidden += merging.SHOWN * 4 ** (len(edges) - 1)
        edges.append(max(0, (chunks - hidden) // 4 ** len(edges) * 4 ** len(edges)))
    found: list[tuple[int, int]] = []
    for level, (stop, first) in enumerate(pairwise(edges)):
        found = [(level, block) for block in range(first // 4**level, stop // 4**level)] + found
    return found


def liked_best(nodes: list[Node], queries: Tensor, enough: int) -> list[Node]:
    """Those whose mean key one of some queries likes best, until they hold enough keys; of equal ones the oldest."""
    nodes = [each for each in nodes if each.keys]
    likes = [[float(query @ each.mean_key) for each in nodes] for query in queries]
    best = sorted(range(len(nodes)), key=lambda c: -max(like[c] - max(like) for like in likes))
    found: list[int] = []
    while best and sum(len(nodes[c].keys) for c in found) < enough:
        found.append(best.pop(0))
    return [nodes[c] for c in sorted(found)]


def oracle(
    finished: Finished, q: Tensor, k: Tensor, v: Tensor, at: Step, b: int, h: int, i: int, reach: int
) -> tuple[Tensor, list[int]]:
    """The formula for one query, by loops: its near keys, its means and its softmax are worked out here."""
    options, g, scale = finished.options, h // SHARE, 1 / math.sqrt(DIM)
    rank, real = int(at.rank[b, i]), at.real[b].tolist()
    begin = max(0, rank // options.chunk - 1) * options.chunk
    begin = begin if begin > options.sinks else 0
    own, wide, keys, values = finished_of(finished, b, g), q[b, h, i].double(), k[b, g].double(), v[b, g].double()
    mine = Step(at.real[b], at.rank[b])
    seen = [
        node(own, mine, keys, values, *block, which)
        for block in seen_by(begin // options.chunk)
        for which in range(finished.per)
    ]
    assert sorted(j for each in seen for j in each.keys) == [real[r] for r in range(min(options.sinks, begin), begin)]
    queries, searched = q[b, g * SHARE : (g + 1) * SHARE, i].double() * scale, seen
    while any(each.inside for each in searched):
        depth = {id(each): height(each) for each in searched}
        top, nodes = max(depth.values()), liked_best(searched, queries, tree.WIDER * reach)
        searched = [x for each in nodes for x in (each.inside if depth[id(each)] == top else [each])]
    searched = liked_best(searched, queries, reach)
    scaled = (q[b, h, i] * scale).float()
    bytes_ = torch.tensor(whole(scaled, 127)) * float(scaled.abs().max()) / 127
    score = {
        j: float(wide @ each.mean_key) * scale + float(bytes_.double() @ residual(keys[j] - each.mean_key))
        for each in searched
        for j in each.keys
    }
    shortlist = sorted(score, key=lambda j: (-score[j], j))[: 2 * options.near]
    near = sorted(shortlist, key=lambda j: (-float(wide @ keys[j]), j))[: options.near]
    met = [real[r] for r in range(min(options.sinks, begin))] + [real[r] for r in range(begin, rank + 1)] + near
    above, below = torch.zeros(v.shape[-1], dtype=torch.float64), 0.0
    for j in met:
        weight = math.exp(float(wide @ keys[j]) * scale)
        above, below = above + weight * values[j], below + weight
    for each in seen:
        left = len([j for j in each.keys if j not in near])
        if left:
            weight = left * math.exp(float(wide @ each.mean_key) * scale)
            above, below = above + weight * each.mean_value, below + weight
    return above / below, near


def height(node: Node) -> int:
    """0 for a chunk's own cluster, 1 for those of blocks of four of them, …"""
    return 1 + max(height(each) for each in node.inside) if node.inside else 0


def finished_of(finished: Finished, b: int, g: int) -> Finished:
    """The clusters of one key head of one sample."""
    assert finished.room is not None
    assert finished.merged is not None
    found = copy(finished)
    found.room = Room(*(x[b, g] for x in finished.room))
    found.merged = Merged(*(x[b, g] for x in finished.merged))
    return found


@pytest.mark.parametrize("reach", [6144, 50], ids=["all", "some"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("near", [0, 5])
def test_a_new_token_gets_what_the_formula_says(
    backend: str, near: int, dtype: torch.dtype, reach: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(coterie.NearFar, "search", Search(reach=1, least=reach))
    q, k, v = tokens(149, dtype=dtype)
    at = step(149, 3, (0, 37))
    finished = Finished(coterie.NearFar(near=near, chunk=16, key_clusters=3), layer=1)
    out, picks = decode(finished, q[:, :, -3:], k, v, at, 1 / math.sqrt(DIM))
    assert out.dtype == dtype
    # Halves: what is rounded is the answer, which is all sums of numbers below 4.
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for b in range(2):
        for h in range(HEADS * SHARE):
            for i in range(3):
                want, near_keys = oracle(finished, q[:, :, -3:], k, v, at, b, h, i, reach)
                assert sorted(picks[b, h, i].tolist()) == sorted(near_keys)
                torch.testing.assert_close(out[b, h, i].double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("reach", "wider"), [(6144, 1), (40, 1), (25, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per", [1, 3])
def test_what_is_far_away_is_merged(
    backend: str, per: int, dtype: torch.dtype, reach: int, wider: int, monkeypatch: pytest.MonkeyPatch
):
    """Blocks of 4 and of 16 chunks; the last queries see other ones than those before."""
    monkeypatch.setattr(coterie.NearFar, "search", Search(reach=1, least=reach))
    monkeypatch.setattr(merging, "SHOWN", 2)
    monkeypatch.setattr(tree, "WIDER", wider)
    q, k, v = tokens(149, dtype=dtype)
    at = step(149, 8, (0, 37))
    assert {level for level, _ in seen_by(35)} == {0, 1, 2}
    assert len({tuple(seen_by(rank // 4 - 1)) for rank in at.rank[0].tolist()}) > 1
    finished = Finished(coterie.NearFar(near=5, chunk=4, sinks=3, key_clusters=per), layer=1)
    out, picks = decode(finished, q[:, :, -8:], k, v, at, 1 / math.sqrt(DIM))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for b, h, i in product(range(2), (0, 5), (0, 3, 7)):
        want, near_keys = oracle(finished, q[:, :, -8:], k, v, at, b, h, i, reach)
        assert sorted(picks[b, h, i].tolist()) == sorted(near_keys)
        torch.testing.assert_close(out[b, h, i].double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sinks", [0, 4, 21])
@pytest.mark.parametrize("chunk", [5, 16])
def test_with_everybody_near_it_is_dense(backend: str, chunk: int, sinks: int):
    q, k, v = tokens(97)
    finished = Finished(coterie.NearFar(near=97, chunk=chunk, sinks=sinks), layer=0)
    out, _ = decode(finished, q[:, :, -2:], k, v, step(97, 2), 0.3)
    mask = torch.ones(97, 97, dtype=torch.bool).tril()[-2:]
    want = F.scaled_dot_product_attention(q[:, :, -2:], k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("near", [6144, 6145])
def test_more_may_be_near_than_are_looked_at(backend: str, near: int):
    q, k, v = tokens(97)
    out, _ = decode(Finished(coterie.NearFar(near=near, chunk=16), layer=0), q[:, :, -1:], k, v, step(97), 0.3)
    want = F.scaled_dot_product_attention(q[:, :, -1:], k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_both_backends_pick_among_the_keys_that_are_searched(monkeypatch: pytest.MonkeyPatch):
    """Fewer than the shortlist has room for, and hardly more than are wanted."""
    monkeypatch.setattr(coterie.NearFar, "search", Search(reach=1, least=40))
    q, k, v = tokens(333)
    found = []
    for wanted in ("", "not wanted here"):
        for module in (finishing, decoding):
            monkeypatch.setattr(module, "why_not", lambda wanted=wanted: wanted)
        mechanism = coterie.NearFar(near=40, chunk=16)
        _, picks = decode(Finished(mechanism, layer=0), q[:, :, -1:], k, v, step(333, 1, (0, 61)), 0.3)
        found.append(picks.sort(-1).values)
    assert torch.equal(*found)


@pytest.mark.parametrize("size", [1e19, 1e20, 1e30])
def test_scores_may_overflow(backend: str, size: float, shown: None):
    """What overflows is an answer like any other, inf or NaN, and the queries after it have theirs."""
    q, k, v = tokens(400)
    finished = Finished(coterie.NearFar(near=8, chunk=16), layer=0)
    out, picks = decode(finished, q[:, :, -2:] * size, k * size, v, step(400, 2), 0.25)
    assert out.shape == (2, HEADS * SHARE, 2, DIM + 1)
    assert bool(((picks >= 0) & (picks < 400)).all())


def test_chunks_may_be_long(backend: str):
    """Places in a chunk of more than 256 keys take more than a byte."""
    q, k, v = tokens(1250)
    finished = Finished(coterie.NearFar(near=9, chunk=300), layer=0)
    out, picks = decode(finished, q[:, :, -1:], k, v, step(1250), 1 / math.sqrt(DIM))
    for h in (0, 5):
        want, near_keys = oracle(finished, q[:, :, -1:], k, v, step(1250), 1, h, 0, 6144)
        assert sorted(picks[1, h, 0].tolist()) == sorted(near_keys)
        torch.testing.assert_close(out[1, h, 0].double(), want, rtol=0, atol=1e-5)


def test_keys_take_a_tenth_of_what_a_cache_in_float32_takes():
    _, k, v = torch.zeros(3, 1, 1, 1 << 15, 64).unbind(0)
    room = Room.of(k, v, 256, 128, 4)
    assert sum(x.nbytes for x in room) < 0.09 * (k.nbytes + v.nbytes)


def test_few_keys_are_met_exactly_where_that_is_asked_for(backend: str):
    q, k, v = tokens(90)
    finished = Finished(coterie.NearFar(near=2, chunk=16), layer=0)
    want = F.scaled_dot_product_attention(q[:, :, -1:], k, v, scale=0.3, enable_gqa=True)
    for least, same in ((91, True), (90, False)):
        out, _ = decode(finished, q[:, :, -1:], k, v, step(90), 0.3, least=least)
        assert torch.allclose(out, want, atol=1e-5) == same


def test_clusters_are_those_of_the_prefill(shown: None):
    q, k, _ = tokens(129)
    options = coterie.NearFar(near=3, chunk=32, seed=5)
    plan = options.plan(q, k, is_causal=True, layer=2)
    means = plan.key_means
    assert means is not None
    finished = Finished(options, layer=2)
    room, _ = finished.finish(k, k, step(129).real, [3, 3])
    for b in range(2):
        for g in range(HEADS):
            for c in range(3 * finished.per):
                first, stop = int(means.start[b, g, c]), int(means.stop[b, g, c])
                want = means.order[b, g, first:stop].tolist()
                first, stop = room.offsets[b, g, c : c + 2].tolist()
                found = [c // finished.per * 32 + at for at in room.order[b, g, first:stop].tolist()]
                assert sorted(found) == sorted(want)


def test_it_does_not_matter_how_the_tokens_came(backend: str, shown: None):
    q, k, v = tokens(133)
    options = coterie.NearFar(near=4, chunk=8)
    at = [100, 101, 117, 125, 126, 132]
    alone = []
    for last in at:
        out, _ = decode(
            Finished(options, 0),
            q[:, :, last : last + 1],
            k[:, :, : last + 1],
            v[:, :, : last + 1],
            step(last + 1),
            0.3,
        )
        alone.append(out)
    one_by_one, finished = [], Finished(options, 0)
    for last in at:
        out, _ = decode(
            finished, q[:, :, last : last + 1], k[:, :, : last + 1], v[:, :, : last + 1], step(last + 1), 0.3
        )
        one_by_one.append(out)
    together, _ = decode(Finished(options, 0), q[:, :, 117:], k, v, step(133, 16), 0.3)
    assert torch.equal(torch.cat(one_by_one, 2), torch.cat(alone, 2))
    assert torch.equal(together[:, :, [0, 8, 9, 15]], torch.cat(alone[2:], 2))


def test_a_sample_of_a_padded_batch_gets_what_it_gets_alone(backend: str, shown: None):
    q, k, v = tokens(97)
    options = coterie.NearFar(near=4, chunk=8)
    out, picks = decode(Finished(options, 0), q[:, :, -2:], k, v, step(97, 2, (0, 31)), 0.3)
    alone, near = decode(Finished(options, 0), q[1:, :, -2:], k[1:, :, 31:], v[1:, :, 31:], step(66, 2, (0,)), 0.3)
    assert torch.equal(out[1:], alone)
    assert torch.equal(picks[1:], near + 31)


def test_a_query_that_sees_nobody_gets_nothing(backend: str):
    q, k, v = tokens(40)
    at = step(40, 3)
    at.rank[1, 0] = -1
    out, picks = decode(Finished(coterie.NearFar(near=4, chunk=8), 0), q[:, :, -3:], k, v, at, 0.3)
    assert not out[1, :, 0].any()
    assert bool((picks[1, :, 0] == -1).all())
    assert bool(out[1, :, 1:].any())


def test_what_was_cropped_is_not_finished(shown: None):
    q, k, v = tokens(70)
    options = coterie.NearFar(near=4, chunk=8)
    finished = Finished(options, 0)
    decode(finished, q[:, :, -1:], k, v, step(70), 0.3)
    assert finished.chunks == [7, 7]
    finished.crop([43, 70])
    assert finished.chunks == [5, 7]
    _, others, values = tokens(70, seed=1)
    k[0, :, 43:], v[0, :, 43:] = others[0, :, 43:], values[0, :, 43:]
    out, _ = decode(finished, q[:, :, -1:], k, v, step(70), 0.3)
    want, _ = decode(Finished(options, 0), q[:, :, -1:], k, v, step(70), 0.3)
    assert torch.equal(out, want)


def test_samples_change_places(shown: None):
    q, k, v = tokens(70, batch=3)
    at = step(70, padding=(0, 20, 3))
    options, index = coterie.NearFar(near=4, chunk=8), torch.tensor([1, 1, 0])
    finished = Finished(options, 0)
    decode(finished, q[:, :, -1:], k, v, at, 0.3)
    finished.reorder(index)
    assert finished.chunks == [5, 5, 7]
    moved = Step(at.real[index], at.rank[index])
    out, _ = decode(finished, q[index, :, -1:], k[index], v[index], moved, 0.3)
    want, _ = decode(Finished(options, 0), q[index, :, -1:], k[index], v[index], moved, 0.3)
    assert torch.equal(out, want)


def test_the_kernel_refuses_what_it_cannot_read():
    q, k, v = tokens(70)
    finished = Finished(coterie.NearFar(near=4, chunk=8), 0)
    room, _ = finished.finish(k, v, step(70).real, [7, 7])
    broken = {
        "offsets: expected those of all keys": lambda: room.offsets.fill_(1),
        "order: expected places in a chunk": lambda: room.order.fill_(8),
    }
    for message, damage in broken.items():
        before = [x.clone() for x in room]
        damage()
        with pytest.raises(ValueError, match=message):
            decode(finished, q[:, :, -1:], k, v, step(70), 0.3)
        for x, old in zip(room, before, strict=True):
            x.copy_(old)
    at = step(70)
    at.rank[0] = 70
    finished.chunks = [99, 99]
    with pytest.raises(ValueError, match="rank: expected at most 69, got 70"):
        decode(finished, q[:, :, -1:], k, v, at, 0.3)
    places = (room.codes[:, :, :1], room.tops[..., :16], room.order[..., :16])
    finished.room = room._replace(**dict(zip(Room._fields, (x.contiguous() for x in places), strict=False)))
    with pytest.raises(ValueError, match="rank: expected finished chunks before the previous one"):
        decode(finished, q[:, :, -1:], k, v, step(70), 0.3)


def test_the_kernel_refuses_blocks_that_it_cannot_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merging, "SHOWN", 2)
    q, k, v = tokens(149)
    finished = Finished(coterie.NearFar(near=4, chunk=4), 0)
    want, _ = decode(finished, q[:, :, -1:], k, v, step(149), 0.3)
    room, merged = finished.finish(k, v, step(149).real, [36, 36])
    broken = {
        "block_sizes: expected at least 0, got less": merged._replace(sizes=-merged.sizes),
        "rank: expected finished chunks before the previous one": Merged(*(x[:, :, :3].contiguous() for x in merged)),
        "block_keys: expected shape": merged._replace(mean_keys=merged.mean_keys[..., :16].contiguous()),
        "labels: expected": merged._replace(labels=merged.labels[..., :3].contiguous()),
    }
    for message, blocks in broken.items():
        finished.merged = blocks
        with pytest.raises(ValueError, match=message):
            decode(finished, q[:, :, -1:], k, v, step(149), 0.3)
    # Nobody is inside of a cluster, or twice in two of them: an answer like any other.
    finished.merged = merged._replace(labels=merged.labels + 99)
    out, picks = decode(finished, q[:, :, -1:], k, v, step(149), 0.3)
    assert bool(out.isfinite().all())
    assert bool((picks < 149).all())
    finished.merged = merged
    assert torch.equal(decode(finished, q[:, :, -1:], k, v, step(149), 0.3)[0], want)
    at = room.offsets[0, 0, 1].clone()
    room.offsets[0, 0, 1] = -5
    with pytest.raises(ValueError, match="offsets: expected ascending places, got others"):
        decode(finished, q[:, :, -1:], k, v, step(149), 0.3)
    room.offsets[0, 0, 1] = at


@pytest.mark.parametrize("chunks", [*range(23), 85, 341, 1000])
def test_blocks_are_kept_one_after_the_other(chunks: int):
    """Where is what counting gives."""
    found = [merging.number(level, block) for level, block in blocks_of(chunks)]
    assert found == list(range(merging.complete(chunks)))


@pytest.mark.parametrize("shown", [1, 2, 64])
def test_a_query_sees_every_finished_chunk_once_and_few_clusters(shown: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merging, "SHOWN", shown)
    for chunks in (1, 7, 64, 65, 67, 68, 333, 5000):
        seen = seen_by(chunks)
        assert [c for level, block in seen for c in range(4**level * block, 4**level * (block + 1))] == [*range(chunks)]
        for level in range(merging.top_level(chunks) + 1):
            blocks = [block for each, block in seen if each == level]
            assert blocks == [*range(4 * merging.blocks(level + 1, chunks), merging.blocks(level, chunks))]
            assert len(blocks) <= shown + 4


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_both_backends_keep_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merging, "SHOWN", 2)
    _, k, v = tokens(133, dtype=dtype)
    k[0, 1, 40, 3] = float("inf")
    at, options = step(133, padding=(0, 31)), coterie.NearFar(near=4, chunk=4, sinks=3, key_clusters=2)
    native, blocks = Finished(options, 2).finish(k, v, at.real, [32, 24])
    monkeypatch.setattr(finishing, "why_not", lambda: "not wanted here")
    reference, others = Finished(options, 2).finish(k, v, at.real, [32, 24])
    for name, mine, theirs in zip(Room._fields, native, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=name.__add__, equal_nan=True)
    for sample, made in enumerate([[(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (1, 4), (1, 5), (1, 6)], [(1, 0), (1, 4)]]):
        block = torch.tensor([blocks_of(32).index(each) for each in made])
        of_block = (block[:, None] * 2 + torch.arange(2)).flatten()
        for name, mine, theirs in zip(Merged._fields, blocks, others, strict=True):
            which = block if name == "labels" else of_block
            pair = mine[sample, :, which], theirs[sample, :, which]
            torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6, msg=name.__add__, equal_nan=True)
    assert bool(blocks.key_steps[0, 1].isnan().any())


def test_finish_refuses_what_it_cannot_write():
    _, k, v = tokens(32)
    room = Room.of(k, v, 2, 16, 1)
    labels, samples = torch.zeros(2, HEADS, 32, dtype=torch.int64), torch.arange(2)

    def finish(*numbers: int, labels: Tensor = labels, samples: Tensor = samples, k: Tensor = k) -> None:
        kernels().finish(k, v, labels, samples, *numbers, 1, *room.native())

    broken = {
        "clusters: expected at most 2, got 3": lambda: finish(0, 0, 0, 3, 16),
        "first_cluster: expected at most 1, got 2": lambda: finish(0, 0, 2, 1, 16),
        "first_place: expected at most 0, got 1": lambda: finish(1, 0, 0, 1, 16),
        "first_rank: expected at least 0, got -1": lambda: finish(0, -1, 0, 1, 16),
        "chunk: expected at most 256, got 257": lambda: finish(0, 0, 0, 1, 257),
        "labels: ": lambda: finish(0, 0, 0, 1, 16, labels=labels + 1),
        "samples: expected at most 1, got 2": lambda: finish(0, 0, 0, 1, 16, samples=samples + 1),
        "v: expected shape": lambda: finish(0, 0, 0, 1, 16, k=k[:1]),
    }
    for message, run in broken.items():
        with pytest.raises(ValueError, match=message):
            run()
