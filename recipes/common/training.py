"""Fine-tuning on Hugging Face's Trainer, with checkpoints from which a run that was killed goes on."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from coterie.cli.inputs import UserError
from recipes.common.processes import processes
from recipes.common.progress import Bar
from recipes.common.stepping import Stepping

_COMPLETE = "complete"  # a file in every checkpoint that was written to its end
_CHECKPOINTS = 8  # in a run


class Schedule(NamedTuple):
    """How a model is fine-tuned."""

    epochs: float
    batch: int
    rate: float
    warmup: float = 0.0  # share of all steps
    decay: float = 0.0
    by_length: bool = False  # put examples of about the same length into a batch
    bf16: bool = False
    at_once: int | None = None  # examples of a batch that are in memory together; all of them by default


class _Steps(TrainerCallback):  # type: ignore[misc]
    """How long steps take, and which checkpoints are complete."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _COMPLETE).touch()


class Trained(NamedTuple):
    """What came of it."""

    seconds_per_step: float  # median
    losses: list[list[float]]  # step, mean loss since the one before


_QUIET = {
    "use_cpu": not torch.accelerator.is_available(),
    "logging_nan_inf_filter": False,  # a loss that is none must be seen
    "disable_tqdm": True,
    "report_to": "none",
    "dataloader_pin_memory": False,
}


def _pieces(schedule: Schedule, count: int) -> tuple[int, int]:
    """How many examples a process has in memory, and how many such pieces of a batch it works off."""
    mine, rest = divmod(schedule.batch, count)
    if rest:
        raise UserError(f"--batch {schedule.batch} must be a multiple of the number of processes, {count}.")
    at_once = min(schedule.at_once or mine, mine)
    if mine % at_once:
        raise UserError(f"--batch {schedule.batch} must be a multiple of --at-once {at_once} × {count} processes.")
    return at_once, mine // at_once


def arguments(folder: Path, schedule: Schedule, seed: int, steps: int) -> TrainingArguments:
    """What the Trainer is told."""
    at_once, pieces = _pieces(schedule, processes().num_processes)
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=schedule.epochs,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=pieces,
        average_tokens_across_devices=False,  # processes take equal parts, whose mean is that of the batch
        per_device_eval_batch_size=2 * schedule.batch,
        learning_rate=schedule.rate,
        warmup_steps=round(schedule.warmup * steps),
        weight_decay=schedule.decay,
        seed=seed,
        data_seed=seed,
        save_steps=max(1, steps // _CHECKPOINTS),
        save_total_limit=2,  # while one is written the one before must stay
        logging_steps=max(1, steps // 20),
        **_QUIET,
    )


def train(model: Any, examples: Any, collate: Any, schedule: Schedule, seed: int, folder: Path, bar: Bar) -> Trained:
    """Fine-tune a model in place; from the last complete checkpoint in `folder`, if there is one."""
    steps = -(-len(examples) // schedule.batch) * schedule.epochs
    told = arguments(folder, schedule, seed, round(steps))
    set_seed(seed)  # a model that was made just now must not decide what is drawn
    watch = _Steps()
    trainer = Stepping(model, told, collate, train_dataset=examples, callbacks=[watch, bar])
    trainer.by_length, trainer.bf16 = schedule.by_length, schedule.bf16
    trainer.remove_callback(PrinterCallback)  # the bar says how far it is
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    losses = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    if not all(math.isfinite(loss) for _, loss in losses):
        raise UserError(f"the training diverged (a loss is not finite): try a rate below {schedule.rate:g}.")
    return Trained(statistics.median(watch.seconds) if watch.seconds else float("nan"), losses)


def predict(
    model: Any, examples: Any, collate: Any, batch: int, folder: Path, *, bf16: bool = False
) -> tuple[Any, Any]:
    """What a model says of each example, and the labels: arrays in the order of the examples, a tuple of them if the
    model says several things, and None for labels that are not there.

    It sees the longest first: batches of the same length have little padding.
    """
    order = np.argsort([-len(ids) for ids in examples["input_ids"]], kind="stable")
    told = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=batch,
        **_QUIET,
    )
    trainer = Stepping(model, told, collate)
    trainer.bf16 = bf16
    trainer.remove_callback(PrinterCallback)
    found = trainer.predict(examples.select(order))
    said = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    if not all(np.isfinite(part).all() for part in said):
        raise UserError("the model's answers are not finite numbers: its training diverged, or its weights are broken.")
    back = np.argsort(order)
    return _taken(found.predictions, back), _taken(found.label_ids, back)


def _taken(found: Any, rows: Any) -> Any:
    if found is None or isinstance(found, tuple):
        return None if found is None else tuple(part[rows] for part in found)
    return found[rows]


def last_checkpoint(folder: Path) -> str | None:
    """The last one that was written to its end."""
    complete = [file.parent for file in folder.glob(f"checkpoint-*/{_COMPLETE}")]
    last = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if last is None else str(last)
