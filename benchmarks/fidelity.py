"""`make fidelity`: what clustered attention costs in fidelity, on real pre-trained models, without training.

Every mechanism meets the same number of keys a query. Printed: the relative error and cosine of attention outputs, of
sentence embeddings, and what becomes of tasks; written: out/fidelity.json and out/fidelity.png.
"""

from __future__ import annotations

import argparse
import csv
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import coterie
from benchmarks import texts
from benchmarks.losses import COLUMNS, Cost, cost, dense_cost, keys_met, read
from benchmarks.models import Heads, MiniLM, SmolLM, attending, dense, with_mechanism
from coterie import Mechanism
from coterie.analysis import save
from coterie.files import write_json

# What meets about `keys` keys a query at 512 tokens.
AT_EQUAL_KEYS: dict[str, Callable[[int], Mechanism]] = {
    "smyrf": lambda keys: coterie.Smyrf(rounds=keys // 32, cluster_size=32),
    "reformer": lambda keys: coterie.Reformer(rounds=keys // 32, chunk_size=16),
    "routing": lambda keys: coterie.Routing(clusters=16, window=keys),
    "local": lambda keys: coterie.Local(window=keys),
    "longformer": lambda keys: coterie.Longformer(window=keys - 8, global_tokens=4),
    "clustered": lambda keys: coterie.Clustered(clusters=keys, space="euclidean"),
    "improved-clustered": lambda keys: coterie.ImprovedClustered(
        clusters=keys // 3, topk=keys - keys // 3, space="euclidean"
    ),
    "topk (oracle)": lambda keys: coterie.TopK(k=keys),
    "near-far": lambda keys: coterie.NearFar(near=keys - keys // 3, key_clusters=keys // 3),
}
BUDGETS = (48, 96, 144, 192)
DOCUMENTS = 3  # × 6 layers × 12 heads = 216 heads


class Fidelity:
    """One run: what it prints, and what it remembers."""

    def __init__(self, data: Path, out: Path) -> None:
        console = Console()
        self.console = Console(width=max(console.width, 160))  # a row is not worth folding
        self.data, self.out = data, out
        self.found: dict[str, Any] = {"torch": torch.__version__, "coterie": coterie.__version__}

    def table(self, title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> None:
        table = Table(title=title)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def missing(self, name: str, what: str) -> bool:
        """Say how to get data that is not there."""
        if (self.data / name).exists():
            return False
        self.console.print(f"[yellow]skipped[/] {name}: put {what} into {self.data / name}, or name its folder: --data")
        self.found[name] = "no data"
        return True

    # --- MiniLM -------------------------------------------------------------------------------------------------------

    def minilm(self, model: MiniLM) -> None:
        """Attention outputs and embeddings of long documents."""
        documentation = texts.documentation()
        documents = [torch.tensor([model.tokens(text)]) for text in documentation if len(model.tokens(text)) == 512]
        caught: list[tuple[Heads, Tensor]] = []

        def catch(heads: Heads) -> Tensor:
            caught.append((heads, dense(heads)))
            return caught[-1][1]

        with attending(catch):
            for ids in documents[:DOCUMENTS]:
                model.embed(ids)
        with attending(dense):
            exact = torch.cat([model.embed(ids) for ids in documents])
        rows = []
        with self.progress() as progress:
            task = progress.add_task("MiniLM", total=len(BUDGETS) * len(AT_EQUAL_KEYS))
            for keys in BUDGETS:
                for name, make in AT_EQUAL_KEYS.items():
                    row = {"name": name, **_compare(make(keys), caught)}
                    if keys == 96:
                        with attending(with_mechanism(make(keys))):
                            found = torch.cat([model.embed(ids) for ids in documents])
                        row["embedding"] = float((found * exact).sum(-1).mean())
                    rows.append(row)
                    progress.advance(task)
        self.found["minilm"] = rows
        heads = sum(h.q.shape[1] for h, _ in caught)
        self.table(
            f"MiniLM, 512 tokens: attention outputs of {heads} heads, embeddings of {len(documents)} documents",
            ("mechanism", "keys met", "relative error", "cosine", "embedding's cosine"),
            [
                [r["mechanism"], f"{r['met']:.0f}", f"{r['error']:.3f}", f"{r['cosine']:.3f}", f"{r['embedding']:.4f}"]
                for r in rows
                if "embedding" in r
            ],
        )
        near_far = next(r for r in rows if r["name"] == "near-far" and "embedding" in r)
        self.table(
            "near-far by layer",
            ("layer", *map(str, range(len(near_far["layers"])))),
            [["relative error", *[f"{e:.3f}" for e in near_far["layers"]]]],
        )
        self.plot(rows)

    def stsb(self, model: MiniLM) -> None:
        """Spearman correlation on STS-B's test set; its sentences are short."""
        if self.missing("stsb", "the STS Benchmark's sts-test.csv"):
            return
        pairs = Stsb(self.data, model)
        rows: list[dict[str, Any]] = []
        for name, attend in (
            ("dense", dense),
            ("near-far:near=4,key_clusters=4", with_mechanism(coterie.NearFar(near=4, key_clusters=4))),
            ("smyrf:rounds=1,cluster_size=8", with_mechanism(coterie.Smyrf(rounds=1, cluster_size=8))),
        ):
            found = pairs.spearman(self.embeddings(model, pairs.sentences, attend, name))
            rows.append({"mechanism": name, "spearman": found})
        self.found["stsb"] = rows
        self.table(
            f"STS-B test, {len(pairs.scores):,} pairs of at most {max(map(len, pairs.sentences))} tokens",
            ("attention", "Spearman"),
            [[r["mechanism"], f"{r['spearman']:.4f}"] for r in rows],
        )

    def documents(self, model: MiniLM) -> None:
        """Accuracy of a logistic regression on frozen embeddings of long labelled documents, 5-fold, ten times over."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

        rows: list[dict[str, Any]] = []
        for name, what, open_ in (
            ("nltk", "NLTK's movie_reviews.zip", _movie_reviews),
            ("hyperpartisan", "the two by-article XML files of SemEval-2019 Task 4", _hyperpartisan),
        ):
            if self.missing(name, what):
                continue
            documents, labels = open_(self.data / name)
            ids = [model.tokens(text) for text in documents]
            share = sum(len(x) == 512 for x in ids) / len(ids)
            for kind, attend in (
                ("dense", dense),
                ("near-far", with_mechanism(coterie.NearFar())),
                ("smyrf:rounds=3,cluster_size=32", with_mechanism(coterie.Smyrf(rounds=3, cluster_size=32))),
            ):
                x = self.embeddings(model, ids, attend, f"{name}, {kind}").numpy()
                folds = RepeatedStratifiedKFold(n_splits=5, n_repeats=10, random_state=0)  # one split moves by a point
                accuracy = cross_val_score(LogisticRegression(max_iter=2000, C=10.0), x, labels, cv=folds)
                rows.append(
                    {"data": open_.__name__[1:], "attention": kind, "accuracy": float(accuracy.mean()), "long": share}
                )
        self.found["documents"] = rows
        if rows:
            self.table(
                "Documents cut at 512 tokens, logistic regression on frozen embeddings, 10 × 5-fold",
                ("data", "attention", "accuracy", "documents of 512 tokens"),
                [[r["data"], r["attention"], f"{r['accuracy']:.2%}", f"{r['long']:.0%}"] for r in rows],
            )

    def embeddings(self, model: MiniLM, ids: list[list[int]], attend: Callable[[Heads], Tensor], title: str) -> Tensor:
        with self.progress() as progress, attending(attend):
            task = progress.add_task(title, total=len(ids))
            return model.embed_all(ids, lambda count: progress.advance(task, count))

    # --- SmolLM2 ------------------------------------------------------------------------------------------------------

    def smollm(self, lengths: list[int], kinds: list[str], pieces: int, mechanisms: list[Mechanism]) -> None:
        """The loss of the next token on long texts, by part of the text."""
        model = SmolLM()
        rows: list[dict[str, Any]] = []
        for kind in kinds:
            try:
                text = texts.text(kind, self.data, self.out / "texts")
            except texts.NoTextError as missing:
                self.console.print(f"[yellow]skipped[/] {missing}")
                self.found[kind] = "no data"
                continue
            for length in lengths:
                costs = self.costs(model, model.pieces(text, length, pieces), mechanisms)
                about = {"text": kind, "role": texts.role(kind), "length": length, "pieces": pieces}
                rows += [about | each.to_dict() for each in costs]
                self.table(
                    f"SmolLM2-135M on {kind} ({texts.role(kind)}), {length:,} tokens, {pieces} pieces: "
                    "loss of the next token, against dense",
                    COLUMNS,
                    [each.row() for each in costs],
                )
        self.found["smollm"] = rows

    def costs(self, model: SmolLM, pieces: list[Tensor], mechanisms: list[Mechanism]) -> list[Cost]:
        """Of dense attention and of each mechanism."""
        with self.progress() as progress:
            task = progress.add_task("SmolLM2", total=1 + (len(mechanisms) or len(_rivals(0))))
            readings = [read(model, ids) for ids in pieces]
            found = [dense_cost(readings)]
            for mechanism in mechanisms or _rivals(keys_met(_NEAR_FAR, readings[0].heads)):
                progress.advance(task)
                found.append(cost(model, readings, mechanism))
        return found

    # --- what is left -------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        return Progress(console=self.console, transient=True)

    def plot(self, rows: list[dict[str, Any]]) -> None:
        """Error against keys met, one line a mechanism."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 5))
        for name in AT_EQUAL_KEYS:
            points = sorted((r["met"], r["error"]) for r in rows if r["name"] == name)
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "near-far" else 1.2)
        axes.set(xlabel="keys met by a query, of 512", ylabel="relative error of the attention output", yscale="log")
        axes.set_title("MiniLM, 216 heads, no training")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2)
        figure.tight_layout()
        save(figure, self.out / "fidelity.png")
        plt.close(figure)

    def save(self) -> None:
        path = self.out / "fidelity.json"
        write_json(path, self.found)
        self.console.print(f"wrote {path}" + (f" and {self.out / 'fidelity.png'}" if "minilm" in self.found else ""))


class Stsb:
    """The pairs of STS-B's test set: their scores, and the tokens of all first sentences and then all second ones."""

    def __init__(self, data: Path, model: MiniLM) -> None:
        with (data / "stsb" / "sts-test.csv").open(encoding="utf-8") as file:
            lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        self.scores = [float(line[4]) for line in lines]
        self.sentences = [model.tokens(line[column]) for column in (5, 6) for line in lines]

    def spearman(self, embeddings: Tensor) -> float:
        """How well cosines of embeddings rank the pairs."""
        from scipy.stats import spearmanr

        first, second = embeddings.chunk(2)
        return float(spearmanr((first * second).sum(-1).numpy(), self.scores).statistic)


_NEAR_FAR = coterie.NearFar(near=176)  # about 410 keys at 4,096 tokens


def _rivals(met: float) -> list[Mechanism]:
    """Near–far, and others that meet about as many keys."""
    return [
        _NEAR_FAR,
        coterie.Longformer(window=max(1, round(met)), global_tokens=4),
        coterie.Smyrf(rounds=max(1, round(met / 32)), cluster_size=64),
    ]


def _compare(mechanism: Mechanism, caught: list[tuple[Heads, Tensor]]) -> dict[str, Any]:
    """Relative error and cosine of attention outputs, means over heads; and the error of each layer."""
    errors: dict[int, list[Tensor]] = {}
    cosines = []
    with torch.no_grad():
        for heads, exact in caught:
            out = with_mechanism(mechanism)(heads)
            error = (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
            errors.setdefault(heads.layer, []).append(error.flatten())
            cosines.append(F.cosine_similarity(out, exact, dim=-1).mean())
    layers = [float(torch.cat(errors[layer]).mean()) for layer in sorted(errors)]
    return {
        "mechanism": str(mechanism),
        "met": keys_met(mechanism, caught[0][0]),
        "error": float(torch.cat([e for each in errors.values() for e in each]).mean()),
        "cosine": float(torch.stack(cosines).mean()),
        "layers": layers,
    }


def _movie_reviews(folder: Path) -> tuple[list[str], list[int]]:
    texts, labels = [], []
    with zipfile.ZipFile(folder / "movie_reviews.zip") as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt") and Path(name).parent.name in ("pos", "neg"):
                texts.append(archive.read(name).decode("utf-8"))
                labels.append(int(Path(name).parent.name == "pos"))
    return texts, labels


def _hyperpartisan(folder: Path) -> tuple[list[str], list[int]]:
    articles = ElementTree.parse(next(folder.glob("articles-*.xml"))).getroot()
    truth = ElementTree.parse(next(folder.glob("ground-truth-*.xml"))).getroot()
    labels = {each.get("id"): int(each.get("hyperpartisan") == "true") for each in truth}
    texts = {a.get("id"): f"{a.get('title')} {' '.join(a.itertext())}" for a in articles}
    return list(texts.values()), [labels[key] for key in texts]


PARTS = ("minilm", "stsb", "documents", "smollm")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens for SmolLM2")
    parser.add_argument("--texts", default=",".join(texts.KINDS), help=f"for SmolLM2: some of {','.join(texts.KINDS)}")
    parser.add_argument("--pieces", type=int, default=2, help="of each text for SmolLM2")
    parser.add_argument(
        "--mechanisms", default="", help="for SmolLM2, separated by semicolons: near-far:near=176;near-far:near=64"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder with stsb, nltk, hyperpartisan"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write to; enwik8 in its folder texts")
    options = parser.parse_args()
    wanted, kinds = options.only.split(","), options.texts.split(",")
    for name, given, known in (("only", wanted, PARTS), ("texts", kinds, texts.KINDS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if options.pieces < 1:
        parser.error(f"--pieces: expected at least 1, got {options.pieces}")
    mechanisms = [coterie.as_mechanism(spec) for spec in options.mechanisms.split(";") if spec.strip()]
    run = Fidelity(options.data, options.out)
    if set(wanted) & {"minilm", "stsb", "documents"}:
        model = MiniLM()
        for part in ("minilm", "stsb", "documents"):
            if part in wanted:
                getattr(run, part)(model)
    if "smollm" in wanted:
        run.smollm([int(length) for length in options.lengths.split(",")], kinds, options.pieces, mechanisms)
    run.save()


if __name__ == "__main__":
    main()
