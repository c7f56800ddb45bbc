"""What the attention of some models is called with, caught once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import coterie.hf
from benchmarks.fits import peaked_encoder, peaked_input
from benchmarks.models import Heads, MiniLM, SmolLM, attending, dense
from benchmarks.texts import documentation
from coterie.hosts import watch_dense
from coterie.observe import Seen

_LAYERS = (0, 4, 9, 14, 18, 22, 27)  # of SmolLM2's 30


def smollm(length: int) -> list[Heads]:
    """Some layers of SmolLM2 on Python's documentation."""
    model = SmolLM()
    ids = model.pieces("\n\n".join(documentation()), length, 1)[0]
    return [
        heads for heads in _caught(lambda: model.model.model(input_ids=ids, use_cache=False)) if heads.layer in _LAYERS
    ]


def minilm(length: int) -> list[Heads]:
    """All layers of MiniLM; from 512 tokens on its positions are interpolated."""
    model = MiniLM()
    if length > 512:
        coterie.hf.extend_positions(model.model, length)
    ids = torch.tensor([model.tokens("\n\n".join(documentation()), length)])
    return _caught(lambda: model.embed(ids))


def encoder(length: int) -> list[Heads]:
    """Both layers of the encoder whose attention is peaked."""
    found: list[Heads] = []

    def look(_: str, seen: Seen) -> None:
        found.append(Heads(seen.q, seen.k, seen.v, seen.q.shape[-1] ** -0.5, False, len(found)))

    with torch.no_grad():
        watch_dense(peaked_encoder(), peaked_input(0, length), look)
    return found


def captured(name: str, make: Callable[[int], list[Heads]], length: int, folder: Path) -> list[Heads]:
    """What `make` catches, from the folder if it is there."""
    file = folder / f"{name}-{length}.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, make(length))
    return _read(file)


def _caught(run: Callable[[], object]) -> list[Heads]:
    found: list[Heads] = []

    def catch(heads: Heads) -> Tensor:
        found.append(heads._replace(layer=heads.layer or len(found)))  # BERT's do not know their index
        return dense(heads)

    with attending(catch):
        run()
    return found


def _write(file: Path, layers: list[Heads]) -> None:
    tensors = {f"{x.layer}.{name}": getattr(x, name).contiguous() for x in layers for name in ("q", "k", "v")}
    save_file(tensors, file, {"scale": str(layers[0].scale), "causal": str(layers[0].causal)})


def _read(file: Path) -> list[Heads]:
    with safe_open(file, "pt") as stored:
        about = stored.metadata()
        scale, causal = float(about["scale"]), about["causal"] == "True"
        layers = sorted({int(name.partition(".")[0]) for name in stored.keys()})  # noqa: SIM118

        def layer(index: int) -> Heads:
            q, k, v = (stored.get_tensor(f"{index}.{name}") for name in ("q", "k", "v"))
            return Heads(q, k, v, scale, causal, index)

        return [layer(index) for index in layers]
