"""A model that writes: its text as it comes, and how fast it came."""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from coterie.cli.listener import Listener
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


def _print(text: str) -> None:
    sys.stdout.write(shown(text))
    sys.stdout.flush()


def write(model: PreTrainedModel, tokenizer: Any, batch: dict[str, Tensor], new_tokens: int, *, aloud: bool) -> Written:
    """Go on with a text, greedily; Ctrl-C ends it, and what was written until then is kept."""
    listener = Listener(tokenizer, _print if aloud else lambda text: None)
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    cache = {"past_key_values": Cache(model)} if takes_cache else {}
    stopped = False
    try:
        model.generate(**batch, **cache, max_new_tokens=new_tokens, do_sample=False, streamer=listener)
    except KeyboardInterrupt:
        stopped = True
        listener.end()
    if aloud:
        _print("\n")
    start, *each = listener.times
    first, last = (each[0], each[-1]) if each else (time.perf_counter(),) * 2
    return Written(listener.text, len(each), first - start, last - first, stopped)
