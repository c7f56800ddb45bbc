"""Every link inside a built site leads to a file and an anchor that exist: `python docs/check_links.py out/docs`."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect href, src, id and name."""
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.links.append(value)
            if key in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """What leads nowhere, as "page → link"."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue  # another site's business
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = target in pages and unquote(parts.fragment) in pages[target].anchors
            if not (known or (target.is_file() and target not in pages)):
                found.append(f"{path.relative_to(site.resolve())} → {link}")
    return found


def main() -> None:
    """Complain about every link that leads nowhere."""
    site = Path(sys.argv[1])
    wrong = broken(site)
    pages = len(list(site.rglob("*.html")))
    print(*wrong, f"{pages} pages, {len(wrong)} broken links", sep="\n")
    raise SystemExit(bool(wrong) or not pages)


if __name__ == "__main__":
    main()
