"""Layers with a sliding window of their own: what is said of them is what runs there."""

from __future__ import annotations

import pytest
import torch

import coterie
import coterie.hf
from tests.hf.families import BY_NAME, NARROW, Family, text
from tests.html_reader import read

WINDOWED = [
    (BY_NAME["modernbert"], {"layers.1.attn": 16, "layers.2.attn": 16}),
    (BY_NAME["gemma3"], {"layers.0.self_attn": 16}),
    (
        Family("mistral", "MistralConfig", "MistralModel", NARROW | {"sliding_window": 12}, text, ("none",)),
        {"layers.0.self_attn": 12, "layers.1.self_attn": 12},
    ),
    (
        Family(
            "qwen2",
            "Qwen2Config",
            "Qwen2Model",
            NARROW | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            text,
            ("none",),
        ),
        {"layers.1.self_attn": 9},
    ),
]
EACH = pytest.mark.parametrize(("family", "windows"), WINDOWED, ids=[family.name for family, _ in WINDOWED])


@EACH
def test_windows_are_named_and_described(family, windows):
    model = family.build()
    assert coterie.hf.own_windows(model) == windows
    before = {layer.name: layer.runs for layer in coterie.hf.describe(model)}
    for spec in ("near-far", "dense"):
        after = {layer.name: layer.runs for layer in coterie.hf.describe(coterie.hf.use(model, spec))}
        for name in before:
            own = f"its own window ({windows.get(name)})"
            assert before[name] == ("eager" if name not in windows else f"eager, {own}")
            assert after[name] == (spec if name not in windows else own)


@EACH
def test_that_window_is_what_runs(family, windows):
    model = coterie.hf.use(family.build(), "near-far:near=8")
    seen: list[str] = []
    with torch.no_grad(), coterie.observing(lambda each: seen.append(str(each.mechanism))):
        model(**family.inputs("none")[0])
    wanted = [
        f"local:window={windows[x]}" if x in windows else "near-far:near=8" for x in coterie.hf.attention_modules(model)
    ]
    assert seen == wanted


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("modernbert", "gemma3")])
def test_others_have_none(name):
    assert coterie.hf.own_windows(BY_NAME[name].build()) == {}


def test_a_description_is_shown_once(capsys):
    model = coterie.hf.use(BY_NAME["gemma3"].build(), "near-far")
    found = coterie.hf.describe(model)
    assert capsys.readouterr().out == ""
    lines = ["layers.0.self_attn  self  its own window (16)", "layers.1.self_attn  self  near-far"]
    assert repr(found).splitlines() == str(found).splitlines() == lines
    assert read(found._repr_html_()).tables == [[line.split("  ") for line in lines]]


def test_what_is_not_reached_is_said_below():
    from coterie.hf.layers import Layer, Layers

    found = Layers([Layer("a", 0, "self", "dense")], ["b attends by itself, untouched"])
    assert str(found) == "a  self  dense\nb attends by itself, untouched"
    assert read(found._repr_html_()).paragraphs == ["b attends by itself, untouched"]
