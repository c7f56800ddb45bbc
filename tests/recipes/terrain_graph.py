"""A terrain generator as an ONNX graph, written down node by node: small, random, laid out as the real one is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """Nodes and weights; every method adds to them and gives the name of its output."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.draw = np.random.default_rng(seed)

    def add(self, kind, *inputs, outputs=1, **attributes):
        names = [f"{kind.lower()}_{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, values, name=None, kind=np.float32):
        name = name or f"val_{len(self.weights)}"
        self.weights[name] = np.asarray(values, dtype=kind)
        return name

    def random(self, shape, size, name=None, mean=0.0):
        return self.weight(mean + size * self.draw.standard_normal(shape), name)

    def silu(self, x):
        return self.add("Mul", x, self.add("Sigmoid", x))

    def linear(self, x, name, inside, outside):
        weight = self.random((outside, inside), inside**-0.5, f"{name}.weight")
        return self.add("Gemm", x, weight, self.random(outside, 0.1, f"{name}.bias"), transB=1)

    def conv(self, x, name, inside, outside, side, size=1.0):
        weight = self.random((outside, inside, side, side), size / (inside * side**2) ** 0.5, f"{name}.weight")
        pads = [side // 2] * 4
        bias = self.random(outside, 0.1, f"{name}.bias")
        return self.add("Conv", x, weight, bias, pads=pads, kernel_shape=[side, side])

    def norm(self, x, channels):
        """Its scale and shift go without a name, as in what torch exports."""
        rows = self.add("Reshape", x, self.weight([0, 32, -1], kind=np.int64))
        ones, zeros = self.weight(np.ones(32)), self.weight(np.zeros(32))
        flat = self.add("InstanceNormalization", rows, ones, zeros, epsilon=1e-5)
        back = self.add("Reshape", flat, self.add("Shape", x))
        scaled = self.add("Mul", back, self.random((channels, 1, 1), 0.3, mean=1.0))
        return self.add("Add", scaled, self.random((channels, 1, 1), 0.3))

    def resample(self, x, by):
        if by == "half":
            return self.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
        if by == "double":
            scales = self.weight([1, 1, 2, 2])
            modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            return self.add("Resize", x, "", scales, **modes)
        return x

    def residual(self, x, told, name, inside, outside, by=None):
        h = self.resample(self.silu(self.norm(x, inside)), by)
        x = self.resample(x, by)
        h = self.conv(h, f"{name}.in_layers.2", inside, outside, 3)
        change = self.linear(told, f"{name}.emb_layers.1", 128, 2 * outside)
        change = self.add("Unsqueeze", change, self.weight([2, 3], kind=np.int64))
        scale, shift = self.add("Split", change, outputs=2, axis=1, num_outputs=2)
        h = self.add("Mul", self.norm(h, outside), self.add("Add", scale, self.weight(1.0)))
        h = self.silu(self.add("Add", h, shift))
        h = self.conv(h, f"{name}.out_layers.3", outside, outside, 3)
        if inside != outside:
            x = self.conv(x, f"{name}.skip_connection", inside, outside, 1)
        return self.add("Add", x, h)

    def attention(self, x, name, width, side):
        """Heads of 32 channels, one after the other; queries and keys are each scaled by 32 to the power of −1/4."""
        rows = self.conv(self.norm(x, width), f"{name}.qkv", width, 3 * width, 1, size=1.5)
        q, k, v = self.add("Split", rows, outputs=3, axis=1, num_outputs=3)
        heads = self.weight([-1, 32, side * side], kind=np.int64)
        q, k = (self.add("Mul", part, self.weight(32**-0.25)) for part in (q, k))
        q, k, v = (self.add("Reshape", part, heads) for part in (q, k, v))
        weights = self.add("Softmax", self.add("Einsum", q, k, equation="bct,bcs->bts"), axis=-1)
        out = self.add("Einsum", weights, v, equation="bts,bcs->bct")
        out = self.add("Reshape", out, self.weight([-1, width, side, side], kind=np.int64))
        return self.add("Add", x, self.conv(out, f"{name}.proj_out", width, width, 1))

    def network(self, noisy, sigma, difficulty, size):
        """Levels of 32, 32 and 64 channels, one block each; the last two attend."""
        widths, last = (32, 32, 64), 2
        spread = self.weight(np.exp(-np.log(10_000) * np.arange(16) / 16)[None])
        one = self.weight([1], kind=np.int64)
        angle = self.add("Mul", self.add("Log", sigma), self.weight(250.0))
        angle = self.add("Mul", self.add("Unsqueeze", angle, one), spread)
        angles = self.add("Concat", self.add("Cos", angle), self.add("Sin", angle), axis=-1)
        time = self.silu(self.linear(angles, "network.time_embed.0", 32, 128))
        time = self.linear(time, "network.time_embed.2", 128, 128)
        label = self.add("Unsqueeze", difficulty, one)
        label = self.silu(self.linear(label, "network.label_emb.0", 1, 128))
        label = self.linear(label, "network.label_emb.2", 128, 128)
        told = self.silu(self.add("Add", time, label))
        x = self.conv(noisy, "network.input_blocks.0.0", 1, 32, 3)
        kept, width, index, side = [(x, 32)], 32, 1, size
        for level, wide in enumerate(widths):
            x = self.residual(x, told, f"network.input_blocks.{index}.0", width, wide)
            x = self.attention(x, f"network.input_blocks.{index}.1", wide, side) if level else x
            kept, width, index = [*kept, (x, wide)], wide, index + 1
            if level < last:
                x, side = self.residual(x, told, f"network.input_blocks.{index}.0", wide, wide, "half"), side // 2
                kept, index = [*kept, (x, wide)], index + 1
        x = self.residual(x, told, "network.middle_block.0", width, width)
        x = self.attention(x, "network.middle_block.1", width, side)
        x = self.residual(x, told, "network.middle_block.2", width, width)
        for index in range(6):
            level, name = last - index // 2, f"network.output_blocks.{index}"
            wide = widths[level]
            beside, more = kept.pop()
            x = self.residual(self.add("Concat", x, beside, axis=1), told, f"{name}.0", width + more, wide)
            x, width = self.attention(x, f"{name}.1", wide, side) if level else x, wide
            if level and index % 2:
                x, side = self.residual(x, told, f"{name}.2", wide, wide, "double"), 2 * side
        return self.conv(self.silu(self.norm(x, width)), "network.out.2", width, 1, 3, size=0.3)

    def generator(self, size):
        """The image: what the network says and what it is given, each times what the noise's strength makes of it."""
        quarter, two = self.weight(0.25), self.weight(2.0)
        beyond = self.add("Sub", "sigma", self.weight(0.002))
        kept = self.add("Div", quarter, self.add("Add", self.add("Pow", beyond, two), quarter))
        root = self.add("Sqrt", self.add("Add", self.add("Pow", "sigma", two), quarter))
        factor = self.add("Div", self.add("Mul", beyond, self.weight(0.5)), root)
        axes = self.weight([1, 2, 3], kind=np.int64)
        kept, factor, less = (
            self.add("Unsqueeze", each, axes) for each in (kept, factor, self.add("Reciprocal", root))
        )
        found = self.network(self.add("Mul", less, "noisy"), "sigma", "difficulty", size)
        both = self.add("Add", self.add("Mul", factor, found), self.add("Mul", kept, "noisy"))
        low, high = self.weight(-1.0), self.weight(1.0)
        self.nodes.append(helper.make_node("Clip", [both, low, high], ["denoised"]))


def model(size: int = 16, seed: int = 0) -> onnx.ModelProto:
    """Images of 16 × 16 pixels, attention over 64 and 16 of them."""
    graph = Graph(seed)
    graph.generator(size)
    shapes = {"noisy": ["batch", 1, size, size], "sigma": ["batch"], "difficulty": ["batch"]}
    made = helper.make_graph(
        graph.nodes,
        "terrain",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("denoised", TensorProto.FLOAT, shapes["noisy"])],
        [numpy_helper.from_array(each, name) for name, each in graph.weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write(path: Path, change=lambda graph: None, size: int = 16) -> Path:
    """Such a file, with something changed in its graph."""
    made = model(size)
    change(made.graph)
    path.write_bytes(made.SerializeToString())
    return path
