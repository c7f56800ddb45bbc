"""Batches of utterances that are about as long: little of them is padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.speech.corpus import Corpus, Utterance


class Batch(NamedTuple):
    """Features (B, frames, channels), their lengths, all labels one after the other, and how many each row has."""

    features: Tensor
    lengths: Tensor
    labels: Tensor
    label_lengths: Tensor


def by_frames(lengths: Sequence[int], frames: int, seed: int, epoch: int) -> list[list[int]]:
    """Every utterance once, in batches of at most so many frames, padding included; a longer utterance is alone.

    The first epoch begins with the shortest, as Deep Speech 2 does; the order of others is random. Lengths are blurred
    by a tenth, so that batches of different epochs differ.
    """
    draw = random.Random(f"{seed} {epoch}")
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] * draw.uniform(1, 1.1))
    found: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if found and (len(found[-1]) + 1) * longest <= frames:
            found[-1].append(i)
        else:
            found.append([i])
            longest = lengths[i]
    if epoch:
        draw.shuffle(found)
    return found


def padded(utterances: Sequence[Utterance]) -> tuple[Tensor, Tensor]:
    """Features with zeros behind them, and how many frames are real."""
    lengths = torch.tensor([len(utterance.features) for utterance in utterances])
    return pad_sequence([utterance.features for utterance in utterances], batch_first=True), lengths


def batch_of(utterances: Sequence[Utterance], corpus: Corpus) -> Batch:
    """Some utterances of the training set."""
    labels = [corpus.labels(utterance.text) for utterance in utterances]
    together = torch.tensor([label for each in labels for label in each])
    return Batch(*padded(utterances), together, torch.tensor([len(each) for each in labels]))
