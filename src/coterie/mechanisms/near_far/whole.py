"""The plan of near–far attention in one native call: what `everyone` and `causal` make of single steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.mechanisms.near_far import levels
from coterie.mechanisms.near_far.causal import count_groups as groups_of_chunk
from coterie.mechanisms.near_far.counts import Fixed
from coterie.mechanisms.near_far.everyone import IN_PART, SAMPLE, count_clusters, count_groups
from coterie.plan import Means, Plan, Round
from coterie.planning import whole
from coterie.planning.orders import ceil_div
from coterie.planning.tokens import Tokens
from coterie.planning.whole import NearFarTensors

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar


def possible(options: NearFar, tokens: Tokens) -> bool:
    """Whether there is such a call for these tokens."""
    return whole.possible(tokens.call) and not (tokens.causal and options.strict)


def make(options: NearFar, tokens: Tokens) -> Plan:
    """The plan."""
    return _causal(options, tokens) if tokens.causal else _everyone(options, tokens)


def _everyone(options: NearFar, tokens: Tokens) -> Plan:
    sizes, search = tokens.sizes, options.search
    groups, clusters = count_groups(options, sizes.queries), count_clusters(options, sizes.keys)
    picking = search.of(options.near, sizes.keys, causal=False, largest=sizes.keys)
    found = whole.near_far(
        tokens.call,
        tokens.query_mask,
        tokens.key_mask,
        chunk=0,
        groups=groups.numbers,
        parts=max(2, ceil_div(groups.room, IN_PART)),
        room=min(groups.room, IN_PART) if isinstance(groups, Fixed) else IN_PART,
        in_part=IN_PART,
        levels=[1, 1, *clusters.numbers],
        iterations=options.iterations,
        key_iterations=options.iterations,
        sample=SAMPLE,
        looked_at=search.looked_at(options.near, sizes.keys, causal=False),
        party=search.party,
        near=picking.near,
        reach=picking.reach,
        wide=picking.wide,
        sinks=0,
        width=clusters.room,
        seed=options.seed,
    )
    return tokens.plan(_far_and_near(tokens, found), key_means=Means(*found.clusters), sound=True)


def _causal(options: NearFar, tokens: Tokens) -> Plan:
    sizes, search = tokens.sizes, options.search
    groups, blocks = groups_of_chunk(options, sizes), list(levels.all_levels(options, sizes.keys))
    largest = min(blocks[-1].size * options.chunk, sizes.keys)
    picking = search.of(options.near, sizes.keys, causal=True, largest=largest)
    found = whole.near_far(
        tokens.call,
        tokens.query_mask,
        tokens.key_mask,
        chunk=options.chunk,
        groups=groups.numbers,
        parts=ceil_div(sizes.queries, options.chunk) + 1,
        room=groups.room,
        in_part=1,
        levels=[number for each in blocks for number in (each.size, each.blocks, *each.in_block.numbers)],
        iterations=min(options.iterations, 1),
        key_iterations=options.iterations,
        sample=levels.SAMPLE,
        looked_at=search.looked_at(options.near, sizes.keys, causal=True),
        party=search.party,
        near=picking.near,
        reach=picking.reach,
        wide=picking.wide,
        sinks=options.sinks,
        width=sum(each.most * each.in_block.room for each in blocks) + min(options.sinks, sizes.keys),
        seed=options.seed,
    )
    order, offsets, keys, start, stop = (tokens.per_head(x) for x in found.chunks)
    rounds = Round(order, offsets, keys, start, stop), *_far_and_near(tokens, found)
    return tokens.plan(rounds, key_means=Means(*found.clusters), sound=True)


def _far_and_near(tokens: Tokens, found: NearFarTensors) -> tuple[Round, Round]:
    """The two rounds of `meeting.meet`."""
    far_start, far_stop, near_start, near_stop = found.bounds.unbind(0)
    rows = tokens.per_head(found.rows.flatten(1))
    return (
        Round(found.order, found.offsets, rows, far_start, far_stop, counts=found.left),
        Round(found.order, found.offsets, found.picks, near_start, near_stop),
    )
