"""Fine-tuning on Hugging Face's Trainer, with checkpoints from which a run that was killed goes on."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from recipes.common.by_length import TrainerByLength
from recipes.common.progress import Bar

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


def _quiet(bf16: bool) -> dict[str, Any]:
    """What the Trainer is told of every run. Without `use_cpu` it takes bfloat16 for a matter of GPUs."""
    cpu = not torch.accelerator.is_available()
    return {
        "bf16": bf16,
        "use_cpu": cpu,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }


def arguments(folder: Path, schedule: Schedule, seed: int, steps: int) -> TrainingArguments:
    """What the Trainer is told."""
    at_once = schedule.at_once or schedule.batch
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=schedule.epochs,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=schedule.batch // at_once,
        per_device_eval_batch_size=2 * schedule.batch,
        learning_rate=schedule.rate,
        warmup_steps=round(schedule.warmup * steps),
        weight_decay=schedule.decay,
        seed=seed,
        data_seed=seed,
        save_steps=max(1, steps // _CHECKPOINTS),
        save_total_limit=2,  # while one is written the one before must stay
        logging_steps=max(1, steps // 20),
        **_quiet(schedule.bf16),
    )


def train(model: Any, examples: Any, collate: Any, schedule: Schedule, seed: int, folder: Path, bar: Bar) -> Trained:
    """Fine-tune a model in place; from the last complete checkpoint in `folder`, if there is one."""
    steps = -(-len(examples) // schedule.batch) * schedule.epochs
    told = arguments(folder, schedule, seed, round(steps))
    set_seed(seed)  # a model that was made just now must not decide what is drawn
    watch = _Steps()
    kind = TrainerByLength if schedule.by_length else Trainer
    trainer = kind(model, told, collate, train_dataset=examples, callbacks=[watch, bar])
    trainer.remove_callback(PrinterCallback)  # the bar says how far it is
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    losses = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
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
        **_quiet(bf16),
    )
    trainer = Trainer(model, told, collate)
    trainer.remove_callback(PrinterCallback)
    found = trainer.predict(examples.select(order))
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
