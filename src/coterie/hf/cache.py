"""A cache for generation that stays fast as the context grows."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from coterie.checks import expect, expect_int
from coterie.hf.buffers import BufferedLayer
from coterie.hf.wrapped import model_inside


class Cache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of a model's earlier tokens, in buffers that have room for more.

    Hugging Face's `DynamicCache` copies all of them for every new token; here a token is written behind the others, so
    a long context costs no more than reading it. It is exact, with any attention, and takes the place of a
    `DynamicCache` wherever that is taken: beams, assisted generation, `crop`, a second `generate` on the same cache.
    Layers with a sliding window keep their own. Of an encoder–decoder model it is an `EncoderDecoderCache`, whose
    self-attention has the buffers.

    The keys and values of a layer are views of its buffers: after `crop` or a reordering of beams, new tokens overwrite
    what an earlier view shows.

    Args:
        model: the model that generates, or a wrapper around it.
        max_length: room for so many tokens from the start, and never for more; None doubles the room as it runs out.

    Example:
        >>> import coterie.hf, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).eval()
        >>> prompt, settings = torch.arange(3, 40)[None], {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
        >>> tokens = model.generate(prompt, past_key_values=coterie.hf.Cache(model), **settings)
        >>> torch.equal(tokens, model.generate(prompt, **settings))
        True
    """

    def __new__(cls, model: nn.Module, max_length: int | None = None) -> Any:
        inner = _checked(model, max_length)
        if inner.config.is_encoder_decoder:
            own = super().__new__(cls)
            own.__init__(model, max_length)  # Python calls it for a Cache alone
            cross = DynamicCache()
            cross.layers, cross.layer_class_to_replicate = _layers(inner), None
            return EncoderDecoderCache(own, cross)
        return super().__new__(cls)

    def __init__(self, model: nn.Module, max_length: int | None = None) -> None:
        inner = _checked(model, max_length)
        super().__init__()
        self.layers, self.layer_class_to_replicate = _layers(inner), None
        self.max_length = max_length
        self.owner = type(inner).__name__
        self.made_for: weakref.ref[nn.Module] | None = weakref.ref(inner)
        grow(self, max_length)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are made of what it holds: a model is not asked for again."""
        return _restored, (type(self), self.__dict__ | {"made_for": None})

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put a layer's new tokens behind those that are there; returns all its keys and values."""
        what = f"{self.owner} with {len(self.layers)} layers, which this cache was made for"
        expect(layer_idx < len(self.layers), "past_key_values", what, f"a model with a layer {layer_idx}")
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found


def check_owner(cache: Cache, model: nn.Module) -> None:
    """Refuse a cache that was made for another model than this one, a part of it, or one that it is a part of."""
    made_for = None if cache.made_for is None else cache.made_for()
    same = made_for is None or any(each is model for each in made_for.modules())
    same = same or any(each is made_for for each in model.modules())
    expect(same, "past_key_values", f"a cache of this {type(model).__name__}", f"one of another {cache.owner}")


def grow(cache: DynamicCache, max_length: int | None = None) -> None:
    """Give the layers of a cache buffers that grow, in place; those that are no plain `DynamicLayer` stay."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = BufferedLayer(max_length)
            cache.layers[place].__dict__.update({key: x for key, x in vars(layer).items() if key != "max_length"})


def _restored(cls: type[Cache], state: dict[str, Any]) -> Cache:
    found = object.__new__(cls)
    found.__dict__.update(state)
    return found


def _checked(model: nn.Module, max_length: int | None) -> PreTrainedModel:
    inner = model_inside(model)
    expect(inner.can_generate(), "model", "one that generates", type(inner).__name__)
    if max_length is not None:
        expect_int("max_length", max_length, at_least=1)
    return inner


def _layers(model: PreTrainedModel) -> list[Any]:
    """Layers of a dynamic cache, as many as there are in what generates: configs may count those of the encoder."""
    config = model.config
    found: list[Any] = DynamicCache(config=config).layers
    known = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None)
    count = int(known) if config.is_encoder_decoder and known else len(found)
    return found[:count] + [DynamicLayer() for _ in range(count - len(found))]
