"""The report in a real browser: Debian's Chromium, driven by Playwright, offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytest.importorskip("plotly", reason="the extra 'report' is not installed")
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
    from coterie.report import Pictures, write

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
    context = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme="light", offline=True)
    found, complaints = context.new_page(), []
    found.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else 0)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: complaints.append(request.url) if "report.html" not in request.url else 0)

    def refuse(dialog):
        complaints.append(dialog.message)
        dialog.dismiss()

    found.on("dialog", refuse)
    found.goto(written[1].as_uri())
    yield found
    context.close()
    assert [text for text in complaints if not text.startswith(("data:", "blob:"))] == []


@needs_chromium
def test_every_plot_is_drawn(page, written):
    plots = page.locator(".plot").all()
    assert [plot.get_attribute("id") for plot in plots] == ["candidates", "lengths", "heads", "meetings"]
    for plot in plots:
        assert plot.locator("svg.main-svg").count() > 0
    assert page.locator("#candidates .trace.scatter").count() == 3  # dense and two candidates
    assert page.locator("#lengths .trace.scatter path.point").count() == 4  # two lengths, two lines
    for name in ("heads", "meetings"):
        assert page.locator(f"#{name} .heatmaplayer image").count() == 1
    assert page.title() == "Coterie: <script>alert('x')</script>"
    assert "coterie fit 'a & b' </script>" in page.locator("pre").inner_text()


@needs_chromium
def test_the_theme_is_changed_from_the_keyboard(page):
    def colours():
        ink = page.locator("#candidates .xtick text").first.evaluate("node => getComputedStyle(node).fill")
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), ink

    light = colours()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    page.keyboard.press("Enter")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    dark = colours()
    assert light[0] != dark[0]
    assert light[1] != dark[1]


@needs_chromium
def test_a_module_is_chosen_and_its_plan_drawn(page):
    def picture():
        return page.locator("#meetings .heatmaplayer image").get_attribute("href")

    before = picture()
    page.locator("#module").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "before => document.querySelector('#meetings .heatmaplayer image').href.baseVal !== before", arg=before
    )
    assert page.locator("#module").evaluate("node => node.selectedIndex") == 1


@needs_chromium
def test_the_whole_table_opens_from_the_keyboard(page, written):
    summary = page.locator("summary")
    assert not page.locator("details table").is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details table").is_visible()
    assert page.locator("details tr").count() == 1 + len(written[0].table)


@needs_chromium
def test_pointing_at_a_point_tells_what_it_is_and_the_legend_hides_it(page):
    page.locator("#candidates").scroll_into_view_if_needed()
    page.locator("#candidates .trace.scatter path.point").first.hover(force=True)
    page.wait_for_selector("#candidates .hoverlayer .hovertext")
    shown = page.locator("#candidates .trace.scatter path.point").count()
    page.locator("#candidates .legendtoggle").first.click(force=True)
    page.wait_for_function(
        "shown => document.querySelectorAll('#candidates .trace.scatter path.point').length < shown", arg=shown
    )


@needs_chromium
def test_it_fits_a_phone_and_follows_a_dark_system(browser, written):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", offline=True)
    page = context.new_page()
    page.goto(written[1].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)")
    assert max(int(red), int(green), int(blue)) < 64
    shot = page.screenshot(full_page=True)
    context.close()
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
    assert "<script>alert" not in text
    assert "coterie fit &#x27;a &amp; b&#x27; &lt;/script&gt;&lt;!--&lt;script&gt;" in text
    assert text.split("id=data>")[1].split("</script>")[0].count("<") == 0
