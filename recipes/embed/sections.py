"""Sections of a text under their headings, and long documents made of them."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from coterie.cli.inputs import UserError, read_text

_UNDERLINED = re.compile(r"^(\S.*)\n([=*~^#+\"'`:.-])\2{2,}[ \t]*$", re.MULTILINE)


class Section(NamedTuple):
    """A section of a text; the line with its heading is not in its text."""

    heading: str
    text: str


def parse(text: str) -> list[Section]:
    """The sections of a text whose headings are underlined, as in reStructuredText. A section ends where the next one
    begins, a nested one too; one without a text of its own is left out, and so is what stands before all headings.

    >>> parse("Birds\\n=====\\nThey fly.\\n\\nOwls\\n----\\nBy night.\\n")
    [Section(heading='Birds', text='They fly.'), Section(heading='Owls', text='By night.')]
    """
    found = [each for each in _UNDERLINED.finditer(text) if _is_heading(each)]
    ends = [*(each.start() for each in found), len(text)][1:]
    sections = [Section(each[1].strip(), text[each.end() : end].strip()) for each, end in zip(found, ends, strict=True)]
    return [section for section in sections if section.text]


def _is_heading(found: re.Match[str]) -> bool:
    """An underline is at least as long as its heading, and no heading is a line of signs alone."""
    return len(found[0].rstrip()) - len(found[1]) - 1 >= len(found[1].rstrip()) and any(map(str.isalnum, found[1]))


def chapters(files: Iterable[Path], seed: int) -> list[list[Section]]:
    """Sections of Python's own documentation, by topic, or of files, by file; chapters in an order drawn by the seed.

    Topics quote each other: a section is taken once, from the longest topic.
    """
    paths = list(files)
    texts = [read_text([path]) for path in paths] or sorted(
        pydoc_data.topics.topics.values(), key=lambda topic: (-len(topic), topic)
    )
    seen: set[str] = set()
    found: list[list[Section]] = []
    for text in texts:
        fresh = []
        for section in parse(text):
            words = " ".join(section.text.split())
            if words not in seen:
                seen.add(words)
                fresh.append(section)
        found.append(fresh)
    found = [chapter for chapter in found if chapter]
    if sum(map(len, found)) < 2:
        raise UserError(
            "the text has fewer than two sections: expected headings that are underlined with = or -, a line of text "
            "below each."
        )
    random.Random(seed).shuffle(found)
    return found


class Cut(NamedTuple):
    """Sections that are short enough, and what was cut off."""

    sections: list[Section]
    tokens: list[int]  # of each section, without special ones
    rest: str


def cut(sections: list[Section], tokenizer: Any, most: int) -> Cut:
    """End sections after so many tokens, so that they are the same at every length."""
    kept, tokens, rest = [], [], []
    for section in sections:
        offsets = tokenizer(section.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = offsets["offset_mapping"]
        end = len(section.text) if len(offsets) <= most else offsets[most][0]
        kept.append(Section(section.heading, section.text[:end].rstrip()))
        tokens.append(min(len(offsets), most))
        rest.append(section.text[end:])
    return Cut(kept, tokens, "\n\n".join(part for part in rest if part))


def pack(tokens: list[int], most: int) -> list[range]:
    """Which sections make up each document: as many as fit, in order.

    Args:
        tokens: of each section; one more is set aside for what stands between two.
        most: tokens of a document, without special ones; no section has more.

    >>> pack([5, 5, 5], 12)
    [range(0, 2), range(2, 3)]
    """
    documents: list[range] = []
    first = used = 0
    for i, count in enumerate(tokens):
        if i > first and used + 1 + count > most:
            documents.append(range(first, i))
            first, used = i, 0
        used += count + (i > first)
    return [*documents, range(first, len(tokens))]
