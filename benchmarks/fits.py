"""`make fits`: what `coterie.fit` promises, on real models and on a long encoder whose attention is peaked.

minilm   MiniLM at 512 tokens, three fidelities; STS-B after the fit if the data is there
smollm   SmolLM2-135M at 4,096 and 8,192 tokens, the loss of the next token
encoder  2 layers, 512 wide, 8 heads, 16,384 tokens
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import coterie.hf
from benchmarks.fidelity import Stsb
from benchmarks.models import MiniLM, SmolLM
from benchmarks.texts import documentation
from coterie import Fit
from coterie.cli.console import bars
from coterie.cli.inputs import places
from coterie.files import write_json

PARTS = ("minilm", "smollm", "encoder")
console = Console(width=150)


class Fits:
    """Fit, print a row for each, and keep everything."""

    def __init__(self, data: Path, out: Path) -> None:
        self.data, self.out = data, out
        self.found: dict[str, Any] = {}

    def minilm(self) -> None:
        """Three fidelities at 512 tokens; fitted models on STS-B, whose sentences are short."""
        model = MiniLM("sdpa")
        ids = torch.tensor(model.tokenizer("\n\n".join(documentation()), add_special_tokens=False)["input_ids"])
        edge = [torch.tensor([token]) for token in (model.tokenizer.cls_token_id, model.tokenizer.sep_token_id)]
        pieces = [torch.cat([edge[0], piece, edge[1]]) for piece in scattered(ids, 510, 24)]
        batches = [{"input_ids": piece[None]} for piece in pieces]
        pairs = Stsb(self.data, model) if (self.data / "stsb").exists() else None

        @torch.no_grad()
        def spearman() -> str:
            if pairs is None:
                return f"left out, as {self.data / 'stsb'} is not there; say where with --data"
            return f"{pairs.spearman(model.embed_all(pairs.sentences, lambda _: None)):.4f}"

        dense = spearman()
        for found in self.fit("MiniLM, 512 tokens", model.model, batches, [0.95, 0.99, 0.999]):
            found.apply(model.model)
            console.print(f"  STS-B after {found.fidelity}: {spearman()}, dense: {dense}")
            coterie.hf.undo(model.model)

    def smollm(self, lengths: tuple[int, ...] = (4096, 8192)) -> None:
        """The loss of a language model at two lengths."""
        model = SmolLM("sdpa")
        (ids,) = model.tokens("\n\n".join(documentation()), 400_000)
        for length in lengths:
            batches = [{"input_ids": part[None]} for part in scattered(ids, length, 6)]
            self.fit(f"SmolLM2, {length:,} tokens", model.model, batches, [0.99])

    def encoder(self) -> None:
        """A long, peaked encoder; dense is SDPA and not PyTorch's fast path, which holds N × N scores."""
        torch.backends.mha.set_fastpath_enabled(False)
        model, batches = peaked_encoder(), [peaked_input(seed) for seed in range(6)]
        console.print(f"entropy of its attention: {', '.join(f'{x:.2f}' for x in entropies(model, batches[0]))} nats")
        self.fit("encoder, 16,384 tokens", model, batches, [0.99])

    def fit(self, name: str, model: Any, batches: list[Any], fidelities: list[float]) -> list[Fit]:
        """Fit and print."""
        start = time.perf_counter()
        with bars() as tell:
            fits = coterie.trade_off(model, batches, fidelities, progress=tell)
        taken = time.perf_counter() - start
        table = Table(title=f"{name}: fitted in {taken:.0f} s")
        for column in ("what", "asked", "certified", "documents", "held out", "at least"):
            table.add_column(column, justify="right")
        for column in ("attention alone", "whole model", "dense", "fitted"):
            table.add_column(column, justify="right")
        for found in fits:
            (at,) = found.lengths
            table.add_row(
                *(found.measure, str(found.fidelity), "yes" if found.certified else "no", str(at.documents)),
                *(f"{found.held_out:.4f}", f"{at.bound:.4f} ({at.method})"),
                *(f"{speedup:.2f}×" for speedup in found.speedups),
                *(f"{seconds:.2f} s" for seconds in (at.dense_seconds, at.fitted_seconds)),
            )
        console.print(table)
        for found in fits:
            kinds = Counter(found.choices.values())
            runs = ", ".join(f"{count} × {spec}" for spec, count in kinds.most_common())
            console.print(f"  {found.fidelity}: {runs}")
            for note in found.notes:
                console.print(f"  {note}")
            self.found[f"{name}, {found.fidelity}"] = found.to_dict() | {"taken": taken}
        return fits

    def save(self) -> None:
        """Write everything as JSON."""
        write_json(self.out / "fits.json", self.found)
        console.print(f"wrote {self.out / 'fits.json'}")


def scattered(ids: Tensor, length: int, count: int) -> list[Tensor]:
    """So many pieces of a text from random places, none of which overlap."""
    return [ids[at : at + length] for at in places([length] * count, len(ids), random.Random(0))]


def peaked_encoder(width: int = 512, heads: int = 8, layers: int = 2, sharpness: float = 2.0) -> nn.Module:
    """An encoder whose keys are noisy copies of its queries; values and outputs keep the size of what they get."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    for each in model.layers:
        assert isinstance(each, nn.TransformerEncoderLayer)
        query, value, out = (nn.init.orthogonal_(torch.empty(width, width)) for _ in range(3))
        key = query + 0.3 * torch.randn(width, width) / width**0.5
        with torch.no_grad():
            each.self_attn.in_proj_weight.copy_(torch.cat([sharpness**0.5 * query, sharpness**0.5 * key, value]))
            each.self_attn.out_proj.weight.copy_(out)
    return model


def peaked_input(seed: int, length: int = 16384, width: int = 512, topics: int = 256) -> Tensor:
    """(1, length, width): tokens of a topic resemble each other."""
    draws = torch.Generator().manual_seed(seed)
    means = torch.randn(topics, width, generator=draws)
    which = torch.randint(topics, (length,), generator=draws)
    return (0.8 * means[which] + 0.6 * torch.randn(length, width, generator=draws))[None]


def entropies(model: Any, batch: Tensor) -> list[float]:
    """The mean entropy of attention in each layer."""
    from coterie.analysis.head_errors import head_errors

    found = head_errors(model, batch, coterie.Local(window=1))
    return [sum(entropy for _, entropy in heads) / len(heads) for heads in found.values()]


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with stsb")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write to")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    run = Fits(options.data, options.out)
    for part in PARTS:
        if part in wanted:
            getattr(run, part)()
    run.save()


if __name__ == "__main__":
    main()
