"""Coterie inside Hugging Face models: small random ones here, real weights in test_real.py."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from coterie.hf import version  # noqa: E402
from coterie.hf.masks import Rules  # noqa: E402
from coterie.hf.positions import Table, learned_positions  # noqa: E402
from coterie.hf.takeover import check_reach  # noqa: E402
from tests.hf.families import BY_NAME, ENCODER_DECODER, FAMILIES, Family, _tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CASES = [pytest.param(family, side, id=f"{family.name}-{side}") for family in FAMILIES for side in family.sides]
CAUSAL = [family for family in FAMILIES if family.causal]
MECHANISMS = [
    "smyrf:rounds=2,cluster_size=16",
    "clustered:clusters=8",
    "improved-clustered:clusters=8,topk=8",
    "reformer:rounds=2,chunk_size=8",
    "routing:clusters=4,window=16",
    "local:window=17",
    "longformer:window=9,global_tokens=2",
    "strided:stride=6",
    "fixed:stride=8,summary=2",
    "topk:k=9",
    "near-far:near=9,chunk=16",
]


def each(items):
    return pytest.mark.parametrize("family", items, ids=[family.name for family in items])


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, float(want.abs().max())))


def positions_of(model: Any) -> Table:
    """The learned table that it must have."""
    found = learned_positions(model)
    assert found is not None
    return found


def loss(answers: list[Tensor]) -> Tensor:
    """A number that every entry has another share in."""
    return torch.stack([(x.flatten() * torch.arange(x.numel()).cos()).sum() for x in answers]).sum()


# --- Full is what the model had --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "padding"), CASES)
def test_full_equals_eager_forward_and_backward(family: Family, padding: str):
    def run(model):
        answers = family.answers(model, padding)
        loss(answers).backward()
        return answers, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    answers, gradients = run(family.build())
    found, found_gradients = run(coterie.hf.use(family.build(), "full"))
    for got, want in zip(found, answers, strict=True):
        close(got, want)
    assert found_gradients.keys() == gradients.keys()
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, want in gradients.items():
        torch.testing.assert_close(found_gradients[name], want, rtol=1e-3, atol=2e-5 * scale, msg=name.__add__)


def refuses(family: Family, mechanism: str) -> bool:
    """What cannot be: mean queries mix the future in, and a mean has no position bias."""
    means = mechanism.startswith(("clustered", "improved"))
    decodes = family.causal or family.name in ("clip", "whisper", "bart", "t5")
    return (means and decodes) or (mechanism.startswith("near-far") and family.name == "t5")


@pytest.mark.parametrize(("family", "padding"), CASES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_runs_or_refuses_by_name(family: Family, padding: str, mechanism: str):
    with torch.no_grad():
        dense = family.answers(family.build(), padding)
        model = coterie.hf.use(family.build(), mechanism)
        if refuses(family, mechanism):
            with pytest.raises(ValueError, match=f"{mechanism.split(':')[0]}.*(is_causal|position bias)"):
                family.answers(model, padding)
            return
        found = family.answers(model, padding)
    assert all(bool(x.isfinite().all()) for x in found)
    assert any(float((a - b).abs().max()) > 1e-5 for a, b in zip(found, dense, strict=True))


@each(CAUSAL)
def test_packed_sequences_do_not_see_each_other(family: Family):
    ids = _tokens(1, 50)
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    with torch.no_grad():
        want = family.build()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        model = coterie.hf.use(family.build(), "full")
        close(model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state, want)
        alone = model(input_ids=ids[:, 20:], use_cache=False).last_hidden_state
        close(want[:, 20:], alone)
        coterie.hf.use(model, "near-far:near=8,chunk=16")
        with pytest.raises(ValueError, match=r"near-far.*cannot honour the mask of layer .*packed sequences"):
            model(input_ids=ids, position_ids=positions, use_cache=False)
        coterie.hf.use(model, "smyrf:rounds=1,cluster_size=16")
        assert model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state.isfinite().all()


@each(CAUSAL)
@pytest.mark.parametrize("padded", [False, True])
def test_chunked_prefill_equals_one_prefill(family: Family, padded: bool):
    ids, mask = _tokens(2, 50), torch.ones(2, 50, dtype=torch.long)
    if padded:
        mask[1, :11] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        eager = family.build()
        want = eager(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state[mask.bool()]
        model = coterie.hf.use(family.build(), "full")
        cache = transformers.DynamicCache(config=model.config)
        parts = []
        for first, stop in ((0, 20), (20, 41), (41, 50)):
            out = model(
                input_ids=ids[:, first:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, first:stop],
                past_key_values=cache,
                use_cache=True,
            )
            parts.append(out.last_hidden_state)
        close(torch.cat(parts, 1)[mask.bool()], want)


@each(CAUSAL)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_full_equals_eager_token_by_token(family: Family, cache: str):
    kind = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    family = Family(**(vars(family) | {"model": kind.get(family.name, "Gemma3ForCausalLM")}))
    ids, mask = _tokens(2, 29), torch.ones(2, 29, dtype=torch.long)
    mask[0, :7] = 0
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "cache_implementation": cache,
        "pad_token_id": 0,
        "eos_token_id": None,
        "disable_compile": True,
    }
    want = family.build().generate(ids, **settings)
    model = coterie.hf.use(family.build(), "full")
    assert torch.equal(model.generate(ids, **settings), want)
    clustered = coterie.hf.use(model, "near-far:near=8,chunk=8").generate(ids, **settings)
    assert clustered.shape == want.shape


def test_encoder_decoder_generates_like_eager():
    family = Family(**(vars(BY_NAME["bart"]) | {"model": "BartForConditionalGeneration"}))
    inputs = family.inputs("right")[0]
    settings = {
        "attention_mask": inputs["attention_mask"],
        "max_new_tokens": 9,
        "do_sample": False,
        "eos_token_id": None,
    }
    settings |= {"forced_eos_token_id": None, "num_beams": 2}
    want = family.build().generate(inputs["input_ids"], **settings)
    assert torch.equal(coterie.hf.use(family.build(), "full").generate(inputs["input_ids"], **settings), want)


# --- masks ------------------------------------------------------------------------------------------------------------


def test_a_users_4d_mask_is_honoured_or_refused():
    family = BY_NAME["llama"]
    ids = _tokens(1, 40)
    seen = torch.ones(40, 40, dtype=torch.bool).tril() & (torch.rand(40, 40) > 0.3) | torch.eye(40, dtype=torch.bool)
    for mask in (seen[None, None], torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]):
        with torch.no_grad():
            float_mask = mask if mask.is_floating_point() else torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            want = family.build()(input_ids=ids, attention_mask=float_mask).last_hidden_state
            model = coterie.hf.use(family.build(), "full")
            close(model(input_ids=ids, attention_mask=mask).last_hidden_state, want)
            with pytest.raises(ValueError, match="a 4-D mask of the caller"):
                coterie.hf.use(model, "near-far")(input_ids=ids, attention_mask=mask)
            with pytest.raises(
                ValueError, match=r"attention_mask: expected a shape that broadcasts to \(1, 4, 40, 40\)"
            ):
                model(input_ids=ids, attention_mask=mask[..., :39])
    with pytest.raises(ValueError, match=r"attention_mask: expected bool or float .* got torch.int64"):
        model(input_ids=ids, attention_mask=seen[None, None].long())


def test_a_causal_module_without_a_mask_must_be_square():
    model = coterie.hf.use(BY_NAME["llama"].build(), "full")
    attention = model.layers[0].self_attn
    q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 12, 8)
    with pytest.raises(ValueError, match="is causal and was called with 10 queries, 12 keys and no mask"):
        coterie.hf.attend.attend(attention, q, k, k, None)


def test_padding_never_builds_a_mask_of_pairs():
    family = BY_NAME["bert"]
    model = coterie.hf.use(family.build(max_position_embeddings=20_000), "near-far:near=8")
    ids, mask = _tokens(1, 20_000), torch.ones(1, 20_000, dtype=torch.long)
    mask[0, 15_000:] = 0
    with torch.no_grad():
        made = coterie.hf.masks.coterie_mask(1, 20_000, 20_000, attention_mask=mask.bool())
        assert made.untyped_storage().nbytes() < 10 * 20_000 * 8
        assert model(input_ids=ids, attention_mask=mask).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padded_queries_are_answered_too_as_some_models_read_them(name):
    family = BY_NAME[name]
    inputs, _ = family.inputs("right")
    with torch.no_grad():
        want = family.build()(**inputs).last_hidden_state
        close(coterie.hf.use(family.build(), "full")(**inputs).last_hidden_state, want)
    settings = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.SiglipTextConfig(**settings, num_attention_heads=4, max_position_embeddings=61)
    torch.manual_seed(0)
    model = transformers.SiglipTextModel(config).eval()  # pools what its last token says, padding or not
    with torch.no_grad():
        want = model(**inputs).pooler_output
        close(coterie.hf.use(model, "full")(**inputs).pooler_output, want)


def test_left_padding_changes_nothing_in_a_causal_model():
    model = coterie.hf.use(BY_NAME["llama"].build(), "near-far:near=8,chunk=16")
    ids, mask = _tokens(1, 44), torch.ones(1, 61, dtype=torch.long)
    mask[0, :17] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = torch.cat([torch.full((1, 17), 5), ids], 1)
    with torch.no_grad():
        got = model(input_ids=padded, attention_mask=mask, position_ids=positions).last_hidden_state[mask.bool()]
        close(got, model(input_ids=ids).last_hidden_state[0])


def test_what_a_mask_function_computes_is_asked_with_symbols():
    m, rule = transformers.masking_utils, coterie.hf.masks._rule
    window = m.sliding_window_bidirectional_overlay(4)
    assert rule(m.causal_mask_function) == (True, 0)
    assert rule(m.bidirectional_mask_function) == (False, 0)
    assert rule(m.sliding_window_causal_mask_function(4)) == (True, 4)
    assert rule(m.sliding_window_bidirectional_mask_function(4)) == (False, 4)
    assert rule(m.and_masks(m.causal_mask_function, window)) == (True, 5)
    assert rule(lambda b, h, q, k: q - k + 3 > 3) is None  # strictly before itself
    assert rule(lambda b, h, q, k: abs(k - q) < 9) == (False, 8)
    segments = torch.zeros(2, 9)
    for no_rule in (
        m.sliding_window_overlay(4),
        m.chunked_causal_mask_function(4, torch.zeros(2)),
        m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(segments)),
        m.or_masks(m.causal_mask_function, m.bidirectional_mask_function),
        lambda b, h, q, k: (k <= q) if b != 3 else (k > q),
        lambda b, h, q, k: (k <= q) if q else (k > q),
        lambda b, h, q, k: k <= 5,
        lambda b, h, q, k: k <= 2 * q,
        lambda b, h, q, k: k <= q % 7,
        lambda b, h, q, k: k == q,
        lambda b, h, q, k: abs(q) <= 4,
        lambda b, h, q, k: abs(q - k) - 1 <= 4,
        lambda b, h, q, k: abs(q - k) <= q,
        lambda b, h, q, k: k + abs(q - k) <= 4,
        lambda b, h, q, k: (k <= q) & (segments[b, k] == 0),
        lambda b, h, q, k: (k <= q) & True,
        lambda b, h, q, k: k <= q + 0.5,
        lambda b, h, q, k: True,
    ):
        assert rule(no_rule) is None


def test_what_is_no_rule_is_a_mask_of_pairs():
    """Windows that are meant otherwise, or two at once: each is the mask that transformers itself would make."""
    m = transformers.masking_utils
    for function in (
        m.sliding_window_overlay(4),
        m.and_masks(m.causal_mask_function, m.sliding_window_bidirectional_overlay(4)),
        m.and_masks(m.sliding_window_causal_mask_function(4), m.sliding_window_overlay(2)),
        m.sliding_window_causal_mask_function(4),
        m.sliding_window_bidirectional_mask_function(4),
    ):
        settings = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": function}
        found = coterie.hf.masks.coterie_mask(**settings)
        rules = Rules.decode(found)
        want = m.sdpa_mask(**settings, allow_is_causal_skip=False)
        assert torch.equal(found if rules is None else rules.pairs(9), want)


def test_rules_survive_their_tensor():
    real = torch.tensor([[True, False, True], [True, True, True]])
    for offset in (0, 5, 20_000, 3_000_000, -7):
        for causal in (False, True):
            for window in (0, 3):
                rules = Rules(real, torch.tensor([offset, offset + 1], dtype=torch.int32), causal, window)
                found = Rules.decode(rules.encode())
                assert found is not None
                assert torch.equal(found.real, real)
                assert torch.equal(found.offset, rules.offset)
                assert found[2:] == rules[2:]
    assert Rules.decode(torch.ones(1, 1, 4, 9)) is None
    assert Rules.decode(torch.ones(1, 1, 4, 9, dtype=torch.long)) is None


# --- choosing, storing, undoing ---------------------------------------------------------------------------------------


def runs(model):
    return [layer.runs for layer in coterie.hf.describe(model)]


def test_mechanisms_by_layer_and_undo():
    family = BY_NAME["llama"]
    model = coterie.hf.use(family.build(num_hidden_layers=4), coterie.Smyrf(rounds=1, cluster_size=8), layers=[1, 3])
    assert runs(model) == ["dense", "smyrf:rounds=1,cluster_size=8"] * 2
    coterie.hf.use(model, {0: "near-far", 3: None})
    assert runs(model) == ["near-far", "smyrf:rounds=1,cluster_size=8", "dense", "dense"]
    assert "layers.0.self_attn  self  near-far\n" in str(coterie.hf.describe(model))
    coterie.hf.undo(model)
    assert runs(model) == ["eager"] * 4
    assert not hasattr(model.config, "coterie")
    close(family.answers(model, "none")[0], family.answers(family.build(num_hidden_layers=4), "none")[0])
    with pytest.raises(ValueError, match=r"model: expected a model that coterie.hf.use was called on"):
        coterie.hf.undo(model)


def test_undo_after_from_pretrained_leaves_a_model_that_masks(tmp_path):
    family = BY_NAME["llama"]
    family.build().save_pretrained(tmp_path)
    model = transformers.LlamaModel.from_pretrained(tmp_path, attn_implementation="coterie").eval()
    coterie.hf.undo(coterie.hf.use(model, "full"))
    assert model.config._attn_implementation == "sdpa"
    close(family.answers(model, "none")[0], family.answers(family.build(), "none")[0])


def test_models_that_share_a_config_are_chosen_apart():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**BY_NAME["llama"].settings)
    first, second = transformers.LlamaModel(config).eval(), transformers.LlamaModel(config).eval()
    coterie.hf.use(first, "smyrf")
    assert runs(second) == ["sdpa", "sdpa"]
    model = BY_NAME["bart"].build()
    coterie.hf.use(model.get_encoder(), "smyrf")
    assert runs(model) == ["smyrf"] * 2 + ["eager"] * 4


def test_use_after_another_implementation_was_set():
    model = coterie.hf.use(BY_NAME["llama"].build(), "full")
    model.set_attn_implementation("sdpa")
    assert runs(coterie.hf.use(model, "smyrf")) == ["smyrf", "smyrf"]
    assert set(model.config.coterie["modules"].values()) == {"smyrf"}


def test_copies_and_pickles_before_and_after_the_first_call():
    family = BY_NAME["llama"]
    model = coterie.hf.use(family.build(), "smyrf:rounds=1,cluster_size=8")
    with torch.no_grad():
        again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        want = family.answers(model, "none")[0]
        again += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in again:
            close(family.answers(each, "none")[0], want)


def test_layers_and_kinds_of_t5_and_of_a_bert_that_decodes():
    model = coterie.hf.use(BY_NAME["t5"].build(num_layers=3), "smyrf", layers=[2], kind="self")
    found = {layer.name: layer.runs for layer in coterie.hf.describe(model)}
    assert found["encoder.block.2.layer.0.SelfAttention"] == found["decoder.block.2.layer.0.SelfAttention"] == "smyrf"
    assert sum(spec == "smyrf" for spec in found.values()) == 2
    bert = BY_NAME["bert"].build(is_decoder=True, add_cross_attention=True)
    kinds = {layer.name: layer.kind for layer in coterie.hf.describe(bert)}
    assert kinds["encoder.layer.0.crossattention.self"] == "cross"
    assert kinds["encoder.layer.0.attention.self"] == "self"


def test_a_submodel_is_named_from_the_start():
    def part():
        return transformers.BertConfig(**BY_NAME["bert"].settings)

    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(part(), part())
    model = coterie.hf.use(transformers.EncoderDecoderModel(config), "smyrf", within="encoder")
    assert runs(model) == ["smyrf"] * 2 + ["dense"] * 4


def test_self_cross_and_submodels_can_be_chosen_apart():
    model = coterie.hf.use(BY_NAME["bart"].build(), "smyrf", kind="cross")
    coterie.hf.use(model, "near-far", within="encoder")
    kinds = {layer.name: layer.runs for layer in coterie.hf.describe(model)}
    assert kinds["decoder.layers.1.encoder_attn"] == "smyrf"
    assert kinds["decoder.layers.1.self_attn"] == "dense"
    assert kinds["encoder.layers.1.self_attn"] == "near-far"
    model = coterie.hf.use(BY_NAME["clip"].build(), "near-far", within="vision_model")
    assert runs(model) == ["dense", "dense", "near-far", "near-far"]
    with pytest.raises(ValueError, match="within, kind: expected some of"):
        coterie.hf.use(model, "near-far", within="audio_model")


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "bart", "clip"])
def test_the_choice_survives_saving_twice(name, tmp_path):
    family = BY_NAME[name]
    model = coterie.hf.use(family.build(), "smyrf:rounds=1,cluster_size=8")
    with torch.no_grad():
        want = family.answers(model, "none")
        for step in range(2):
            model.save_pretrained(tmp_path / str(step))
            plain = type(model).from_pretrained(tmp_path / str(step), attn_implementation="coterie").eval()
            model = coterie.hf.load(tmp_path / str(step)).eval()
            for again in (plain, model):
                assert set(runs(again)) == {"smyrf:rounds=1,cluster_size=8"}
                for got, old in zip(family.answers(again, "none"), want, strict=True):
                    close(got, old)


def test_a_choice_by_layer_survives_saving(tmp_path):
    model = coterie.hf.use(BY_NAME["llama"].build(), {0: "near-far", 1: None})
    model.save_pretrained(tmp_path / "llama")
    kind = type(model)
    for again in (
        kind.from_pretrained(tmp_path / "llama", attn_implementation="coterie"),
        coterie.hf.load(tmp_path / "llama"),
    ):
        assert runs(again) == ["near-far", "dense"]
    with_head = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="coterie")
    assert runs(with_head) == ["near-far", "dense"]
    model = coterie.hf.use(BY_NAME["vit"].build(), {0: "near-far", 1: None})
    model.save_pretrained(tmp_path / "vit")
    assert runs(coterie.hf.load(tmp_path / "vit")) == ["near-far", "dense"]
    lazy = transformers.ViTModel.from_pretrained(tmp_path / "vit", attn_implementation="coterie").eval()
    with pytest.raises(ValueError, match=r"differs between the layers .* load the model with coterie.hf.load"):
        BY_NAME["vit"].answers(lazy, "none")


def test_without_a_stored_choice_it_is_near_far(tmp_path):
    BY_NAME["bert"].build().save_pretrained(tmp_path)
    model = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="coterie").eval()
    assert runs(model) == ["near-far", "near-far"]
    with pytest.raises(ValueError, match="a config with a stored choice"):
        coterie.hf.load(tmp_path)


# --- nothing silent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model", "settings"),
    [
        ("DebertaV2Config", "DebertaV2Model", {}),
        ("MPNetConfig", "MPNetModel", {}),
        ("YosoConfig", "YosoModel", {"use_expectation": True}),
        ("LongformerConfig", "LongformerModel", {"attention_window": 8}),
        ("BigBirdConfig", "BigBirdModel", {"attention_type": "original_full"}),
        ("RoFormerConfig", "RoFormerModel", {}),
        (
            "ReformerConfig",
            "ReformerModel",
            {
                "attn_layers": ["local"],
                "axial_pos_shape": [8, 8],
                "axial_pos_embds_dim": [16, 16],
                "attention_head_size": 8,
            },
        ),
    ],
)
def test_models_without_the_interface_are_refused(config, model, settings):
    wide = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    built = getattr(transformers, model)(getattr(transformers, config)(**(wide | settings)))
    with pytest.raises(ValueError, match=rf"{model} has attention of its own that ignores .* interface: .* in BERT, "):
        coterie.hf.use(built, "near-far")
    assert "Coterie cannot reach it" in str(coterie.hf.describe(built))


class Bypass(LlamaAttention):
    """Mentions ALL_ATTENTION_FUNCTIONS, and goes another way."""

    def forward(self, hidden_states, **rest):
        """Has ALL_ATTENTION_FUNCTIONS in its source, as a model with an own path for some setting has."""
        return hidden_states, None


def test_attention_that_never_reaches_coterie_is_an_error():
    model = BY_NAME["llama"].build()
    model.layers[1].self_attn = Bypass(model.config, 1)
    coterie.hf.use(model, "near-far")
    for each in (model, copy.deepcopy(model), model):  # and it stays one
        with pytest.raises(RuntimeError, match=r"layers.1.self_attn ran without calling attn_implementation='coterie'"):
            each(_tokens(1, 30))


def test_models_that_are_partly_on_the_interface_are_refused():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GitConfig(
        vision_config=vision | {"image_size": 32, "patch_size": 16}, vocab_size=99, **vision, max_position_embeddings=64
    )
    for refuse in (check_reach, partial(coterie.hf.use, mechanism="full")):
        with pytest.raises(ValueError, match=r"attention that is all on .* got GitModel with attention of its own in"):
            refuse(transformers.GitModel(config))


def test_from_pretrained_of_a_model_without_the_interface_says_so(tmp_path):
    config = transformers.MPNetConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=99)
    transformers.MPNetModel(config).save_pretrained(tmp_path)
    model = transformers.MPNetModel.from_pretrained(tmp_path, attn_implementation="coterie").eval()
    with pytest.raises(ValueError, match="MPNet models have attention of their own that ignores"):
        model(_tokens(1, 20), attention_mask=torch.ones(1, 20, dtype=torch.long))


def test_output_attentions_softcap_sinks_and_unknown_arguments_are_refused():
    model = coterie.hf.use(BY_NAME["bert"].build(), "near-far")
    with pytest.raises(ValueError, match=r"output_attentions: .* attn_implementation='eager'"):
        model(_tokens(1, 30), output_attentions=True)
    model.config.output_attentions = False
    asked = BY_NAME["bert"].build(output_attentions=True)
    with pytest.raises(ValueError, match=r"output_attentions: .* attn_implementation='eager'"):
        coterie.hf.use(asked, "near-far")(_tokens(1, 30))
    module, q = model.encoder.layer[0].attention.self, torch.randn(1, 4, 30, 8)
    for name, message in (
        ("softcap", "softcap"),
        ("s_aux", "attention sinks"),
        ("brand_new", "the argument 'brand_new', which this version of Coterie does not know"),
        ("output_attentions", "output_attentions"),
    ):
        extra: dict[str, Any] = {name: 1.0}
        with pytest.raises(ValueError, match=message):
            coterie.hf.attend.attend(module, q, q, q, None, **extra)
    config = transformers.Gemma2Config(**(vars(BY_NAME["gemma3"])["settings"] | {"attn_logit_softcapping": 50.0}))
    softcapped = coterie.hf.use(transformers.Gemma2Model(config), "full")
    with pytest.raises(ValueError, match="Gemma2Attention asks for softcap"):
        softcapped(_tokens(1, 30))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: coterie.hf.use(m, "nearest"), "mechanism: expected one of"),
        (lambda m: coterie.hf.use(m, "near-far", layers=[2]), r"layers: expected layers among \[0, 1\], got 2"),
        (lambda m: coterie.hf.use(m, "near-far", layers=[-1]), "layers: expected an int ≥ 0, got -1"),
        (lambda m: coterie.hf.use(m, {0: "near-far"}, layers=[0]), "layers: expected None with a dict"),
        (lambda m: coterie.hf.use(m, "near-far", kind="both"), "kind: expected one of"),
        (lambda m: coterie.hf.load(m), "model: expected a config with a stored choice"),
        (lambda m: coterie.hf.load(m, revision="main"), "settings: expected none for a model that is loaded already"),
        (
            lambda m: coterie.hf.extend_positions(m, 100),
            "length: expected more than the 512 positions there are, got 100",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(BY_NAME["bert"].build())


def test_old_versions_of_transformers_are_refused():
    version.check("5.1.0")
    version.check("5.10rc1")
    with pytest.raises(ImportError, match=r"needs transformers ≥ 5.1, and 4.57.1 is installed"):
        version.check("4.57.1")


# --- long inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "distilbert", "electra", "gpt2"])
def test_the_table_of_positions_is_a_limit_that_can_be_stretched(name):
    family = BY_NAME[name]
    limit = 128 if name == "gpt2" else 512
    room = {"max_position_embeddings": 514} if name == "roberta" else {}
    model = coterie.hf.use(family.build(**room), "near-far:near=8")
    with pytest.raises(ValueError, match=rf"this model has {limit} positions, and the input has 600 tokens"):
        model(input_ids=_tokens(1, 600))
    before = positions_of(model).embedding.weight[-limit:].detach().clone()
    coterie.hf.extend_positions(model, 600)
    table = positions_of(model)
    assert table.limit == 600
    close(table.embedding.weight[table.first], before[0])
    close(table.embedding.weight[-1], before[-1])
    with torch.no_grad():
        assert model(input_ids=_tokens(1, 600)).last_hidden_state.shape == (1, 600, 32)


@pytest.mark.parametrize(
    ("config", "model", "limit"),
    [
        ("BartConfig", "BartModel", 64),
        ("BlenderbotConfig", "BlenderbotModel", 64),
        ("WhisperConfig", "WhisperModel", 64),
        ("OPTConfig", "OPTModel", 64),
    ],
)
def test_stretched_tables_can_be_saved_and_loaded(config, model, limit, tmp_path):
    settings = ENCODER_DECODER | {"max_position_embeddings": 64, "max_target_positions": 64}
    settings |= {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    built = getattr(transformers, model)(getattr(transformers, config)(**settings))
    assert positions_of(built).limit == limit
    coterie.hf.extend_positions(built, 100)
    built.save_pretrained(tmp_path)
    again = getattr(transformers, model).from_pretrained(tmp_path)
    want, found = positions_of(built), positions_of(again)
    assert found.limit == want.limit == 100
    assert torch.equal(found.embedding.weight, want.embedding.weight)


def test_tables_that_are_computed_are_not_stretched():
    settings = ENCODER_DECODER | {"max_position_embeddings": 64}
    pegasus = transformers.PegasusModel(transformers.PegasusConfig(**settings))
    with pytest.raises(ValueError, match="a learned table of positions"):
        coterie.hf.extend_positions(pegasus, 100)


def test_rotary_models_have_no_table():
    with pytest.raises(ValueError, match="with rotary or relative positions there is nothing to stretch"):
        coterie.hf.extend_positions(BY_NAME["llama"].build(), 10_000)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    family, found = BY_NAME[name], []
    mechanism = "smyrf:rounds=2,cluster_size=16"
    for checkpointing in (False, True):
        model = coterie.hf.use(family.build(), mechanism).train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss(family.answers(model, "right")).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, want in found[0].items():
        close(found[1][name], want)


@pytest.mark.parametrize("name", ["bert", "llama", "gemma3", "modernbert"])
def test_compiles(name):
    torch._dynamo.reset()
    family = BY_NAME[name]
    model = coterie.hf.use(family.build(), "near-far:near=8,chunk=16")
    inputs = family.inputs("right")[0] | ({"use_cache": False} if family.causal else {})
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        backend = "inductor" if name == "bert" else "aot_eager"  # one is enough, and takes its time
        got = torch.compile(model, fullgraph=True, backend=backend)(**inputs).last_hidden_state
    close(got, want, 1e-4)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_bfloat16_autocast(name):
    family = BY_NAME[name]
    model = coterie.hf.use(family.build(), "near-far:near=8,chunk=16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = family.answers(model, "right")[0]
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
