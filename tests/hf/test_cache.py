"""`coterie.hf.Cache` gives the tokens of the dynamic cache, however they are generated; real weights at the end."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers.cache_utils import DynamicLayer  # noqa: E402

import coterie.hf  # noqa: E402
from coterie.hf.buffers import Buffer, BufferedLayer  # noqa: E402
from tests.hf.families import BY_NAME, Family, _tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

WRITERS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "several": {"do_sample": True, "num_return_sequences": 3},
}
ODD = {"max_new_tokens": 13, "pad_token_id": 0, "eos_token_id": None}


def writer(name: str, **changes: Any) -> Any:
    """A small random model that generates, the same at every call."""
    if name == "t5":
        changes |= {"decoder_start_token_id": 0}
    model = Family(**(vars(BY_NAME[name]) | {"model": WRITERS[name]})).build(**changes)
    model.set_attn_implementation("sdpa")
    return model


def prompt(name: str, padded: bool = True) -> dict[str, Tensor]:
    """What a model of this family goes on from: two samples, the first one padded where that is possible."""
    if name == "whisper":
        return {"input_features": BY_NAME[name].inputs("none")[0]["input_features"]}
    mask = torch.ones(2, 29, dtype=torch.long)
    if padded:
        mask[0, :7] = 0
    return {"input_ids": _tokens(2, 29), "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], cache: Any, **settings: Any) -> Tensor:
    torch.manual_seed(7)
    settings = ODD | settings
    if model.config.model_type == "whisper":
        settings |= {"eos_token_id": 2, "min_new_tokens": 9, "forced_decoder_ids": None, "suppress_tokens": None}
        settings |= {"begin_suppress_tokens": None}
    found: Tensor = model.generate(**inputs, past_key_values=cache, **settings)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITERS)
def test_tokens_are_those_of_the_dynamic_cache(name: str, way: str):
    model = writer(name)
    want = generate(model, prompt(name), None, **WAYS[way])
    cache = coterie.hf.Cache(model)
    assert torch.equal(generate(model, prompt(name), cache, **WAYS[way]), want)
    own = cache.self_attention_cache if model.config.is_encoder_decoder else cache
    assert all(layer.get_seq_length() > 0 for layer in own.layers)
    assert sum(isinstance(layer, BufferedLayer) for layer in own.layers) == (1 if name == "gemma3" else 2)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "full", "near-far:near=3,chunk=8"])
def test_tokens_are_the_same_with_every_attention(name: str, implementation: str):
    model = writer(name)
    if implementation == "eager":
        model.set_attn_implementation("eager")
    else:
        coterie.hf.use(model, implementation)
    want = generate(model, prompt(name), transformers.DynamicCache(config=model.config))
    assert torch.equal(generate(model, prompt(name), coterie.hf.Cache(model)), want)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_generation_crops_what_was_not_accepted(name: str):
    model, assistant = writer(name), writer(name, num_hidden_layers=1, layer_types=["full_attention"])
    inputs = {key: x[1:] for key, x in prompt(name).items()}
    want = generate(model, inputs, None)
    found = generate(model, inputs, coterie.hf.Cache(model), assistant_model=assistant)
    assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_a_chunked_prefill_changes_nothing(name: str):
    model, inputs = writer(name), prompt(name, padded=False)
    want = generate(model, inputs, None)
    assert torch.equal(generate(model, inputs, coterie.hf.Cache(model), prefill_chunk_size=8), want)


@pytest.mark.parametrize("max_length", [None, 60])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_conversation_goes_on_with_the_same_cache(name: str, max_length: int | None):
    model, cache = writer(name), coterie.hf.Cache(writer(name), max_length)
    first = generate(model, prompt(name, padded=False), cache)
    longer = torch.cat([first, _tokens(2, 5, seed=3)], 1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert torch.equal(generate(model, inputs, cache), generate(model, inputs, None))
    assert cache.get_seq_length() == longer.shape[1] + 12


def filled(layer: DynamicLayer, lengths: tuple[int, ...] = (7, 1, 1, 60, 3)) -> DynamicLayer:
    """A layer with the same tokens at every call; they outgrow the first buffers."""
    torch.manual_seed(0)
    for length in lengths:
        layer.update(torch.randn(3, 2, length, 4), torch.randn(3, 2, length, 5))
    return layer


@pytest.mark.parametrize("max_length", [None, 200])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: None,
        lambda layer: layer.crop(-5),
        lambda layer: layer.reorder_cache(torch.tensor([2, 1, 1])),
        lambda layer: layer.reorder_cache(torch.tensor([1, 2, 0])),
        lambda layer: layer.reorder_cache(torch.tensor([0, 0, 1, 2])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([2, 0])),
        lambda layer: layer.offload(),
        lambda layer: layer.reset(),
    ],
    ids=["nothing", "crop", "reorder", "rotate", "more-beams", "repeat", "select", "offload", "reset"],
)
def test_a_layer_holds_what_a_dynamic_one_holds(max_length: int | None, change: Any):
    ours, theirs = filled(BufferedLayer(max_length)), filled(DynamicLayer())
    for layer in (ours, theirs):
        change(layer)
        layer.prefetch()
        torch.manual_seed(1)
        batch = 2 if layer.get_seq_length() == 0 else layer.keys.shape[0]
        for length in (1, 4):
            new = torch.randn(batch, 2, length, 4), torch.randn(batch, 2, length, 5)
            keys, values = layer.update(*new)
            assert keys is layer.keys
            assert values is layer.values
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)
    assert ours.get_max_length() == (-1 if max_length is None else 200)


def test_a_new_token_is_written_where_there_is_room():
    layer = filled(BufferedLayer(), (40,))
    first = layer.keys.data_ptr()
    for _ in range(40):
        filled(layer, (1,))
    assert layer.keys.data_ptr() == first  # 80 tokens fit
    filled(layer, (1,))
    assert layer.keys.data_ptr() != first
    second = layer.keys.data_ptr()
    layer.crop(-70)
    layer.reorder_cache(torch.tensor([1, 1, 0]))
    filled(layer, (70,))
    assert layer.keys.data_ptr() == second


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_copy_goes_on_by_itself(name: str, copied: Any):
    model, cache = writer(name), coterie.hf.Cache(writer(name))
    assert generate(model, prompt(name), cache).shape[0] == 2
    own = (cache.self_attention_cache if name == "bart" else cache).layers[0]
    other = copied(cache)
    layer = (other.self_attention_cache if name == "bart" else other).layers[0]
    before, length = layer.keys.clone(), layer.get_seq_length()
    shape = own.keys[:, :, :1].shape
    own.crop(-3)
    for _ in range(3):
        own.update(torch.zeros(shape), torch.zeros(shape))
    assert torch.equal(layer.keys, before)
    layer.update(torch.ones(shape), torch.ones(shape))
    assert layer.get_seq_length() == length + 1
    assert torch.equal(layer.keys[:, :, :-1], before)
    assert not own.keys[:, :, -3:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_stay_what_they_are(dtype: torch.dtype):
    model = writer("llama").to(dtype)
    want = generate(model, prompt("llama"), None)
    cache = coterie.hf.Cache(model)
    assert torch.equal(generate(model, prompt("llama"), cache), want)
    assert cache.layers[0].keys.dtype == dtype


def test_gradients_flow_through_cached_tokens():
    ids = _tokens(2, 21)

    def gradient(cache: Any) -> Tensor:
        model = writer("llama")
        model(ids[:, :9], past_key_values=cache, use_cache=True)
        model(ids[:, 9:], past_key_values=cache, use_cache=True).logits.cos().sum().backward()
        found: Tensor = model.model.layers[0].self_attn.k_proj.weight.grad
        return found

    want = gradient(transformers.DynamicCache(config=writer("llama").config))
    torch.testing.assert_close(gradient(coterie.hf.Cache(writer("llama"))), want)


def test_tokens_of_inference_mode_are_copied_outside_of_it():
    model, cache, ids = writer("llama"), coterie.hf.Cache(writer("llama")), _tokens(2, 21)
    with torch.inference_mode():
        model(ids[:, :9], past_key_values=cache)
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 0]))
        found = model(ids.flip(0)[:, 9:], past_key_values=cache).logits
        want = model(ids.flip(0)).logits[:, 9:]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True], ids=["ours", "theirs"])
def test_beams_that_change_places_leave_gradients_alone(dense: bool):
    model, ids, swap = writer("llama"), _tokens(2, 21), torch.tensor([1, 0])
    cache = transformers.DynamicCache(config=model.config) if dense else coterie.hf.Cache(model)
    first = model(ids[:, :9], past_key_values=cache).logits
    cache.reorder_cache(swap)
    second = model(ids[swap, 9:], past_key_values=cache).logits
    whole = model(ids[swap]).logits
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    found = torch.autograd.grad(torch.cat([first[swap], second], 1).square().sum(), list(model.parameters()))
    want = torch.autograd.grad(whole.square().sum(), list(model.parameters()))
    for name, each, other in zip(names, found, want, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-3, msg=name)


def test_tensors_that_somebody_puts_there_are_not_written_to():
    layer = filled(BufferedLayer())
    layer.keys = mine = torch.randn(3, 2, 72, 4)
    before = mine.clone()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.keys, before[[2, 0, 0]])
    filled(layer, (5,))
    assert torch.equal(mine, before)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_cache_of_another_model_is_refused():
    model, other, ids = writer("llama"), writer("llama", num_key_value_heads=4), _tokens(2, 9)
    with torch.no_grad():
        cache = coterie.hf.Cache(model)
        model(ids, past_key_values=cache)
        with pytest.raises(
            ValueError, match="expected the model whose tokens are cached, with 2 heads, keys of 8 and v"
        ):
            other(ids, past_key_values=cache)
        deep = writer("llama", num_hidden_layers=3)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM with 2 layers, .* got a model with a layer 2"):
            deep(ids, past_key_values=coterie.hf.Cache(model))


def test_a_cache_of_another_model_of_the_same_shape_is_refused_where_coterie_has_taken_the_model():
    model, other = (coterie.hf.use(writer("llama"), "dense") for _ in range(2))
    with torch.no_grad():
        cache = coterie.hf.Cache(model)
        model(_tokens(2, 9), past_key_values=cache)
        model.model(_tokens(2, 1), past_key_values=cache)  # a part of it is no other
        with pytest.raises(ValueError, match="expected a cache of this LlamaForCausalLM, got one of another Llama"):
            other(_tokens(2, 1), past_key_values=cache)
        other(_tokens(2, 1), past_key_values=copy.deepcopy(cache))  # nobody knows whose a copy is


def test_another_batch_is_refused():
    model = writer("llama")
    cache = coterie.hf.Cache(model)
    with torch.no_grad():
        model(_tokens(2, 9), past_key_values=cache)
        with pytest.raises(
            ValueError, match="past_key_values: expected a batch of 2, as the 9 cached tokens are, got 3"
        ):
            model(_tokens(3, 1), past_key_values=cache)


def test_more_tokens_than_there_is_room_for_are_refused():
    model = writer("llama")
    with pytest.raises(ValueError, match=r"max_length: expected at least 36, as the cache is to hold so .* got 35"):
        generate(model, prompt("llama"), coterie.hf.Cache(model, max_length=35))
    assert generate(model, prompt("llama"), coterie.hf.Cache(model, max_length=41)).shape == (2, 42)


def test_what_is_no_writer_has_no_cache():
    with pytest.raises(ValueError, match="model: expected one that generates, got BertModel"):
        coterie.hf.Cache(BY_NAME["bert"].build())
    with pytest.raises(TypeError, match=r"model: expected a transformers\.PreTrainedModel"):
        coterie.hf.Cache(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="max_length: expected an int ≥ 1, got 0"):
        coterie.hf.Cache(writer("bart"), max_length=0)
    with pytest.raises(TypeError, match="max_length: expected an int, got float"):
        coterie.hf.Cache(writer("llama"), max_length=3.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_long_buffers_begin_with_large_pages(dtype: torch.dtype):
    whole = torch.randn(1, 2, 17000, 64).to(dtype)
    buffer = Buffer()
    kept = buffer.append(whole[:, :, :0], whole[:, :, :16500], None)
    first = kept.data_ptr()
    kept = buffer.append(kept, whole[:, :, 16500:], None)
    assert kept.data_ptr() == first  # there was room
    assert torch.equal(kept, whole)
    if dtype != torch.float64:
        assert [kept[:, h].data_ptr() % 2**21 for h in (0, 1)] == [0, 0]
