"""Text comes while a model writes: character by character, and none is torn apart or lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")

from coterie.cli.listener import Listener  # noqa: E402


def in_bytes() -> Any:
    """A token is a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE({each: at for at, each in enumerate(alphabet)}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


def in_words() -> Any:
    """A token is a word and the space before it, which the first one of a text loses, as Llama's does."""
    words = {each: at for at, each in enumerate(("<unk>", "</s>", "▁if", "▁x", "\n", "▁", "y"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    model.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


def heard(tokenizer: Any, tokens: list[int]) -> list[str]:
    told: list[str] = []
    listener = Listener(tokenizer, told.append)
    listener.put(torch.tensor([[1, 2, 3]]))  # the prompt is not told
    for token in tokens:
        listener.put(torch.tensor([token]))
    listener.end()
    assert listener.text == "".join(told)
    assert len(listener.times) == 1 + len(tokens)
    return told


def test_a_character_of_several_tokens_is_told_when_it_is_whole():
    text = "é 🦊日本\n\n\tfin"
    told = heard(in_bytes(), in_bytes()(text)["input_ids"])
    assert told == list(text)  # at once, where nobody writes a space


def test_what_is_no_character_holds_nobody_up():
    tokens = in_bytes()("🦊")["input_ids"]
    assert "".join(heard(in_bytes(), tokens[:3])) == "\ufffd"  # the end came first
    told = heard(in_bytes(), [tokens[1]] * 6 + in_bytes()("ab")["input_ids"])
    assert "".join(told) == 6 * "\ufffd" + "ab"


def test_a_space_at_the_beginning_of_a_line_stays():
    tokens = [2, 3, 4, 5, 5, 3, 1, 3, 6]
    assert "".join(heard(in_words(), tokens)) == in_words().decode(tokens, skip_special_tokens=True)
    assert "".join(heard(in_words(), tokens)) == "if x\n   x xy"
