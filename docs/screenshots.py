"""The report's pictures in the documentation: `python -m docs.screenshots report.html compared.html`.

The first is a report of `coterie fit --out`, the second one of `coterie report` on several fits. Needs Chromium and
playwright; writes docs/report.png and docs/guide/pictures/.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PICTURES = DOCS / "guide" / "pictures"
# What the tutorial shows of the report on one fit, and of the report on several.
SECTIONS = {
    "meaning": "What this means",
    "runs": "What runs",
    "lengths": "Fidelity and speed by length",
    "tried": "What was tried",
    "heads": "Which heads are hard",
    "meetings": "Who meets whom",
}
COMPARED = {"trade-off": "Fidelity against speed", "choices": "What runs in each"}


def _open(browser: Any, path: Path) -> Any:
    page = browser.new_page(viewport={"width": 1000, "height": 860}, color_scheme="light")
    page.goto(path.resolve().as_uri())
    return page


def _sections(page: Any, wanted: dict[str, str]) -> None:
    for name, title in wanted.items():
        heading = page.get_by_role("heading", name=title, exact=True)
        page.locator("section", has=heading).last.screenshot(path=PICTURES / f"{name}.png")


def main(report: Path, compared: Path) -> None:
    """Draw."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = _open(browser, report)
        page.screenshot(path=DOCS / "report.png")
        page.locator("section[aria-label=summary]").screenshot(path=PICTURES / "summary.png")
        _sections(page, SECTIONS)
        _sections(_open(browser, compared), COMPARED)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
