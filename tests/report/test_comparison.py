"""Several fits of one model side by side, fits of old, and numbers that nobody can draw."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.fitting.fit import AtLength, Fit
from coterie.fitting.profile import Tried
from coterie.report import Pictures, write, write_several
from coterie.report.comparison import several_page
from coterie.report.page import page as one_page
from coterie.report.words import meaning
from tests.html_reader import read
from tests.report.opened import CLASHES, INSIDE, opened, told
from tests.report.test_report import browser, needs_chromium  # noqa: F401

MODULES = [f"encoder.layer.{i}.attention.self" for i in range(3)]


def fit(asked: float = 0.99, seen: float = 0.994, near: int = 48, seconds: float = 3.7, **other: object) -> Fit:
    specs = [f"near-far:near={near},chunk=64@2048"] * 2 + ["local:window=256"]
    table = [
        row
        for module in MODULES
        for row in (
            Tried(module, "dense", 0.0, 0.1),
            Tried(module, specs[0], 0.07, 0.04),
            Tried(module, "smyrf", 0.9, 0.01),
        )
    ]
    found = Fit(
        choices=dict(zip(MODULES, specs, strict=True)),
        measure="hidden",
        fidelity=asked,
        calibrated=seen,
        held_out=seen,
        table=table,
        attention_seconds=(0.3, 0.1),
        lengths=[
            AtLength(512, 1.0, 0.36, 0.36, 4, 1.0, "exact"),
            AtLength(4096, seen, 7.1, seconds, 4, seen - 0.001, "t"),
        ],
        seed=0,
        environment={"coterie": "0.1.0", "machine": "x86_64, 2 threads"},
        certified=True,
    )
    return replace(found, **other)  # type: ignore[arg-type]


def old() -> Fit:
    """As it is read from a file of before there were bounds."""
    return fit(certified=False, lengths=[AtLength(512, 0.992, 0.4, 0.3), AtLength(4096, 0.994, 7.0, 4.0)])


NAMES = ["asked 0.95", "asked 0.99", "asked 0.999"]
THREE = [fit(0.95, 0.97, 16, 2.9), fit(), fit(0.999, 0.9994, 128, 6.0)]


def drawn(name: str = "smyrf") -> Pictures:
    return Pictures({m: [0.1, 0.2] for m in MODULES}, dict.fromkeys(MODULES, name), {MODULES[1]: [[0.0, 1.0]]})


def of_several(fits: list[Fit], **other: object) -> str:
    return several_page(fits, model="m", command="coterie report", **other)  # type: ignore[arg-type]


def labels(text: str) -> list[str]:
    """What is written beside the points of the trade-off."""
    plot = text.split("id=trade-off>")[1].split("</svg>")[0]
    return [part.split("<")[0] for part in plot.split("<text class=label")[1:] for part in [part.split(">", 1)[1]]]


def body(text: str) -> str:
    return text.split("<main>")[1].split("</main>")[0]


def test_a_point_for_each_fit_is_labelled_with_what_was_asked():
    text = of_several(THREE)
    assert labels(text) == ["asked 0.95", "asked 0.99", "asked 0.999", "dense"]
    plot = text.split("id=trade-off>")[1].split("</svg>")[0]
    assert plot.count('class="point ') == 4
    assert plot.count('class="whisker ') == 3
    assert "at least 0.9690" in plot
    assert labels(of_several(THREE[:2], names=["a", "b"])) == ["a: asked 0.95", "b: asked 0.99", "dense"]


def test_tables_set_fits_side_by_side():
    tables = read(body(of_several(THREE))).tables
    summary, lengths, choices = tables[:3]
    assert summary[0] == ["fit", "asked", "seen", "at least", "promised", "model", "attention", "replaced", "coterie"]
    assert [row[:4] for row in summary[1:]] == [
        ["asked 0.95", "0.95", "0.9700", "0.9690"],
        ["asked 0.99", "0.99", "0.9940", "0.9930"],
        ["asked 0.999", "0.999", "0.9994", "0.9984"],
    ]
    assert [row[:2] for row in lengths[1:]] == [[n, name] for n in ("512", "4,096") for name in NAMES]
    assert choices[1] == [MODULES[0], *(f"near-far:near={near},chunk=64@2048" for near in (16, 48, 128))]
    assert choices[3] == [MODULES[2], *["local:window=256"] * 3]


def test_modules_in_which_fits_differ_are_marked_and_counted():
    text = of_several(THREE)
    assert text.count("<tr class=differs>") == 2
    assert "The fits differ in 2 of 3 attention modules, which are marked." in text
    other = of_several([fit(), fit(0.95, choices=dict.fromkeys(MODULES, "smyrf"))])
    assert "The fits differ in 3 of 3 attention modules." in other
    assert "<tr class=differs>" not in other  # where all are, marks tell nothing
    same = of_several([fit(), fit(0.95)])
    assert "<tr class=differs>" not in same
    assert "The fits differ in 0 of 3 attention modules." in same


def test_the_fastest_that_is_promised_is_named():
    assert "Of those that are promised, the fastest is this one: asked 0.95." in of_several(THREE)
    hopeful = [replace(THREE[0], certified=False), *THREE[1:]]
    assert "the fastest is this one: asked 0.99." in of_several(hopeful)
    assert "A hollow point is not promised." in of_several(hopeful)
    untimed = fit(lengths=[AtLength(4096, 0.994, 7.0, math.nan, 4, 0.993, "t")])
    assert "asked 0.99: speed of the model not timed. With 95% confidence" in of_several([THREE[0], untimed])
    assert "the fastest is this one: asked 0.95." in of_several([THREE[0], untimed])
    assert "the fastest is" not in of_several([old(), replace(old(), fidelity=0.95)])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"measure": "loss"}, "Fidelity is not the same thing in all of them: cosine of the final hidden states; loss"),
        ({"confidence": 0.9}, "Confidence differs: 95\u00a0%; 90\u00a0%."),
        ({"share": 0.9}, "What is promised differs: the mean; 90\u00a0%."),
        ({"lengths": []}, "Numbers of tokens differ: 512, 4,096; none."),
        (
            {"environment": {"coterie": "0.1.0", "machine": "arm"}},
            "Times are of different machines: x86_64, 2 threads; arm",
        ),
        ({"environment": {"machine": "x86_64, 2 threads"}}, "Versions of Coterie differ: 0.1.0; unknown."),
    ],
)
def test_what_cannot_be_compared_is_said(other, said):
    assert said in of_several([fit(0.95), fit(**other)])


def test_what_was_tried_is_shown_once_if_it_is_the_same():
    assert of_several([replace(each, table=THREE[0].table) for each in THREE]).count("-candidates>") == 1
    assert of_several([THREE[0], replace(THREE[1], table=THREE[1].table[:4])]).count("-candidates>") == 2


def test_fits_of_the_same_fidelity_are_numbered():
    assert labels(of_several([fit(), fit(near=64)])) == ["fit 1, asked 0.99", "fit 2, asked 0.99", "dense"]


def test_one_fit_is_the_page_of_one():
    assert of_several([fit()]) == one_page(fit(), model="m", command="coterie report")
    assert of_several([fit()], pictures=[drawn()]) == one_page(fit(), drawn(), model="m", command="coterie report")


@pytest.mark.parametrize(
    ("fits", "other", "said"),
    [
        ([], {}, "fits: expected at least one, got 0"),
        (THREE, {"pictures": [drawn()]}, "pictures: expected none, or 3 of them, got 1"),
        (THREE, {"names": ["a", "b"]}, "names: expected 3 that differ"),
        (THREE, {"names": ["a", "b", "a"]}, "names: expected 3 that differ"),
        (
            [fit(), fit(choices={"blocks.0": "dense"})],
            {"names": ["a", "b"]},
            r"fits: expected fits of one model; a has 3 attention modules such as encoder\.layer\.0\.attention\.self, "
            r"got b with 1 attention module such as blocks\.0",
        ),
        ([fit(), fit(choices={})], {"names": ["a", "b"]}, "got b with 0 attention modules$"),
    ],
)
def test_what_cannot_be_shown_together_is_refused(fits, other, said):
    with pytest.raises(ValueError, match=said):
        of_several(fits, **other)


# --- one fit ----------------------------------------------------------------------------------------------------------


def test_one_length_draws_no_empty_chart():
    text = one_page(fit(lengths=fit().lengths[1:]), model="m", command="c")
    assert "id=lengths" not in text
    assert "4,096" in text  # in the table
    assert "id=lengths" in one_page(fit(), model="m", command="c")


def test_without_pictures_there_are_no_heads():
    text = one_page(fit(), model="m", command="c")
    assert "Which heads are hard" not in text
    assert "Who meets whom" not in text
    nobody = Pictures({m: [0.0] for m in MODULES}, dict.fromkeys(MODULES, "dense"), {})
    assert "Who meets whom" not in one_page(fit(), nobody, model="m", command="c")


def test_the_bound_and_the_confidence_are_told():
    text = one_page(fit(), model="m", command="c")
    assert "≥ 0.9930" in text
    assert "the mean of all such documents, with 95\u00a0% confidence" in text
    said = meaning(fit())
    assert said[0].startswith(
        "Take new documents like yours, of 512 or 4,096 tokens. Averaged over very many of them, "
    )
    assert said[1].startswith(
        "With 95\u00a0% confidence, the mean is at least 0.9930 at the hardest length: by Student"
    )
    assert "from 4 documents of 4,096 tokens, whose own mean is 0.9940" in said[1]
    assert said[2].endswith("one held-out document of each length took 4.06 s instead of 7.46 s.")


def test_a_share_is_told_as_a_share():
    at = AtLength(4096, 0.995, 7.0, 4.0, 80, 0.963, "binomial")
    found = fit(share=0.95, lengths=[at, replace(at, tokens=2048, bound=0.97)])
    said = " ".join(meaning(found))
    assert "At least 95\u00a0% of them have a fidelity of 0.99." in said
    assert "96.3% of documents at least hold: by counting, which assumes nothing of the documents, from 80" in said
    text = one_page(found, model="m", command="c")
    assert "≥ 96.3%" in text
    assert 'class="whisker' not in text  # a share is no fidelity


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (fit(choices=dict.fromkeys(MODULES, "dense")), "Every attention module stays as it was"),
        (
            old(),
            "0.9940 was seen on documents that were held out, which is what was asked for, but nothing is promised",
        ),
        (old(), "No bound is known: documents were too few for one, or an older version made this fit."),
        (fit(certified=False, held_out=0.98), "which is less than the 0.99 that was asked for: do not use this plan"),
        (fit(measure="loss"), "Fidelity is the loss of the next token, dense over fitted"),
        (fit(measure="accuracy"), "Fidelity is the accuracy"),
        (fit(lengths=[]), "of the same number of tokens"),
        (fit(certified=False, held_out=math.nan), "this plan was not run on documents that were held out"),
        (fit(lengths=[AtLength(512, 0.99, 1.0, math.nan, 4, 0.99, "t")]), "on one machine; not in this fit."),
        (fit(lengths=fit().lengths[:1]), "it is 1 where nothing has changed"),  # exact: nothing was tested
    ],
)
def test_what_it_means_is_said_in_every_case(found, said):
    assert said in " ".join(meaning(found))
    assert said in one_page(found, model="m", command="c").replace("&#x27;", "'")


def test_a_length_from_which_on_it_runs_is_explained():
    said = "“near-far:near=48,chunk=64@2048” runs near-far:near=48,chunk=64 on inputs of 2,048 keys or more"
    assert said in one_page(fit(), model="m", command="c")
    assert "keys or more" not in one_page(fit(choices=dict.fromkeys(MODULES, "smyrf")), model="m", command="c")


def test_windows_of_a_models_own_are_explained():
    assert "A module with a window of its own" in one_page(fit(windows={MODULES[0]: 128}), model="m", command="c")
    assert "A module with a window of its own" not in one_page(fit(), model="m", command="c")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -5.0, 0.0])
def test_numbers_that_nobody_can_draw_break_nothing(number):
    """A file may say anything."""
    at = AtLength(4096, number, number, number, 4, number, "t")
    rows = [Tried(MODULES[0], "smyrf", number, number), Tried(MODULES[0], "dense", 0.0, number)]
    wild = fit(
        fidelity=number,
        held_out=number,
        lengths=[at, at, *fit().lengths],
        table=rows,
        attention_seconds=(number, number),
    )
    pictures = Pictures({m: [number] for m in MODULES}, dict.fromkeys(MODULES, "smyrf"), {MODULES[0]: [[number]]})
    for text in (one_page(wild, pictures, model="m", command="c"), of_several([wild, fit()], pictures=[pictures] * 2)):
        assert "nan" not in "".join(part.split(">")[0] for part in body(text).split("<path ")[1:])


# --- in the browser ---------------------------------------------------------------------------------------------------


@needs_chromium
@pytest.mark.parametrize("width", [390, 1100])
def test_the_comparison_in_a_browser(browser, tmp_path: Path, width):  # noqa: F811
    close = [fit(0.99, 0.9941, 48), fit(0.991, 0.9942, 49), fit(0.992, 0.9943, 50), fit(0.5, 1.0, 16, 7.1)]
    path = tmp_path / "report.html"
    write_several(path, close, [drawn(), drawn("local"), drawn(), drawn()], model="m", command="c")
    with opened(browser, path, width=width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#trade-off .point").count() == 5
        assert page.evaluate(CLASHES, "#trade-off svg text") == []
        assert page.evaluate(INSIDE, "#trade-off svg")
        assert "as fast" in told(page, page.locator("#trade-off .point").nth(1))
        folded = page.locator("details", has_text="in full")
        assert not page.locator("#fit2-meetings").is_visible()
        folded.nth(1).locator("summary").first.click()
        assert "local" in page.locator("#fit2-meetings option").inner_text()
        assert page.locator("#fit2-lengths svg .bar").count() == 2


@pytest.mark.parametrize("number", [0, 1])
def test_reports_of_real_size_are_below_a_megabyte_and_a_half(tmp_path, number):
    """48 modules with 32 heads, 30 candidates, and plans without any order; three fits of them."""
    import random

    draw = random.Random(0)
    modules = [f"model.layers.{i}.self_attn" for i in range(48)]
    grids = {m: [[draw.random() for _ in range(128)] for _ in range(128)] for m in modules}
    pictures = Pictures({m: [0.1] * 32 for m in modules}, dict.fromkeys(modules, "near-far:near=48"), grids)
    table = [
        Tried(m, f"near-far:near={n},chunk=64@2048", 0.1, 0.1, "slower than dense") for m in modules for n in range(30)
    ]
    big = fit(choices=dict.fromkeys(modules, "near-far:near=48"), table=table)
    path = tmp_path / "report.html"
    if number:
        write_several(path, [big, replace(big, fidelity=0.95), replace(big, fidelity=0.999)], model="m", command="c")
    else:
        write(path, big, pictures, model="m", command="c")
    assert path.stat().st_size < 1_500_000
