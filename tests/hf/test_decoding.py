"""`coterie.hf.use(model, …, decode="near-far")`: new tokens over a cache, in small random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from coterie.hf.buffers import BufferedLayer  # noqa: E402
from coterie.mechanisms.near_far.finished import Finished  # noqa: E402
from tests.hf.families import BY_NAME, NARROW, _tokens  # noqa: E402
from tests.hf.test_cache import WAYS, generate, prompt, writer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

EVERYONE, FEW = "near-far:near=999,chunk=4", "near-far:near=3,chunk=4"


def decoding(name: str, decode: Any = FEW, **changes: Any) -> Any:
    return coterie.hf.use(writer(name, **changes), "dense", decode=decode)


def logits(model: Any, ids: Tensor, cuts: list[int], mask: Tensor | None = None, cache: Any = None) -> Tensor:
    """Those of all tokens behind the first cut, which come in as many calls as there are cuts."""
    cache = coterie.hf.Cache(model) if cache is None else cache
    found, first = [], cache.get_seq_length()
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for cut in cuts:
            told = (
                {}
                if mask is None or positions is None
                else {
                    "attention_mask": mask[:, :cut],
                    "position_ids": positions[:, first:cut],
                }
            )
            found.append(model(ids[:, first:cut], past_key_values=cache, **told).logits)
            first = cut
    return torch.cat(found[1:], 1)


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2", "bart", "whisper"])
def test_with_everybody_near_tokens_are_the_dense_ones(name: str, way: str):
    want = generate(writer(name), prompt(name), None, **WAYS[way])
    model = decoding(name, EVERYONE)
    assert torch.equal(generate(model, prompt(name), coterie.hf.Cache(model), **WAYS[way]), want)
    assert torch.equal(generate(model, prompt(name), None, **WAYS[way]), want)  # in the cache that it makes itself


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_with_everybody_near_assistants_chunks_and_conversations_are_the_dense_ones(name: str):
    dense, model = writer(name), decoding(name, EVERYONE)
    assistant = writer(name, num_hidden_layers=1, layer_types=["full_attention"])
    inputs = {key: x[1:] for key, x in prompt(name).items()}
    want = generate(dense, inputs, None)
    assert torch.equal(generate(model, inputs, coterie.hf.Cache(model), assistant_model=assistant), want)
    assert torch.equal(generate(model, inputs, coterie.hf.Cache(model), prefill_chunk_size=8), want)
    cache = coterie.hf.Cache(model)
    longer = torch.cat([generate(model, inputs, cache), _tokens(1, 5, seed=3)], 1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert torch.equal(generate(model, inputs, cache), generate(dense, inputs, None))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_it_does_not_matter_in_which_calls_the_tokens_come(name: str):
    model, ids = decoding(name), _tokens(2, 79)
    want = logits(model, ids, [40, *range(41, 80)])
    dense = logits(writer(name), ids, [40, 79])
    assert float((want - dense).abs().max()) > 1e-3  # clusters are not the keys themselves
    for cuts in ([40, 47, 63, 79], [40, 56, 72, 73, 79]):
        torch.testing.assert_close(logits(model, ids, cuts), want, rtol=1e-4, atol=1e-4)


def test_a_sample_of_a_padded_batch_gets_what_it_gets_alone():
    model, ids = decoding("llama"), _tokens(2, 79)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    found = logits(model, ids, [60, *range(61, 80)], mask)
    alone = logits(model, ids[1:, 23:], [37, *range(38, 57)])
    torch.testing.assert_close(found[1:], alone, rtol=1e-4, atol=1e-4)


def test_what_was_cropped_leaves_no_trace():
    model, ids, other = decoding("llama"), _tokens(2, 79), _tokens(2, 79, seed=5)
    cache = coterie.hf.Cache(model)
    both = torch.cat([ids[:, :51], other[:, 51:]], 1)
    logits(model, both, [40, *range(41, 80)], cache=cache)
    assert cache.layers[0].finished.chunks == [18, 18]
    cache.crop(-28)
    assert cache.layers[0].finished.chunks == [12, 12]
    found = logits(model, ids, [52, *range(53, 80)], cache=cache)
    torch.testing.assert_close(found, logits(model, ids, [40, *range(41, 80)])[:, 12:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_beams_take_their_chunks_along(name: str, monkeypatch: pytest.MonkeyPatch):
    model = decoding(name)
    settings = {"num_beams": 4, "do_sample": False, "max_new_tokens": 31}
    moved = generate(model, prompt(name), coterie.hf.Cache(model), **settings)

    def forget(layer: Any, index: Tensor) -> None:
        layer.forget()
        layer.keys, layer.values = layer.keys[index], layer.values[index]

    monkeypatch.setattr(BufferedLayer, "reorder_cache", forget)
    assert torch.equal(generate(model, prompt(name), coterie.hf.Cache(model), **settings), moved)


def test_batches_are_repeated_and_selected():
    model, ids = decoding("llama"), _tokens(2, 60)
    cache = coterie.hf.Cache(model)
    logits(model, ids, [40, 41, 42], cache=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    index = torch.tensor([0, 1, 0])
    found = logits(model, ids[index], [43, *range(44, 61)], cache=cache)
    torch.testing.assert_close(found, logits(model, ids, [40, *range(41, 61)])[index, 3:], rtol=1e-4, atol=1e-4)


def test_other_tokens_are_real_than_before():
    model, ids = decoding("llama"), _tokens(1, 60)
    cache, mask = coterie.hf.Cache(model), torch.ones(1, 60, dtype=torch.long)
    logits(model, ids, [40, 41, 42], mask, cache)
    hidden = mask.clone()
    hidden[0, :9] = 0
    found = cache.layers[0].finished
    with torch.no_grad():
        model(ids[:, 42:43], past_key_values=cache, attention_mask=hidden[:, :43], position_ids=torch.tensor([[42]]))
    assert cache.layers[0].finished is not found
    assert cache.layers[0].finished.chunks == [7]  # of 34 keys


def test_tensors_that_somebody_puts_there_are_clustered_anew():
    model, ids = decoding("llama"), _tokens(1, 60)
    cache = coterie.hf.Cache(model)
    logits(model, ids, [40, 41, 42], cache=cache)
    for layer in cache.layers:
        layer.keys, layer.values = (x.flip(2).contiguous() for x in (layer.keys, layer.values))
    again = copy.deepcopy(cache)
    for layer in again.layers:
        layer.forget()
    found = logits(model, ids, [43, 59], cache=cache)
    assert torch.equal(found, logits(model, ids, [43, 59], cache=again))


@pytest.mark.parametrize("moved", [lambda layer: layer.crop(-2), lambda layer: (layer.offload(), layer.prefetch())])
def test_what_the_layer_does_itself_forgets_nothing(moved: Any):
    model, ids = decoding("llama"), _tokens(1, 60)
    cache = coterie.hf.Cache(model)
    logits(model, ids, [40, 41, 42], cache=cache)
    before = [layer.finished for layer in cache.layers]
    for layer in cache.layers:
        moved(layer)
    logits(model, ids, [43, 44], cache=cache)
    assert all(layer.finished is each for layer, each in zip(cache.layers, before, strict=True))


def test_chunks_are_clustered_once(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []
    cluster = Finished._cluster

    def watched(self: Finished, *given: Any) -> None:
        seen.append(given[-2:])
        cluster(self, *given)

    monkeypatch.setattr(Finished, "_cluster", watched)
    logits(decoding("llama", num_hidden_layers=1), _tokens(2, 60), [40, *range(41, 61)])
    assert seen == [(0, 9), (9, 10), (10, 11), (11, 12), (12, 13)]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_decodes_as_it_does_without():
    model, ids = decoding("llama", num_hidden_layers=1), _tokens(2, 60)
    torch.compiler.reset()
    cache = coterie.hf.Cache(model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        found = torch.compile(model, backend="eager")(ids[:, 40:41], past_key_values=cache).logits
    torch.compiler.reset()
    assert cache.layers[0].finished is not None
    torch.testing.assert_close(found, logits(model, ids, [40, 41]), rtol=1e-4, atol=1e-4)


def test_from_a_length_on():
    ids = _tokens(2, 60)
    want = logits(writer("llama"), ids, [40, *range(41, 61)])
    found = logits(decoding("llama", f"{FEW}@51"), ids, [40, *range(41, 61)])
    torch.testing.assert_close(found[:, :10], want[:, :10], rtol=1e-4, atol=1e-4)
    assert float((found[:, 10:] - want[:, 10:]).abs().max()) > 1e-3


# --- which layers, and what is kept -----------------------------------------------------------------------------------


def test_each_layer_has_its_own(tmp_path: Any):
    model = coterie.hf.use(writer("llama"), "near-far:near=9", decode={1: FEW})
    runs = [layer.runs for layer in coterie.hf.describe(model)]
    assert runs == ["near-far:near=9", f"near-far:near=9, new tokens {FEW}"]
    model.save_pretrained(tmp_path)
    loaded = coterie.hf.load(tmp_path)
    assert [layer.runs for layer in coterie.hf.describe(loaded)] == runs
    by_itself = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="coterie")
    ids = _tokens(1, 60)
    found = [logits(each, ids, [40, *range(41, 61)]) for each in (model, loaded, by_itself)]
    for each in found[1:]:  # weights lie elsewhere in memory, which products may round by: 6e-8 was measured
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-6)
    coterie.hf.use(loaded, "near-far:near=9")  # dense again
    assert [layer.runs for layer in coterie.hf.describe(loaded)] == ["near-far:near=9"] * 2
    assert "decode" not in loaded.config.coterie


def test_windows_and_other_peoples_keys_stay_exact():
    for name, where in (("gemma3", "layers.1"), ("bart", "decoder.layers")):
        layers = coterie.hf.describe(decoding(name, FEW))
        assert {where in layer.name and "encoder_attn" not in layer.name for layer in layers if FEW in layer.runs} == {
            True
        }
        assert len([layer for layer in layers if FEW in layer.runs]) == (1 if name == "gemma3" else 2)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["smyrf", "local:window=8", "topk@99"])
def test_a_mechanism_without_a_form_for_decoding_is_refused(mechanism: str):
    with pytest.raises(ValueError, match=f"decode: expected 'dense' or 'near-far', as no other .* got {mechanism}"):
        decoding("llama", mechanism)


def test_a_model_in_which_nothing_decodes_is_refused():
    with pytest.raises(ValueError, match=r"decode: expected layers of BertModel with causal self-attention and no"):
        coterie.hf.use(BY_NAME["bert"].build(), "dense", decode="near-far")
    with pytest.raises(ValueError, match=r"decode: expected layers of Gemma3ForCausalLM .* got layers \[0\]"):
        coterie.hf.use(writer("gemma3"), "dense", decode={0: "near-far"})


def test_another_cache_is_refused():
    model = decoding("llama")
    with pytest.raises(ValueError, match=r"decode=near-far:near=3,chunk=4 needs .* past_key_values=coterie\.hf\.Cache"):
        generate(model, prompt("llama"), None, cache_implementation="static", disable_compile=True)


def test_keys_that_a_model_makes_of_what_it_caches_are_refused():
    settings = NARROW | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "moe_intermediate_size": 16}
    settings |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    config = transformers.DeepseekV3Config(**settings)
    model = coterie.hf.use(transformers.DeepseekV3ForCausalLM(config).eval(), "dense", decode="near-far")
    with pytest.raises(ValueError, match=r"attention over the keys and .* are cached, got DeepseekV3Attention, which"):
        generate(model, prompt("llama"), coterie.hf.Cache(model))


def test_layers_that_attend_in_chunks_of_their_own_are_left_alone():
    settings = {"num_local_experts": 1, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 16}
    kinds = ["chunked_attention", "full_attention"]
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**NARROW, **settings, layer_types=kinds)
    ).eval()
    want = generate(model, prompt("llama"), None)
    coterie.hf.use(model, "dense", decode=EVERYONE)
    assert ["new tokens" in layer.runs for layer in coterie.hf.describe(model)] == [False, True]
    assert torch.equal(generate(model, prompt("llama"), None), want)


def test_a_position_bias_is_refused():
    with pytest.raises(ValueError, match="expected attention without a position bias, got that of T5Attention"):
        generate(decoding("t5"), prompt("t5"), None)


def test_gradients_are_refused():
    model, ids = decoding("llama"), _tokens(1, 30)
    cache = coterie.hf.Cache(model)
    model(ids[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match=r"expected torch\.no_grad\(\), as decoding has no gradient"):
        model(ids[:, 20:22], past_key_values=cache)


def test_a_mask_of_pairs_is_refused():
    model, ids = decoding("llama"), _tokens(1, 30)
    cache = coterie.hf.Cache(model)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="expected a mask that only hides padding and the future, got another one"):
            model(ids[:, 20:22], past_key_values=cache, attention_mask=torch.ones(1, 1, 2, 22, dtype=torch.bool))
