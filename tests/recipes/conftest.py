"""A model small enough to be trained in a test."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "in",
    "under",
    "over",
    "good",
    "bad",
    "fine",
    "poor",
    "red",
    "green",
    "blue",
    "big",
    "small",
    "and",
    "not",
    "very",
]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """A folder with a BERT of 2 layers, random weights, 128 positions, and a tokenizer that knows a few words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz.,?!0123456789"]
    vocabulary += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("\n".join(dict.fromkeys(vocabulary)))
    tokenizer = BertTokenizerFast(vocab=str(file), model_max_length=128)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
