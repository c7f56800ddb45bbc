"""Keys and values of one layer in buffers with room to spare, so that a new token is written and the others stay."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from coterie.checks import expect
from coterie.compiled import kernels, why_not
from coterie.planning.orders import ceil_div

if TYPE_CHECKING:
    from coterie.mechanisms.near_far.finished import Finished

_LEAST = 64  # tokens that a buffer has room for
_LARGE = 2**21  # bytes of a large page
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


class Buffer:
    """A (B, H, room, D) tensor of which the first tokens are used. It doubles where room runs out; on Linux, room that
    nobody has written to takes no memory."""

    def __init__(self) -> None:
        self.room: Tensor | None = None

    def append(self, kept: Tensor, new: Tensor, limit: int | None) -> Tensor:
        """Write rows behind those that are kept; returns all of them, a view of the buffer.

        Args:
            kept: (B, H, N, D), what `append` returned, or the beginning of it, or any other tensor, which is copied.
            new: (B, H, n, D).
            limit: room for so many from the start; None doubles.
        """
        length, total = kept.shape[2], kept.shape[2] + new.shape[2]
        room = self.room if self.room is not None and _writable(self.room) else None
        mine = room is not None and _begins(room, kept, new)
        if room is None or not mine or room.shape[2] < total:
            size = max(2 * total, _LEAST) if limit is None else limit
            room = _fresh(new, size, total)
            room[:, :, :length] = kept
            self.room = room
        room[:, :, length:total] = new
        return room[:, :, :total]

    def reorder(self, kept: Tensor, index: Tensor) -> Tensor:
        """Let sample i be what sample index[i] was; only those that change are copied, in a buffer of our own."""
        if self.room is None or not _begins(self.room, kept, kept):
            return kept[index]  # somebody else's tensor, or one that a gradient needs as it is
        moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
        kept[moved] = kept[index[moved]]
        return kept


def _fresh(like: Tensor, size: int, used: int) -> Tensor:
    """Room for so many tokens or a few more, where large pages fit. They are asked for below the tokens that are about
    to be written, and not behind them, where they would take memory for nobody."""
    batch, heads, _, dim = like.shape
    row = dim * like.element_size()
    plain = like.device.type != "cpu" or like.dtype not in _NATIVE or bool(why_not())
    if plain or used * row < _LARGE or _LARGE % row:
        return like.new_empty(batch, heads, size, dim)
    size = ceil_div(size * row, _LARGE) * _LARGE // row  # so that each head begins with a page
    flat = like.new_empty(batch * heads * size * dim + _LARGE // like.element_size())
    skipped = -flat.data_ptr() % _LARGE // like.element_size()
    room = flat[skipped : skipped + batch * heads * size * dim].view(batch, heads, size, dim)
    kernels().prefer_large_pages(room.detach(), used)
    return room


def _begins(room: Tensor, kept: Tensor, new: Tensor) -> bool:
    """Whether what is kept is the beginning of this buffer: an empty one always is, if the new rows fit in."""
    if (room.shape[0], room.shape[1], room.shape[3]) != (new.shape[0], new.shape[1], new.shape[3]):
        return False
    if room.dtype != new.dtype or room.device != new.device:
        return False
    if kept.shape[2] == 0:
        return True
    return kept.data_ptr() == room.data_ptr() and kept.stride() == room.stride()


def _writable(room: Tensor) -> bool:
    """Tensors of inference mode cannot be written to outside of it."""
    return not room.is_inference() or torch.is_inference_mode_enabled()


class _Latest(threading.local):
    """The layer that was updated last, in each thread."""

    layer: Any = None  # a weak reference


_latest = _Latest()


def holder(keys: Tensor) -> BufferedLayer | None:
    """The layer that has just given these keys to its attention, if it is one with buffers."""
    layer: BufferedLayer | None = None if _latest.layer is None else _latest.layer()
    return layer if layer is not None and layer.keys is keys else None


def made_of_cached(keys: Tensor) -> bool:
    """Whether a model has made these keys of what the layer that was updated last holds of as many tokens."""
    layer: BufferedLayer | None = None if _latest.layer is None else _latest.layer()
    return layer is not None and layer.get_seq_length() == keys.shape[2] and layer.keys.shape != keys.shape


class BufferedLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer of a cache, as `DynamicLayer` is, without its copy of all keys and values for every token.

    `keys` and `values` are views of the buffers. Who puts other tensors there is believed: they are copied into new
    buffers with the next token, and what decoding has made of the old ones is forgotten. With gradients, tokens are
    concatenated, as a buffer that is written to has none.
    """

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self._buffers = Buffer(), Buffer()
        self.finished: Finished | None = None  # of near–far decoding
        self.seen: Tensor | None = None  # (B, N) bool: which tokens it took for real
        self._left: tuple[Tensor, Tensor] | None = None  # keys and values as it left them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put new tokens behind those that are there; returns all keys and all values."""
        if not self.is_initialized or self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        if not self._holds_its_own():
            self.forget()
        if torch.is_grad_enabled() and (key_states.requires_grad or self.keys.requires_grad):
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        else:
            keys, values = self._buffers
            self.keys = keys.append(self.keys, key_states, self.max_length)
            self.values = values.append(self.values, value_states, self.max_length)
        self._left = self.keys, self.values
        _latest.layer = weakref.ref(self)
        return self._left

    def get_max_length(self) -> int:
        """How many tokens there can be; −1 is no limit."""
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.10

    def reset(self) -> None:
        """Forget all tokens, and keep the buffers for the next ones."""
        self.forget()
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    def forget(self) -> None:
        """Forget what decoding has made of the tokens: it will be made again."""
        self.finished = self.seen = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many tokens (a negative number) from the end; chunks that they are in are no longer finished."""
        with self._changing():
            super().crop(tokens_to_remove)
        if self.finished is not None and self.seen is not None:
            self.seen = self.seen[:, : self.get_seq_length()]
            self.finished.crop(self.seen.sum(-1).tolist())

    def offload(self) -> None:
        """Move keys and values to the CPU."""
        with self._changing():
            super().offload()

    def prefetch(self) -> None:
        """Move keys and values back."""
        with self._changing():
            super().prefetch()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each sample be there so many times."""
        self.forget()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only keep these samples."""
        self.forget()
        super().batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sample i be what sample beam_idx[i] was."""
        if self.get_seq_length() == 0:
            return
        if len(beam_idx) != self.keys.shape[0] or not all(map(_writable, (self.keys, self.values))):
            self.forget()
            super().reorder_cache(beam_idx)
            return
        if self.finished is not None and self.seen is not None:
            self.finished.reorder(beam_idx.to(self.keys.device))
            self.seen = self.seen[beam_idx.to(self.seen.device)]
        keys, values = self._buffers
        index = beam_idx.to(self.keys.device)
        with self._changing():
            self.keys, self.values = keys.reorder(self.keys, index), values.reorder(self.values, index)

    def _holds_its_own(self) -> bool:
        """Whether nobody has put other tensors there since."""
        return self._left is not None and self._left[0] is self.keys and self._left[1] is self.values

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is done inside to keys and values is done by the layer itself."""
        mine = self._holds_its_own()
        yield
        self._left = (self.keys, self.values) if mine else None

    def _check(self, keys: Tensor, values: Tensor) -> None:
        """New tokens must be of the same samples and heads as those that are there, and there must be room."""
        length, total = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if length:
            batch, *cached = self.keys.shape[0], self.keys.shape[1], self.keys.shape[3], self.values.shape[3]
            samples, *given = keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3]
            name, heads = "past_key_values", "{} heads, keys of {} and values of {}"
            expect(samples == batch, name, "a batch of {}, as the {} cached tokens are", samples, batch, length)
            what = f"the model whose tokens are cached, with {heads}"
            expect(given == cached, name, what, heads.format(*given), *cached)
        enough = self.max_length is None or total <= self.max_length
        expect(enough, "max_length", "at least {}, as the cache is to hold so many tokens", self.max_length, total)
