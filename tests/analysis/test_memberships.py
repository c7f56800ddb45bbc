"""Memberships, meetings and locality against loops over plans and over all pairs."""

from __future__ import annotations

import math
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

import coterie
from coterie.analysis import memberships
from coterie.analysis.figures.memberships import draw_grid, draw_locality, draw_meetings, draw_tokens, tokens_html
from coterie.analysis.figures.palette import lab, paint, palette
from coterie.analysis.figures.saving import save
from coterie.analysis.images import image_queries
from coterie.analysis.memberships import Locality, bands, check_grid, groups_of, locality, meetings
from coterie.plan.slices import one_head
from coterie.plan.tiles import count_pairs
from tests.cases import CAUSAL, MECHANISMS, padding, tensors


def plan_of(name: str, *, causal: bool = False, queries: int = 63, keys: int | None = None, mask=None) -> coterie.Plan:
    q, k, _ = tensors(heads=4, key_heads=2, queries=queries, keys=keys)
    return MECHANISMS[name].plan(q, k, is_causal=causal, key_mask=mask)


def met(plan: coterie.Plan, head: int, sample: int) -> np.ndarray:
    """Who meets whom directly, dense."""
    return (count_pairs(plan)[sample, head, : plan.num_queries, : plan.num_keys] > 0).numpy()


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_groups_of_queries_are_those_of_the_round(name):
    mask = padding(2, 63, [63, 41], "scattered")
    plan = plan_of(name, mask=mask)
    for index, each in enumerate(plan.rounds):
        labels = groups_of(plan, round=index, head=3, sample=1).tolist()
        assert all(label == -1 for label, real in zip(labels, mask[1].tolist(), strict=True) if not real)
        want = [-1] * 63
        offsets = each.query_offsets[1, 3].tolist()
        for g in range(each.groups):
            for row in each.query_order[1, 3, offsets[g] : offsets[g + 1]].tolist():
                if row < 63 and each.key_start[1, 3, g] < each.key_stop[1, 3, g]:
                    want[row] = g
        if max(want) == -1 and offsets[-1] > 0:  # only means are grouped: a query belongs to the one that answers it
            assert plan.answer is not None
            answers = plan.answer[1, 3].tolist()
            want = [answer - 63 if answer >= 0 else -1 for answer in answers]
        assert labels == want


def test_the_groups_of_keys_are_where_the_keys_are_met():
    q, k, _ = tensors(heads=2, queries=45, keys=71)
    plan = coterie.Smyrf(rounds=2, cluster_size=10).plan(q, k)
    for index in range(2):
        one = coterie.Plan(**(vars(plan) | {"rounds": plan.rounds[index : index + 1]}))
        rows, keys = (groups_of(plan, round=index, head=1, side=side) for side in ("queries", "keys"))
        assert (len(rows), len(keys)) == (45, 71)
        assert torch.equal(one.to_dense()[0, 1] > 0, rows[:, None] == keys[None])


@pytest.mark.parametrize("name", ["reformer", "topk", "routing", "near-far"])
def test_keys_in_several_groups_are_refused(name):
    with pytest.raises(ValueError, match=r"round: expected a round whose groups share no keys, as Smyrf's .*meetings"):
        groups_of(plan_of(name), side="keys")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"round": 3}, "round: expected one of the 3 rounds, from 0, got 3"),
        ({"round": -1}, "round: expected an int ≥ 0"),
        ({"head": 4}, "head: expected one of the 4 heads, from 0, got 4"),
        ({"sample": 2}, "sample: expected one of the 2 samples, from 0, got 2"),
        ({"side": "values"}, "side: expected one of 'queries', 'keys', got 'values'"),
    ],
)
def test_what_a_plan_does_not_have_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        groups_of(plan_of("smyrf"), **settings)
    with pytest.raises(TypeError, match=r"plan: expected a coterie.Plan, got int"):
        groups_of(3)  # type: ignore[arg-type]


# --- meetings ---------------------------------------------------------------------------------------------------------


def in_cells(pairs: np.ndarray, cells: int) -> np.ndarray:
    """The share of True in each cell, pair by pair."""
    rows, columns = min(cells, pairs.shape[0]), min(cells, pairs.shape[1])
    hits, area = np.zeros((rows, columns)), np.zeros((rows, columns))
    for i in range(pairs.shape[0]):
        for j in range(pairs.shape[1]):
            at = (i * rows // pairs.shape[0], j * columns // pairs.shape[1])
            hits[at] += pairs[i, j]
            area[at] += 1
    return hits / area


@pytest.mark.parametrize("budget", [1 << 24, 700], ids=["one-band", "many-bands"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_meetings_are_the_shares_of_the_dense_matrix(name, causal, budget, monkeypatch):
    if causal and name not in CAUSAL:
        pytest.skip(f"{name} attends through mean queries, which refuse is_causal")
    monkeypatch.setattr(memberships, "_BAND", budget)
    plan = plan_of(name, causal=causal, mask=padding(2, 63, [57, 63], "left"))
    for head, sample in ((0, 0), (3, 1)):
        want = met(plan, head, sample)
        found = meetings(plan, head=head, sample=sample, cells=10)
        np.testing.assert_allclose(found.numpy(), in_cells(want, 10), atol=1e-12)
        rows = torch.cat([part for _, part in bands(one_head(plan, head=head, sample=sample))])
        assert np.array_equal(rows.numpy(), want)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 40), st.booleans())
def test_cells_fit_any_lengths(queries, keys, cells, causal):
    plan = plan_of("smyrf", causal=causal, queries=queries, keys=keys)
    np.testing.assert_allclose(
        meetings(plan, head=1, cells=cells).numpy(), in_cells(met(plan, 1, 0), cells), atol=1e-12
    )


def test_a_bias_that_hides_a_key_and_a_skip_are_honoured():
    """Key 1 is hidden in one round and met, twice, in the other, where query 1 skips it; key 2 is only hidden."""

    def index(*numbers: int) -> torch.Tensor:
        return torch.tensor([[numbers]], dtype=torch.int32)

    hidden = torch.tensor([[[0.0, -math.inf, -math.inf]]])
    everyone: dict[str, Any] = {"query_order": index(0, 1, 2), "query_offsets": index(0, 3), "key_start": index(0)}
    first = coterie.Round(**everyone, key_order=index(0, 1, 2), key_stop=index(3), bias=hidden)
    skip = torch.tensor([[[[-1], [1], [-1]]]], dtype=torch.int32)
    second = coterie.Round(**everyone, key_order=index(1, 1), key_stop=index(2), skip=skip)
    plan = coterie.Plan(3, 3, 1, (first, second), torch.zeros(1, dtype=torch.int32))
    assert meetings(plan, cells=3).tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]


def test_an_empty_plan_and_bad_cells_are_refused():
    q = torch.zeros(1, 1, 0, 4)
    with pytest.raises(ValueError, match="plan: expected one with queries and keys, got none"):
        meetings(coterie.Smyrf().plan(q, q))
    with pytest.raises(ValueError, match="cells: expected an int ≥ 1, got 0"):
        meetings(plan_of("smyrf"), cells=0)
    with pytest.raises(ValueError, match=r"plan: expected one of a single head: one_head\(plan, …\), got \(2, 4\)"):
        next(bands(plan_of("smyrf")))


# --- locality ---------------------------------------------------------------------------------------------------------


def apart(i: int, j: int, grid: tuple[int, int] | None) -> int | None:
    """The distance of two tokens, along a line or an axis of a grid; None if they are on neither."""
    if grid is None:
        return abs(i - j)
    (a, b), (c, d) = divmod(i, grid[1]), divmod(j, grid[1])
    return abs(b - d) if a == c else abs(a - c) if b == d else None


@pytest.mark.parametrize("grid", [None, (7, 9), (3, 21), (63, 1)])
@pytest.mark.parametrize("name", ["smyrf", "reformer", "clustered", "improved", "near-far", "routing"])
def test_the_locality_of_groups_is_that_of_all_pairs(name, grid):
    plan = plan_of(name, mask=padding(2, 63, [50, 63]))
    found = locality(plan, grid=grid, head=2)
    labels = [groups_of(plan, round=r, head=2).tolist() for r in range(len(plan.rounds))]
    real = [(i, j) for i in range(50) for j in range(50) if i != j]
    assert found.distances[0] == 1
    for distance, share, count in zip(found.distances, found.shares, found.pairs, strict=True):
        pairs = [(i, j) for i, j in real if i < j and apart(i, j, grid) == distance]
        same = [each[i] == each[j] for each in labels for i, j in pairs]
        assert count == len(same)
        assert share == pytest.approx(np.mean(same)) if same else math.isnan(share)
    assert found.chance == pytest.approx(np.mean([each[i] == each[j] for each in labels for i, j in real]))


@pytest.mark.parametrize("budget", [1 << 24, 700], ids=["one-band", "many-bands"])
@pytest.mark.parametrize(("keys", "offset"), [(63, None), (40, -30), (80, 25), (80, -70)])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_locality_of_meetings_is_that_of_all_pairs(keys, offset, causal, budget, monkeypatch):
    monkeypatch.setattr(memberships, "_BAND", budget)
    q, k, _ = tensors(queries=63, keys=keys)
    plan = coterie.Reformer(rounds=2, chunk_size=8).plan(q, k, is_causal=causal, causal_offset=offset)
    shift = int(plan.offset[0])
    want = met(plan, 1, 0)
    found = locality(plan, of="meetings", head=1, distances=[1, 2, 5, 30])
    seen = {(i, j) for i in range(63) for j in range(keys) if want[i].any() and (j <= i + shift or not causal)}
    for distance, share, count in zip(found.distances, found.shares, found.pairs, strict=True):
        pairs = [want[i, j] for i, j in seen if abs(i + shift - j) == distance]
        assert count == len(pairs)
        assert share == pytest.approx(np.mean(pairs)) if pairs else math.isnan(share)
    assert found.chance == pytest.approx(np.mean([want[i, j] for i, j in seen])) if seen else math.isnan(found.chance)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_meetings_on_a_grid(causal):
    plan = plan_of("smyrf", causal=causal)
    want = met(plan, 0, 0)
    found = locality(plan, of="meetings", grid=(7, 9))
    for distance, share in zip(found.distances, found.shares, strict=True):
        pairs = [
            (i, j) for i in range(63) for j in range(63) if apart(i, j, (7, 9)) == distance and (j < i or not causal)
        ]
        assert share == pytest.approx(np.mean([want[i, j] for i, j in pairs]))


def test_near_and_far_are_the_first_share_and_the_mean_of_distant_pairs():
    found = Locality("groups", (1, 4, 8, 16), (0.9, 0.5, 0.2, math.nan), (10, 8, 6, 0), 0.3)
    assert found.near == 0.9
    assert found.far == pytest.approx(0.2)
    assert math.isnan(Locality("groups", (1,), (math.nan,), (0,), math.nan).far)


def test_one_round_alone():
    plan = plan_of("smyrf")
    each = [locality(plan, round=r).shares for r in range(3)]
    np.testing.assert_allclose(locality(plan).shares, np.mean(each, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": (8, 8)}, r"grid: expected \(H, W\) with H · W = 63, such as \(7, 9\), got \(8, 8\)"),
        ({"grid": (-7, -9)}, r"grid: expected \(H, W\) with H · W = 63"),
        ({"grid": 63}, r"grid: expected two ints \(H, W\), got 63"),
        ({"distances": [0]}, "distances: expected an int ≥ 1, got 0"),
        ({"distances": [63]}, "distances: expected an int ≤ 62, got 63"),
        ({"distances": [3, 2]}, r"distances: expected different ints that ascend, got \[3, 2\]"),
        ({"distances": []}, "distances: expected different ints that ascend"),
        ({"of": "keys"}, "of: expected one of 'groups', 'meetings'"),
        ({"of": "meetings", "round": 1}, "round: expected None for meetings, which are of all rounds, got 1"),
    ],
)
def test_bad_settings_of_locality_are_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        locality(plan_of("smyrf"), **settings)


def test_what_has_no_locality_is_refused():
    with pytest.raises(
        ValueError, match="grid: expected a plan of tokens that attend to each other, got 63 queries, 40"
    ):
        locality(plan_of("smyrf", keys=40), of="meetings", grid=(7, 9))
    with pytest.raises(ValueError, match="plan: expected at least two tokens in a row, got 1"):
        locality(plan_of("smyrf", queries=1))
    nobody = plan_of("smyrf", mask=torch.zeros(2, 63, dtype=torch.bool))
    with pytest.raises(ValueError, match="plan: expected a round that groups queries, got none"):
        locality(nobody)
    with pytest.raises(ValueError, match=r"H · W = 0, got \(1, 1\)"):
        check_grid((1, 1), 0)


def test_65536_tokens_within_a_gibibyte():
    code = (
        "import resource, torch, coterie\n"
        "from coterie.analysis.memberships import groups_of, locality, meetings\n"
        "from coterie.analysis.figures.memberships import draw_grid, draw_meetings\n"
        "from coterie.analysis.figures.saving import _drawn\n"
        "torch.set_num_threads(2)\n"
        "q = torch.randn(1, 1, 65536, 16)\n"
        "_drawn(draw_meetings(torch.ones(2, 2)), 'png')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "plan = coterie.Smyrf(rounds=2, cluster_size=64).plan(q, q)\n"
        "shares = meetings(plan)\n"
        "assert abs(shares.mean().item() * 65536**2 / (2 * 65536 * 64) - 1) < 0.05\n"
        "assert locality(plan, grid=(128, 512)).distances[-1] == 256\n"
        "_drawn(draw_grid({'groups': groups_of(plan)}, (128, 512)), 'png')\n"
        "_drawn(draw_meetings(shares), 'png')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1024 * 1024


# --- images -----------------------------------------------------------------------------------------------------------


def test_the_queries_of_an_image_are_projected_colours_and_places():
    image = np.random.default_rng(0).integers(0, 256, (7, 11, 3), dtype=np.uint8)
    found = image_queries(image, dim=6, place=0.5, seed=3)
    features = np.zeros((77, 5))
    for i in range(77):
        features[i] = [*image[i // 11, i % 11] / 255, i // 11, i % 11]
    features = (features - features.mean(0)) / features.std(0) * [1, 1, 1, 0.5, 0.5]
    matrix = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).numpy() / 6**0.5
    np.testing.assert_allclose(found.q[0, 0].numpy(), features @ matrix, atol=1e-5)
    assert found.grid == (7, 11)
    same = image_queries(torch.from_numpy(image) / 255, dim=6, place=0.5, seed=3)
    torch.testing.assert_close(same.q, found.q)


def test_an_image_is_averaged_to_a_grid():
    image = np.random.default_rng(0).random((6, 8, 3))
    small = image_queries(image, grid=(3, 2)).image.numpy()
    for i in range(3):
        for j in range(2):
            np.testing.assert_allclose(small[i, j], image[2 * i : 2 * i + 2, 4 * j : 4 * j + 4].mean((0, 1)), rtol=1e-5)


@pytest.mark.parametrize(
    ("image", "settings", "message"),
    [
        (np.zeros((4, 4)), {}, r"image: expected shape \(H, W, 3\), got \(4, 4\)"),
        (np.zeros((4, 0, 3)), {}, r"image: expected shape \(H, W, 3\)"),
        (np.full((4, 4, 3), 2.0), {}, r"image: expected integers in \[0, 255\] or floats in \[0, 1\]"),
        (np.full((4, 4, 3), math.nan), {}, r"image: expected integers in \[0, 255\] or floats in \[0, 1\]"),
        (np.zeros((4, 4, 3)), {"grid": (5, 4)}, r"grid: expected \(H, W\), at most the image's \(4, 4\), got \(5, 4\)"),
        (np.zeros((4, 4, 3)), {"grid": (4,)}, r"grid: expected \(H, W\)"),
        (np.zeros((4, 4, 3)), {"dim": 0}, "dim: expected an int ≥ 1"),
        (np.zeros((4, 4, 3)), {"seed": -1}, "seed: expected an int ≥ 0"),
        (np.zeros((4, 4, 3)), {"place": "here"}, "place: expected a number, got str"),
    ],
)
def test_bad_images_are_named(image, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        image_queries(image, **settings)


def test_in_a_photograph_neighbours_are_grouped_and_distant_pixels_less():
    """What §12 of the supplement sees in Figure 7, as numbers; with 2 and with 128 clusters."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the photograph")
    pixels = image_queries(datasets.load_sample_image("china.jpg"), grid=(32, 48))
    for clusters in (2, 128):
        plan = coterie.Smyrf(rounds=1, cluster_size=1536 // clusters).plan(pixels.q, pixels.q)
        assert len(groups_of(plan).unique()) == clusters
        found = locality(plan, grid=pixels.grid)
        assert found.near > 1.3 * found.chance
        assert found.near > found.far


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_128_colours_are_far_apart_and_more_extend_them():
    colours = palette(128)
    distances = torch.pdist(lab(torch.cat([colours, torch.zeros(1, 3)])))
    assert float(distances.min()) > 14  # a difference of 2 is just visible
    assert torch.equal(palette(300)[:128], colours)
    assert torch.equal(palette(4915)[-3:], palette(4912)[:3])
    assert torch.equal(
        paint(torch.tensor([[0, -1], [5, 1]])),
        torch.stack([palette(6)[0], torch.zeros(3), palette(6)[5], palette(6)[1]]).view(2, 2, 3),
    )
    with pytest.raises(ValueError, match="count: expected an int ≥ 1, got 0"):
        palette(0)


def test_lab_is_that_of_the_standard():
    """Values of the sRGB primaries under D65, as colour tables print them."""
    found = lab(torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.5, 0.5]]))
    want = [[53.24, 80.09, 67.20], [87.73, -86.18, 83.18], [32.30, 79.19, -107.86], [53.39, 0, 0]]
    np.testing.assert_allclose(found.numpy(), want, atol=0.06)


def test_pixels_have_the_colours_of_their_groups():
    labels = torch.tensor([0, 1, 2, -1, 2, 1])
    figure = draw_grid({"three": labels}, (2, 3), image=torch.full((2, 3, 3), 0.25))
    first, second = (axes.images[0].get_array() for axes in figure.axes)
    assert (np.asarray(first) == 0.25).all()
    np.testing.assert_array_equal(
        second, torch.stack([palette(3)[i] if i >= 0 else torch.zeros(3) for i in labels]).view(2, 3, 3)
    )
    with pytest.raises(ValueError, match=r"grid: expected \(H, W\) with H · W = 6, such as \(2, 3\), got \(4, 2\)"):
        draw_grid({"three": labels}, (4, 2))
    with pytest.raises(ValueError, match=r"image: expected shape \(2, 3, 3\), got \(3, 2, 3\)"):
        draw_grid({"three": labels}, (2, 3), image=torch.zeros(3, 2, 3))
    with pytest.raises(ValueError, match="panels: expected at least one, got none"):
        draw_grid({}, (2, 3))


def test_tokens_are_drawn_in_order_and_lines_are_not_too_long():
    tokens = ["A ", "$1$ ", "long\n", "line ", "of text"]
    figure = draw_tokens(tokens, torch.tensor([0, 1, 2, 3, -1]), columns=11, title="five")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["A ", "$1$ ", "long⏎", "line ", "of text"]
    assert [int(box.get_y()) for box in axes.patches if isinstance(box, Rectangle)] == [0, 0, 0, 1, 2]
    for patch, colour in zip(axes.patches, [*palette(4).tolist(), [0, 0, 0]], strict=True):
        assert patch.get_facecolor()[:3] == pytest.approx(tuple(colour))


class Spans(HTMLParser):
    """What a page says in its spans."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        if tag == "span":
            self.found.append((dict(attrs)["title"], ""))

    def handle_data(self, data):
        if self.found:
            title, text = self.found[-1]
            self.found[-1] = (title, text + data)


def test_a_page_of_tokens_says_what_was_given():
    tokens = ["<script>", "a & b ", '\n"quoted"']
    page = tokens_html(tokens, torch.tensor([0, 7, -1]), title="<title>")
    spans = Spans()
    spans.feed(page)
    assert [(title, text.removesuffix("\n")) for title, text in spans.found] == [
        ("group 0", tokens[0]),
        ("group 7", tokens[1]),
        ("in no group", tokens[2]),
    ]
    assert "<script>" not in page
    assert "<h1>&lt;title&gt;</h1>" in page


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        (["a"], torch.tensor([0, 1]), "tokens: expected one for each of the 2 labels, got 1"),
        ("ab", torch.tensor([0, 1]), "tokens: expected a list of strings, got str"),
        ([1, 2], torch.tensor([0, 1]), "tokens: expected a list of strings, got list"),
        (["a"], [0], "labels: expected a tensor, got list"),
        (["a"], torch.tensor([0.0]), r"labels: expected integers, got torch.float32"),
        (["a"], torch.tensor([True]), r"labels: expected integers, got torch.bool"),
        (["a"], torch.tensor([[0]]), r"labels: expected one group for each token, \(N,\), got \(1, 1\)"),
        (["a"], torch.tensor([-2]), "labels: expected groups from 0, or −1 for none, got -2"),
    ],
)
def test_bad_tokens_are_named(tokens, labels, message):
    for draw in (draw_tokens, tokens_html):
        with pytest.raises((ValueError, TypeError), match=message):
            draw(tokens, labels)


def test_meetings_and_locality_are_drawn_as_they_are():
    shares = torch.rand(3, 5)
    np.testing.assert_array_equal(draw_meetings(shares, title="m").axes[0].images[0].get_array(), shares.numpy())
    found = Locality("groups", (1, 2, 4), (0.9, 0.5, 0.3), (9, 8, 6), 0.4)
    share, chance = draw_locality({"x": found}, title="l").axes[0].lines
    assert np.asarray(share.get_ydata()).tolist() == [0.9, 0.5, 0.3]
    assert np.asarray(chance.get_ydata()).tolist() == [0.4, 0.4]
    with pytest.raises(ValueError, match=r"shares: expected \(rows, columns\), see meetings\(\), got \(5,\)"):
        draw_meetings(shares[0])
    with pytest.raises(ValueError, match="found: expected at least one Locality, got none"):
        draw_locality({})


def test_files_are_whole_the_same_each_time_or_not_there(tmp_path, monkeypatch):
    figure = draw_tokens(["a ", "b"], torch.tensor([0, 1]))
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        first = save(figure, tmp_path / "new" / name).read_bytes()
        assert first.startswith(start)
        assert save(figure, tmp_path / name).read_bytes() == first
    assert save("<p>", str(tmp_path / "a.html")).read_text() == "<p>"
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .png or .svg for a figure, got a.html"):
        save(figure, tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .html for a page, got a.png"):
        save("<p>", tmp_path / "a.png")
    with pytest.raises(TypeError, match="picture: expected a matplotlib Figure or a string, got int"):
        save(3, tmp_path / "a.png")  # type: ignore[arg-type]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("pathlib.Path.replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save("<p>", tmp_path / "b.html")
    assert sorted(tmp_path.rglob("*")) == before
