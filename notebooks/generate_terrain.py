# %% [markdown]
# # Generate with a pre-trained generator and clustered attention
#
# A U-Net with 28 attention blocks makes maps of heights, 128 × 128 pixels, from noise in one step. Its weights come
# from the PyPI package `adaptive-terrain-diffusion`. SMYRF's authors swapped their attention into a pre-trained BigGAN.
# This notebook does the same here, without training: what becomes of the images?

# %%
import os

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML
from recipes.common import clusters
from recipes.terrain import maps, pictures
from recipes.terrain.attending import COMMON, Way, by_tokens, choose, generate, pairs, watch
from recipes.terrain.images import given, relative_error, shape_error
from recipes.terrain.weights import load

import coterie
from coterie.analysis import draw_grid, draw_locality, draw_spectra, locality
from coterie.tables import Table

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
IMAGES = 1 if QUICK else 4

# %% [markdown]
# ## The generator
#
# It is a plain torch module whose blocks call `scaled_dot_product_attention`. It knows nothing of Coterie.

# %%
model = load()
start = given(0, model.layout.size)  # noise, how strong it is, and how rough the terrain is to be
with torch.no_grad():
    dense = model(*start)
print(f"{len(model.attentions())} attention blocks, {sum(p.numel() for p in model.parameters()):,} parameters")
plt.figure(figsize=(3, 3))
plt.imshow(dense[0, 0], cmap="gist_earth")
plt.axis("off")
plt.show()

# %% [markdown]
# ## One line
#
# Inside `coterie.replacing`, every call of `scaled_dot_product_attention` runs a mechanism. `replaced.calls` says what
# ran where.

# %%
with torch.no_grad(), coterie.replacing("near-far") as replaced:
    image = model(*start)
print(f"{len(replaced.calls)} calls, the first: {next(iter(replaced.calls.items()))}")
print(f"the image changed by {relative_error(image, dense):.3%}")

# %% [markdown]
# ## A quarter of the pairs
#
# Now every mechanism gets the same: a quarter of all pairs meet, over 1,024 tokens as over 64. `choose` finds the size
# for each number of tokens. The first row is what is left of attention if it chooses nothing: every query gets the
# answer of the mean query.
#
# *Image error* is ‖x̂ − x‖ / ‖x‖ of values from −1 to 1. *Shape error* is the same after both lost their mean.

# %%
names = {
    COMMON: "one answer for all",
    "smyrf": "SMYRF",
    "improved-clustered": "improved clustered",
    "near-far": "near–far",
}
seen = watch(model, start)
choices = {name: choose(Way(spec, 0 if spec == COMMON else 4), seen) for spec, name in names.items()}
images = torch.zeros(1 + len(choices), IMAGES, *dense.shape[2:])
errors, shapes, shares = torch.zeros(3, 1 + len(choices), IMAGES).unbind(0)
for seed in range(IMAGES):
    at = given(seed, model.layout.size)
    images[0, seed] = generate(model, at, {}).image
    for row, choice in enumerate(choices.values(), 1):
        made = generate(model, at, choice, seed)
        images[row, seed] = made.image
        shares[row, seed] = made.met / pairs(seen)
        errors[row, seed] = relative_error(images[row, seed], images[0, seed])
        shapes[row, seed] = shape_error(images[row, seed], images[0, seed])
rows = [
    [name, f"{shares[row].mean():.1%}", f"{errors[row].mean():.2%}", f"{shapes[row].mean():.2%}"]
    for row, name in enumerate(choices, 1)
]
HTML(Table(["attention", "pairs met", "image error", "shape error"], rows).html())

# %% [markdown]
# Each row is a mechanism, each column an image. The dense images are on top.

# %%
pictures.sheet(["dense", *choices], images, errors[1:].tolist())

# %% [markdown]
# What each mechanism adds to the dense images. Every row has its own scale.

# %%
pictures.sheet(["dense", *choices], images, errors[1:].tolist(), differences=True)

# %% [markdown]
# SMYRF changes the images most: it drops keys that matter. The others keep every key, near–far through the means of
# far ones. Look at the first row before you praise them. This generator's queries agree about which keys matter, so
# even one answer for all of them costs little.
#
# ## Why: the maps
#
# The singular values of the attention maps, one line for each head, and the error of SMYRF in the same heads. The
# SMYRF paper shows such a decay for BigGAN (Figure 5).

# %%
largest = next(iter(by_tokens(seen).values()))
looked = dict(list(largest.items())[-1:]) if QUICK else largest
way = Way("smyrf", 4)
found = maps.spectra_of(looked, way, maps.errors_of(looked, choose(way, looked)))
draw_spectra(found, title="blocks over 1,024 tokens")

# %% [markdown]
# A few values hold nearly everything. That makes the maps easy for means, and does not help a hash.
#
# ## Memberships
#
# The clusters of the pixels in one hashing round of SMYRF, in the last block over 1,024 tokens: 2 clusters, as grey and
# white, and 128 clusters of 8 pixels (Figure 7). A pixel asks as a query and answers as a key.

# %%
block = list(largest.values())[-1]
grid = clusters.grid_of(block)
draw_grid(clusters.memberships(block, seed=0), grid, image=pictures.coloured(dense[0, 0], grid[0]))

# %% [markdown]
# Neighbours are together more often than chance (dashed), and distant pixels hardly.

# %%
near_by = {f"{count} clusters": each for count, each in clusters.localities({"last": block}, seed=0).items()}
draw_locality(near_by, title="two pixels in one cluster, by distance")

# %%
locality(clusters.hashed(block, 2, seed=0), grid=grid)

# %% [markdown]
# `python -m recipes.terrain` measures all this on 8 images, with standard errors, at 1/2, 1/4 and 1/8 of the pairs. The
# [results](../../docs/results.md) have its figures.
