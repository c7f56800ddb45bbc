"""A row of a padded batch is the row alone: in every family, for every mechanism, on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from tests.hf.families import BY_NAME, VOCABULARY, WIDE, Family  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

MEANS = ["clustered:clusters=5,iterations=3", "improved-clustered:clusters=5,topk=7,iterations=3"]
OTHERS = [
    "smyrf:rounds=2,cluster_size=8",
    "smyrf:rounds=2,cluster_size=8,hash=cross-polytope,duplicates=once",
    "reformer:rounds=2,chunk_size=8",
    "routing:clusters=4,window=9",
    "near-far:near=9,chunk=16",
    "near-far:near=9,chunk=8,strict=true",
    "near-far:near=5,chunk=16@40",
    "local:window=17",
    "longformer:window=9,global_tokens=2",
    "topk:k=9",
    "full",
]
LENGTHS = (61, 44, 23, 7)
ENCODERS = ("bert", "roberta", "albert", "distilbert", "electra", "modernbert")
DECODERS = ("gpt2", "llama", "qwen2", "gemma3")
PAIRS = ("bart", "t5", "whisper")  # an encoder and a decoder
# Left padding where a model lets its positions be told, has none, or counts them from its padding.
LEFT = ("bert", "albert", "electra", "modernbert", "roberta", *DECODERS)


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, count), generator=generator)


def padded(texts: list[Tensor], side: str, pad: int) -> tuple[Tensor, Tensor]:
    """The texts in one batch, and its mask."""
    width = max(text.shape[1] for text in texts)
    ids, mask = torch.full((len(texts), width), pad), torch.zeros(len(texts), width, dtype=torch.long)
    for b, text in enumerate(texts):
        place = slice(0, text.shape[1]) if side == "right" else slice(width - text.shape[1], width)
        ids[b, place], mask[b, place] = text[0], 1
    return ids, mask


def hidden(model, **inputs) -> Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def check(found: Tensor, mask: Tensor, alone: list[Tensor], tolerance: float = 1e-5) -> None:
    for b, want in enumerate(alone):
        got = found[b][mask[b].bool()]
        worst = float((got - want[0]).abs().max()) / max(1.0, float(want.abs().max()))
        assert worst <= tolerance, f"row {b} of {want.shape[1]} tokens differs by {worst:.1e}"


def encode(family: Family, model, side: str, **kept) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Hidden states of a padded batch, its mask, and those of each row alone."""
    texts = [rows(count, seed) for seed, count in enumerate(LENGTHS)]
    ids, mask = padded(texts, side, pad=1)
    told = {}
    if side == "left" and family.name != "roberta":  # which counts from its padding by itself
        told = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return (
        hidden(model, input_ids=ids, attention_mask=mask, **told, **kept),
        mask,
        [hidden(model, input_ids=text, **kept) for text in texts],
    )


CASES = [
    pytest.param(name, mechanism, side, id=f"{name}-{mechanism}-{side}")
    for name in (*ENCODERS, *DECODERS)
    for mechanism in (OTHERS if name in DECODERS else MEANS + OTHERS)
    for side in (("right", "left") if name in LEFT else ("right",))
]


@pytest.mark.parametrize(("name", "mechanism", "side"), CASES)
def test_a_row_of_a_padded_batch_is_the_row_alone(name: str, mechanism: str, side: str):
    family = BY_NAME[name]
    model = coterie.hf.use(family.build(), mechanism)
    check(*encode(family, model, side, **({"use_cache": False} if family.causal else {})))


PAIRED = [
    pytest.param(name, mechanism, id=f"{name}-{mechanism}")
    for name in PAIRS
    for mechanism in OTHERS
    if not (name == "t5" and mechanism.startswith("near-far"))  # a mean has no position bias
]


@pytest.mark.parametrize("known", [True, False], ids=["use", "from-config"])
@pytest.mark.parametrize(("name", "mechanism"), PAIRED)
def test_cross_attention_does_not_look_at_padded_queries(name: str, mechanism: str, known: bool):
    """An attention between encoder and decoder is not told which queries are real; those before it in its layer are."""
    family = BY_NAME[name]
    model = family.build()
    if known:
        coterie.hf.use(model, mechanism)
    else:  # as after from_pretrained(…, attn_implementation="coterie"): which attention is which, nobody has said
        for part in model.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation = "coterie"
                part.config.coterie = {"modules": {"": mechanism}}
    for lengths in ((61, 23, 37), (23, 52, 9)):  # the longest row has as many queries as keys, or none has
        texts = [rows(count, seed) for seed, count in enumerate((61, 44, 23))]
        answers = [rows(count, 10 + seed) for seed, count in enumerate(lengths)]
        ids, mask = padded(texts, "right", pad=1)
        decoded, decoded_mask = padded(answers, "right", pad=1)
        told = {"decoder_attention_mask": decoded_mask, "use_cache": False}
        if name == "whisper":
            sound = torch.randn(3, 80, 122, generator=torch.Generator().manual_seed(0))
            found = hidden(model, input_features=sound, decoder_input_ids=decoded, **told)
            alone = [hidden(model, input_features=sound[b : b + 1], decoder_input_ids=x) for b, x in enumerate(answers)]
        else:
            found = hidden(model, input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, **told)
            alone = [hidden(model, input_ids=x, decoder_input_ids=y) for x, y in zip(texts, answers, strict=True)]
        check(found, decoded_mask, alone)


def test_a_mask_of_pairs_tells_padding_too():
    """A caller's 4-D mask: a token that nobody may look at takes no part in the planning."""
    model = coterie.hf.use(BY_NAME["bert"].build(), "smyrf:rounds=2,cluster_size=8")
    texts = [rows(61, 0), rows(44, 1)]
    ids, mask = padded(texts, "right", pad=1)
    pairs = mask.bool()[:, None, None, :].expand(2, 1, 61, 61).contiguous()
    pairs[0, 0, 0, 3] = False  # so that it is no mask of keys
    alone = pairs[:1], torch.ones(1, 1, 44, 44, dtype=torch.bool)
    check(
        hidden(model, input_ids=ids, attention_mask=pairs),
        mask,
        [hidden(model, input_ids=x, attention_mask=y) for x, y in zip(texts, alone, strict=True)],
    )


@pytest.mark.parametrize("mechanism", ["smyrf:rounds=2,cluster_size=8", "near-far:near=9", "topk:k=9"])
def test_a_model_that_writes_ten_thousand_for_infinity(mechanism: str):
    """MarkupLM makes its own mask of keys, of −10,000; it is a mask of keys all the same."""
    sizes = ("max_xpath_tag_unit_embeddings", "max_xpath_subs_unit_embeddings", "xpath_unit_hidden_size")
    settings = WIDE | dict.fromkeys(sizes, 8) | {"vocab_size": VOCABULARY, "max_depth": 4}
    config = transformers.MarkupLMConfig(**settings, tag_pad_id=7, subs_pad_id=7)
    torch.manual_seed(0)
    model = transformers.MarkupLMModel(config).eval()
    for name, weight in model.named_parameters():
        if "query.weight" in name or "key.weight" in name:
            weight.data.mul_(8)
    coterie.hf.use(model, mechanism)
    check(*encode(BY_NAME["bert"], model, "right"))


@pytest.mark.parametrize("hidden_by", [-1e4, -1e9, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_mask_of_pairs_tells_padding_however_it_writes_infinity(hidden_by: float, dtype: torch.dtype):
    model = coterie.hf.use(BY_NAME["bert"].build().to(dtype), "smyrf:rounds=2,cluster_size=8")
    texts = [rows(61, 0), rows(44, 1)]
    ids, mask = padded(texts, "right", pad=1)
    pairs = torch.where(mask.bool(), 0.0, hidden_by)[:, None, None, :].expand(2, 1, 61, 61).to(dtype)
    found = hidden(model, input_ids=ids, attention_mask=pairs.contiguous())
    alone = hidden(model, input_ids=texts[1])
    check(found[1:].float(), mask[1:], [alone.float()], 1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", ["modernbert", "gemma3"])
def test_full_keeps_a_window_at_padded_queries_too(name: str):
    family = BY_NAME[name]
    texts = [rows(count, seed) for seed, count in enumerate(LENGTHS)]
    ids, mask = padded(texts, "right", pad=1)
    dense, full = (coterie.hf.use(family.build(), spec) for spec in ("dense", "full"))
    want, got = (hidden(model, input_ids=ids, attention_mask=mask) for model in (dense, full))
    torch.testing.assert_close(got[:, :30], want[:, :30], rtol=1e-4, atol=1e-4)  # from there on some see nobody


@pytest.mark.parametrize("mechanism", [*MEANS, *OTHERS])
def test_what_padding_says_changes_nobody_and_comes_from_the_keys_that_its_host_meets(mechanism: str):
    """Guests: real rows are the same to the bit with and without them; each guest's answer is made of real values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 61, 8, generator=generator).unbind(0)
    real = torch.arange(61) < torch.tensor([[61], [37]])
    chosen = coterie.as_mechanism(mechanism)
    settings: dict[str, Any] = {"key_mask": real, "query_mask": real}
    without = coterie.attention(q, k, v, chosen, **settings)
    out, lse = coterie.attention(q, k, v, chosen, **settings, guests=~real, return_lse=True)
    at = real[:, None, :].expand_as(lse)
    assert torch.equal(out[at], without[at])
    assert lse.isfinite().all() or mechanism.startswith("local")  # whose window does not reach from everywhere
    low, high = v[1, :, :37].amin(1, keepdim=True), v[1, :, :37].amax(1, keepdim=True)
    heard = lse[1].isfinite()[..., None]
    assert bool((~heard | ((out[1] >= low - 1e-5) & (out[1] <= high + 1e-5))).all())
    # A guest that asks what its host asks gets what its host gets.
    same = q.clone()
    same[1, :, 37:] = q[1, :, 36:37]
    if not chosen.per_query:
        got = coterie.attention(same, k, v, chosen, **settings, guests=~real)
        torch.testing.assert_close(got[1, :, 37:], got[1, :, 36:37].expand(-1, 24, -1))
