"""The dense pass that tries candidates: what counts in its errors."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

import coterie
from coterie.fitting.dense import dense
from coterie.fitting.lengths import Lengths
from coterie.fitting.profile import Profile, Trial
from coterie.fitting.task import Task
from coterie.hosts import TorchHost, host_of
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


def asked(host, batches, *candidates, budget=None, start=0.0):
    """A task whose host is tried with candidates."""
    some = [coterie.as_mechanism(each) for each in candidates]
    end = start + (budget or 0.0)
    return Task(host, batches, [], 0.9, 0.95, None, some, budget, start, end, lambda *_: None)


def tried(task):
    """What a pass over every batch finds."""
    found = Profile()
    task.host.put_everywhere("full")
    with torch.no_grad(), task.host.watching():
        for number, batch in enumerate(task.fitted):
            with coterie.observing(Trial(task, found, len(task.fitted) - number)):
                task.host.run(batch)
    task.host.restore()
    return found


def test_guests_do_not_count_however_the_keys_are_masked():
    q, k, v = tensors(2, 2, 41)
    real = padding(2, 41, [41, 17])
    for masks in ({"attn_mask": real[:, None, None]}, {"key_mask": real}):
        found = tried(asked(OneCall(q, k, v, guests=~real, **masks), [None], "local:window=5"))
        (errors,) = found.errors["only", "local:window=5"].values()
        out, exact = (coterie.attention(q, k, v, m, key_mask=real) for m in ("local:window=5", "full"))
        out, exact = (x.transpose(1, 2)[real] for x in (out, exact))
        close(torch.tensor(errors), ((out - exact).square().sum() / exact.square().sum())[None])
        (shape,) = found.shapes["only"]
        assert (shape.queries, shape.causal) == ((2, 2, 41, 8), False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_offset": 3},
        {"scale": 0.7},
        {"key_mask": padding(2, 41, [41, 17])},
        {"attn_mask": torch.randn(1, 6, 41, 41)},
    ],
)
def test_dense_attention_is_what_the_pass_goes_on_with(settings):
    q, k, v = tensors(2, 6, 41)
    seen = []
    with coterie.observing(seen.append):
        exact = coterie.attention(q, k, v, "full", **settings)
    close(dense(seen[0]).out, exact)
    some = seen[0].some_heads(2)
    close(dense(some).out, exact[:, [0, 3]])


def test_an_answer_that_an_observer_has_is_not_computed_again():
    q, k, v = tensors(1, 2, 20)
    known = torch.randn(1, 2, 20, 8)
    with coterie.observing(lambda seen: known):
        assert coterie.attention(q, k, v, "full") is known
        assert coterie.attention(q, k, v, "full", return_lse=True).out is not known  # who asks for more gets it


def test_few_heads_show_what_is_not_worth_running_in_full():
    q, k, v = tensors(1, 12, 700)
    ran = []

    class Worse(coterie.Local):
        """As good as a window, and slow."""

        def plan(self, q, k, **settings):
            ran.append(q.shape[1])
            time.sleep(0.05)
            return super().plan(q, k, **settings)

    mechanisms = [coterie.Local(window=65), Worse(window=33), coterie.Full()]
    task = replace(asked(OneCall(q, k, v), [None, None]), candidates=mechanisms)
    found = tried(task)
    assert set(ran) == {2}  # of 12 heads
    note = found.beaten["only", str(mechanisms[1])]
    assert note.endswith("on 2 of 12 heads")
    rows = {row.mechanism: row for row in found.table(mechanisms)}
    assert rows[str(mechanisms[1])].note == note
    assert math.isnan(rows[str(mechanisms[1])].error)


def test_without_time_one_candidate_is_tried_in_each_module():
    q, k, v = tensors(1, 4, 64)
    found = tried(asked(OneCall(q, k, v), [None], "local:window=9", "local:window=17", budget=1.0, start=-10.0))
    assert [name for _, name in found.errors] == ["local:window=9"]
    rows = {row.mechanism: row.note for row in found.table([coterie.as_mechanism("local:window=17")])}
    assert rows["local:window=17"] == "not tried: the time was up"


# --- lengths ----------------------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    """Its tokens are in a tuple in a dict, sequences first."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32).eval()

    def forward(self, given, *, scale=1.0):
        return self.layer(given["pair"][0]) * scale


def test_lengths_are_those_that_attention_meets_wherever_tokens_are():
    model = Nested()
    data = [{"given": {"pair": (torch.randn(n, 1, 16), None)}, "scale": 2.0} for n in (50, 50, 90, 90, 90)]
    found = coterie.fit(model, data, 0.5, candidates=["local:window=9"])
    assert [at.tokens for at in found.lengths] == [50, 90]
    assert [at.documents for at in found.lengths] == [1, 2]
    assert found.measure == "outputs"


def test_speech_is_as_long_as_what_its_encoder_attends_to():
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    config = transformers.WhisperConfig(
        **{"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8},
        **{"max_source_positions": 60, "pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1},
    )
    host = host_of(transformers.WhisperModel(config).eval())
    batch = {"input_features": torch.randn(1, 8, 120), "decoder_input_ids": torch.ones(1, 3, dtype=torch.long)}
    lengths = Lengths(host)
    lengths.answer(batch, lambda: host.hidden(batch))
    assert lengths.of(batch) == 60
    host.restore()


def test_lengths_of_what_is_too_short_to_be_seen_are_the_inputs():
    class Blind(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return x

    lengths, batch = Lengths(host_of(Blind())), torch.randn(1, 7, 8)
    lengths.answer(batch, lambda: None)
    assert lengths.of(batch) == 7
