"""How alike clusters are over heads and layers, and how they follow segments: against loops over pairs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coterie
import coterie.hosts
from coterie.analysis import (
    Agreement,
    Segment,
    adjusted_rand,
    agreement,
    draw_agreement,
    draw_timeline,
    following,
    groups_of,
    head_groups,
)
from coterie.analysis.figures.palette import paint


def rand_by_pairs(first: list[int], second: list[int]) -> float:
    """The index from its definition, pair by pair."""
    known = [(a, b) for a, b in zip(first, second, strict=True) if a >= 0 and b >= 0]
    pairs = list(itertools.combinations(known, 2))
    if not pairs:
        return math.nan
    mine = sum(p[0] == q[0] for p, q in pairs)
    other = sum(p[1] == q[1] for p, q in pairs)
    both = sum(p == q for p, q in pairs)
    expected, most = mine * other / len(pairs), (mine + other) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)


LABELS = st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 4)), min_size=0, max_size=17)


@given(LABELS)
def test_the_index_is_that_of_all_pairs(labels):
    first, second = [a for a, _ in labels], [b for _, b in labels]
    found = adjusted_rand(torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64))
    assert found == pytest.approx(rand_by_pairs(first, second), nan_ok=True)


def test_names_of_groups_do_not_matter_and_chance_is_nothing():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (999,), generator=generator)
    assert adjusted_rand(labels, 7 * (4 - labels)) == 1
    assert abs(adjusted_rand(labels, torch.randint(5, (999,), generator=generator))) < 0.02


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0], torch.zeros(1), "first: expected a tensor, got list"),
        (torch.zeros(1, 2), torch.zeros(2), r"first: expected one group for each token, \(N,\), got \(1, 2\)"),
        (torch.zeros(3), torch.zeros(2), "second: expected a group for each of the 3 tokens, got 2"),
    ],
)
def test_labels_that_are_refused(first, second, said):
    with pytest.raises((ValueError, TypeError), match=said):
        adjusted_rand(first, second)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("mechanism", ["clustered:clusters=5", "smyrf:cluster_size=9,rounds=2", "near-far:near=4"])
def test_groups_of_every_head_are_those_of_its_own_plan(encoder, mechanism):
    batch, seen = torch.randn(2, 41, 32), dict[str, Any]()
    found = head_groups(encoder, batch, mechanism, sample=1)
    coterie.hosts.watch_dense(encoder, batch, seen.__setitem__)
    assert list(found) == [(f"layers.{layer}.self_attn", head) for layer in range(2) for head in range(4)]
    for (module, head), labels in found.items():
        call = seen[module]
        plan = coterie.as_mechanism(mechanism).plan(call.q, call.k, **call.planning())
        assert torch.equal(labels, groups_of(plan, head=head, sample=1))


def test_modules_are_chosen_by_name(encoder):
    batch = torch.randn(1, 30, 32)
    assert {module for module, _ in head_groups(encoder, batch, "smyrf", within="layers.1")} == {"layers.1.self_attn"}
    with pytest.raises(
        ValueError, match=r"within: expected a name that begins one of layers\.0\.self_attn, .* 'layer'"
    ):
        head_groups(encoder, batch, "smyrf", within="layer")
    for placed in ("local", "full", "fixed", "strided", "longformer", "topk:k=4", "local@100"):
        with pytest.raises(ValueError, match="mechanism: expected one that groups queries by what they are"):
            head_groups(encoder, batch, placed)


@pytest.fixture(scope="module")
def some() -> dict[tuple[str, int], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        (f"l{layer}", head): torch.randint(3, (23,), generator=generator) for layer in range(3) for head in range(2)
    }


def test_means_over_heads_and_layers_are_those_of_loops(some):
    found = agreement(some)
    assert found.modules == ("l0", "l1", "l2")
    for (a, i), (b, j) in itertools.product(enumerate(some), enumerate(some)):
        assert float(found.index[a, b]) == pytest.approx(rand_by_pairs(some[i].tolist(), some[j].tolist()))
    for a, b in itertools.product(range(3), range(3)):
        pairs = [
            rand_by_pairs(some[f"l{a}", i].tolist(), some[f"l{b}", j].tolist())
            for i, j in itertools.product(range(2), range(2))
            if (a, i) != (b, j)
        ]
        assert float(found.layers()[a, b]) == pytest.approx(sum(pairs) / len(pairs))
    assert torch.equal(found.of("l1"), found.index[2:4, 2:4])
    best = max(float(found.index[i, j]) for i in range(6) for j in range(i))
    assert found.closest(1)[0][2] == best
    said = found.describe()
    assert "6 heads of 3 layers" in said
    assert f"of one layer: {found.layers().diagonal().mean():.3f}" in said
    assert "<table>" in found._repr_html_()
    assert len(found.table().rows) == 3


def test_a_single_head_has_no_pairs():
    found = agreement({("only", 0): torch.arange(5)})
    assert math.isnan(found.between("only", "only"))
    assert found.describe() == "1 heads of 1 layers; mean adjusted Rand index of two heads"
    assert len(draw_agreement(found).axes) == 3


def test_refusals_of_agreement(some):
    with pytest.raises(ValueError, match="labels: expected at least one head, got none"):
        agreement({})
    with pytest.raises(ValueError, match=r"as many tokens in every head .*, got \[2, 3\]"):
        agreement({("a", 0): torch.arange(3), ("b", 0): torch.arange(2)})
    with pytest.raises(ValueError, match="module: expected one of l0, l1, l2, got 'l9'"):
        agreement(some).of("l9")


def test_pictures_show_the_numbers(some):
    found = agreement(some)
    layers, heads, _ = draw_agreement(found, title="a_b").axes
    drawn = layers.get_images()[0].get_array()
    assert drawn is not None
    torch.testing.assert_close(torch.as_tensor(drawn.data), found.layers())
    assert [label.get_text() for label in heads.get_xticklabels()] == ["0", "1", "2"]
    one, _ = draw_agreement(found, across="heads", module="l2").axes
    drawn = one.get_images()[0].get_array()
    assert drawn is not None
    torch.testing.assert_close(torch.as_tensor(drawn.data), found.of("l2"))
    with pytest.raises(ValueError, match="across: expected"):
        draw_agreement(found, across="rounds")
    with pytest.raises(ValueError, match="module: expected None across layers"):
        draw_agreement(found, module="l1")
    assert isinstance(found, Agreement)


# --- along time -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-1, 3), min_size=12, max_size=12), st.sets(st.integers(1, 11), max_size=5), st.integers(0, 4)
)
def test_following_is_counted_token_by_token(labels, cuts, gap):
    edges = [gap, *sorted(cut for cut in cuts if cut > gap), 12]
    segments = [Segment(a, b, "xy"[i % 2]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    which = [next((i for i, each in enumerate(segments) if each.start <= t < each.end), -1) for t in range(12)]
    named = [-1 if i < 0 else "xy".index(segments[i].name) for i in which]
    found = following(torch.tensor(labels), segments)
    assert found.agreement == pytest.approx(rand_by_pairs(labels, which), nan_ok=True)
    assert found.by_name == pytest.approx(rand_by_pairs(labels, named), nan_ok=True)
    known = [t for t in range(11) if min(labels[t], labels[t + 1], which[t], which[t + 1]) >= 0]
    for share, at in ((found.at_boundaries, True), (found.inside, False)):
        mine = [labels[t] != labels[t + 1] for t in known if (which[t] != which[t + 1]) == at]
        assert share == pytest.approx(sum(mine) / len(mine) if mine else math.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([], "segments: expected at least one, got none"),
        (
            [Segment(0, 4, "a"), Segment(3, 5, "b")],
            "each to begin where the one before ends, or later, got 'b' from 3 to 5",
        ),
        ([Segment(2, 2, "a")], "some of the 9 tokens in each, got 'a' from 2 to 2"),
        ([Segment(2, 10, "a")], "some of the 9 tokens in each, got 'a' from 2 to 10"),
        ([Segment(-1, 3, "a")], "each to begin where"),
    ],
)
def test_segments_that_are_refused(segments, said):
    labels = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(ValueError, match=said):
        following(labels, segments)
    with pytest.raises(ValueError, match=said):
        draw_timeline({"a": labels}, segments, seconds=1.0)


def test_a_timeline_has_a_strip_for_each_row_and_a_line_at_each_border():
    rows = {"one": torch.tensor([4, 4, 2, -1]), "two": torch.tensor([0, 1, 0, 1])}
    segments = [Segment(0, 2, "a$b"), Segment(2, 3, "c")]
    figure = draw_timeline(rows, segments, seconds=0.5, features=torch.rand(7, 8), title="t")
    top, strips = figure.axes
    drawn = strips.get_images()[0].get_array()
    assert drawn is not None
    want = torch.stack([paint(torch.tensor([0, 0, 1, -1])), paint(torch.tensor([0, 1, 0, 1]))])
    torch.testing.assert_close(torch.as_tensor(drawn.data), want)
    assert list(strips.get_images()[0].get_extent()) == [0, 2.0, 2, 0]
    assert {float(line.get_xdata()[0]) for line in strips.lines} == {0.0, 1.0, 1.5}  # type: ignore[index,arg-type]
    assert [text.get_text() for text in top.texts] == ["a$b", "c"]
    assert len(draw_timeline(rows, segments, seconds=0.5).axes) == 1


def test_refusals_of_timelines():
    with pytest.raises(ValueError, match="rows: expected at least one, got none"):
        draw_timeline({}, [Segment(0, 1, "a")], seconds=1.0)
    with pytest.raises(ValueError, match=r"rows: expected as many tokens in each, got \[2, 3\]"):
        draw_timeline({"a": torch.arange(2), "b": torch.arange(3)}, [Segment(0, 1, "a")], seconds=1.0)


def test_a_head_that_groups_nobody_spoils_no_mean():
    two, none = torch.arange(20) % 2, torch.full((20,), -1)
    found = agreement({("a", 0): two, ("a", 1): none, ("b", 0): two, ("b", 1): none})
    assert found.between("a", "b") == 1
    assert math.isnan(found.between("a", "a"))
    assert found.closest() == [(("a", 0), ("b", 0), 1.0)]
    assert "nan" not in found.describe()
