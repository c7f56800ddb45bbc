"""check_mechanism: our mechanisms keep every rule; a zoo of broken ones is caught, each by the rule that it breaks."""

import random
import re
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import coterie
from coterie import Means, Mechanism, Plan, Round, Tokens
from coterie.checking import RULES
from coterie.mechanisms import base
from coterie.planning.orders import balanced_offsets
from tests.cases import MECHANISMS, POSITIONAL

OTHERS = {
    "at-least": coterie.as_mechanism("clustered:clusters=5@1024"),
    "smyrf-resample": coterie.Smyrf(rounds=2, cluster_size=16, resample=True),
    "near-far-long": coterie.NearFar(near=8, chunk=32, strict=True),
}
ALL = {**MECHANISMS, **OTHERS}


@pytest.mark.parametrize("name", ALL)
def test_our_own_mechanisms_keep_every_rule(name):
    found = coterie.check_mechanism(ALL[name])
    assert found.ok, found
    assert len(found.kept) == 13
    positional = "padding in the midst of a sequence, against the sequence alone"
    assert set(found.skipped) <= {"compile", positional}
    assert (positional in found.skipped) == (name in POSITIONAL)


@pytest.mark.parametrize("name", ["smyrf", "near-far"])
def test_our_own_mechanisms_compile(name):
    found = coterie.check_mechanism(MECHANISMS[name], compile=True)
    assert found.ok, found
    assert "compile" in found.kept


def test_as_many_rounds_as_the_data_need_is_a_shape_that_depends_on_data():
    """The one setting of ours that breaks a rule, and says so when it is compiled."""
    auto = coterie.Smyrf(rounds="auto", max_error=1.5, max_rounds=8, cluster_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some heads want more rounds
        found = coterie.check_mechanism(auto)
    assert [each.rule for each in found.broken] == ["shapes"], found


# --- the zoo ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Good(Mechanism):
    """Tokens sorted by their first number and cut into groups; everything below breaks one thing of it."""

    size: int = 16
    seed: int = 0

    name: ClassVar[str] = "good"

    def numbers(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens.q[..., 0], tokens.k[..., 0]

    def masks(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens.query_mask, tokens.key_mask

    def round(self, tokens: Tokens) -> Round:
        by, masks = self.numbers(tokens), self.masks(tokens)
        orders = [
            x.masked_fill(~m[:, None], torch.inf).argsort(dim=-1, stable=True).int()
            for x, m in zip(by, masks, strict=True)
        ]
        num_queries, num_keys = (m.sum(-1) for m in masks)
        groups = torch.minimum((num_queries + self.size - 1) // self.size, num_keys).clamp(min=1)
        capacity = max(1, -(-tokens.sizes.queries // self.size))
        queries, keys = (tokens.per_head(balanced_offsets(n, groups, capacity)) for n in (num_queries, num_keys))
        return Round(orders[0], queries, orders[1], keys[..., :-1], keys[..., 1:])

    def build(self, tokens: Tokens) -> Plan:
        return tokens.plan((self.round(tokens),))


ZOO: dict[type[Mechanism], tuple[set[str], str]] = {}


def breaks(*rules: str, says: str):
    """Enter a mechanism into the zoo: which rules it breaks, and what the first one's complaint says."""

    def enter(cls):
        cls = dataclass(frozen=True)(cls)
        cls.name = cls.__name__.lower()
        ZOO[cls] = (set(rules), says)
        return cls

    return enter


@breaks("runs", says="gave NoneType, not a Plan")
class Forgetful(Good):
    def build(self, tokens):
        super().build(tokens)


@breaks("runs", says="raised KeyError: 'oops'")
class Typo(Good):
    def build(self, tokens):
        raise KeyError("oops")


@breaks("runs", says="plan: expected a plan for")
class Half(Good):
    def build(self, tokens):
        some = tokens.sizes.queries // 2
        sizes = tokens.sizes._replace(queries=some)
        half = replace(tokens.call, q=tokens.raw_q[:, :, :some], sizes=sizes)
        return super().build(replace(tokens, call=half, query_mask=tokens.query_mask[:, :some]))


@breaks("runs", says="causality is 'sometimes'")
class Unsure(Good):
    @property
    def causality(self):  # type: ignore[override]
        return "sometimes"


@breaks("lengths", says="0 queries and 0 keys raised IndexError")
class NoEmpty(Good):
    def build(self, tokens):
        if tokens.sizes.keys:
            return super().build(tokens)
        raise IndexError("max(): empty")


@breaks("valid", says="query_order: expected each query at most once")
class Twice(Good):
    def build(self, tokens):
        one = self.round(tokens)
        order = one.query_order.clone()
        if tokens.sizes.queries > 1:
            order[..., 1] = order[..., 0]
        return tokens.plan((replace(one, query_order=order),))


# A query that is infinitely fond of a key answers NaN, in every comparison.
@breaks("valid", "padding", "isolation", "causality", "heads", "gradients", says="inf or NaN")
class Infinite(Good):
    def build(self, tokens):
        one = self.round(tokens)
        bias = torch.zeros(one.key_order.shape)
        bias[..., :1] = torch.inf
        return tokens.plan((replace(one, bias=bias),))


@breaks("shapes", says="has shape")
class Tight(Good):
    def build(self, tokens):
        one = self.round(tokens)
        longest = int(tokens.key_mask.sum(-1).max()) if tokens.sizes.batch else 0
        shortest = int((tokens.q[..., 0] == 0).all())  # and by data
        order = torch.nn.functional.pad(one.key_order[..., :longest], (0, shortest))
        return tokens.plan((replace(one, key_order=order),))


@breaks("padding", says="padded keys are in its groups")
class PaddedKeys(Good):
    def masks(self, tokens):
        return tokens.query_mask, torch.ones_like(tokens.key_mask)


@breaks("padding", says="padded queries are in its groups")
class PaddedQueries(Good):
    def masks(self, tokens):
        return torch.ones_like(tokens.query_mask), tokens.key_mask


@breaks("padding", says="a batch padded to 150 \\(left\\): the plan of the sample with 97 tokens")
class Absolute(Good):
    """Groups by blocks of positions that do not count from the first real token."""

    causality = "strict"

    def build(self, tokens):
        sizes = tokens.sizes
        blocks = -(-max(sizes.queries, sizes.keys) // self.size) + 1
        edges = torch.arange(blocks + 1) * self.size

        def cut(mask, positions):
            number = torch.where(mask, positions.clamp(0, edges[-1] - 1) // self.size, blocks)
            counts = torch.nn.functional.one_hot(number, blocks + 1).sum(1)[:, :-1]
            return number.argsort(dim=-1, stable=True), torch.nn.functional.pad(counts.cumsum(-1), (1, 0))

        rows, row_edges = cut(tokens.query_mask, tokens.query_positions)
        keys, key_edges = cut(tokens.key_mask, torch.arange(sizes.keys).expand(sizes.batch, -1))
        parts = (rows, row_edges, keys, key_edges[:, :-1], key_edges[:, 1:])
        return tokens.plan((Round(*(tokens.per_head(part) for part in parts)),))


@breaks("padding", says="not the one that it gets alone")
class ByPlace(Good):
    """Draws by the place in the batch."""

    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        sign = 1 - 2 * (torch.arange(tokens.sizes.batch) % 2)[:, None, None]
        return q * sign, k


def mean_of_keys(tokens: Tokens, mask: torch.Tensor, position: int) -> Means:
    """One mean of all keys in the mask."""
    order = (~mask).int().argsort(dim=-1, stable=True)
    lead = (tokens.sizes.batch, tokens.sizes.key_heads)
    stop = mask.sum(-1)[:, None, None].expand(*lead, 1).int()
    placed = torch.full((*lead, 1), position, dtype=torch.int32)
    return Means(order.int()[:, None].expand(*lead, -1).contiguous(), torch.zeros_like(stop), stop, placed)


def to_the_mean(tokens: Tokens) -> Round:
    """Every real query meets the one mean of keys."""
    queries, count = tokens.real_queries
    ends = torch.stack([torch.zeros_like(count), count], -1)
    key = torch.full((tokens.sizes.batch, tokens.sizes.heads, 1), tokens.sizes.keys, dtype=torch.int32)
    return Round(tokens.per_head(queries), tokens.per_head(ends), key, torch.zeros_like(key), torch.ones_like(key))


@breaks("padding", "isolation", says="a mean holds padded tokens")
class PaddedMeans(Good):
    """A mean over everybody; the engine refuses it in the other rule that pads."""

    causality = "none"

    def build(self, tokens):
        means = mean_of_keys(tokens, torch.ones_like(tokens.key_mask), 0)
        return tokens.plan((to_the_mean(tokens),), key_means=means)


@breaks("padding", "isolation", says="not the one that it gets alone")
class OverTheBatch(Good):
    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        return (q - q.sum() / max(1, q.numel())).abs(), k


@breaks("isolation", says="in the padding changes the plan")
class Raw(Good):
    """Whether some number of the raw tensor is wild turns the order round."""

    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        wild = (tokens.raw_k.abs() > 1e6) | ~tokens.raw_k.isfinite()
        return torch.where(wild.any(-1).any(-1).any(-1)[:, None, None], -q, q), k


@breaks("isolation", says="it declares per_query, and whom a query meets changes")
class Sociable(Good):
    per_query: ClassVar[bool] = True


@breaks("isolation", says="changes q or k in place")
class Scribbler(Good):
    def build(self, tokens):
        plan = super().build(tokens)
        if tokens.sizes.batch == 3 and tokens.sizes.queries:
            tokens.raw_q[0, 0, 0, 0] += 1.0
        return plan


@breaks("causality", says="values from key 1 on reach queries before")
class Seer(Good):
    def build(self, tokens):
        return replace(super().build(tokens), causal=False)


@breaks("causality", says='declares "strict", and tokens from')
class Boastful(Good):
    causality = "strict"


@breaks("causality", says="values from key 1 on reach queries before")
class EarlyMean(Good):
    """A mean of all keys that claims to sit at the first one."""

    def build(self, tokens):
        return tokens.plan((to_the_mean(tokens),), key_means=mean_of_keys(tokens, tokens.key_mask, -(10**6)))


@breaks("causality", says='declares "none" and does not refuse')
class Meek(Good):
    causality = "none"

    def plan(self, q, k, *, is_causal=False, **settings):
        return super().plan(q, k, **settings)


@breaks("determinism", says="planning draws from torch's generator")
class Gambler(Good):
    def numbers(self, tokens):
        torch.rand(1)
        return super().numbers(tokens)


@breaks("determinism", says="the same input gives two plans")
class Moody(Good):
    """Alone in a batch of two, so that no other rule sees it."""

    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        return (q * random.choice([-1, 1, 2, 3]) + random.random() * tokens.q[..., 1] if q.shape[0] == 2 else q), k


@breaks("layers", says="layer 1 raised ValueError")
class OneLayer(Good):
    def build(self, tokens):
        if tokens.layer:
            raise ValueError("layer: expected 0")
        return super().build(tokens)


@breaks("layers", says="seed 9223372036854775807 raised ValueError")
class SmallSeed(Good):
    def check(self):
        if self.seed > 1000:
            raise ValueError("seed: expected less than 1000")


@breaks("heads", says="4 heads on 2 key heads")
class WrongHeads(Good):
    """Reads key head h % Hk, where the engine reads h // (H / Hk)."""

    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        share = tokens.sizes.heads // tokens.sizes.key_heads
        return q, k[:, ::share].repeat(1, share, 1)


@breaks("gradients", says="the gradient's slope is")
class Smooth(Good):
    def build(self, tokens):
        one = self.round(tokens)
        bias = tokens.k[..., 1].gather(-1, one.key_order.long()).float()
        return tokens.plan((replace(one, bias=bias),))


@breaks("text", says="raised ValueError: mechanism: expected one of")
class Nameless(Good):
    pass


@breaks("text", says="is read as another mechanism")
class Listed(Good):
    """A tuple comes back from JSON as a list."""

    sizes: tuple[int, ...] = (1, 2)

    def __str__(self):
        return self.name


class Mutable(Mechanism):
    """Not frozen; entered by hand."""

    name = "mutable"
    build = Good.build
    round = Good.round
    numbers = Good.numbers
    masks = Good.masks

    def __init__(self) -> None:
        self.size = 16

    def __str__(self) -> str:
        return self.name


ZOO[Mutable] = ({"text"}, "not a frozen dataclass")


@breaks("backends", says="the native plan differs")
class Partial(Good):
    def numbers(self, tokens):
        q, k = super().numbers(tokens)
        return (-q if tokens.backend == "native" else q), k


def enlist(cls, monkeypatch):
    """Register it until the test ends."""
    for table in ("_REGISTRY", "_FIELDS"):
        monkeypatch.setattr(base, table, dict(getattr(base, table)))
    coterie.register(cls.name)(cls)


@pytest.mark.parametrize("cls", [Good, *ZOO], ids=lambda cls: cls.__name__)
def test_each_animal_of_the_zoo_is_caught_by_the_rule_that_it_breaks(cls, monkeypatch):
    if cls is not Nameless:
        enlist(cls, monkeypatch)
    rules, says = ZOO.get(cls, (set(), ""))
    state = torch.random.get_rng_state()
    found = coterie.check_mechanism(cls())
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's generator stays as it was"
    assert {each.rule for each in found.broken} == rules, found
    assert found.ok == (not rules)
    if not rules:
        found.raise_if_broken()
        return
    assert re.search(says, found.broken[0].what), found
    with pytest.raises(AssertionError, match=re.escape(found.broken[0].mend)):
        found.raise_if_broken()


def test_a_graph_break_is_caught_and_every_rule_has_an_animal(monkeypatch):
    @dataclass(frozen=True)
    class Peeking(Good):
        name: ClassVar[str] = "peeking"

        def build(self, tokens):
            assert float(tokens.q.sum()) < 1e9
            return super().build(tokens)

    enlist(Peeking, monkeypatch)
    found = coterie.check_mechanism("peeking", compile=True)
    assert [each.rule for each in found.broken] == ["compile"], found
    assert {"compile"}.union(*(rules for rules, _ in ZOO.values())) == set(RULES)


def test_what_the_report_says(monkeypatch):
    enlist(PaddedKeys, monkeypatch)
    found = coterie.check_mechanism("paddedkeys:size=8")
    assert str(found).splitlines() == [
        "paddedkeys:size=8 breaks 1 of 13 rules",
        "  padding: a batch padded to 150 (right): padded keys are in its groups",
        f"    → {found.broken[0].mend}",
        "  not run: compile (ask for it with compile=True)",
    ]
    assert str(coterie.check_mechanism("full")).startswith("full keeps all 13 rules that were run: runs, lengths, ")
    assert coterie.check_mechanism(Typo()).skipped == {"all others": "an ordinary call does not work"}


def test_holes_are_distances_only_where_positions_decide(monkeypatch):
    """Reads the same as Local, but says that it does not go by positions."""
    found = coterie.check_mechanism("local:window=8", positional=False)
    assert [each.rule for each in found.broken] == ["padding"]
    assert "scattered" in found.broken[0].what
    assert coterie.check_mechanism("smyrf:cluster_size=16", positional=True).ok


def test_without_the_native_engine_two_rules_are_not_run(monkeypatch):
    monkeypatch.setattr("coterie.checking.answers.backends", lambda: {"native": "not built"})
    found = coterie.check_mechanism("full", compile=True)
    assert found.ok
    assert found.skipped == {"backends": "not built", "compile": "not built"}
    assert "backends" not in found.kept


@pytest.mark.parametrize(("name", "value"), [("compile", 1), ("positional", "yes")])
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(TypeError, match=f"{name}: expected a bool"):
        coterie.check_mechanism("full", **{name: value})
    with pytest.raises(ValueError, match="mechanism: expected one of"):
        coterie.check_mechanism("fool")
