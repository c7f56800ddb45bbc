"""The transformers model inside a wrapper: PEFT's, sentence-transformers', a parallel or a compiled one."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from coterie.checks import expect, expect_type


def model_inside(model: Any) -> PreTrainedModel:
    """The one model of transformers that a module is or holds; none, or several side by side, are refused by name."""
    if isinstance(model, PreTrainedModel):
        return model
    wanted = "a transformers.PreTrainedModel, or a module with one inside"
    expect_type(isinstance(model, nn.Module), "model", wanted, type(model).__name__)
    found: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    expect_type(bool(found), "model", wanted, type(model).__name__)
    several = f"{type(model).__name__} with {', '.join(found)}: pass one of these"
    expect(len(found) == 1, "model", "one model of transformers inside", several)
    return next(iter(found.values()))
