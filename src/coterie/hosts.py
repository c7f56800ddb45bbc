"""Models whose attention can be chosen: Hugging Face's through `coterie.hf`, all others through `coterie.nn`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coterie.checks import expect, expect_type
from coterie.mechanisms import Full
from coterie.nn.swapping import Found, Swap, swap
from coterie.observe import Seen, observing
from coterie.sdpa.scope import Chosen

DENSE = "dense"
_NOTES = ("modality", "prompt_length")  # what sentence-transformers writes beside the tokens, for itself


class Host(ABC):
    """A model, the attention modules in it, and what runs in them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The attention modules that can be chosen."""

    @abstractmethod
    def put(self, choices: Mapping[str, str], decode: Mapping[str, str] | None = None) -> None:
        """Let these mechanisms run, "dense" included; `decode` answers new tokens over a cache."""

    @abstractmethod
    def restore(self) -> None:
        """Put everything back."""

    def undo(self) -> None:
        """The model's own attention, whatever was put before this host came."""
        self.restore()

    def windows(self) -> dict[str, int]:
        """Modules with a sliding window of their own, and how wide it is."""
        return {}

    def check(self, batch: Any) -> None:
        """Refuse a batch that the model cannot be called with."""
        return

    def run(self, batch: Any) -> Any:
        """One forward pass."""
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, tuple) else self.model(batch)

    def attend(self, batch: Any) -> Any:
        """One forward pass, of which no more is wanted than that attention runs."""
        return self.run(batch)

    def hidden(self, batch: Any) -> Tensor:
        """The final hidden states, (B, N, dim); an image is one vector."""
        out = self.attend(batch)
        try:
            found = out if isinstance(out, Tensor) else out[0]
        except (KeyError, IndexError, TypeError):
            found = out
        what = f"a callable, as {type(self.model).__name__} gives no tensor, and nothing that begins with one"
        expect(isinstance(found, Tensor), "measure", what, "'hidden'")
        return found.flatten(1)[:, None] if found.ndim > 3 else found

    def put_everywhere(self, mechanism: str) -> None:
        """The same mechanism in every module."""
        self.put(dict.fromkeys(self.names, mechanism))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, `name_of` knows what runs."""
        yield

    @abstractmethod
    def name_of(self, seen: Seen) -> str:
        """The attention that is seen, among `names`."""


class TorchHost(Host):
    """Any other model: torch.nn.MultiheadAttention, modules that an adapter knows, and whoever calls SDPA.

    Calls of SDPA are known by name from when the model has run, with anything or nothing put into it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        found = Found(model)
        found.check(Chosen(Full()))
        self._names = dict.fromkeys(found.names())
        self._swap: Swap | None = None

    @property
    def names(self) -> list[str]:
        if self._swap is not None:
            self._names |= dict.fromkeys(self._swap.calls)
        return list(self._names)

    def name_of(self, seen: Seen) -> str:
        return seen.name

    def put(self, choices: Mapping[str, str], decode: Mapping[str, str] | None = None) -> None:
        expect(not decode, "decode", "a model of transformers", type(self.model).__name__)
        self._put(dict(choices))

    def put_everywhere(self, mechanism: str) -> None:
        self._put(mechanism)

    def _put(self, mechanism: Any) -> None:
        self.restore()
        self._swap = swap(self.model, mechanism)

    def restore(self) -> None:
        self._names = dict.fromkeys(self.names)
        if self._swap is not None:
            self._swap.undo()
        self._swap = None


class HfHost(Host):
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        import coterie.hf
        from coterie.hf.stored import DECODE, modules_in

        super().__init__(model)
        self._current = ""  # the module that is running
        self.hf = coterie.hf
        self._modules = coterie.hf.attention_modules(model)
        stored = getattr(model.config, "coterie", None)  # what `use` has put there, to be put back
        in_use = model.config._attn_implementation == "coterie" and stored
        self._before = (dict(modules_in(stored)), dict(modules_in(stored, DECODE))) if in_use else None
        self._taken = False

    @property
    def names(self) -> list[str]:
        return list(self._modules)

    @contextmanager
    def watching(self) -> Iterator[None]:
        def enter(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any) -> None:
                self._current = name

            return hook

        hooks = [module.register_forward_pre_hook(enter(name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def name_of(self, seen: Seen) -> str:
        return self._current

    def put(self, choices: Mapping[str, str], decode: Mapping[str, str] | None = None) -> None:
        self.hf.apply(self.model, choices, decode)
        self._taken = True

    def decoders(self) -> list[str]:
        """The modules whose new tokens look back at a cache that only grows: those that `decode` can be for."""
        from coterie.hf import decoding, sites

        there = sites.sites_of(self.model).each
        return [site.short for site in there if decoding.fits(site)] if self.model.can_generate() else []

    def undo(self) -> None:
        if self._taken:
            self.hf.undo(self.model)
        self._taken = False

    def restore(self) -> None:
        self.undo()
        if self._before is not None:
            self.hf.apply(self.model, *self._before)

    def windows(self) -> dict[str, int]:
        found: dict[str, int] = self.hf.own_windows(self.model)
        return found

    def check(self, batch: Any) -> None:
        wanted = 'dicts of what the model takes, such as {"input_ids": tokens}'
        expect_type(isinstance(batch, Mapping), "batches", wanted, type(batch).__name__)

    def run(self, batch: Any) -> Any:
        return super().run({name: value for name, value in batch.items() if name not in _NOTES})

    def attend(self, batch: Any) -> Any:
        return getattr(self.model, "base_model", self.model)(**without_labels(batch))

    def hidden(self, batch: Any) -> Tensor:
        out = self.attend(batch)
        found = getattr(out, "last_hidden_state", getattr(out, "logits", None))
        what = f"a callable, as {type(self.model).__name__} gives neither hidden states nor logits"
        expect(isinstance(found, Tensor), "measure", what, "'hidden'")
        assert isinstance(found, Tensor)
        return found


def without_labels(batch: Any) -> dict[str, Any]:
    """A batch as the model without its head takes it."""
    return {name: value for name, value in batch.items() if name not in ("labels", *_NOTES)}


def host_of(model: Any) -> Host:
    """The host that fits a model."""
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    if _is_hf(model):
        return HfHost(model)
    mixed = any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    if not mixed and any(_is_hf(part) for part in model.modules()):
        from coterie.hf.wrapped import model_inside  # transformers is there, as a model of its is

        return HfHost(model_inside(model))
    return TorchHost(model)


def _is_hf(module: nn.Module) -> bool:
    return any(
        f"{kind.__module__}.{kind.__qualname__}".endswith("modeling_utils.PreTrainedModel")
        for kind in type(module).__mro__
    )


@torch.no_grad()
def watch_dense(model: Any, batch: Any, look: Callable[[str, Seen], None]) -> tuple[str, ...]:
    """Run a batch densely and call `look(name, seen)` once for every attention module, the first time that it runs.

    Returns:
        The modules that were not seen so: those with a sliding window of their own, or with a few queries alone.
    """
    host, done = host_of(model), set()

    def observer(seen: Seen) -> None:
        full = isinstance(seen.mechanism, Full) or seen.mechanism == "full"
        name = host.name_of(seen)
        if full and name not in done:
            done.add(name)
            look(name, seen)

    host.put_everywhere("full")
    try:
        with host.watching(), observing(observer):
            host.attend(batch)
    finally:
        host.restore()
    return tuple(name for name in host.names if name not in done)
