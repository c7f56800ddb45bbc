"""Decoding over a long context: milliseconds a token with each cache, and what the memory is.

    python -m benchmarks.decode                    # a Llama of 4 layers, 8 heads of 64, random weights
    python -m benchmarks.decode --model smollm     # SmolLM2-135M on Python's documentation, and its loss
    python -m benchmarks.decode --model layer      # the attention of one layer alone, up to 131,072 tokens
    python -m benchmarks.decode --dtype bfloat16   # weights, keys and values in half precision

dynamic      transformers' DynamicCache with SDPA
static       transformers' StaticCache with SDPA
ours + sdpa  coterie.hf.Cache with SDPA
ours         coterie.hf.Cache and coterie.hf.use(model, "dense")
near-far     coterie.hf.Cache and decode="near-far"

The caches take turns, token by token; each figure is a median. The keys of the random Llama are filled in, not
computed. Memory is how far the process grows while the first 8 tokens are decoded, what near–far keeps of the context
included, beside the bytes of all keys and values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import coterie
import coterie.hf
from benchmarks import texts
from benchmarks.measure import peak_bytes
from benchmarks.models import SmolLM
from coterie.checks import expect
from coterie.hf.questions import Question
from coterie.mechanisms.near_far.decoding import Step

_ROOM = 256  # tokens that are decoded at most
_LENGTHS = {"llama": "2048,8192,32768", "smollm": "8192", "layer": "8192,16384,32768,65536,131072"}


class Contender(NamedTuple):
    """A way to decode."""

    name: str
    cache: Callable[[Any, int], Any]  # of a model and a context
    decode: str | None  # what coterie.hf.use is told, if it is called


def contenders(near: str) -> list[Contender]:
    """All of them; the first is what others are compared with."""
    return [
        Contender("dynamic", lambda model, _: DynamicCache(config=model.config), None),
        Contender("static", lambda model, length: StaticCache(config=model.config, max_cache_len=length + _ROOM), None),
        Contender("ours + sdpa", lambda model, _: coterie.hf.Cache(model), None),
        Contender("ours", lambda model, _: coterie.hf.Cache(model), "dense"),
        Contender(near, lambda model, _: coterie.hf.Cache(model), near),
    ]


def llama(layers: int = 4, heads: int = 8) -> Any:
    """A small model with a long memory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64 * heads, "intermediate_size": 128 * heads, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=999, num_attention_heads=heads, max_position_embeddings=1 << 18, **sizes)
    return LlamaForCausalLM(config).eval()


def prompt(model: Any, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of tokens of 64 topics, as those of a trained model are alike."""
    config, found = model.config, []
    heads = config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(layer)
        topics = torch.randn(heads, 64, 64, generator=generator)
        which = torch.randint(64, (length,), generator=generator)
        noise = torch.randn(2, batch, heads, length, 64, generator=generator)
        found.append((1.2 * topics[:, which] + 0.8 * noise[0], noise[1]))
    return found


class Turn(NamedTuple):
    """A contender with its cache, ready to decode."""

    contender: Contender
    model: Any
    cache: Any
    length: int

    def token(self, ids: Tensor) -> float:
        """Seconds of one."""
        _switch(self.model, self.contender.decode)
        start = time.perf_counter()
        self.model(ids, past_key_values=self.cache, use_cache=True)
        return time.perf_counter() - start


def _switch(model: Any, decode: str | None) -> None:
    """Let a model decode in a contender's way."""
    ours = model.config._attn_implementation == "coterie"
    if decode is None and ours:
        coterie.hf.undo(model)
    elif decode is not None:
        coterie.hf.use(model, "dense", decode=decode)


def measure(
    model: Any, chosen: list[Contender], filled: list[tuple[Tensor, Tensor]], ids: Tensor, tokens: int
) -> Iterator[tuple[str, float, float | None]]:
    """The name, the median seconds a token and the growth of memory of each contender."""
    length = filled[0][0].shape[2]
    turns, grown = [], {}
    for each in chosen:
        cache = each.cache(model, length)
        for layer, (keys, values) in enumerate(filled):
            cache.update(keys, values, layer)
        turns.append(Turn(each, model, cache, length))
        Turn(each, model, each.cache(model, _ROOM), 0).token(ids)  # what every process allocates once
        run = partial(_tokens, turns[-1], ids, 8)
        grown[each.name] = peak_bytes(run, kept=True)
    taken: dict[str, list[float]] = {each.name: [] for each in chosen}
    for _ in range(tokens):
        for turn in turns:
            taken[turn.contender.name].append(turn.token(ids))
    for name, seconds in taken.items():
        yield name, statistics.median(seconds), grown[name]


def _tokens(turn: Turn, ids: Tensor, count: int) -> None:
    for _ in range(count):
        turn.token(ids)


def random_llama(lengths: list[int], batches: list[int], near: str, tokens: int, dtype: torch.dtype) -> None:
    """Print the table of the random Llama."""
    model = llama().to(dtype)
    print("| context | batch | cache | ms a token | times as fast | memory / keys and values |")
    print("|---:|---:|---|---:|---:|---:|")
    for length in lengths:
        for batch in batches:
            filled = [(keys.to(dtype), values.to(dtype)) for keys, values in prompt(model, batch, length)]
            size = sum(x.nbytes for pair in filled for x in pair)
            ids = torch.randint(999, (batch, 1))
            first = None
            for name, seconds, grown in measure(model, contenders(near), filled, ids, tokens):
                first = first or seconds
                memory = "–" if grown is None else f"{1 + grown / size:.2f}"
                print(
                    f"| {length:,} | {batch} | {name} | {1e3 * seconds:.1f} | {first / seconds:.1f} | {memory} |",
                    flush=True,
                )


def smollm(lengths: list[int], near: str, tokens: int, following: int, dtype: torch.dtype, kept: Path | None) -> None:
    """Print what SmolLM2 does: its prompt is computed, densely, and the loss of what follows is compared."""
    model = SmolLM("sdpa")
    model.model.to(dtype)
    text = "\n\n".join(texts.documentation())
    print("| context | cache | ms a token | tokens a second | times as fast | loss of the next | against dense |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for length in lengths:
        wanted = length + max(1, following)
        ids = model.tokens(text[len(text) // 3 :][: 24 * wanted], wanted)
        filled = _prefilled(model.model, ids[:, :length], kept, dtype)
        losses = {}
        for name, decode in (("ours", "dense"), (near, near)) if following else ():
            cache = coterie.hf.Cache(model.model)
            for layer, (keys, values) in enumerate(filled):
                cache.update(keys, values, layer)
            _switch(model.model, decode)
            losses[name] = _loss(model, cache, ids[:, length:])
        if losses and not tokens:
            print(*(f"{name}: {loss:.4f}" for name, loss in losses.items()), sep=", ")
            continue
        floor = _floor(model.model, ids[:, :1], tokens)
        print(f"| 0 | no context | {1e3 * floor:.1f} | {1 / floor:.1f} | | – | – |", flush=True)
        first = None
        for name, seconds, _ in measure(model.model, contenders(near), filled, ids[:, length : length + 1], tokens):
            first, loss = first or seconds, losses.get(name)
            told = "| – | – |" if loss is None else f"| {loss:.4f} | {100 * (loss / losses['ours'] - 1):+.2f} % |"
            speed = f"{1e3 * seconds:.1f} | {1 / seconds:.1f} | {first / seconds:.2f}"
            print(f"| {length:,} | {name} | {speed} {told}", flush=True)


def _prefilled(model: Any, ids: Tensor, kept: Path | None, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a prompt in each layer; they are read from a file if they are kept there."""
    path = None if kept is None else kept / f"{ids.shape[1]}.safetensors"
    layers = range(model.config.num_hidden_layers)
    if path is not None and path.exists():
        saved = load_file(path)
        expect(torch.equal(saved["ids"], ids), "keep", f"a folder whose {path.name} is of this text", "another text")
        return [(saved[f"keys.{i}"].to(dtype), saved[f"values.{i}"].to(dtype)) for i in layers]
    start = DynamicCache(config=model.config)
    for part in ids.split(1024, 1):
        model.model(input_ids=part, past_key_values=start)
    filled = [(layer.keys, layer.values) for layer in start.layers]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        named = {"ids": ids.contiguous()}
        for i, (keys, values) in enumerate(filled):
            named |= {f"keys.{i}": keys.contiguous(), f"values.{i}": values.contiguous()}
        save_file(named, path)
    return filled


def _floor(model: Any, ids: Tensor, tokens: int) -> float:
    """Median seconds of a token that has no context, or hardly any: what attention could not save."""
    turn = Turn(Contender("", lambda model, _: coterie.hf.Cache(model), "dense"), model, coterie.hf.Cache(model), 0)
    return statistics.median([turn.token(ids) for _ in range(tokens)])


def layer(lengths: list[int], near: str, tokens: int, dtype: torch.dtype, heads: int = 9, key_heads: int = 3) -> None:
    """Print what the attention of one layer takes for one new token: of SmolLM2's shape, with keys as in `prompt`."""
    mechanism = coterie.as_mechanism(near)
    assert isinstance(mechanism, coterie.NearFar)
    means = replace(mechanism, near=0)  # what is left is the chunks that are met exactly, and all means
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=key_heads)
    print("| context | sdpa, ms | all keys, ms | near–far, ms | without near keys, ms | near–far / all keys |")
    print("|---:|---:|---:|---:|---:|---:|")
    for length in lengths:
        keys, values = (x.to(dtype) for x in prompt(SimpleNamespace(config=config), 1, length)[0])
        q = torch.randn(1, heads, 1, 64).to(dtype)
        step = Step(torch.arange(length, dtype=torch.int32)[None], torch.tensor([[length - 1]], dtype=torch.int32))
        question = Question(None, q, keys, values, step, 1 / 8, 0)
        calls: dict[str, Callable[[], object]] = {
            "sdpa": partial(F.scaled_dot_product_attention, q, keys, values, enable_gqa=True),
            "all keys": question.attend,
            "near-far": partial(question.near_far, question.clusters(mechanism)),
            "means": partial(question.near_far, question.clusters(means)),
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(tokens + 2):
            for name, run in calls.items():
                start = time.perf_counter()
                run()
                if turn > 1:
                    taken[name].append(time.perf_counter() - start)
        ms = {name: 1e3 * statistics.median(each) for name, each in taken.items()}
        told = " | ".join(f"{each:.2f}" for each in ms.values())
        print(f"| {length:,} | {told} | {ms['near-far'] / ms['all keys']:.2f} |", flush=True)


def _loss(model: SmolLM, cache: Any, ids: Tensor) -> float:
    """The mean loss of tokens behind a context, which are given 16 at a time: so many are decoded, not prefilled."""
    hidden = [
        model.model.model(input_ids=part, past_key_values=cache).last_hidden_state[0]
        for part in ids.split(coterie.hf.FEW_QUERIES, 1)
    ]
    logits = model.model.lm_head(torch.cat(hidden)[:-1]).float()
    return float(F.cross_entropy(logits, ids[0, 1:]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["llama", "smollm", "layer"], default="llama")
    parser.add_argument("--lengths", default="", help=f"of the context; {_LENGTHS}")
    parser.add_argument("--batches", default="1,4", help="of the random Llama")
    parser.add_argument("--decode", default="near-far", help="a mechanism")
    parser.add_argument(
        "--tokens", type=int, default=32, help="that are decoded, and timed; of SmolLM2, 0 prints the losses alone"
    )
    parser.add_argument("--following", type=int, default=512, help="tokens whose loss is compared, of SmolLM2; 0: none")
    parser.add_argument(
        "--keep", type=Path, help="a folder for the keys and values of SmolLM2's prompt; those that are there are read"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    sizes = [int(each) for each in (options.lengths or _LENGTHS[options.model]).split(",")]
    with torch.no_grad():
        if options.model == "llama":
            random_llama(
                sizes, [int(each) for each in options.batches.split(",")], options.decode, options.tokens, dtype
            )
        elif options.model == "layer":
            layer(sizes, options.decode, options.tokens, dtype)
        else:
            smollm(sizes, options.decode, options.tokens, options.following, dtype, options.keep)


if __name__ == "__main__":
    main()
