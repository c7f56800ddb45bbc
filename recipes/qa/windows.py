"""Paragraphs as overlapping windows of tokens, and spans of tokens as characters of the paragraph."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coterie.cli.inputs import UserError
from recipes.qa.squad import Answer, Question

NOWHERE = 0  # the token that windows without the answer are taught to point to; it is never in the paragraph
LONGEST_ANSWER = 30  # tokens
_LONGEST_QUESTION = 64  # tokens; of short windows a third


class Window(NamedTuple):
    """A piece of a paragraph behind its question.

    Attributes:
        question: its number.
        first: the paragraph's first token in the window.
        characters: of each token of the paragraph, from `first` on, where it begins and ends in the paragraph.
        inputs: of the model.
    """

    question: int
    first: int
    characters: list[tuple[int, int]]
    inputs: dict[str, list[int]]


def cut(tokenizer: Any, questions: list[Question], length: int, stride: int) -> list[Window]:
    """The windows of all questions, in their order.

    Args:
        length: tokens of a window, question included.
        stride: tokens of the paragraph that a window shares with the one before.
    """
    longest = min(_LONGEST_QUESTION, length // 3)
    room = length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if stride >= room:
        raise UserError(
            f"--stride {stride} is too much: a window of --length {length} has room for {room} tokens of a paragraph."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say where its tokens are in a text: a fast one is needed."
        )
    tokenizer.padding_side = "right"  # so that positions stay
    found = tokenizer(
        [_shortened(tokenizer, question.text.strip(), longest) for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    names = [name for name in tokenizer.model_input_names if name in found]
    windows = []
    for i, question in enumerate(found["overflow_to_sample_mapping"]):
        inside = [at for at, part in enumerate(found.sequence_ids(i)) if part == 1]
        characters = [tuple(found["offset_mapping"][i][at]) for at in inside]
        inputs = {name: found[name][i] for name in names}
        windows.append(Window(question, inside[0] if inside else 0, characters, inputs))
    return windows


def _shortened(tokenizer: Any, text: str, tokens: int) -> str:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def find(window: Window, answer: Answer) -> tuple[int, int]:
    """The first and the last token of an answer; NOWHERE, twice, if it is not in the window as a whole."""
    text = answer.text.strip()
    start = answer.start + answer.text.index(text)
    stop = start + len(text)
    touched = [i for i, (begin, end) in enumerate(window.characters) if begin < stop and end > start]
    if not touched or window.characters[0][0] > start or window.characters[-1][1] < stop:
        return NOWHERE, NOWHERE
    return window.first + touched[0], window.first + touched[-1]


def text_of(window: Window, context: str, first: int, last: int) -> str:
    """The characters of a span of tokens."""
    return context[window.characters[first - window.first][0] : window.characters[last - window.first][1]]


def best_span(window: Window, starts: Any, ends: Any) -> tuple[float, int, int]:
    """The span of at most LONGEST_ANSWER tokens of the paragraph with the highest sum of its start's and its end's
    logits: the sum, first and last token; −∞ if the window holds nothing of the paragraph."""
    stop = window.first + len(window.characters)
    begin, end = np.asarray(starts)[window.first : stop], np.asarray(ends)[window.first : stop]
    best = (-np.inf, NOWHERE, NOWHERE)
    for more in range(min(LONGEST_ANSWER, len(begin))):
        sums = begin[: len(begin) - more] + end[more:]
        at = int(sums.argmax())
        if sums[at] > best[0]:
            best = (float(sums[at]), window.first + at, window.first + at + more)
    return best


def answers(windows: list[Window], questions: list[Question], starts: Any, ends: Any) -> list[str]:
    """What logits say to each question: the best span of all its windows.

    Args:
        starts, ends: a row of logits for each window.
    """
    best = [-np.inf] * len(questions)
    said = [""] * len(questions)
    for window, start, end in zip(windows, starts, ends, strict=True):
        sum_of_logits, first, last = best_span(window, start, end)
        if sum_of_logits > best[window.question]:
            best[window.question] = sum_of_logits
            said[window.question] = text_of(window, questions[window.question].context, first, last)
    return said
