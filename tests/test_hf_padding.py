"""A row of a padded batch is the row alone: in every family, for every mechanism, on either side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from tests.families import BY_NAME, VOCABULARY, Family  # noqa: E402

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
