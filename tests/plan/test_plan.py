"""Plans: shapes, checks, dict round trip, dense counts."""

from dataclasses import replace

import pytest
import torch

import coterie
from coterie.plan import Means, Plan, Round
from coterie.plan.slices import one_head, restrict
from tests.cases import CAUSAL, MEANS, MECHANISMS, SMALL_ROUND, fails, index, mistakes, padding, tensors


def small(**changes):
    """Two groups over four queries and five keys, one head; `changes` go to the round."""
    return Round(**{**SMALL_ROUND, **changes})


def plan_of(*rounds, **changes):
    fields = {"num_queries": 4, "num_keys": 5, "key_heads": 1, "offset": torch.zeros(1, dtype=torch.int32)}
    return Plan(**{**fields, "rounds": rounds, **changes})


def means(start=(0,), stop=(2,), **changes):
    return Means(**{"order": index([0, 1]), "start": index(list(start)), "stop": index(list(stop)), **changes})


def test_to_dense_counts():
    plan = plan_of(small(), small()).validate()
    assert plan.to_dense()[0, 0].tolist() == [
        [2, 2, 0, 0, 0],
        [2, 2, 0, 0, 0],
        [0, 2, 0, 0, 2],
        [2, 2, 0, 0, 0],
    ]
    assert plan.pairs_met().tolist() == [[16]]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_writes_a_valid_plan_of_fixed_shape(name):
    """Shapes follow from input shapes alone, indices are int32, padded tokens are in no group."""
    q, k, _ = tensors(2, 2, 63, 70)
    query_mask, key_mask = padding(2, 63, [40, 0], "left"), padding(2, 70, [70, 13], "scattered")
    bare = MECHANISMS[name].plan(q, k).validate()
    padded = MECHANISMS[name].plan(q * 3, k, query_mask=query_mask, key_mask=key_mask).validate()
    for (key, a), (other, b) in zip(bare.to_dict().items(), padded.to_dict().items(), strict=True):
        assert key == other
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.dtype in (torch.int16, torch.int32, torch.int64, torch.bool, torch.float32)
    met = padded.to_dense()
    assert not met.transpose(1, 2)[~query_mask].any()
    assert not met.permute(0, 3, 1, 2)[~key_mask].any()


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n not in ("topk", "full")])
def test_plans_take_memory_in_proportion_to_length(name):
    def numbers(length):
        q, k, _ = tensors(1, 2, length)
        return sum(x.untyped_storage().nbytes() for x in MECHANISMS[name].plan(q, k).to_dict().values())

    assert numbers(1600) <= 4.5 * numbers(400) + 4096


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [False, True])
def test_round_trip_to_a_dict_of_tensors(name, causal, tmp_path):
    q, k, v = tensors(2, 2, 40)
    causal = causal and name in CAUSAL
    plan = MECHANISMS[name].plan(q, k, is_causal=causal)
    torch.save(plan.to_dict(), tmp_path / "plan.pt")
    again = Plan.from_dict(torch.load(tmp_path / "plan.pt", weights_only=True)).validate()
    for (key, a), (other, b) in zip(plan.to_dict().items(), again.to_dict().items(), strict=True):
        assert key == other
        assert torch.equal(a, b)
    outs = [coterie.attention(q, k, v, None, plan=p, is_causal=causal) for p in (plan, again, plan.to("cpu"))]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert outs[0].equal(coterie.attention(q, k, v, MECHANISMS[name], is_causal=causal))


def test_plans_move_between_devices():
    q, k, _ = tensors(1, 2, 40)
    plan = coterie.ImprovedClustered(clusters=4, topk=5).plan(q, k).to("meta")
    assert all(each.key_order.device.type == "meta" for each in plan.rounds)
    assert plan.query_means is not None
    assert plan.query_means.order.device.type == "meta"
    assert plan.device.type == "meta"


def test_from_dict_refuses_what_to_dict_never_wrote():
    q, k, _ = tensors(1, 1, 10)
    tensors_of = coterie.Full().plan(q, k).to_dict()
    renamed = {name.replace("rounds.0", "rounds.7"): x for name, x in tensors_of.items()}
    partial = {name: x for name, x in tensors_of.items() if name != "rounds.0.key_order"}
    for broken, message in [
        ({**tensors_of, "extra": torch.zeros(1)}, r"tensors: expected fields of Plan, got \['extra'\]"),
        ({**tensors_of, "nope.x": torch.zeros(1)}, r"tensors: expected rounds numbered from 0: .* got nope"),
        ({**tensors_of, "rounds.0.x": torch.zeros(1)}, r"tensors: expected fields of Round, got \['rounds.0.x'\]"),
        (renamed, r"tensors: expected rounds numbered from 0: \['rounds.0'\], got rounds.7"),
        (partial, r"tensors: expected all of rounds.0.key_order, .* got no \['key_order'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            Plan.from_dict(broken)


@pytest.mark.parametrize("name", MECHANISMS)
def test_describe_says_what_there_is(name):
    q, k, _ = tensors(1, 2, 63)
    plan = MECHANISMS[name].plan(q, k)
    text = plan.describe()
    assert "63 queries" in text
    assert text.count("round") == len(plan.rounds)
    scores = float(plan.pairs_met().double().mean())
    assert f"{scores:,.0f} a head" in text
    assert text.startswith("plan: batch 1, 2 heads on 2")


def test_describe_of_an_empty_plan():
    q, k, _ = tensors(0, 2, 5)
    assert "0 groups of 0 queries" in coterie.Full().plan(q, k).describe()


def test_pairs_met_equals_the_dense_count_where_nothing_is_virtual():
    q, k, _ = tensors(2, 2, 63)
    for name in (n for n in CAUSAL if n not in MEANS):
        plan = CAUSAL[name].plan(q, k, is_causal=True)
        assert torch.equal(plan.pairs_met(), plan.to_dense().sum((-2, -1))), name


SHAPE_ERRORS = [
    (lambda: plan_of(), ValueError, r"rounds: expected at least one round"),
    (lambda: plan_of(small(), num_keys=-1), ValueError, r"num_keys: expected an int ≥ 0, got -1"),
    (lambda: plan_of(small(), num_queries=4.0), TypeError, r"num_queries: expected an int, got float"),
    (lambda: plan_of(small(), causal=3), TypeError, r"causal: expected a bool, got int"),
    (lambda: plan_of(small(), rounds=[small()]), TypeError, r"rounds: expected a tuple of Rounds, got list"),
    (lambda: plan_of(small(query_order=[1])), TypeError, r"query_order: expected a tensor, got list"),
    (lambda: plan_of(small(key_order=[1])), TypeError, r"key_order: expected a tensor, got list"),
    (lambda: plan_of(small(key_start=[1])), TypeError, r"key_start: expected a tensor, got list"),
    (lambda: plan_of(small(), key_means=Means(index([0]), [0], [1])), TypeError, r"key_means.start: expected a tensor"),  # type: ignore[arg-type]
    (lambda: plan_of(small(window=(0.5, 1))), TypeError, r"window: expected two ints, got \(0.5, 1\)"),
    (
        lambda: plan_of(small(), query_means=means(), mass=torch.full((1, 1, 4), 4).int()),
        ValueError,
        r"mass: expected an answer to be merged with, got none",
    ),
    (lambda: plan_of(small(), key_heads=2), ValueError, r"key_heads: expected a divisor of the 1 query heads, got 2"),
    (lambda: plan_of(small(), duplicates="x"), ValueError, r"duplicates: expected 'count' or 'once', got 'x'"),
    (lambda: plan_of(small(), offset=torch.zeros(2).int()), ValueError, r"offset: expected shape \(1\), got \(2,\)"),
    (lambda: plan_of(small(query_order=torch.zeros(2).int())), ValueError, r"query_order: expected 3 dimensions"),
    (lambda: plan_of(small(key_order=index([1]).float())), TypeError, r"key_order: expected dtype torch.int32"),
    (lambda: plan_of(small(query_offsets=index([0, 4]))), ValueError, r"query_offsets: expected shape \(1, 1, 3\)"),
    (lambda: plan_of(small(key_stop=index([1]))), ValueError, r"rounds\[0\].key_stop: expected shape \(1, 1, 2\)"),
    (
        lambda: plan_of(small(bias=torch.zeros(1, 1, 2))),
        ValueError,
        r"bias: expected shape \(1, 1, 3\), got \(1, 1, 2\)",
    ),
    (lambda: plan_of(small(bias=torch.zeros(1, 1, 3).double())), TypeError, r"bias: expected dtype torch.float32"),
    (lambda: plan_of(small(skip=index([[1]]))), ValueError, r"skip: expected shape \(1, 1, 4, any\)"),
    (lambda: plan_of(small(counts=[1])), TypeError, r"counts: expected a tensor, got list"),
    (
        lambda: plan_of(small(counts=index([[1]]).short())),
        ValueError,
        r"rounds\[0\].counts: expected shape \(1, 1, 2, any\), got \(1, 1, 1, 1\)",
    ),
    (
        lambda: plan_of(small(counts=index([[1, 1]] * 2).long())),
        TypeError,
        r"counts: expected dtype torch.int16 or torch.int32, got torch.int64",
    ),
    (lambda: plan_of(small(window=(3, 1))), ValueError, r"window: expected low ≤ high, got \(3, 1\)"),
    (lambda: plan_of(small(), self_keys=torch.zeros(1, 3).int()), ValueError, r"self_keys: expected shape \(1, 4\)"),
    (lambda: plan_of(small(), answer=torch.zeros(1, 1, 4).int()), ValueError, r"answer: expected query_means"),
    (
        lambda: plan_of(small(), causal=True, key_means=means()),
        ValueError,
        r"key_means.positions: expected positions in a causal or windowed plan, got none",
    ),
    (
        lambda: plan_of(small(), key_means=means(start=(0, 1))),
        ValueError,
        r"key_means.stop: expected shape \(1, 1, 2\)",
    ),
    (
        lambda: plan_of(small(), key_means=means(positions=index([1, 2]))),
        ValueError,
        r"key_means.positions: expected shape \(1, 1, 1\)",
    ),
]


@mistakes(SHAPE_ERRORS)
def test_shapes_and_dtypes_are_checked_when_a_plan_is_made(case):
    fails(case)


VALUE_ERRORS = [
    (plan_of(small(query_order=index([2, 0, 4, 1]))), r"query_order: expected indices in \[0, 4\), got 4"),
    (plan_of(small(query_order=index([2, 0, -1, 1]))), r"query_order: expected indices in \[0, 4\), got -1"),
    (plan_of(small(query_order=index([2, 0, 2, 1]))), r"each query at most once in a round, got one 2 times"),
    (plan_of(small(query_offsets=index([1, 1, 4]))), r"query_offsets: expected a first offset of 0"),
    (
        plan_of(small(query_offsets=index([0, 3, 2]))),
        r"query_offsets: expected 0 ≤ start ≤ stop ≤ 4, got start 3, stop 2",
    ),
    (
        plan_of(small(query_offsets=index([0, 1, 9]))),
        r"query_offsets: expected 0 ≤ start ≤ stop ≤ 4, got start 1, stop 9",
    ),
    (plan_of(small(key_order=index([4, 5, 0]))), r"key_order: expected indices in \[0, 5\), got 5"),
    (plan_of(small(key_start=index([-1, 1]))), r"key_start, key_stop: expected 0 ≤ start ≤ stop ≤ 3, got start -1"),
    (
        plan_of(small(key_stop=index([2, 4]))),
        r"key_start, key_stop: expected 0 ≤ start ≤ stop ≤ 3, got start 1, stop 4",
    ),
    (plan_of(small(skip=index([[2, 1]] * 4))), r"skip: expected ascending key rows"),
    (plan_of(small(skip=index([[-2, 1]] * 4))), r"skip: expected indices in \[0, 5\), got -2"),
    (plan_of(small(counts=index([[1]] * 2).short())), r"counts: expected room for 2 keys, the longest range, got 1"),
    (plan_of(small(counts=index([[1, 1], [-1, 1]]).short())), r"counts: expected no number below 0, got one"),
    (plan_of(small(), self_keys=torch.full((1, 4), 5).int()), r"self_keys: expected indices in \[0, 5\), got 5"),
    (
        plan_of(small(), causal=True, self_keys=torch.full((1, 4), 2).int()),
        r"self_keys: expected no key after its query in a causal plan, got a later one",
    ),
    (plan_of(small(bias=torch.full((1, 1, 3), float("nan")))), r"bias: expected numbers, got NaN"),
    (plan_of(small(), key_means=means(stop=(3,))), r"key_means.start, stop: expected 0 ≤ start ≤ stop ≤ 2"),
    (plan_of(small(), key_means=means(order=index([0, 7]))), r"key_means.order: expected indices in \[0, 5\), got 7"),
    (plan_of(small(), query_means=means(order=index([0, 4]))), r"query_means.order: expected indices in \[0, 4\)"),
    (
        plan_of(small(), query_means=means(), answer=torch.full((1, 1, 4), 2).int()),
        r"answer - num_queries: expected indices in \[0, 1\), got -2",
    ),
    (
        plan_of(
            small(), query_means=means(), answer=torch.full((1, 1, 4), 4).int(), mass=torch.full((1, 1, 4), 5).int()
        ),
        r"mass - num_queries: expected indices in \[0, 1\), got 1",
    ),
]


@pytest.mark.parametrize(("plan", "message"), VALUE_ERRORS, ids=[m[:40] for _, m in VALUE_ERRORS])
def test_values_are_checked_before_anything_is_computed(plan, message):
    with pytest.raises(ValueError, match=message):
        plan.validate()
    q, k, v = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match=message):
        coterie.grouped_attention(q, k, v, plan)
    with pytest.raises(ValueError, match=message):
        coterie.attention(q, k, v, None, plan=plan, is_causal=plan.causal)


def test_counts_go_wherever_their_plan_goes():
    """Through a dict, to one head, to some queries; a count of 0 hides a key, and one behind the range says nothing."""
    counts = index([[0, 3, -9], [2, 1, -9]])
    for kind in (torch.int16, torch.int32):
        plan = plan_of(small(counts=counts.to(kind))).validate()
        assert plan.to_dense()[0, 0].tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
        assert plan.pairs_met().tolist() == [[7]]
        assert "round 0: 2 groups of 1–3 queries, 2 keys, counted" in plan.describe()
        for other in (Plan.from_dict(plan.to_dict()), plan.to("cpu"), one_head(plan)):
            assert other.rounds[0].counts is not None
            assert torch.equal(other.rounds[0].counts, counts.to(kind))
        assert restrict(plan, torch.tensor([[2, 3]])).to_dense()[0, 0].sum(-1).tolist() == [0, 0, 1, 2]


def test_unused_slots_may_hold_anything():
    plan = plan_of(small(key_order=index([4, 1, 99]), key_stop=index([2, 2]), query_offsets=index([0, 1, 3])))
    plan = replace(plan, rounds=(replace(plan.rounds[0], query_order=index([2, 0, 3, -7])),)).validate()
    assert plan.to_dense()[0, 0].sum(-1).tolist() == [1, 0, 2, 1]
    k = v = torch.randn(1, 1, 5, 2)
    assert coterie.grouped_attention(torch.randn(1, 1, 4, 2), k, v, plan).out.isfinite().all()


# --- passing a plan in again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_plan_made_before_is_used_as_it_is_with_its_masks(name):
    q, k, v = tensors(2, 2, 40)
    mask = padding(2, 40, [40, 23])
    plan = MECHANISMS[name].plan(q, k, key_mask=mask)
    want = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask)
    assert torch.equal(coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask, plan=plan), want)
    assert torch.equal(coterie.attention(q, k, v, None, plan=plan), want)


def test_masks_given_beside_a_plan_are_honoured_or_refused():
    q, k, v = tensors(2, 2, 40)
    mask = padding(2, 40, [40, 23])
    bare = coterie.Full().plan(q, k)
    masked = coterie.attention(q, k, v, None, plan=bare, key_mask=mask)
    torch.testing.assert_close(masked, coterie.attention(q, k, v, "full", key_mask=mask))
    halved = coterie.grouped_attention(q, k, v, bare, query_mask=mask).out
    assert (halved.transpose(1, 2)[~mask] == 0).all()
    means_of_all = coterie.Clustered(clusters=4).plan(q, k)
    with pytest.raises(ValueError, match="query_mask: expected to be the mask that the plan's means were made with"):
        coterie.attention(q, k, v, None, plan=means_of_all, key_mask=mask)


def test_a_plan_for_something_else_is_refused():
    q, k, v = tensors(2, 2, 40)
    plan = coterie.Full().plan(q, k)
    longer = tensors(2, 2, 41)
    with pytest.raises(ValueError, match=r"plan: expected a plan for Sizes\(.*queries=41.*got Sizes\(.*queries=40"):
        coterie.attention(*longer, None, plan=plan)
    with pytest.raises(ValueError, match="is_causal: expected False, which the plan was made with, got True"):
        coterie.attention(q, k, v, None, plan=plan, is_causal=True)
    with pytest.raises(
        ValueError, match=r"causal_offset: expected \[0, 0\], which the plan was made with, got \[3, 3\]"
    ):
        coterie.attention(q, k, v, None, plan=plan, causal_offset=3)
    with pytest.raises(TypeError, match=r"plan: expected a coterie.Plan, got dict"):
        coterie.attention(q, k, v, None, plan=plan.to_dict())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"plan: expected a coterie.Plan, got dict"):
        coterie.grouped_attention(q, k, v, plan.to_dict())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plan: expected device cpu, got meta"):
        coterie.attention(q, k, v, None, plan=plan.to("meta"))


def test_a_mean_in_a_window_needs_a_position():
    with pytest.raises(ValueError, match=r"query_means.positions: expected positions"):
        plan_of(small(window=(0, 1)), query_means=means())
