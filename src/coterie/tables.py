"""Tables of strings, as text and as the small HTML that notebooks show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from coterie.files import shown


class Table(NamedTuple):
    """Cells that are written already.

    Attributes:
        columns: their titles; none for a table without a first line.
        rows: each with as many cells as the others.
        words: the columns that hold words and start at the left; the others are numbers.

    Example:
        >>> from coterie.tables import Table
        >>> found = Table(["layer", "error"], [["first", "0.10"], ["second", "0.2"]])
        >>> print(found.text())
        layer   error
        first    0.10
        second    0.2
        >>> found.html().count("<tr>")
        3
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: tuple[int, ...] = (0,)

    def text(self) -> str:
        """Columns of equal width, two spaces between them."""
        lines = [*([self.columns] if self.columns else []), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index in self.words else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def html(self) -> str:
        """A `<table>` without colours of its own, so that the page's theme holds."""
        head = f"<thead>{self._line('th', self.columns)}</thead>" if self.columns else ""
        body = "".join(self._line("td", row) for row in self.rows)
        return f"<table>{head}<tbody>{body}</tbody></table>"

    def _line(self, tag: str, cells: Sequence[str]) -> str:
        sides = ("left" if index in self.words else "right" for index in range(len(cells)))
        written = (
            f'<{tag} style="text-align:{side}">{as_html(x)}</{tag}>' for side, x in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(written)}</tr>"


def as_html(text: str) -> str:
    """Text that no tag and no attribute ends: names from a model may hold anything.

    >>> as_html("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return escape(shown(text))


def facts(found: Iterable[tuple[str, str]]) -> Table:
    """Names and what is to be said of them, in words: a table without a first line.

    >>> facts([("round 0", "4 groups")]).text()
    'round 0  4 groups'
    """
    return Table((), [list(pair) for pair in found], words=(0, 1))


def output(*parts: str) -> str:
    """Pieces of HTML as one output of a notebook. A dollar in it is a dollar: no formula is looked for.

    >>> output("<p>one</p>", "<p>two</p>")
    '<div class="tex2jax_ignore mathjax_ignore"><p>one</p><p>two</p></div>'
    """
    return f'<div class="tex2jax_ignore mathjax_ignore">{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """Text as a paragraph.

    >>> paragraph("a < b")
    '<p>a &lt; b</p>'
    """
    return f"<p>{as_html(text)}</p>"


def folded(title: str, content: str) -> str:
    """HTML that opens when a reader asks for it.

    >>> folded("more", "<p>of it</p>")
    '<details><summary>more</summary><p>of it</p></details>'
    """
    return f"<details><summary>{as_html(title)}</summary>{content}</details>"
