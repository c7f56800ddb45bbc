"""`make search`: how near–far finds its near keys, what each way finds, and what it costs.

smollm       causal: 7 layers of SmolLM2-135M at 8,192 tokens
minilm-512   bidirectional: all layers of MiniLM
minilm-2048  the same with interpolated positions
encoder      bidirectional: the peaked encoder of `make fits`, 16,384 tokens

Shipped searches run as they are: near–far with other settings of its `search`, and any mechanism that is named.
Searches that are not shipped, and budgets by mass, are simulated (benchmarks/simulated.py): quality without time.

picked      keys that are met exactly and had to be chosen; own and previous chunk and the first 4 keys are not counted
recall      share of a query's own best keys, as many as `near`, that it meets exactly
mass        share of its softmax over all keys that it meets exactly
error       ‖out − dense‖ / ‖dense‖, mean over heads and layers
plan, execute  milliseconds of the middle layer; all take turns, medians
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import coterie
from benchmarks import captured, simulated
from benchmarks.losses import Cost, Reading, cost, keys_met, read
from benchmarks.models import Heads, SmolLM, dense
from benchmarks.simulated import CHUNK, SINKS, Caught, Scene
from benchmarks.texts import documentation
from coterie import Mechanism, Plan
from coterie.files import write_json
from coterie.plan.slices import restrict
from coterie.plan.tiles import PlanTiles
from coterie.timing import interleaved

LEAF = coterie.NearFar.search.leaf
SHARES = (0.8, 0.9, 0.95, 0.98)
# Each changes one thing of near–far's own search.
KNOBS: dict[str, tuple[int, ...]] = {
    "leaf": (1, 2, 4, 8, 12),  # causal alone
    "groups": (14, 57, 228),  # not causal alone
    "party": (1, 4, 8, 16),
    "reach": (12, 24, 48, 0),
    "least": (1, 3072, 6144),  # causal alone
}


class Setting(NamedTuple):
    """Where searches are compared."""

    make: Callable[[int], list[Heads]]
    length: int
    base: str  # the mechanism whose search is varied


SETTINGS = {
    "smollm": Setting(captured.smollm, 8192, "near-far:near=176"),
    "minilm-512": Setting(captured.minilm, 512, "near-far:near=64,key_clusters=32"),
    "minilm-2048": Setting(captured.minilm, 2048, "near-far:near=64"),
    "encoder": Setting(captured.encoder, 16384, "near-far:near=128"),
}


class Variant(NamedTuple):
    """A mechanism, and what is changed in near–far's search."""

    mechanism: Mechanism
    knobs: dict[str, int]

    @staticmethod
    def read(text: str) -> Variant:
        """From `near-far:near=176` or `near-far:near=176 leaf=8,reach=0`."""
        spec, _, rest = text.strip().partition(" ")
        pairs = [item.strip().partition("=") for item in rest.split(",") if item.strip()]
        for name, _, value in pairs:
            if name not in KNOBS or not value.isdecimal():
                raise ValueError(f"search: expected some of {', '.join(KNOBS)} with whole numbers, got {name}={value}")
        return Variant(coterie.as_mechanism(spec), {name: int(value) for name, _, value in pairs})

    def __str__(self) -> str:
        return " ".join(
            [str(self.mechanism), ",".join(f"{name}={value}" for name, value in self.knobs.items())]
        ).strip()

    @contextmanager
    def searching(self) -> Iterator[Mechanism]:
        """The mechanism; inside, near–far searches so."""
        near_far: Any = coterie.NearFar
        if not self.knobs:
            yield self.mechanism
            return
        before = near_far.search
        near_far.search = before._replace(**self.knobs)
        try:
            yield self.mechanism
        finally:
            near_far.search = before

    def plan(self, heads: Heads) -> Plan:
        """Its plan for a layer."""
        with self.searching() as mechanism:
            return mechanism.plan(heads.q, heads.k, is_causal=heads.causal, scale=heads.scale, layer=heads.layer)


def variants(base: str) -> list[Variant]:
    """Near–far as it is, and with each of its knobs turned alone."""
    mechanism, shipped = coterie.as_mechanism(base), coterie.NearFar.search
    turned = [{knob: value} for knob, values in KNOBS.items() for value in values if value != getattr(shipped, knob)]
    return [Variant(mechanism, knobs) for knobs in [{}, *turned]]


class Truth:
    """Dense attention of a layer: its output, and for some of its queries all weights."""

    def __init__(self, heads: Heads) -> None:
        length = heads.q.shape[2]
        self.heads, self.out = heads, dense(heads)
        self.rows = torch.linspace(0, length - 1, 256).long().unique()
        if heads.causal:
            self.rows = torch.cat([torch.arange(at * CHUNK, (at + 1) * CHUNK) for at in simulated.places(length)])
        keys = torch.arange(length)
        k = heads.k[0].repeat_interleave(heads.q.shape[1] // heads.k.shape[1], 0)
        scores = heads.scale * heads.q[0, :, self.rows] @ k.mT
        self.pickable = torch.ones(len(self.rows), length, dtype=torch.bool)
        if heads.causal:
            scores.masked_fill_(keys > self.rows[:, None], -torch.inf)
            self.pickable = (keys >= SINKS) & (keys < (self.rows[:, None] // CHUNK - 1) * CHUNK)
        self.weights = scores.softmax(-1)
        self.choice = scores.masked_fill_(~self.pickable, -torch.inf)
        self._best: dict[int, Tensor] = {}

    def best(self, near: int) -> Tensor:
        """Each query's own best keys, (H, R, N) bool."""
        if near not in self._best:
            self._best = {near: simulated.best(self.choice, near) & self.pickable}
        return self._best[near]

    def caught(self, variant: Variant, near: int) -> Caught:
        """What a plan is worth here."""
        plan = variant.plan(self.heads)
        out = coterie.grouped_attention(*self.heads[:3], plan, scale=self.heads.scale).out
        met, best = exactly_met(plan, self.rows), self.best(getattr(variant.mechanism, "near", near))
        mass = float(self.weights.masked_fill(~met, 0).sum(-1).mean())
        return Caught(
            float((met & self.pickable).sum(-1).float().mean()),
            float(((met & best).sum(-1) / best.sum(-1).clamp(min=1)).mean()),
            mass,
            1 - mass,
            float(((out - self.out).flatten(2).norm(dim=-1) / self.out.flatten(2).norm(dim=-1)).mean()),
        )


def exactly_met(plan: Plan, rows: Tensor) -> Tensor:
    """Which keys some queries of the first sample meet themselves, not through a mean, (H, R, Nk) bool."""
    place = torch.full((plan.query_rows,), len(rows))
    place[rows] = torch.arange(len(rows))
    counts = torch.zeros(plan.heads, len(rows) + 1, plan.key_rows, dtype=torch.int32)
    for tile in PlanTiles(restrict(plan, rows[None]))():
        where = (tile.heads[:, None, None], place[tile.rows][:, :, None], tile.keys[:, None, :])
        counts.index_put_(where, tile.meets.int(), accumulate=True)
    return counts[:, :-1, : plan.num_keys] > 0


# --- simulated --------------------------------------------------------------------------------------------------------


def not_shipped() -> dict[str, Callable[[Scene, int], Tensor]]:
    """Searches by name: which keys each query picks."""
    found: dict[str, Callable[[Scene, int], Tensor]] = {
        f"all keys, leaf {leaf}": partial(_everything, leaf) for leaf in (1, LEAF, 32)
    }
    found["shortlist of 4·near by the mean of 8 leaves, from which leaves pick"] = _shortlist
    for rank in simulated.RANKS:
        for reach in (6, 12):
            found[f"clusters by {rank}, reach {reach}"] = partial(_in_clusters, rank, reach)
    for kind in ("bfloat16", "int8"):
        found[f"all keys in {kind}, best 2·near again"] = partial(_low_precision, kind)
    return found


def _everything(leaf: int, scene: Scene, near: int) -> Tensor:
    return simulated.everything(scene, leaf, near)


def _in_clusters(rank: str, reach: int, scene: Scene, near: int) -> Tensor:
    return simulated.in_clusters(scene, LEAF, near, rank, reach)


def _shortlist(scene: Scene, near: int) -> Tensor:
    return simulated.shortlist(scene, LEAF, near)


def _low_precision(kind: str, scene: Scene, near: int) -> Tensor:
    return simulated.low_precision(scene, LEAF, near, kind)


def _mean(found: list[Caught]) -> Caught:
    return Caught(*(fmean(values) for values in zip(*found, strict=True)))


# --- one run ----------------------------------------------------------------------------------------------------------


class Searches:
    """One run: what it prints, and what it remembers."""

    def __init__(self, out: Path, repeats: int) -> None:
        self.console = Console(width=max(Console().width, 150))
        self.out, self.repeats = out, repeats
        self.found: dict[str, Any] = {"torch": torch.__version__, "coterie": coterie.__version__}

    def run(self, name: str, extra: list[Variant], *, knobs: bool, simulate: bool, loss: bool, length: int) -> None:
        """Compare all in one setting."""
        setting = SETTINGS[name]
        length = length or setting.length
        heads = captured.captured(name.partition("-")[0], setting.make, length, self.out / "captured")
        causal, near = heads[0].causal, getattr(coterie.as_mechanism(setting.base), "near")  # noqa: B009
        chosen = (variants(setting.base) if knobs else []) + extra
        title = f"{name}: {len(heads)} layers, {length:,} tokens"
        rows = self.shipped(heads, chosen, near)
        if loss and causal:
            for row, each in zip(rows, self.losses(chosen, length), strict=True):
                row["loss"] = each.to_dict()
        self.show(f"{title}, shipped", rows)
        self.found[name] = {"shipped": rows}
        if simulate:
            scenes = [scene for each in heads for scene in simulated.scenes(each)]
            rows = self.simulated(scenes, near)
            self.show(f"{title}, near={near}, simulated", rows)
            budgets = self.budgets(scenes, near, causal=causal)
            self.show(f"{title}, simulated: budget by mass, at most {4 * near} keys", budgets)
            self.found[name] |= {"simulated": rows, "budgets": budgets}

    def shipped(self, heads: list[Heads], chosen: list[Variant], near: int) -> list[dict[str, Any]]:
        """Quality in all layers, time in the middle one."""
        worth: list[list[Caught]] = [[] for _ in chosen]
        for each in self.track(heads, "quality, layer by layer"):
            truth = Truth(each)
            for found, variant in zip(worth, chosen, strict=True):
                found.append(truth.caught(variant, near))
        middle = heads[len(heads) // 2]
        runs: dict[str, Callable[[], object]] = {"sdpa": partial(dense, middle)}
        for index, variant in enumerate(chosen):
            plan = variant.plan(middle)
            runs[f"{index} plan"] = partial(variant.plan, middle)
            runs[f"{index} execute"] = partial(coterie.grouped_attention, *middle[:3], plan, scale=middle.scale)
        seconds = interleaved(runs, self.repeats)
        rows: list[dict[str, Any]] = []
        for index, (variant, found) in enumerate(zip(chosen, worth, strict=True)):
            with variant.searching() as mechanism:
                met = keys_met(mechanism, middle)
            plan_ms, execute_ms = (1e3 * seconds[f"{index} {what}"] for what in ("plan", "execute"))
            times = {"plan ms": plan_ms, "execute ms": execute_ms, "sdpa ms": 1e3 * seconds["sdpa"]}
            rows.append({"variant": str(variant), "met": met, **_mean(found)._asdict(), **times})
        return rows

    def losses(self, chosen: list[Variant], length: int) -> list[Cost]:
        """The loss of the next token on the documentation, which all of this is tuned on."""
        model = SmolLM()
        readings: list[Reading] = [read(model, ids) for ids in model.pieces("\n\n".join(documentation()), length, 1)]
        found = []
        for variant in self.track(chosen, "loss"):
            with variant.searching() as mechanism:
                found.append(cost(model, readings, mechanism))
        return found

    def simulated(self, scenes: list[Scene], near: int) -> list[dict[str, Any]]:
        """Searches that are not shipped."""
        rows = []
        for name, pick in self.track(list(not_shipped().items()), "simulated searches"):
            found = _mean([simulated.caught(scene, pick(scene, near)) for scene in scenes])
            rows.append({"variant": name, **found._asdict()})
        return rows

    def budgets(self, scenes: list[Scene], near: int, *, causal: bool) -> list[dict[str, Any]]:
        """As many keys as catch a share of the estimated mass, each beside as many for everybody."""
        kinds: list[tuple[str, dict[str, Any]]] = [("of the keys to choose from", {})]
        if causal:
            kinds += [
                ("of all keys", {"of_all": True}),
                ("of all keys, half of near at least", {"of_all": True, "least": near // 2}),
            ]
        rows = []
        for (what, how), share in self.track([(kind, share) for kind in kinds for share in SHARES], "budgets by mass"):
            picks = [simulated.by_mass(scene, LEAF, share, 4 * near, **how) for scene in scenes]
            found = _mean([simulated.caught(scene, each) for scene, each in zip(scenes, picks, strict=True)])
            rows.append({"variant": f"{share:.0%} of the mass {what}", **found._asdict()})
            same = max(1, round(found.picked))
            fixed = _mean([simulated.caught(scene, simulated.everything(scene, LEAF, same)) for scene in scenes])
            rows.append({"variant": f"  near={same}", **fixed._asdict()})
        return rows

    def track(self, items: list[Any], what: str) -> Iterator[Any]:
        yield from track(items, what, console=self.console, transient=True)

    def show(self, title: str, rows: list[dict[str, Any]]) -> None:
        """Print a table."""
        if not rows:
            return
        table = Table(title=title)
        columns = ["picked", "recall", "mass", "error"]
        timed, read_ = "plan ms" in rows[0], "loss" in rows[0]
        columns += ["keys met", "plan", "execute", "time / SDPA"] if timed else []
        columns += ["loss, all", "loss, last half"] if read_ else []
        for index, column in enumerate(["variant", *columns]):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            cells = [f"{row['picked']:.0f}", f"{row['recall']:.3f}", f"{row['mass']:.2%}", f"{row['error']:.4f}"]
            if timed:
                both = row["plan ms"] + row["execute ms"]
                cells += [f"{row['met']:.0f}", f"{row['plan ms']:.0f} ms", f"{row['execute ms']:.0f} ms"]
                cells += [f"{both / row['sdpa ms']:.2f}"]
            if read_:
                cells += [f"{row['loss']['against dense'][part] - 1:+.2%}" for part in ("all", "last half")]
            table.add_row(row["variant"], *cells)
        self.console.print(table)

    def save(self) -> None:
        """Write everything as JSON."""
        write_json(self.out / "search.json", self.found)
        self.console.print(f"wrote {self.out / 'search.json'}")


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETTINGS), help=f"some of {','.join(SETTINGS)}")
    parser.add_argument(
        "--mechanisms",
        default="",
        help="more variants, separated by semicolons, each with what to change in near–far's search: "
        "near-far:near=88;near-far:near=176 leaf=8,reach=0",
    )
    parser.add_argument(
        "--no-knobs", action="store_true", help="leave out near–far with each knob of its search turned"
    )
    parser.add_argument("--no-simulated", action="store_true", help="leave out what is only simulated")
    parser.add_argument("--loss", action="store_true", help="SmolLM2's loss of the next token too: slow")
    parser.add_argument("--length", type=int, default=0, help="tokens, in place of each setting's own")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder to write to; captured tensors are kept there"
    )
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - set(SETTINGS)):
        parser.error(f"--only: expected some of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    if options.length and options.length < 4 * CHUNK:
        parser.error(f"--length: expected at least {4 * CHUNK}, got {options.length}")
    try:
        extra = [Variant.read(text) for text in options.mechanisms.split(";") if text.strip()]
    except ValueError as error:
        parser.error(f"--mechanisms: {error}")
    run = Searches(options.out, options.repeats)
    with torch.no_grad():
        for name in wanted:
            run.run(
                name,
                extra,
                knobs=not options.no_knobs,
                simulate=not options.no_simulated,
                loss=options.loss,
                length=options.length,
            )
    run.save()


if __name__ == "__main__":
    main()
