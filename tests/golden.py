"""What must not change by accident: fingerprints of plans and outputs, the public surface, the ops' schemas.

`python -m tests.golden` writes `tests/golden.json` anew. Do that only for a change that is meant to alter plans,
outputs or the interface, and say in the commit what changed and why.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import coterie
import coterie.engine.triton  # which declares ops
import coterie.hf
import coterie.planning.triton  # which does, too
from tests.cases import MECHANISMS, padding, tensors

FILE = Path(__file__).with_name("golden.json")
BACKENDS = ("reference", "native")


class Situation(NamedTuple):
    """Tensors and arguments of one call; `hidden` is the key mask that comes as an `attn_mask`."""

    inputs: tuple[Tensor, Tensor, Tensor]
    settings: dict[str, Any]
    hidden: Tensor | None = None

    def planning(self) -> dict[str, Any]:
        """Those arguments that `Mechanism.plan` takes."""
        names = ("key_mask", "query_mask", "guests", "causal_offset", "scale", "layer")
        found = {name: x for name, x in self.settings.items() if name in names}
        return found if self.hidden is None else found | {"key_mask": self.hidden}


def _pairs() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    mask = torch.randn(1, 4, 63, 63, generator=generator)
    return mask.masked_fill(torch.rand(mask.shape, generator=generator) < 0.3, float("-inf"))


def _situations() -> dict[str, Callable[[], Situation]]:
    def plain() -> Situation:
        return Situation(tensors(dtype=torch.float32), {})

    def padded() -> Situation:
        mask = padding(3, 111, [111, 64, 5], "scattered")
        return Situation(
            tensors(3, 4, 111, key_heads=2, dtype=torch.float32),
            {"key_mask": mask, "enable_gqa": True, "layer": 3, "scale": 0.4},
        )

    def guests() -> Situation:
        real = padding(2, 65, [40, 65], "left")
        return Situation(
            tensors(2, 2, 65, dtype=torch.float32, value_dim=5),
            {"attn_mask": real[:, None, None], "query_mask": real, "guests": ~real, "dense_below": 50},
            real,
        )

    def cross() -> Situation:
        real = padding(2, 97, [97, 70])
        bias = torch.where(real, 0.0, float("-inf"))
        return Situation(
            tensors(2, 4, 50, 97, key_heads=1, dtype=torch.float32),
            {"attn_mask": bias[:, None, None], "causal_offset": torch.tensor([47, 20]), "enable_gqa": True},
            real,
        )

    def dropped() -> Situation:
        return Situation(tensors(1, 2, 63, dtype=torch.float32), {"dropout_p": 0.25})

    def pair_mask() -> Situation:
        return Situation(tensors(1, 4, 63, dtype=torch.float32), {"attn_mask": _pairs()})

    return {each.__name__: each for each in (plain, padded, guests, cross, dropped, pair_mask)}


SITUATIONS = _situations()
CASES = [
    f"{name}/{situation}/{'causal' if causal else 'everyone'}"
    for name in MECHANISMS
    for situation in SITUATIONS
    for causal in (False, True)
]


def fingerprint(case: str, backend: str) -> dict[str, Any]:
    """The plan as a hash, output and gradients as a few weighted sums; or how the call is refused."""
    name, situation, kind = case.split("/")
    mechanism, given = MECHANISMS[name], SITUATIONS[situation]()
    settings: dict[str, Any] = {"is_causal": kind == "causal", "backend": backend}
    q, k, v = (x.requires_grad_() for x in given.inputs)
    torch.manual_seed(7)
    try:
        plan = mechanism.plan(q, k, **given.planning(), **settings)
        out, lse = coterie.attention(q, k, v, mechanism, return_lse=True, **given.settings, **settings)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    results = (out, torch.where(lse == float("-inf"), -1, lse))
    loss = torch.stack([(_weights(x) * x.double()).sum() for x in results]).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    sums = [float((_weights(x) * x.detach().double()).sum()) for x in (*results, *gradients)]
    return {"plan": plan_hash(plan), "sums": [round(x, 6) for x in sums]}


def _weights(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(x.ndim), dtype=torch.float64)


def plan_hash(plan: coterie.Plan) -> str:
    """Of everything a plan says; slots that no group uses hold nothing."""
    said = hashlib.sha256()
    for part in _said(plan):
        said.update(repr((tuple(part.shape), part.flatten().tolist())).encode() if isinstance(part, Tensor) else part)
    return said.hexdigest()[:16]


def _said(plan: coterie.Plan) -> Iterator[Tensor | bytes]:
    settings = (plan.num_queries, plan.num_keys, plan.key_heads, plan.causal, plan.duplicates, len(plan.rounds))
    yield repr(settings).encode()
    yield from (x for x in (plan.offset, plan.self_keys, plan.answer, plan.mass) if x is not None)
    for each in plan.rounds:
        slots = torch.arange(each.query_order.shape[-1])
        used = slots < each.query_offsets[..., -1:]
        yield from (each.query_offsets, torch.where(used, each.query_order, -1), each.key_start, each.key_stop)
        met = _inside(each.key_order, each.key_start, each.key_stop)
        yield torch.where(met, each.key_order, -1)
        if each.bias is not None:
            yield torch.where(met, each.bias, -1)
        if each.skip is not None:
            yield torch.where(used[..., None], each.skip, -1)
        if each.counts is not None:
            inside = torch.arange(each.counts.shape[-1]) < each.key_sizes[..., None]
            yield torch.where(inside, each.counts, -1)
        yield repr(each.window).encode()
    for means in (plan.query_means, plan.key_means):
        if means is not None:
            yield from (means.start, means.stop)
            yield torch.where(_inside(means.order, means.start, means.stop), means.order, -1)
            yield from () if means.positions is None else (means.positions,)


def _inside(order: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Which slots lie in some [start, stop)."""
    found = torch.zeros(order.shape, dtype=torch.bool)
    for b in range(order.shape[0]):
        for h in range(order.shape[1]):
            for first, last in zip(start[b, h].tolist(), stop[b, h].tolist(), strict=True):
                found[b, h, first:last] = True
    return found


def surface() -> dict[str, Any]:
    """Public names with the names, kinds and defaults of their parameters; the schemas of the native ops."""
    named = {name: getattr(coterie, name) for name in coterie.__all__}
    named |= {f"hf.{name}": getattr(coterie.hf, name) for name in coterie.hf.__all__}
    named |= {f"nn.{name}": getattr(coterie.nn, name) for name in coterie.nn.__all__}
    found = {}
    for name, each in named.items():
        if inspect.isclass(each):
            members = {m: x for base in reversed(each.__mro__) for m, x in vars(base).items() if _of_coterie(base)}
            public = sorted(m for m in members if not m.startswith("_"))
            found[name] = [_signature(each), *(f"{m}{_signature(getattr(each, m))}" for m in public)]
        else:
            found[name] = [_signature(each)]
    ops = sorted(op for op in torch._C._dispatch_get_all_op_names() if op.startswith("coterie::"))
    schemas = [str(torch._C._get_schema(*(op.split(".") if "." in op else (op, "")))) for op in ops]
    return {"names": found, "schemas": schemas, "mechanisms": {k: m.to_json() for k, m in MECHANISMS.items()}}


def _of_coterie(base: type) -> bool:
    return base.__module__.startswith("coterie")


def _signature(each: object) -> str:
    if not callable(each):
        return ""
    parameters = inspect.signature(each).parameters.values()
    written = [
        f"{'*' * (p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))}{'/' * (p.kind is p.KEYWORD_ONLY)}{p.name}"
        + ("" if p.default is p.empty or "object at 0x" in repr(p.default) else f"={p.default!r}")
        for p in parameters
    ]
    return "(" + ", ".join(written) + ")"


def main() -> None:
    """Write the file anew."""
    calls = {backend: {case: fingerprint(case, backend) for case in CASES} for backend in BACKENDS}
    FILE.write_text(json.dumps({"surface": surface(), "calls": calls}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
