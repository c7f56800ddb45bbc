"""The generator's weights, from the ONNX file of its package or from another one of the same layout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.layout import expect_same
from recipes.terrain.network import HEAD, Generator, Layout

PACKAGE = "adaptive-terrain-diffusion"
_GET = f"pip install --no-deps {PACKAGE}"

# An exported graph keeps the names of all weights but those of norms. A norm goes by the convolution that it feeds.
_NORM_BEFORE = {"in_layers.2": "in_layers.0", "out_layers.3": "out_layers.0", "qkv": "norm", "out.2": "out.0"}


def load(path: Path | None = None) -> Generator:
    """The generator with the weights of this file; None is that of the installed package."""
    file = _installed() if path is None else path
    graph = _read(file)
    found = _named(graph, file)
    model = Generator(_layout(found, _size(graph, file), file))
    expect_same(found, model.state_dict(), file)
    model.load_state_dict(found)
    return model.eval().requires_grad_(False)


def _installed() -> Path:
    spec = find_spec("terrain_diffusion")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise UserError(f"the terrain generator is not installed: {_GET}")
    file = next(iter(sorted(Path(folders[0]).glob("weights/*.onnx"))), None)
    if file is None:
        raise UserError(f"the package {PACKAGE} that is installed has no weights/*.onnx: {_GET}==0.4.2")
    return file


def _read(file: Path) -> Any:
    """The graph of an ONNX file."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError("weights are read with the package onnx, which is not installed: pip install onnx") from error
    try:
        return onnx.load_model_from_string(file.read_bytes()).graph
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except DecodeError as error:
        raise UserError(f"{file} is not an ONNX file, or not a whole one.") from error


def _named(graph: Any, file: Path) -> dict[str, Tensor]:
    """Every weight of the network by name."""
    from onnx.numpy_helper import to_array

    try:
        arrays = {each.name: torch.from_numpy(to_array(each).copy()) for each in graph.initializer}
    except (ValueError, TypeError) as error:  # fewer numbers than its shape has, or numbers in another file
        raise UserError(f"{file} has weights that cannot be read: {next(iter(str(error).splitlines()), '')}") from error
    named = {name: each for name, each in arrays.items() if name.startswith("network.")}
    if not named:
        raise UserError(f"{file} holds no terrain generator: it has no weights called network.….")
    made = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        for conv, norm in _NORM_BEFORE.items() if node.op_type == "Conv" else ():
            if (weight := node.input[1]).endswith(f".{conv}.weight"):
                name = weight.removesuffix(f"{conv}.weight") + norm
                named[f"{name}.weight"], named[f"{name}.bias"] = _norm(node.input[0], made, arrays, weight, file)
    return named


def _norm(tensor: str, made: dict[str, Any], arrays: dict[str, Tensor], conv: str, file: Path) -> list[Tensor]:
    """Scale and shift of the norm whose output becomes this tensor: back along first inputs, up to the norm."""
    found: list[Tensor] = []
    while (node := made.get(tensor)) is not None and node.op_type != "Conv":
        if node.op_type == "InstanceNormalization" and len(found) == 2:
            return found[::-1]  # it is scaled first, and met last
        if node.op_type in ("Mul", "Add") and node.input[1] in arrays:
            found.append(arrays[node.input[1]].flatten())
        tensor = node.input[0]
    raise UserError(f"{file} is laid out in another way: there is no norm before {conv}.")


def _size(graph: Any, file: Path) -> int:
    shapes = {each.name: [side.dim_value for side in each.type.tensor_type.shape.dim] for each in graph.input}
    shape = shapes.get("noisy", [])
    if len(shape) != 4 or shape[2] != shape[3] or not shape[2]:
        raise UserError(f"{file} has no input noisy of square images: its inputs are {shapes}.")
    return int(shape[2])


def _layout(found: dict[str, Tensor], size: int, file: Path) -> Layout:
    """Read from the way up: the last block of every level but the finest has a second residual block."""
    count = len({name.split(".")[2] for name in found if name.startswith("network.output_blocks.")})
    ups = [
        index
        for index in range(count)
        if any(f"network.output_blocks.{index}.{part}.in_layers.2.weight" in found for part in (1, 2))
    ]
    levels = len(ups) + 1
    ends = [(level + 1) * count // levels - 1 for level in range(levels)]
    firsts = [found.get(f"network.output_blocks.{end}.0.in_layers.2.weight") for end in ends]
    if not count or ends[:-1] != ups or any(each is None for each in firsts) or size % 2 ** (levels - 1):
        raise UserError(f"{file} is laid out in another way: its output_blocks are no levels of as many blocks each.")
    widths = tuple(each.shape[0] for each in reversed(firsts) if each is not None)
    attends = tuple(f"network.output_blocks.{end}.1.qkv.weight" in found for end in reversed(ends))
    if any(width % HEAD for width in widths):
        raise UserError(f"{file} has levels of {widths} channels: expected multiples of {HEAD}.")
    return Layout(widths, attends, count // levels - 1, size)
