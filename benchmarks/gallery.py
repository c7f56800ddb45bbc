"""`make gallery`: every figure of the supplement that Coterie can draw, on real weights and images, into docs/gallery/.

All seeds are fixed. About a quarter of an hour on 2 cores; a part alone: --only spectra, memberships, clusters, errors,
rounds, theory, terrain or biggan. The last shows generators that were trained: --biggan takes the folder of a study of
recipes/biggan, and without it that page stays as it is. Clusters of speech need Whisper, clips and pocketsphinx
(recipes/whisper/README.md), or are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console

import coterie
from benchmarks import generators, theory
from benchmarks import rounds as training
from benchmarks.models import MiniLM, SmolLM
from benchmarks.texts import documentation
from coterie.analysis import (
    Comparison,
    agreement,
    biclustering,
    compare,
    draw_agreement,
    draw_grid,
    draw_locality,
    draw_meetings,
    draw_spectra,
    draw_tokens,
    groups_of,
    head_groups,
    image_queries,
    locality,
    meetings,
    save,
    spectra,
    tokens_html,
)
from coterie.cli.inputs import UserError
from coterie.files import write_whole
from coterie.hosts import watch_dense
from coterie.observe import Seen

console = Console(width=140)
_FIRST = 3.3  # seconds of a clip that are drawn


# Every page: its picture on the first page, and what it is called there.
PAGES = {
    "spectra": ("spectra-minilm-near-far-output", "Spectra of attention maps"),
    "memberships": ("memberships-image", "Who is grouped with whom"),
    "clusters": ("clusters-minilm-clustered", "Clusters over layers, heads and time"),
    "errors": ("errors-minilm", "What mechanisms lose"),
    "rounds": ("rounds", "Adaptive hashing rounds"),
    "theory": ("theory-distance", "The theory, drawn"),
    "terrain": ("terrain-images", "A pre-trained image generator"),
    "biggan": ("biggan-smyrf-sheet", "Generators trained from scratch"),
}


class Gallery:
    """Pictures in a folder, and the page that shows them.

    Args:
        biggan: the folder of a study of recipes/biggan.
        clips: recordings with transcripts, as recipes/whisper takes them.
    """

    def __init__(self, folder: Path, biggan: Path | None = None, clips: Path | None = None) -> None:
        self.folder, self.study, self.clips = folder, biggan, clips

    def put(self, name: str, picture: Figure | str | bytes) -> str:
        """Write a picture, or a PNG as it is; what Markdown calls it."""
        kind = "html" if isinstance(picture, str) else "png"
        if isinstance(picture, bytes):
            write_whole(self.folder / f"{name}.{kind}", picture)
        else:
            save(picture, self.folder / f"{name}.{kind}")
        console.print(f"wrote {self.folder / name}.{kind}")
        return f"![{name}]({name}.{kind})"

    def page(self, name: str, title: str, parts: list[str]) -> None:
        """Write a page."""
        write_whole(self.folder / f"{name}.md", "\n\n".join([f"# {title}", *parts]) + "\n")
        write_whole(self.folder / "index.md", index(self.folder))

    # --- parts --------------------------------------------------------------------------------------------------------

    def spectra(self) -> None:
        """Figures 5 and 6: singular values of every head, and whether slow heads are harder."""
        minilm, smollm = MiniLM("sdpa"), SmolLM("sdpa")
        text = "\n\n".join(documentation())
        parts = [
            "On the left are the singular values of the attention maps after the softmax (supplement §11, Figures 5 "
            "and 6), one line for each head. Heads that decay slowly are red. On the right is the effective rank "
            "(exp of the entropy of the normalised singular values) against the relative error of a mechanism in the "
            "same head. The supplement says that slow heads are harder. Whether that is true depends on the "
            "mechanism, the error and the model: see the rank correlations."
        ]
        for name, model, ids in (
            ("MiniLM, 512 tokens", minilm.model, torch.tensor([minilm.tokens(text, 512)])),
            ("SmolLM2-135M, 512 tokens", smollm.model, smollm.tokens(text, 512)),
        ):
            for spec, error in (
                ("smyrf:rounds=4,cluster_size=32", "output"),
                ("smyrf:rounds=4,cluster_size=32", "frobenius"),
                ("near-far:near=32", "output"),
            ):
                found = spectra(model, {"input_ids": ids}, mechanism=spec, error_of=error)
                file = f"spectra-{name.split(',')[0].lower()}-{spec.split(':')[0]}-{error}"
                picture = self.put(file, draw_spectra(found, title=name))
                parts += [f"## {name}, {spec}: error of the {error}", picture, f"```text\n{found.describe()}\n```"]
        self.page("spectra", "Spectra of attention maps", parts)

    def memberships(self) -> None:
        """Figure 7: who is grouped with whom, over an image, a text and as a matrix."""
        from sklearn.datasets import load_sample_image

        pixels = image_queries(load_sample_image("china.jpg"), grid=(96, 144))
        tokens = pixels.grid[0] * pixels.grid[1]
        plans = {
            f"{name}, {clusters} clusters": mechanism.plan(pixels.q, pixels.q)
            for clusters in (2, 128)
            for name, mechanism in (
                ("SMYRF", coterie.Smyrf(rounds=1, cluster_size=tokens // clusters)),
                ("k-means", coterie.Clustered(clusters=clusters, space="euclidean")),
            )
        }
        panels = {title: groups_of(plan) for title, plan in plans.items()}
        local = {title: locality(plan, grid=pixels.grid) for title, plan in plans.items()}
        parts = [
            "These pictures show who shares a group (supplement §12, Figure 7). The query of a pixel is its colour "
            "and place times a random matrix.",
            self.put("memberships-image", draw_grid(panels, pixels.grid, image=pixels.image)),
            "How often two pixels at a given distance share a group. The dashed line is the average over any two "
            "pixels:",
            self.put("memberships-locality", draw_locality(local)),
        ]
        model = MiniLM("sdpa")
        ids = model.tokens("\n\n".join(documentation()), 300)
        calls = _calls(model.model, ids)
        name, seen = list(calls.items())[2]
        words = model.tokenizer.convert_ids_to_tokens(ids)
        groups = groups_of(coterie.NearFar(near=16).plan(seen.q, seen.k, **seen.planning()))
        title = f"MiniLM, {name}, head 0: query groups of near-far"
        self.put("memberships-text", tokens_html(words, groups, title=title))
        parts += [
            "Tokens in the colours of their groups ([as a page](memberships-text.html)):",
            self.put("memberships-tokens", draw_tokens(words, groups, title=title)),
            "Who meets whom in that head, by mechanism:",
        ]
        for spec in (
            "smyrf:rounds=4,cluster_size=16",
            "near-far:near=32",
            "local:window=64",
            "routing:clusters=8,window=32",
        ):
            plan = coterie.as_mechanism(spec).plan(seen.q, seen.k, **seen.planning())
            parts.append(self.put(f"meetings-{spec.split(':')[0]}", draw_meetings(meetings(plan), title=spec)))
        self.page("memberships", "Who is grouped with whom", parts)

    def clusters(self) -> None:
        """How clusters change over heads and layers, and how they follow words and phones (response 001)."""
        minilm = MiniLM("sdpa")
        batch = {"input_ids": torch.tensor([minilm.tokens("\n\n".join(documentation()), 512)])}
        parts = [
            "The authors of clustered attention promised their reviewers a look at the clusters (response 001). Here "
            "is how alike those of two heads are, by the adjusted Rand index: 1 for the same clusters, 0 for what two "
            "heads that know nothing of each other have in common.",
        ]
        for spec in ("clustered:clusters=25", "near-far:near=16"):
            found = agreement(head_groups(minilm.model, batch, spec))
            name = f"clusters-minilm-{spec.split(':')[0]}"
            picture = self.put(name, draw_agreement(found, title=f"MiniLM, 512 tokens: {spec}"))
            parts += [f"## MiniLM, {spec}", picture, f"```text\n{found.describe()}\n```"]
        self.page("clusters", "Clusters over layers, heads and time", [*parts, *_speech(self)])

    def errors(self) -> None:
        """The ablation at an equal number of keys."""
        parts = [
            "This is what each mechanism loses when every query meets about 64 keys. SMYRF's transform is compared "
            "with older ones, E2LSH, the cross-polytope hash, clustered attention and the oracle. The error of the "
            "weights is ‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F."
        ]
        minilm, smollm = MiniLM("sdpa"), SmolLM("sdpa")
        text = "\n\n".join(documentation())
        for name, model, ids in (
            ("MiniLM", minilm.model, minilm.tokens(text, 512)),
            ("SmolLM2-135M", smollm.model, smollm.tokens(text, 512)[0].tolist()),
        ):
            calls = list(_calls(model, ids).items())
            module, seen = calls[len(calls) // 2]
            found = compare(None, seen.q, seen.k, seen.v, keys=64, rows=128, **seen.planning())
            parts += [
                f"## {name}, {module}, 512 tokens",
                self.put(f"errors-{name.lower()}", _bars(found)),
                f"```text\n{found}\n```",
            ]
        self.page("errors", "What mechanisms lose at an equal number of keys", parts)

    def rounds(self) -> None:
        """Rounds that a schedule takes while a model is trained."""
        found = {name: training.run(name, 300, 0) for name in training.TWINS}
        with console.capture() as text:
            training.show(found, console)
        figure = Figure(figsize=(11, 4), layout="constrained")
        chosen, losses = figure.subplots(1, 2)
        log = found["schedule"]["log"]
        for module in sorted({each["module"] for each in log}):
            mine = [each for each in log if each["module"] == module]
            chosen.step([e["step"] for e in mine], [e["rounds"] for e in mine], where="post", label=module)
        chosen.set(xlabel="step", ylabel="hashing rounds", ylim=(0, None))
        chosen.legend(frameon=False)
        for name, each in found.items():
            looks = each["looks"]
            losses.plot([look["step"] for look in looks], [look["loss"] for look in looks], label=name)
        losses.set(xlabel="step", ylabel="training loss", yscale="log")
        losses.legend(frameon=False, fontsize=8)
        parts = [
            "A small encoder learns associative recall from scratch (supplement §16.1). `RoundsSchedule` takes as "
            "many hashing rounds as a bound on the error of the attention maps needs: many while attention is "
            "diffuse, fewer later. The loss stays within 0.1 nats of dense attention. With 128 tokens there is no "
            "time to gain.",
            self.put("rounds", figure),
            f"```text\n{text.get()}\n```",
        ]
        self.page("rounds", "Adaptive hashing rounds", parts)

    def theory(self) -> None:
        """How far methods are from the best clusters, and where the supplement's proofs fail."""
        model = MiniLM()
        ratios: dict[str, list[float]] = {}
        for q, k, scale in theory._heads(model, theory.SENTENCES[:1], 8):
            values = theory._values(q, k, scale, biclustering.Problem.balanced((scale * (q @ k.mT))[0, 0], 2))
            best = values.pop("optimum")
            for name, value in values.items():
                ratios.setdefault(name, []).append(value / best)
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.boxplot(list(ratios.values()), orientation="horizontal", tick_labels=list(ratios), showfliers=False)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="softmax error / the optimum's, 72 heads of MiniLM, 8 + 8 tokens in 2 clusters")
        axes.invert_yaxis()
        parts = [
            "[The theory](../theory.md) explains these pictures. The first shows how far methods are from the best "
            "clusters. “Keys shared” is not a clustering, so it may beat the best one:",
            self.put("theory-distance", figure),
            "Lemma 1's reduction fails on T = {(1,1,1), (2,1,2), (2,2,1)}. There is no matching, yet these clusters "
            "reach the value, because the weights know only pairs:",
            self.put("theory-lemma", _counterexample()),
            "Theorem 1's equivalence: in how many of 40 random instances is the claimed optimum the optimum of the "
            "softmax problem?",
            self.put("theory-theorem1", _theorem1()),
        ]
        self.page("theory", "The theory, drawn", parts)

    def terrain(self) -> None:
        """A pre-trained generator whose attention is replaced."""
        self.page("terrain", PAGES["terrain"][1], generators.terrain(self.put, Path("out/gallery/terrain")))

    def biggan(self) -> None:
        """Generators of a study that was run before."""
        assert self.study is not None
        self.page("biggan", PAGES["biggan"][1], generators.biggan(self.put, self.study))


def index(folder: Path) -> str:
    """The first page: those that are there, two in a row."""
    there = [name for name in PAGES if (folder / f"{name}.md").exists()]
    cells = [f"[![{PAGES[n][1]}]({PAGES[n][0]}.png)]({n}.md) [{PAGES[n][1]}]({n}.md)" for n in there]
    pairs = [[*cells[i : i + 2], ""][:2] for i in range(0, len(cells), 2)]
    words = [
        "# Gallery",
        "The figures and theorems of the SMYRF supplement, and clusters of text and speech, on real weights (MiniLM, "
        "SmolLM2, Whisper, an image generator) and real images. `make gallery` draws them again.",
        "\n".join(["| | |", "|---|---|", *(f"| {' | '.join(pair)} |".replace("|  |", "| |") for pair in pairs)]),
        "\n".join(["```{toctree}", ":hidden:", "", *there, "```"]),
    ]
    return "\n\n".join(words) + "\n"


def _speech(gallery: Gallery, spec: str = "clustered:clusters=25") -> list[str]:
    """The same of Whisper, and how its clusters follow words and phones; nothing where one of its parts is missing."""
    from recipes.whisper import clips, clusters, listening
    from recipes.whisper.alignment import align

    try:
        listener, spoken = listening.load(None), clips.load(gallery.clips)
        clip = max(spoken, key=lambda each: len(each.samples))
        aligned = align(clip)
    except UserError as error:
        console.print(f"no clusters of speech: {error}")
        return []
    labels = clusters.groups(listener, clip, spec)
    found, rows = agreement(labels), clusters.rows(labels, aligned)
    features = listener.heard([clip.samples])[0]
    _, columns, cells = clusters.table({"clip": clip.name, "mechanism": spec, "rows": rows})
    parts = [
        f"## Whisper tiny.en, {spec}",
        "The encoder's 20 ms tokens of one sentence, without the silence after it. In the strips a colour is a "
        "cluster. Lines are where words and phones begin, as a forced alignment by pocketsphinx has them. Drawn are "
        f"the first {_FIRST} seconds; figures are of the whole sentence.",
        gallery.put("clusters-whisper", draw_agreement(found, title=f"Whisper tiny.en: {spec}")),
        f"```text\n{found.describe()}\n```",
    ]
    for kind, segments in aligned._asdict().items():
        first = [each for each in segments if each.end <= _FIRST / clusters.SECONDS]
        title = f"Whisper tiny.en, {spec}: clusters and {kind}"
        parts.append(gallery.put(f"clusters-{kind}", clusters.timeline(labels, features, first, title)))
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    parts += [
        "Means over the heads of a layer. *Segments* and *names*: adjusted Rand index of clusters with single words or "
        "phones, and with all of one name. *Changes*: how often the cluster changes from a token to the next, where a "
        "word or phone ends and inside of it:",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
    ]
    return parts


def _calls(model: Any, ids: list[int]) -> dict[str, Seen]:
    """What every attention module is called with."""
    found: dict[str, Seen] = {}
    watch_dense(model, {"input_ids": torch.tensor([ids])}, found.__setitem__)
    return found


def _bars(found: Comparison) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [row.name for row in found.rows]
    for shift, measure in ((-0.2, "relative_frobenius"), (0.2, "output")):
        each = [row.estimates()[measure] for row in found.rows]
        values = np.array([float(x.value) for x in each])
        spread = [values - [float(x.low) for x in each], [float(x.high) for x in each] - values]
        label = "weights" if measure != "output" else "output"
        axes.barh(np.arange(len(names)) + shift, values, 0.4, xerr=np.abs(spread), label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="relative error, mean over heads")
    axes.legend(frameon=False)
    return figure


def _counterexample() -> Figure:
    instance = biclustering.Matching3D(2, ((0, 0, 0), (1, 0, 1), (1, 1, 0)))
    problem = biclustering.supplement_problem(instance)
    best = biclustering.solve(problem).clustering
    figure = Figure(figsize=(4.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(problem.scores, cmap="Blues")
    for i, j in np.ndindex(problem.scores.shape):
        together = best.queries[i] == best.keys[j]
        weight = "bold" if together else "normal"
        axes.text(
            j,
            i,
            f"{problem.scores[i, j]:g}",
            ha="center",
            va="center",
            weight=weight,
            color="C3" if together else "0.4",
        )
    axes.set_xticks(range(4), ["x1", "x2", "y1", "y2"])
    axes.set_yticks(range(4), ["x1", "x2", "z1", "z2"])
    axes.set(xlabel="keys", ylabel="queries", title="weights; red: together in the best clusters")
    return figure


def _theorem1() -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    sharpness = (2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
    draws = [np.random.default_rng(seed).normal(size=(4, 4)) for seed in range(40)]
    for deviation in (1.0, 2.0, 3.0):
        problems = [biclustering.Problem.balanced(deviation * draw, 2) for draw in draws]
        for copies, line in ((1, "-"), (100, "--")):
            shares = [mean(biclustering.equivalence(p, a, copies).claim for p in problems) for a in sharpness]
            axes.plot(sharpness, shares, line, marker="o", label=f"deviation {deviation:g}, {copies} special keys")
    axes.set(xscale="log", xlabel="a", ylabel="share of instances", ylim=(None, 1.02))
    axes.set_xticks(sharpness, [f"{a:g}" for a in sharpness])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure


PARTS: dict[str, Callable[[Gallery], None]] = {
    "spectra": Gallery.spectra,
    "memberships": Gallery.memberships,
    "clusters": Gallery.clusters,
    "errors": Gallery.errors,
    "rounds": Gallery.rounds,
    "theory": Gallery.theory,
    "terrain": Gallery.terrain,
    "biggan": Gallery.biggan,
}


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--biggan", type=Path, metavar="FOLDER", help="a study of recipes/biggan")
    parser.add_argument("--out", type=Path, default=Path("docs/gallery"), help="folder to write to")
    parser.add_argument("--clips", type=Path, help="recordings with transcripts, as recipes/whisper takes them")
    options = parser.parse_args()
    wanted = (options.only or ",".join(PARTS)).split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if "biggan" in wanted and options.biggan is None:
        if options.only:
            parser.error("--only biggan: expected --biggan FOLDER with a study of recipes/biggan")
        wanted.remove("biggan")
        console.print("biggan stays as it is: --biggan FOLDER draws it from a study")
    try:
        if "biggan" in wanted:
            generators.results_of(options.biggan)  # before anything is drawn
        options.out.mkdir(parents=True, exist_ok=True)
        gallery = Gallery(options.out, options.biggan, options.clips)
        for name in wanted:
            PARTS[name](gallery)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
