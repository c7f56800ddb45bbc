"""The Trainer, with batches by length, and steps that are the same however many examples are in memory together."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from recipes.common.by_length import ByLength
from recipes.common.precision import autocast


class Stepping(Trainer):  # type: ignore[misc]
    """Trains on the mean loss of each batch.

    A batch may be cut into pieces, and a model's own loss is the mean of a piece. The Trainer would add these means up
    for models that take any keyword, as most do, and a last piece that is smaller would count as much as the others.

    Attributes:
        by_length: whether examples of about the same length are in a batch.
        bf16: whether forwards run in bfloat16. What the Trainer is told of it counts only the first time in a process.
    """

    by_length = False
    bf16 = False

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return autocast(self.model, self.bf16)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if (
            num_items_in_batch is not None
        ):  # how many labels the whole batch has; there are none where spans are learned
            loss = loss * (len(inputs["labels"]) / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not self.by_length:
            return super()._get_train_sampler(train_dataset)
        examples = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(ids) for ids in examples["input_ids"]]
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return ByLength(lengths, batch, self.args.seed, lambda: int(self.state.epoch or 0))
