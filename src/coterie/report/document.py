"""The HTML around a report: one file, its own style and script, and nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from coterie.files import plain, readable
from coterie.tables import Table, as_html

# The browser holds the page to it: nothing is fetched, whatever a name from a model contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, heading: str, sections: Sequence[str], data: Any) -> str:
    """A whole page; `data` is what its script reads."""
    stored = json.dumps(plain(data), allow_nan=False).replace("<", "\\u003c")  # no tag ends or begins inside a script
    return readable(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">'
        "<meta name=viewport content='width=device-width,initial-scale=1'><link rel=icon href='data:,'>"
        f"<title>{as_html(title)}</title><style>{_file('page.css')}</style></head><body><main>"
        f"<header><h1>{as_html(heading)}</h1><button id=theme type=button>Light / dark</button></header>"
        f"{''.join(sections)}</main><div id=tip role=status></div>"
        f"<script type=application/json id=data>{stored}</script><script>{_file('page.js')}</script></body></html>"
    )


def _file(name: str) -> str:
    return files("coterie.report").joinpath(name).read_text(encoding="utf-8")


def section(title: str, *parts: str) -> str:
    """A part of the page under its title."""
    return f"<section><h2>{as_html(title)}</h2>{''.join(parts)}</section>"


def plot(name: str, drawn: str, *said: str) -> str:
    """A figure, and what it shows in sentences beside it."""
    words = "".join(f"<p>{as_html(each)}</p>" for each in said)
    return f"<figure class=plot id={name}>{drawn}<figcaption>{words}</figcaption></figure>"


def wide(table: Table) -> str:
    """A table that scrolls on its own where the screen is narrow."""
    return f"<div class=scroll tabindex=0>{table.html()}</div>"


def paragraphs(sentences: Sequence[str]) -> str:
    """Each of them on its own."""
    return "".join(f"<p>{as_html(each)}</p>" for each in sentences)
