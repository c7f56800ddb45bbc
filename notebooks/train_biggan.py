# %% [markdown]
# # Train a small SMYRF-BigGAN
#
# SMYRF's authors moved the attention of BigGAN to full resolution, and trained it from scratch on portraits. This
# notebook trains two tiny ones on portraits of 32 × 32 pixels, with the code of `recipes/biggan`: one with dense
# attention over all 1,024 pixels, one with SMYRF. Both have the same seed.
#
# A few hundred steps on a CPU give blurred faces. `python -m recipes.biggan` trains for longer, and with several seeds.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import HTML
from recipes.biggan.attention import attend_by, blocks
from recipes.biggan.config import Config
from recipes.biggan.pretrained import from_pretrained, save_pretrained
from recipes.biggan.sampling import draw_y, draw_z, generate, sample
from recipes.biggan.training import Settings, Training
from recipes.common.progress import bar

from coterie.tables import Table
from recipes.biggan import memberships, portraits, quality, running, sheets

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
STEPS, BATCH, CH = (4, 4, 2) if QUICK else (400, 16, 8)
LOOK = max(1, STEPS // 8)
work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Portraits
#
# Two packages draw them, by seed, at any resolution. Some are kept aside to judge by.

# %%
count, tests = (48, 16) if QUICK else (1024, 256)
every = portraits.load(count, 32, work)
train, test = running.sets(every, tests)
sheets.grid(train.pixels[:24], columns=8, zoom=3)

# %% [markdown]
# ## Two generators
#
# Attention is at 32², the full resolution: 1,024 pixels ask, 256 squares of 2 × 2 pixels answer. SMYRF starts with 4
# rounds of 8 clusters, which is half of the pairs. `max_error` lets a schedule choose the rounds as training goes on
# (supplement §16.1): as many as its error bound needs, at most 8.
#
# A step is two of the discriminator and one of the generator. Now and then we look at what the same z give.

# %%
config = Config(resolution=32, ch=CH, dim_z=24, attention=(32,))
smyrf = "smyrf:rounds=4,cluster_size=128,resample=true"
runs, films = {}, {}

with bar(2) as shown:
    for name, mechanism, max_error in (("dense", "dense", None), ("SMYRF", smyrf, 0.5)):
        settings = Settings(
            steps=STEPS,
            batch=BATCH,
            ttur="code",
            rate_factor=4.0,
            mechanism=mechanism,
            max_error=max_error,
            look=LOOK,
        )
        training = runs[name] = Training(config, settings, train, seed=0)
        z, y = draw_z(training.g, 32, None, 0), draw_y(training.g, 32, 0)
        film = films[name] = [generate(training.g, z[:8], y[:8])]
        shown.begin(name, STEPS)
        while training.step < STEPS:
            training.advance()
            shown.tick()
            if training.step % LOOK == 0:
                film.append(generate(training.g, z[:8], y[:8]))
        shown.done()

# %% [markdown]
# ## Losses

# %%
figure, row = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharey=True)
for axes, (name, training) in zip(row, runs.items(), strict=True):
    axes.plot([losses.d for losses in training.losses], label="discriminator", linewidth=0.8)
    axes.plot([losses.g for losses in training.losses], label="generator", linewidth=0.8)
    axes.set(title=name, xlabel="step")
row[0].legend()
plt.show()

# %% [markdown]
# ## What they draw
#
# The dense one:

# %%
sheets.grid(generate(runs["dense"].g, z, y), columns=8, zoom=3)

# %% [markdown]
# The one with SMYRF, from the same z:

# %%
sheets.grid(generate(runs["SMYRF"].g, z, y), columns=8, zoom=3)

# %% [markdown]
# The film of the latter: a row for each look, from the first step to the last, with the same z in every row.

# %%
sheets.grid(torch.cat(films["SMYRF"]), columns=8, zoom=3)

# %% [markdown]
# ## Rounds over training
#
# What the schedule chose, and the error of the attention map that it estimated. The supplement expects many rounds
# while maps are diffuse, and fewer as training makes them sparse. A training this short may not get there.

# %%
chosen = runs["SMYRF"].rounds
assert chosen is not None
rows = [[str(each.step), each.module, str(each.rounds), f"{each.error:.3f}"] for each in chosen.log]
HTML(Table(["from step", "block", "rounds", "error"], rows, words=(1,)).html())

# %% [markdown]
# ## Are the weights interchangeable?
#
# Attention has no parameters, so each generator runs with either mechanism. The figures are Fréchet distances to
# portraits that no network saw, in the features of a small network trained on portraits. **They are no FID.**

# %%
features = quality.train(train, 10 if QUICK else 300)
real = quality.describe(features, test)
rows = []
for name, training in runs.items():
    own = str(next(blocks(training.g)).mechanism)
    with_smyrf = own if name == "SMYRF" else smyrf
    judged = [
        quality.judge(real, quality.describe(features, sample(attend_by(training.g, each), tests, 0))).distance
        for each in ("dense", with_smyrf)
    ]
    attend_by(training.g, own)
    rows.append([f"trained {name}", *(f"{each:.2f}" for each in judged)])
HTML(Table(["", "run dense", "run with SMYRF"], rows).html())

# %% [markdown]
# ## The clusters of its pixels
#
# One hashing round of SMYRF on the queries of the first image, 2 clusters and 128 (Figure 7). A key stands for a square
# of four pixels. `python -m recipes.biggan.memberships` measures how local they are.

# %%
generator = runs["SMYRF"].g
first = generate(generator, z[:1], y[:1])
(block,) = memberships.watch(generator.eval(), z[:1], y[:1]).values()
memberships.drawn(first[0], block, seed=0)

# %% [markdown]
# ## Keep it
#
# Weights as safetensors, with a config and a model card. Whoever loads them chooses the attention.

# %%
save_pretrained(generator, work / "portraits", about={"steps": STEPS})
again = from_pretrained(work / "portraits", mechanism="dense")
apart = (generate(again, z, y) - generate(attend_by(generator, "dense"), z, y)).abs().max()
print(f"{sorted(path.name for path in (work / 'portraits').iterdir())}; images differ by {float(apart):.0e}")
