"""The report in a real browser: Debian's Chromium, driven by Playwright, offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.report import Pictures, write
from tests.report.opened import CLASHES, INSIDE, opened, told

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: make chromium")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[coterie.Fit, Path]:
    """A report on a real fit, with names that would break careless HTML."""
    host, generator = model(), torch.Generator().manual_seed(0)
    batches = [torch.randn(1, length, 64, generator=generator) for length in (301, 301, 301, 77, 77, 77)]
    with torch.no_grad():
        found = coterie.fit(
            host, batches[:2] + batches[3:5], 0.9, held_out=batches[2::3], candidates=["local:window=33", "smyrf"]
        )
    pictures = Pictures.of(host, found, batches[2], lambda *_: None)
    path = tmp_path_factory.mktemp("report") / "report.html"
    command = "coterie fit 'a & b' </script><!--<script>"
    write(path, found, pictures, model="<script>alert('x')</script>", command=command)
    return found, path


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tool:
        yield tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture
def page(browser, written):
    """The report, open; nothing may be fetched and nothing may complain."""
    with opened(browser, written[1]) as found:
        yield found


@needs_chromium
def test_every_plot_is_drawn(page, written):
    plots = page.locator(".plot").all()
    assert [plot.get_attribute("id") for plot in plots] == ["lengths", "candidates", "heads", "meetings"]
    assert page.locator("#candidates > svg .point").count() == 3  # dense and two candidates
    assert page.locator("#lengths svg .point").count() == 2  # lengths
    assert page.locator("#lengths svg .bar").count() == 2
    assert page.locator("#heads td[data-value]").count() == 3 * 4
    assert page.locator("#meetings img").evaluate("node => node.naturalWidth") == 128
    assert page.title() == "Coterie: <script>alert('x')</script>"
    assert "coterie fit 'a & b' </script>" in page.locator("pre").inner_text()


@needs_chromium
def test_axes_name_modules_and_measures(page):
    assert page.locator("#heads tbody th").all_inner_texts() == ["layers.0", "layers.1", "layers.2"]
    words = page.locator("body").inner_text()
    assert "Fidelity is the cosine of the " in words
    assert "hidden ≥" not in words


@needs_chromium
def test_words_in_plots_overlap_nothing(page):
    for plot in ("lengths", "candidates", "heads", "meetings"):
        words = f"#{plot} svg text, #{plot} .legend button, #{plot} figcaption p"
        assert page.evaluate(CLASHES, words) == []
    for plot in page.locator(".plot svg[role=img]").all():
        assert plot.evaluate(f"svg => ({INSIDE})(svg)")


@needs_chromium
def test_the_theme_is_changed_from_the_keyboard(page):
    def colours():
        ink = page.locator("#candidates > svg text").first.evaluate("node => getComputedStyle(node).fill")
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), ink

    light = colours()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    page.keyboard.press("Enter")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    dark = colours()
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.keyboard.press("Enter")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    assert colours() == light


@needs_chromium
def test_a_module_is_chosen_and_its_plan_drawn(page):
    page.locator("#meetings select").select_option(index=1)
    assert page.locator("#meetings img").get_attribute("src")  # what a busy machine chose may look the same in both
    assert page.locator("#meetings select").evaluate("node => node.selectedIndex") == 1


@needs_chromium
def test_the_whole_table_opens_from_the_keyboard(page, written):
    summary = page.locator("summary")
    assert not page.locator("details table").is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details table").is_visible()
    assert page.locator("details tr").count() == 1 + len(written[0].table)


@needs_chromium
def test_pointing_at_a_value_tells_what_it_is(page, written):
    assert "ms, error" in told(page, page.locator("#candidates > svg .point").first)
    assert "s dense" in told(page, page.locator("#lengths .bar").last)
    head = told(page, page.locator("#heads td[data-value]").nth(1))
    assert head.startswith("layers.0.self_attn: ")
    assert "\nhead 1: error " in head
    assert "of the pairs meet" in told(page, page.locator("#meetings img"))
    assert told(page, page.locator("h1")) == ""
    assert not page.locator("#tip").is_visible()


@needs_chromium
def test_what_is_told_of_a_cell_is_what_its_plan_says(browser, tmp_path):
    """The share is read back from the picture: nothing else holds it."""
    shares = [[0.0, 0.25], [0.5, 1.0]]
    found = coterie.Fit({"a": "smyrf"}, "hidden", 0.9, 0.95, 0.94, [], (0.2, 0.05), [], 0)
    write(
        tmp_path / "report.html", found, Pictures({"a": [0.1]}, {"a": "smyrf"}, {"a": shares}), model="m", command="c"
    )
    with opened(browser, tmp_path / "report.html") as page:
        image = page.locator("#meetings img")
        side = image.bounding_box()["width"]
        for row, shares_of_row in enumerate(shares):
            for column, share in enumerate(shares_of_row):
                words = told(page, image, position={"x": side * (0.25 + 0.5 * column), "y": side * (0.25 + 0.5 * row)})
                assert f"queries at {50 * row}–{50 * row + 50} %, keys at {50 * column}–{50 * column + 50} %" in words
                assert f"about {100 * share:.0f} % of the pairs meet" in words


@needs_chromium
def test_families_are_picked_in_the_legend(page):
    def faint():
        return page.locator("#candidates > svg .point").evaluate_all(
            "nodes => nodes.filter(node => getComputedStyle(node).opacity < 0.5).map(node => node.dataset.series)"
        )

    assert faint() == []
    page.locator("#candidates .legend button", has_text="smyrf").click()
    assert sorted(faint()) == ["dense", "local"]
    page.locator("#candidates .legend button", has_text="smyrf").click()
    assert faint() == []


@needs_chromium
def test_it_fits_a_phone_and_follows_a_dark_system(browser, written):
    with opened(browser, written[1], width=390, scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)")
        assert max(int(red), int(green), int(blue)) < 64
        shot = page.screenshot(full_page=True)
    from io import BytesIO

    from matplotlib.image import imread

    pixels = imread(BytesIO(shot))[..., :3]
    assert len(np.unique((pixels * 255).astype(np.uint8).reshape(-1, 3), axis=0)) > 200  # something was painted


def test_what_a_page_shows_is_what_was_found(written):
    found, path = written
    text = path.read_text(encoding="utf-8")
    for row in found.table:
        cells = (f'<td style="text-align:left">{name}</td>' for name in (row.module, row.mechanism))
        assert "".join(cells) in text
    assert f"{found.held_out:.4f}" in text
    assert found.promise in text
    assert "<script>alert" not in text
    assert "coterie fit &#x27;a &amp; b&#x27; &lt;/script&gt;&lt;!--&lt;script&gt;" in text
    assert text.split("id=data>")[1].split("</script>")[0].count("<") == 0


def test_a_page_is_small(written):
    assert written[1].stat().st_size < 200_000
