"""Late chunking: embed the sections of a long document in context (Günther et al. 2024, arXiv:2409.04701).

The usual way cuts a document into sections and embeds each alone: "it" and "the method above" then stand for nothing.
Late chunking lets the whole document through the model once and cuts afterwards. Each section is the mean of its own
tokens' states, and those states have met the whole document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coterie.checks import expect

JOINT = "\n\n"  # between two sections of a document


def late_chunks(model: Any, sections: Sequence[str]) -> Tensor:
    """The embeddings of a document's sections, each in the context of all others, (sections, dim).

    A document of one section is embedded as `model.encode` does.

    Args:
        model: a SentenceTransformer that takes the mean over tokens.
        sections: texts that make up the document, in order.

    Example:
        >>> from sentence_transformers import SentenceTransformer  # doctest: +SKIP
        >>> model = SentenceTransformer("all-MiniLM-L6-v2")  # doctest: +SKIP
        >>> late_chunks(model, ["Berlin is a city.", "It has 3.7 million inhabitants."]).shape  # doctest: +SKIP
        torch.Size([2, 384])
    """
    states, spans = read(model, sections)
    return pool(model, states, spans)


@torch.no_grad()
def read(model: Any, sections: Sequence[str]) -> tuple[Tensor, list[range]]:
    """The states of a document's tokens, (tokens, dim), and which of them are each section's."""
    check(model)
    expect(len(sections) > 0, "sections", "at least one", 0)
    starts = [0]
    for section in sections[:-1]:
        starts.append(starts[-1] + len(section) + len(JOINT))
    tokens = model.tokenizer(
        JOINT.join(sections), return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False
    )
    offsets, special = tokens.pop("offset_mapping"), tokens.pop("special_tokens_mask")
    most = model.max_seq_length
    expect(most is None or len(offsets) <= most, "sections", f"a document of at most {most} tokens", len(offsets))
    spans = token_spans([None if mark else at for at, mark in zip(offsets, special, strict=True)], starts)
    features = {name: torch.tensor([each], device=model.device) for name, each in tokens.items()}
    return model[0](features)["token_embeddings"][0], spans


def token_spans(offsets: Sequence[tuple[int, int] | None], starts: Sequence[int]) -> list[range]:
    """Which tokens are each section's: together they are all tokens.

    A token is where its first character is. Special tokens in front are the first section's, those at the end the
    last one's, so that a document of one section has all of them, as without chunking.

    Args:
        offsets: first and last character of each token, as a tokenizer gives them; None for special ones.
        starts: the first character of each section, in order.

    Example:
        >>> token_spans([None, (0, 2), (3, 5), (7, 9), None], [0, 7])  # [CLS] "It" "is." "So" [SEP]
        [range(0, 3), range(3, 5)]
    """
    owners = [None if at is None else max(0, bisect_right(starts, at[0]) - 1) for at in offsets]
    for section in range(len(starts)):
        expect(section in owners, "sections", "a token in each", f"none in section {section}")
    bounds = [0, *(owners.index(section) for section in range(1, len(starts))), len(offsets)]
    return [range(first, last) for first, last in pairwise(bounds)]


@torch.no_grad()
def pool(model: Any, states: Tensor, spans: Sequence[range]) -> Tensor:
    """The embedding of each span of tokens, by what the model has after its transformer: (spans, dim)."""
    longest = max(map(len, spans))
    found = states.new_zeros(len(spans), longest, states.shape[-1])
    mask = torch.zeros(len(spans), longest, dtype=torch.long, device=states.device)
    for row, span in enumerate(spans):
        found[row, : len(span)] = states[span.start : span.stop]
        mask[row, : len(span)] = 1
    features = {"token_embeddings": found, "attention_mask": mask}
    for module in list(model)[1:]:
        features = module(features)
    return features["sentence_embedding"]


def check(model: Any) -> None:
    """Refuse a model that does not take the mean over tokens, or whose tokenizer does not say where tokens are."""
    modes = [module.pooling_mode for module in model if hasattr(module, "pooling_mode")]
    expect(modes == ["mean"], "model", "one that takes the mean over tokens, as late chunking does", modes)
    expect(model.tokenizer.is_fast, "model", "a fast tokenizer, which says where tokens are", "a slow one")
