# %% [markdown]
# # Copy what is far away
#
# Clustered attention lets similar queries share an answer. Can a model that is trained that way still fetch one
# symbol from far away? The clustered-attention paper asks this with a task that is nothing but fetching:
# `0 w 0 w`, some symbols masked. `recipes/copy` runs the study; this notebook shows the task, trains small models, and
# looks at who meets whom.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML
from recipes.common.progress import Bar
from recipes.copy.cells import Cell
from recipes.copy.learning import Learner, Schedule
from recipes.copy.network import Shape
from recipes.copy.sequences import MASK, SEPARATOR, batch

import coterie
from coterie.analysis import groups_of
from coterie.tables import Table

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
LENGTH = 16 if QUICK else 64

# %% [markdown]
# ## The task
#
# `|` is 0. A fifth of the symbols are masked (·), never both copies of one. So each can be read at the same place of
# the other copy, half a sequence away, and nowhere else.

# %%
examples = batch("masked", 3, LENGTH, seed=0, step=0)
for seen in examples.seen.tolist():
    print(*({SEPARATOR: "|", MASK: "·"}.get(token, token % 10) for token in seen))

# %% [markdown]
# ## Three models
#
# Four layers each. One attends densely. The queries of the other are put into 15 clusters, whose means attend to all
# keys; each query then meets the best keys of its cluster itself. The third has a window of 8 and cannot succeed: 4
# layers reach 16 tokens to either side.

# %%
shape = Shape(layers=2 if QUICK else 4)
schedule = Schedule(
    steps=20 if QUICK else 1000, rate=1e-3, warmup=100, tokens=2048, tests=100, every=10 if QUICK else 25
)
names = ["dense", "improved-clustered:clusters=15", "local:window=8"]
learners, results = {}, []
for name in names:
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Cell(name, 0, name, LENGTH), "masked", shape, schedule, 0, Path(folder))
        found = learner.learn(Bar(lambda what, done, total: None, 1))
    learners[name] = learner
    results.append([name, f"{100 * found['accuracy']:.1f} %", str(found["steps"]), f"{found['seconds']:.0f} s"])
HTML(Table(["attention", "right", "steps", "time"], results).html())

# %% [markdown]
# Copying is learned all at once: for a while every model guesses (10 %), then a head finds the other copy.

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
for name, learner in learners.items():
    axes.plot(*zip(*learner.tests, strict=True), label=name)
axes.set(xlabel="step", ylabel="accuracy on fresh sequences", ylim=(0, 1.02))
axes.legend()
plt.show()

# %% [markdown]
# ## Who looks where
#
# The clustered model's queries and keys, caught by `coterie.observing`. For each head: how much of a masked symbol's
# weight lies on its other copy. Dense attention of the same queries is shown; a head near 1 does the copying.

# %%
calls: list[coterie.Seen] = []
model = learners["improved-clustered:clusters=15"].model.eval()
with coterie.observing(calls.append), torch.no_grad():
    model(examples.seen)
rows, places = examples.scored.nonzero(as_tuple=True)
others = (places + LENGTH // 2) % LENGTH
shares = []
for call in calls:
    weights = (call.q @ call.k.mT * call.q.shape[-1] ** -0.5).softmax(-1)
    shares.append(weights[rows, :, places, others].mean(0))
figure, axes = plt.subplots(figsize=(4, 3))
picture = axes.imshow(torch.stack(shares), vmin=0, vmax=1)
axes.set(xlabel="head", ylabel="layer", title="weight on the other copy")
figure.colorbar(picture)
plt.show()

# %% [markdown]
# The clusters of the head that looks there most, in the first sequence: each bar is a cluster of queries, and the
# dark part of it are queries at masked symbols. Those of one cluster share its top keys, so it had better have few of
# them.

# %%
layer, head = divmod(int(torch.stack(shares).argmax()), shares[0].numel())
call = calls[layer]
plan = coterie.as_mechanism(names[1]).plan(call.q, call.k, **call.planning())
cluster = groups_of(plan, head=head)
masked = examples.scored[0]
figure, axes = plt.subplots(figsize=(6, 2.5))
for which, colour, label in ((~masked, "lightgrey", "others"), (masked, "tab:blue", "masked")):
    below = 0 if colour == "lightgrey" else cluster[~masked].bincount(minlength=15)
    axes.bar(range(15), cluster[which].bincount(minlength=15), bottom=below, color=colour, label=label)
axes.set(xlabel="cluster", ylabel="queries", title=f"layer {layer}, head {head}")
axes.legend()
plt.show()

# %% [markdown]
# The whole study, with heat maps of clusters × length: `python -m recipes.copy`.
