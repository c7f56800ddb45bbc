# %% [markdown]
# # Fine-tune on GLUE with clustered attention
#
# SMYRF fine-tuned BERT on GLUE with its attention replaced, and found the accuracy of dense attention. It also found
# that weights can be exchanged: train with one attention, run with the other. This notebook does both on one task,
# with the code of `recipes/glue`.
#
# Set `COTERIE_GLUE` to a folder with GLUE's task folders (`CoLA/train.tsv` …), and `COTERIE_TASK` to a task. Without
# it the notebook makes a stand-in in CoLA's own format from Python's documentation: *is the order of the words right?*

# %%
import os
import pydoc_data.topics
import random
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from datasets import disable_progress_bars
from IPython.display import HTML
from recipes.common import comparison
from recipes.common.classification import FineTuning
from recipes.common.progress import bar
from recipes.common.study import Study
from recipes.common.training import Schedule
from recipes.glue import tasks
from transformers.utils import logging

from coterie.tables import Table

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
logging.set_verbosity_error()
disable_progress_bars()
work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The task
#
# Sentences of at least 20 words, so that there is something to cluster: half of them as they are, half with their
# words shuffled.


# %%
def stand_in(folder: Path) -> Path:
    """CoLA's files, with sentences of Python's documentation."""
    text = " ".join(" ".join(topic.split()) for topic in pydoc_data.topics.topics.values())
    sentences = [s for s in dict.fromkeys(re.split(r"(?<=\.) ", text)) if 20 <= len(s.split()) <= 60]
    draw = random.Random(0)
    draw.shuffle(sentences)
    rows = []
    for number, sentence in enumerate(sentences):
        words = sentence.split()
        if number % 2:
            draw.shuffle(words)
        rows.append(f"docs\t{1 - number % 2}\t\t{' '.join(words)}\n")
    (folder / "CoLA").mkdir()
    (folder / "CoLA" / "dev.tsv").write_text("".join(rows[:300]), encoding="utf-8")
    (folder / "CoLA" / "train.tsv").write_text("".join(rows[300:]), encoding="utf-8")
    return folder


data = os.environ.get("COTERIE_GLUE") or stand_in(work)
name = os.environ.get("COTERIE_TASK", "cola")
task = tasks.load(name, str(data), 16 if QUICK else 800, 8 if QUICK else 300)
print(f"{task.name}: {len(task.train)} to train on, {len(task.test)} to test on")
print(task.train[0])

# %% [markdown]
# ## Three models
#
# One is trained densely, one with SMYRF (2 rounds of clusters of 8), one with near–far attention (8 near
# keys, all others through means). All see the same batches in the same order, and start from the same weights.
# Sentences are short, so clusters must be small, or nothing is approximated.

# %%
mechanisms = ["dense", "smyrf:rounds=2,cluster_size=8", "near-far:near=8"]
schedule = Schedule(epochs=1 if QUICK else 2, batch=4 if QUICK else 16, rate=5e-5, warmup=0.1)
tuning = FineTuning(task, "demo", 128, schedule)
study = Study.open(work / "study", {"recipe": "glue", "task": name})
with bar(len(mechanisms)) as shown:
    results = tuning.run(study, mechanisms, range(1), shown)
    costs = tuning.costs(study, mechanisms, 1, shown, texts=8)

# %% [markdown]
# ## What came out
#
# One seed says little: `python -m recipes.glue --seeds 3` prints means with standard errors.

# %%
title, columns, rows = comparison.trained_with(results, costs, tuning.task.score.__name__)
print(title)
HTML(Table(columns, rows).html())

# %% [markdown]
# ## Are the weights interchangeable?
#
# Trained densely or clustered → run densely or clustered.

# %%
_, columns, rows = comparison.interchange(results, tuning.task.score.__name__)
HTML(Table(columns, rows).html())

# %% [markdown]
# ## How the loss fell

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
for result in results:
    steps, losses = zip(*result["losses"], strict=True)
    axes.plot(steps, losses, marker="o", markersize=3, label=result["trained"])
axes.set(xlabel="step", ylabel="training loss", title=f"{task.name}, all from the same weights")
axes.legend()
plt.show()
