# %% [markdown]
# # Speech with CTC: trained densely, run clustered
#
# A small transformer learns to write down strings of spoken digits. Then the same weights run with other mechanisms:
# who still hears right, and how long does it take? `python -m recipes.speech` is the whole experiment, with models that
# were trained with each mechanism.
#
# Set `COTERIE_FSDD` to a folder with the Free Spoken Digit Dataset (`recordings.zip`, or its recordings). Without it
# the notebook makes a stand-in: a telephone's touch tones, at several speeds and with noise.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import soundfile
import torch
from IPython.display import HTML
from recipes.common.progress import bar
from recipes.speech.decoding import greedy, prefix_beam
from recipes.speech.digits import Range
from recipes.speech.network import Config, Recogniser, attend_by
from recipes.speech.testing import Reader, errors, hear, milliseconds
from recipes.speech.training import Settings, Training, train

from coterie.tables import Table
from recipes.speech import loading

QUICK = os.environ.get("COTERIE_QUICK") == "1"  # less of everything, to see that it runs
RATE = 8000

# %% [markdown]
# ## The recordings


# %%
def touch_tone(digit: int, seconds: float, draw: np.random.Generator) -> np.ndarray:
    """What a telephone sends for a digit, with noise."""
    row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
    t = np.arange(int(seconds * RATE)) / RATE
    tones = np.sin(2 * np.pi * (697, 770, 852, 941)[row] * t) + np.sin(2 * np.pi * (1209, 1336, 1477)[column] * t)
    return 0.2 * tones * np.hanning(len(t)) + 0.05 * draw.standard_normal(len(t))


def stand_in(folder: Path, numbers: int) -> Path:
    """Recordings of two telephones, called as those of the data set."""
    draw = np.random.default_rng(0)
    for name, speed in (("slow", 0.3), ("quick", 0.2)):
        for digit in range(10):
            for number in range(numbers):
                seconds = speed * draw.uniform(0.8, 1.2)
                soundfile.write(folder / f"{digit}_{name}_{number}.wav", touch_tone(digit, seconds, draw), RATE)
    return folder


folder = os.environ.get("COTERIE_FSDD") or str(stand_in(Path(tempfile.mkdtemp()), 8 if QUICK else 25))
last = Range(4, 8) if QUICK else Range(20, 40)
corpus = loading.load(folder, first=Range(1, 3), last=last, held_out=[], spelled=False, tests=4 if QUICK else 20)
longest = max(corpus.test, key=lambda each: len(each.text))
print(f"{len(corpus.test)} strings to test on; the longest: {longest.text}")

# %% [markdown]
# What the model hears: 40 channels of a log-mel spectrogram, 100 frames a second.

# %%
figure, axes = plt.subplots(figsize=(9, 2.5))
axes.imshow(
    longest.features[:400].T, origin="lower", aspect="auto", extent=(0, min(400, len(longest.features)) / 100, 0, 40)
)
axes.set(xlabel="seconds", ylabel="mel channel", title="the beginning of the longest string")
plt.show()

# %% [markdown]
# ## Training, densely
#
# CTC adds up the probability of every way in which the digits can lie in time. Strings are short at first: it hardly
# starts on long ones.

# %%
config = Config(corpus.channels, len(corpus.symbols), layers=2 if QUICK else 3, dim=32 if QUICK else 96, heads=2)
settings = Settings(epochs=3 if QUICK else 24, frames=4000, rate=2e-3)
training = Training(config, settings, corpus, "dense", seed=0)


def error(model: Recogniser) -> float:
    """The digit error of the test."""
    return float(errors(corpus, hear(model, corpus.test, settings.frames), Reader(corpus))["digit"])


with tempfile.TemporaryDirectory() as work, bar(1) as shown:
    shown.begin("training", settings.epochs)
    came = train(training, Path(work), shown, error)
model = training.model

figure, (losses, seen) = plt.subplots(1, 2, figsize=(9, 3))
losses.plot(range(1, settings.epochs + 1), came["losses"])
losses.set(xlabel="epoch", ylabel="CTC loss for each digit")
seen.plot(*zip(*came["looks"], strict=True), marker="o")
seen.set(xlabel="epoch", ylabel="digit error", ylim=(0, None))
figure.tight_layout()
plt.show()

# %% [markdown]
# ## From probabilities to digits
#
# At most tokens the blank is most probable; digits stand out as peaks. The best path is the most probable symbol at
# each token; a beam search adds up the paths that say the same.

# %%
with torch.no_grad():
    (heard,) = hear(model, [longest], settings.frames)
figure, axes = plt.subplots(figsize=(9, 2.5))
axes.plot(heard[:200].exp())
axes.set(xlabel="token", ylabel="probability", title=f"of the blank and {len(corpus.symbols)} digits")
plt.show()
best = prefix_beam(heard, 8, 1e-4)[0]
print("said     ", longest.text)
print("best path", corpus.text(greedy(heard)))
print("beam of 8", corpus.text(best.labels), f"(log probability {best.log_probability:.2f})")

# %% [markdown]
# ## The same weights with other mechanisms
#
# None of them was trained with. Time is that of a string alone, without decoding; tables of the recipe also have models
# that were trained with each mechanism.

# %%
mechanisms = [
    "dense",
    "near-far:near=32",
    "improved-clustered:clusters=50",
    "clustered:clusters=50",
    "smyrf:rounds=4,cluster_size=32",
]
times = milliseconds(model, corpus.test[:4], mechanisms, repeats=1 if QUICK else 5)
found = {name: error(attend_by(model, name)) for name in mechanisms}
rows = [[name, f"{found[name]:.1%}", f"{times[name]:.1f}"] for name in mechanisms]
HTML(Table(["run with", "digit error", "ms a string"], rows).html())

# %%
figure, axes = plt.subplots(figsize=(6, 3.5))
for name in mechanisms:
    axes.plot(times[name], 100 * found[name], "o", label=name)
axes.set(xlabel="ms a string", ylabel="digit error, %", title="one model, trained densely", ylim=(-2, None))
axes.legend(fontsize=8)
plt.show()
