"""`python -m benchmarks.rounds`: trained from scratch with as many hashing rounds as it needs (supplement §16.1).

Associative recall: a sequence of (key, value) tokens, then keys whose values are asked for. Attention starts diffuse
and ends on one token. Trained four times from the same weights on the same batches: dense, with `RoundsSchedule`, and
with SMYRF of the most and of the fewest rounds; the most, 8 rounds of 8 groups, cost as many scores as dense attention.
Printed: what the schedule chose over time, and loss and accuracy on held-out sequences. Two minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import coterie
from coterie.files import write_json
from coterie.mechanisms.smyrf import Smyrf
from coterie.rounds_schedule import RoundsSchedule

PAIRS, ASKED, VALUES, DIM, HEADS, LAYERS, BATCH = 96, 32, 16, 64, 4, 2, 16
CLUSTER_SIZE, MAX_ERROR, MAX_ROUNDS, EVERY = 16, 0.6, 8, 25


def sequences(generator: torch.Generator, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, N) as keys, their values (VALUES where one is asked for), and what should be answered (B, ASKED)."""
    keys = torch.stack([torch.randperm(PAIRS, generator=generator) for _ in range(batch)])
    values = torch.randint(VALUES, (batch, PAIRS), generator=generator)
    asked = torch.stack([torch.randperm(PAIRS, generator=generator)[:ASKED] for _ in range(batch)])
    unknown = torch.full((batch, ASKED), VALUES)
    return torch.cat([keys, keys.gather(1, asked)], 1), torch.cat([values, unknown], 1), values.gather(1, asked)


class Recall(nn.Module):
    """A small encoder over the sum of a key's and a value's embedding; there are no positions, as none are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(PAIRS, DIM), nn.Embedding(VALUES + 1, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.answer = nn.Linear(DIM, VALUES)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        found: Tensor = self.answer(self.encoder(self.key(keys) + self.value(values))[:, -ASKED:])
        return found


@torch.no_grad()
def held_out(model: Recall) -> tuple[float, float]:
    """Loss and accuracy on sequences that were not trained on."""
    generator = torch.Generator().manual_seed(10**6)
    loss = right = 0.0
    model.eval()
    for _ in range(8):
        keys, values, wanted = sequences(generator, 32)
        logits = model(keys, values)
        loss += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten())) / 8
        right += float((logits.argmax(-1) == wanted).float().mean()) / 8
    model.train()
    return loss, right


def train(model: Recall, steps: int, seed: int, schedule: RoundsSchedule | None, looks: list[dict[str, Any]]) -> float:
    """Train in place; returns the seconds that it took. `looks` gets the loss every so often."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    start = time.perf_counter()
    for step in range(1, steps + 1):
        keys, values, wanted = sequences(generator)
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm.step()
        if schedule is not None:
            schedule.step()
        if step % EVERY == 1:  # where the schedule chooses
            looks.append({"step": step, "loss": loss.item()})
    return time.perf_counter() - start


_SMYRF = Smyrf(rounds=MAX_ROUNDS, cluster_size=CLUSTER_SIZE, resample=True)
TWINS: dict[str, str] = {
    "dense": "full",
    "schedule": str(_SMYRF),
    f"smyrf, always {MAX_ROUNDS} rounds": str(_SMYRF),
    "smyrf, always 1 round": str(replace(_SMYRF, rounds=1)),
}


def run(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train one twin: the same weights and batches for each, and the same hashes however many were trained before."""
    torch.manual_seed(seed)
    model = Recall()
    coterie.nn.swap(model, TWINS[name])
    schedule = None
    if name == "schedule":
        schedule = RoundsSchedule(model, max_error=MAX_ERROR, every=EVERY, max_rounds=MAX_ROUNDS)
    looks: list[dict[str, Any]] = []
    seconds = train(model, steps, seed, schedule, looks)
    loss, accuracy = held_out(model)
    found: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "seconds": seconds, "looks": looks}
    if schedule is not None:
        found["log"] = [each._asdict() for each in schedule.log]
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """The tables."""
    log = found["schedule"]["log"]
    modules = sorted({each["module"] for each in log})
    losses = {name: {look["step"]: look["loss"] for look in each["looks"]} for name, each in found.items()}
    table = Table(title=f"rounds that the schedule chose: relative Frobenius error ≤ {MAX_ERROR}, at most {MAX_ROUNDS}")
    for column in (
        "step",
        *(f"layer {i}: rounds (error)" for i in range(len(modules))),
        "loss, schedule",
        "loss, dense",
    ):
        table.add_column(column, justify="right")
    chosen = {(each["step"], each["module"]): each for each in log}
    for step in sorted({each["step"] for each in log}):
        cells = [chosen[step, m] for m in modules]
        table.add_row(
            f"{step:,}",
            *(f"{c['rounds']} ({c['error']:.2f})" for c in cells),
            f"{losses['schedule'][step]:.3f}",
            f"{losses['dense'][step]:.3f}",
        )
    console.print(table)
    rounds = [each["rounds"] for each in log]
    dense = found["dense"]
    table = Table(title="held-out sequences")
    for column in ("attention", "mean rounds", "loss", "against dense", "accuracy", "time"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for name, each in found.items():
        mean = {"dense": "–", "schedule": f"{sum(rounds) / len(rounds):.2f}"}.get(name) or name.split()[-2]
        table.add_row(
            name,
            mean,
            f"{each['loss']:.4f}",
            f"{each['loss'] - dense['loss']:+.4f}",
            f"{each['accuracy']:.1%}",
            f"{each['seconds']:.0f} s",
        )
    console.print(table)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write rounds.json to")
    options = parser.parse_args()
    found = {name: run(name, options.steps, options.seed) for name in TWINS}
    write_json(options.out / "rounds.json", found)
    show(found, Console())


if __name__ == "__main__":
    main()
