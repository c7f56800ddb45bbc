"""HTML as a reader sees it, by the standard library's parser."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"br", "hr", "img", "input"}


class Read(NamedTuple):
    """What a piece of HTML holds."""

    tables: list[list[list[str]]]  # their rows, and the cells of each
    paragraphs: list[str]
    tags: set[str]
    classes: set[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.read = Read([], [], set(), set())
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.read.tags.add(tag)
        self.read.classes.update((dict(attrs).get("class") or "").split())
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.read.tables.append([])
        elif tag == "tr":
            self.read.tables[-1].append([])
        elif tag in ("td", "th"):
            self.read.tables[-1][-1].append("")
        elif tag == "p":
            self.read.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.read.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "p":
            self.read.paragraphs[-1] += data


def read(text: str) -> Read:
    """Tables and paragraphs of HTML whose tags are all closed, in order."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader.read
