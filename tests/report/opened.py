"""A report in a browser in which nothing may be fetched and nothing may complain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Words that overlap, as pairs: of all that a selector finds.
CLASHES = """selector => {
    const words = [...document.querySelectorAll(selector)];
    const boxes = words.map(node => [node.textContent, node.getBoundingClientRect()]);
    const apart = (a, b) =>
        a.right - 1 <= b.left || b.right - 1 <= a.left || a.bottom - 1 <= b.top || b.bottom - 1 <= a.top;
    const met = (a, rest) => rest.filter(([, b]) => !apart(a, b)).map(([other]) => other);
    return boxes.flatMap(([one, a], i) => met(a, boxes.slice(i + 1)).map(other => [one, other]));
}"""
# Whether no word of a plot is cut off at its sides.
INSIDE = """found => {
    const plot = typeof found === "string" ? document.querySelector(found) : found;
    const whole = plot.getBoundingClientRect();
    const boxes = [...plot.querySelectorAll("text")].map(node => node.getBoundingClientRect());
    return boxes.every(box => box.left >= whole.left - 1 && box.right <= whole.right + 1);
}"""


def told(page: Any, value: Any, **where: Any) -> str:
    """What pointing at a value tells; the page scrolls first, as that hides what was told."""
    value.scroll_into_view_if_needed()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    value.hover(force=True, **where)
    return str(page.locator("#tip").inner_text())


@contextmanager
def opened(browser: Any, path: Path, width: int = 1100, scheme: str = "light") -> Iterator[Any]:
    """The page at a path; whatever its console said is an error in the end."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    context.set_default_timeout(120_000)  # milliseconds, as the machine may be busy
    found, complaints = context.new_page(), []

    def refuse(dialog: Any) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    found.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else 0)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: complaints.append(request.url) if path.name not in request.url else 0)
    found.on("dialog", refuse)
    found.goto(path.as_uri())
    yield found
    context.close()
    assert [text for text in complaints if not text.startswith("data:")] == []
