"""The dense pass that tries candidates: what counts in its errors."""

from __future__ import annotations

import torch

import coterie
from coterie.fitting.measures import length_of
from coterie.fitting.profile import _watch
from coterie.fitting.task import Task
from coterie.hosts import TorchHost
from coterie.observe import called
from tests.cases import close, padding, tensors


class OneCall(TorchHost):
    """A host whose only module attends once, with a mask of keys that comes as `attn_mask`."""

    def __init__(self, *inputs, **settings):
        super().__init__(torch.nn.TransformerEncoderLayer(8, 2))
        self.inputs, self.settings = inputs, settings

    def run(self, batch):
        q, k, v = self.inputs
        with called("only"):
            return coterie.attention(q, k, v, "full", **self.settings)


def test_guests_do_not_count_however_the_keys_are_masked():
    q, k, v = tensors(2, 2, 41)
    real = padding(2, 41, [41, 17])
    for masks in ({"attn_mask": real[:, None, None]}, {"key_mask": real}):
        host = OneCall(q, k, v, guests=~real, **masks)
        task = Task(host, [None], [], 0.9, 0.95, None, [coterie.Local(window=5)], None, 0.0, lambda *_: None)
        found = _watch(task)
        host.restore()
        (errors,) = found.errors["only", "local:window=5"].values()
        out, exact = (coterie.attention(q, k, v, m, key_mask=real) for m in ("local:window=5", "full"))
        out, exact = (x.transpose(1, 2)[real] for x in (out, exact))
        close(torch.tensor(errors), ((out - exact).square().sum() / exact.square().sum())[None])
        (shape,) = found.shapes["only"]
        assert (shape.queries, shape.causal) == ((2, 2, 41, 8), False)


def test_speech_is_as_long_as_its_frames():
    """Whisper has them behind the bins, other models before."""
    assert length_of({"input_features": torch.zeros(2, 80, 3000), "decoder_input_ids": torch.zeros(2, 4)}) == 3000
    assert length_of({"input_features": torch.zeros(2, 700, 80)}) == 700
