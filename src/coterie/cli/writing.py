"""A model that writes: its text as it comes, and how fast it came."""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, TextStreamer

from coterie.files import shown
from coterie.hf import Cache


class Written(NamedTuple):
    """What a model wrote."""

    text: str
    new_tokens: int
    prefill_seconds: float  # until the first new token
    decode_seconds: float  # for the others
    stopped: bool  # by Ctrl-C

    def speeds(self, tokens: int) -> str:
        """Tokens a second, of a prompt of so many and of the new ones.

        >>> Written("…", 65, 2.0, 4.0, False).speeds(8192)
        'prefill 8,192 tokens in 2.00 s (4,096 tokens/s), decoding 64 more in 4.00 s (16.0 tokens/s)'
        """
        prefill = f"prefill {tokens:,} tokens in {self.prefill_seconds:.2f} s"
        if self.new_tokens == 0:
            return f"stopped after {self.prefill_seconds:.2f} s of prefill"
        fast = f"{prefill} ({tokens / self.prefill_seconds:,.0f} tokens/s)"
        if self.new_tokens < 2:
            return fast
        more, seconds = self.new_tokens - 1, self.decode_seconds
        return f"{fast}, decoding {more:,} more in {seconds:.2f} s ({more / seconds:,.1f} tokens/s)"


class _Listener(TextStreamer):  # type: ignore[misc]  # transformers has no types
    """Hears every token: prints it if that is wanted, and knows when it came."""

    def __init__(self, tokenizer: Any, *, aloud: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.aloud = aloud
        self.text = ""
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        if self.aloud:
            sys.stdout.write("".join(shown(part) for part in text.splitlines(keepends=True)))
            sys.stdout.write("\n" if stream_end else "")
            sys.stdout.flush()


def write(model: PreTrainedModel, tokenizer: Any, batch: dict[str, Tensor], new_tokens: int, *, aloud: bool) -> Written:
    """Go on with a text, greedily; Ctrl-C ends it, and what was written until then is kept."""
    listener = _Listener(tokenizer, aloud=aloud)
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    cache = {"past_key_values": Cache(model)} if takes_cache else {}
    stopped = False
    try:
        model.generate(**batch, **cache, max_new_tokens=new_tokens, do_sample=False, streamer=listener)
    except KeyboardInterrupt:
        stopped = True
        listener.end()
    start, *each = listener.times
    first, last = (each[0], each[-1]) if each else (time.perf_counter(),) * 2
    return Written(listener.text, len(each), first - start, last - first, stopped)
