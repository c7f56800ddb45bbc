"""The processes of `accelerate launch` or `torchrun`; mostly there is one."""

from __future__ import annotations

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """Which one this is, of how many. Not told that there is no accelerator, each takes itself for the only one."""
    return PartialState(cpu=not torch.accelerator.is_available())
