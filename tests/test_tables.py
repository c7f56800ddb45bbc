"""What notebooks show: the tables of every result, read back from their HTML and compared with the text."""

from __future__ import annotations

import math
import re

import pytest
import torch

import coterie
from coterie.analysis import Locality, Spectra, attention_errors, compare, head_spectra, locality, spectra
from coterie.fitting.profile import Tried
from coterie.fitting.result import AtLength
from coterie.fitting.tables import choices_table, lengths_table, tried_table
from coterie.tables import Table, facts, folded, output, paragraph
from tests.cases import tensors
from tests.html_reader import read

WILD = "a<script>alert('x')</script>&amp;\"$x^2$\x1b[2J"
SEEN = WILD.replace("\x1b", "�")  # a control character steers nothing
QUIET = {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def a_fit(module: str = "layers.0.self_attn") -> coterie.Fit:
    nan = math.nan
    table = [
        Tried(module, "dense", 0.0, 0.25),
        Tried(module, "near-far", 0.103, 0.0504),
        Tried(module, "clustered", nan, nan, "is_causal: expected False, got True"),
        Tried("other", "dense", 0.0, 0.25),
    ]
    return coterie.Fit(
        choices={module: "near-far", "other": "dense", "never ran": "dense"},
        measure="hidden",
        fidelity=0.99,
        calibrated=0.995,
        held_out=0.9916,
        table=table,
        attention_seconds=(0.5, 0.3004),
        lengths=[AtLength(512, 1.0, 0.14, 0.14), AtLength(2048, 0.9916, 0.83, 0.64, 4, 0.99054, "t")],
        seed=0,
        notes=["Short inputs stay dense.", f"A note on {WILD}."],
    )


def test_a_table_says_the_same_as_text_and_as_html():
    table = Table(["name", "words", "count"], [["a", "b c", "1,000"], ["long name", "", "2"]], words=(0, 1))
    assert table.text().splitlines() == [
        "name       words  count",
        "a          b c    1,000",
        "long name             2",
    ]
    [cells] = read(table.html()).tables
    assert cells == [["name", "words", "count"], ["a", "b c", "1,000"], ["long name", "", "2"]]
    aligned = re.findall(r'<td style="text-align:(\w+)">', table.html())
    assert aligned == ["left", "left", "right"] * 2


def test_a_table_without_titles_or_rows():
    assert read(facts([("a", "b")]).html()).tables == [[["a", "b"]]]
    assert "thead" not in read(facts([("a", "b")]).html()).tags
    assert Table(["a", "b"], []).text() == "a  b"
    assert read(Table(["a", "b"], []).html()).tables == [[["a", "b"]]]
    assert Table([], []).text() == ""


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="zip"):
        Table(["a", "b"], [["1"]]).text()


def test_nothing_breaks_out_of_its_cell():
    whole = output(paragraph(WILD), Table([WILD], [[WILD]]).html(), folded(WILD, paragraph(WILD)))
    found = read(whole)
    assert found.tables == [[[SEEN], [SEEN]]]
    assert found.paragraphs == [SEEN, SEEN]
    assert found.tags <= QUIET
    assert found.classes >= {"tex2jax_ignore", "mathjax_ignore"}, "a dollar is a dollar"


def test_colours_are_left_to_the_theme():
    shown = a_fit()._repr_html_()
    assert "color" not in shown
    assert "background" not in shown
    assert set(re.findall(r'style="([^"]*)"', shown)) == {"text-align:left", "text-align:right"}


# --- fit --------------------------------------------------------------------------------------------------------------


def test_a_fit_shows_what_it_says():
    found = a_fit(WILD)
    shown = read(found._repr_html_())
    choices, lengths, tried = shown.tables
    assert choices == [
        ["attention module", "runs", "error there", "attention, ms", "dense, ms"],
        [SEEN, "near-far", "0.103", "50.4", "250.0"],
        ["other", "dense", "0.000", "250.0", "250.0"],
        ["never ran", "dense", "–", "–", "–"],
    ]
    assert lengths[2] == ["2,048", "4", "0.9916", "0.9905 (t)", "0.83 s", "0.64 s", "1.30×"]
    assert tried[3] == [SEEN, "clustered", "–", "–", "is_causal: expected False, got True"]
    assert len(tried) == 1 + len(found.table)
    assert shown.paragraphs == str(found).replace("\x1b", "�").split("\n\n")[1].split("\n")
    assert shown.tags <= QUIET
    assert repr(found).startswith("Fit(choices="), "text stays as it was"


def test_the_tables_of_a_fit_as_text():
    found = a_fit()
    for table in (choices_table(found), lengths_table(found), tried_table(found)):
        assert len(table.text().splitlines()) == 1 + len(table.rows)


def test_a_length_that_took_no_time_has_no_speed_up():
    found = coterie.Fit({}, "hidden", 0.9, 1.0, math.nan, [], (0.0, 0.0), [AtLength(5, math.nan, 0.0, 0.0)], 0)
    assert lengths_table(found).rows == [["5", "–", "–", "–", "0.00 s", "0.00 s", "–"]]
    at = AtLength(5, 1.0, 1.0, 1.0, 60, 0.9513, "binomial"), AtLength(9, 1.0, 1.0, 1.0, 3, 1.0, "exact")
    table = lengths_table(coterie.Fit({}, "hidden", 0.9, 1.0, 1.0, [], (0.0, 0.0), list(at), 0, share=0.95))
    assert table.columns[3] == "share at least"
    assert [row[3] for row in table.rows] == ["95.1% (binomial)", "exact"]


# --- plans and the analysis -------------------------------------------------------------------------------------------


def said_of(lines: list[str]) -> list[list[str]]:
    """Lines such as "  name: what is said"."""
    return [line.strip().split(": ", 1) for line in lines]


@pytest.mark.parametrize("mechanism", ["smyrf:rounds=2", "near-far:near=8", "clustered:clusters=5", "local:window=9"])
def test_a_plan_shows_what_it_describes(mechanism):
    q, k, _ = tensors(2, 2, 63)
    plan = coterie.as_mechanism(mechanism).plan(q, k)
    title, *lines = plan.describe().splitlines()
    shown = read(plan._repr_html_())
    assert shown.paragraphs == [title]
    assert shown.tables == [said_of(lines)]
    assert len(lines) >= 2
    assert repr(plan).startswith("Plan(num_queries=63, num_keys=63, batch=2, heads=2, key_heads=2, rounds=")


@pytest.mark.parametrize("mechanism", ["near-far:near=8", "clustered:clusters=5"])
def test_a_plan_and_its_parts_are_one_short_line(mechanism):
    q, k, _ = tensors(1, 2, 300)
    plan = coterie.as_mechanism(mechanism).plan(q, k)
    means = [each for each in (plan.query_means, plan.key_means) if each is not None]
    assert means
    for part in (plan, *plan.rounds, *means):
        assert len(repr(part)) < 120
        assert "tensor" not in repr(part)
    assert repr(means[0]).startswith(f"Means(rows={means[0].rows}, order=(1, 2, ")
    assert repr(plan.rounds[0]).startswith(f"Round(groups={plan.rounds[0].groups}, query_order=(1, 2, ")


def test_a_mechanism_shows_its_settings():
    for spec, title in (("local:window=64", "local:window=64"), ("local:window=64@512", "local:window=64@512")):
        shown = read(coterie.as_mechanism(spec)._repr_html_())
        assert shown.paragraphs == [title]
        assert ["window", "64"] in shown.tables[0]
    assert shown.tables[0][1] == ["at_least", "512"]
    assert read(coterie.Full()._repr_html_()).paragraphs == ["full"]
    assert ["strict", "false"] in read(coterie.NearFar()._repr_html_()).tables[0]


def test_a_swap_shows_what_it_replaced_and_what_ran():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with coterie.nn.swap(model, "local:window=8") as swapped:
        names = ["layers.0.self_attn", "layers.1.self_attn"]
        assert repr(swapped) == f"Swap(replaced={names}, calls={{}})"
        shown = read(swapped._repr_html_())
        assert shown.paragraphs == ["2 modules replaced, no call of SDPA seen yet"]
        assert shown.tables == [[[name, "replaced"] for name in names]]
    swapped.replaced, swapped._scope.calls = [], {WILD: "local", "b": "dense"}
    shown = read(swapped._repr_html_())
    assert shown.paragraphs == ["0 modules replaced, 2 calls of SDPA seen"]
    assert shown.tables == [[[SEEN, "local"], ["b", "dense"]]]


def test_spectra_show_what_they_describe():
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("<b>", torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval())
    found = spectra(model, torch.randn(1, 40, 32), mechanism="smyrf:cluster_size=10")
    title, *lines = found.describe().splitlines()
    shown = read(found._repr_html_())
    assert shown.paragraphs == [title]
    assert shown.tables == [said_of(lines)]
    one = Spectra("", head_spectra(*torch.randn(2, 1, 1, 9, 4).unbind(0)), skipped=(WILD,))
    assert read(one._repr_html_()).tables[0][-1] == ["no dense map", SEEN]


def test_errors_show_what_they_print():
    q, k, v = tensors(1, 2, 63)
    for rows in (None, 20):
        found = attention_errors(q, k, v, "topk:k=9", rows=rows)
        title, *lines = str(found).splitlines()
        shown = read(found._repr_html_())
        assert shown.paragraphs == [title]
        assert [f"  {name:<26} {value}" for name, value in shown.tables[0]] == lines


def test_a_comparison_shows_what_it_prints():
    q, k, v = tensors(1, 2, 63)
    found = compare({WILD: "topk", "windows": "local"}, q, k, v, keys=9, rows=20)
    *lines, legend = str(found).splitlines()
    shown = read(found._repr_html_())
    assert shown.paragraphs == [legend]
    [cells] = shown.tables
    assert cells[1][0] == SEEN
    assert [re.sub(r"\s+", " ", line.strip()) for line in lines[2:]] == [" ".join(row) for row in cells[2:]]
    assert shown.tags <= QUIET


def test_locality_shows_its_numbers():
    q = torch.arange(64.0).view(1, 1, 64, 1)
    found = locality(coterie.Smyrf(rounds=1, cluster_size=16).plan(q, q), distances=[1, 32])
    shown = read(found._repr_html_())
    assert shown.tables == [
        [
            ["distance", "pairs in one group", "of pairs"],
            ["1", f"{100 * found.near:.1f} %", "63"],
            ["32", "0.0 %", "32"],
        ]
    ]
    assert shown.paragraphs == [f"of all pairs, at whatever distance: {100 * found.chance:.1f} %"]
    empty = read(Locality("meetings", (1,), (math.nan,), (0,), math.nan)._repr_html_())
    assert empty.tables[0] == [["distance", "pairs that meet", "of pairs"], ["1", "–", "0"]]
