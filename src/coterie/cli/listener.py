"""What a model writes, as text, while it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

_UNFINISHED = "\ufffd"  # at the end of a text whose last character is still to come
_LONGEST = 4  # tokens of a character: each is a byte at least


class Listener(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Hears every token: knows when it came, and tells its text as soon as the character is whole.

    A token is read behind those that were told before it, as some tokenizers drop the space at the beginning of a text.

    Args:
        tokenizer: that of the model.
        tell: is called with each piece of text.
    """

    def __init__(self, tokenizer: Any, tell: Callable[[str], None]) -> None:
        self.tokenizer, self.tell = tokenizer, tell
        self.text = ""
        self.times = [time.perf_counter()]
        self._before: list[int] = []  # told with the last piece
        self._waiting: list[int] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt, and then each token."""
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self._waiting += value.flatten().tolist()
        self._tell(whole=len(self._waiting) > _LONGEST)

    def end(self) -> None:
        """Nothing comes any more: what is not whole is told as it is."""
        self._tell(whole=True)

    def _tell(self, *, whole: bool) -> None:
        text = self._decode(self._before + self._waiting)
        if not self._waiting or (text.endswith(_UNFINISHED) and not whole):
            return
        piece = text[len(self._decode(self._before)) :]
        self._before, self._waiting = (self._waiting if piece else self._before + self._waiting), []
        self.text += piece
        self.tell(piece)

    def _decode(self, tokens: list[int]) -> str:
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return found
