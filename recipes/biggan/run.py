"""Train BigGAN with attention at full resolution, dense and clustered, and compare the images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import coterie
from coterie import Smyrf, as_mechanism
from coterie.cli.inputs import UserError
from coterie.observe import Seen
from recipes.biggan import images as reading
from recipes.biggan import portraits, published, quality, running, tables
from recipes.biggan.attention import DENSE, attend_by, blocks
from recipes.biggan.config import Config
from recipes.biggan.images import Images
from recipes.biggan.inception import Inception, fid_and_kid
from recipes.biggan.pretrained import save_pretrained
from recipes.biggan.rates import TTUR
from recipes.biggan.sampling import sample
from recipes.biggan.training import Settings, Training, part_size
from recipes.common import command, weights
from recipes.common.digest import of_file
from recipes.common.models import out_folder, slug
from recipes.common.precision import in_bf16
from recipes.common.processes import processes
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.study import Result, Study

QUICK: list[list[str]] = [[]]
_PORTRAITS = Path("out/recipes/portraits")


@dataclass(frozen=True)
class Comparison:
    """What all runs of a study share."""

    study: Study
    config: Config
    train: Images
    test: Images
    mechanisms: list[str]
    settings: dict[str, Settings]  # of each mechanism
    features: nn.Module
    inception: Path | None

    def run(self, mechanism: str, seed: int, shown: Bar) -> Result:
        """Train with a mechanism, and judge what comes out, run with every mechanism."""
        name = f"{slug(mechanism)}-{seed}"

        def make(work: Path) -> Result:
            shown.begin(f"{mechanism}, seed {seed}", self.settings[mechanism].steps)
            training = Training(self.config, self.settings[mechanism], self.train, seed)
            found = running.train(training, work, self.study.folder / "pictures" / name, shown)
            judged = self.judge(training)
            self.keep(training, name, mechanism, judged[mechanism])
            return {"trained": mechanism, "seed": seed, "quality": judged, "pairs": pairs_met(training.shown), **found}

        result = self.study.run(name, make)
        shown.done()
        return result

    def judge(self, training: Training) -> dict[str, Any]:
        """Quality of the generator, run with each mechanism; the rounds that it was trained with are its own."""
        real = quality.describe(self.features, self.test)
        model, own = training.shown, training.settings.mechanism
        ends = [block.mechanism for block in blocks(training.g)]
        found = {}
        for mechanism in self.mechanisms:
            attend_by(model, mechanism)
            if mechanism == own:
                for block, end in zip(blocks(model), ends, strict=True):
                    block.mechanism = end
            fake = sample(model, len(self.test), training.seed)
            judged: dict[str, Any] = quality.judge(real, quality.describe(self.features, fake))._asdict()
            if self.inception is not None:
                judged |= fid_and_kid(self.inception, self.test, fake)
            found[mechanism] = judged
        for block, end in zip(blocks(model), ends, strict=True):
            block.mechanism = end
        return found

    def keep(self, training: Training, name: str, mechanism: str, judged: dict[str, Any]) -> None:
        """The generator in a folder of its own, and all in the form of BigGAN-PyTorch."""
        if not processes().is_main_process:
            return
        about = {**training.settings.to_dict(), "seed": training.seed, **judged}
        folder = self.study.folder / "models" / name
        save_pretrained(training.shown, folder, discriminator=training.d, about=about)
        state = {"itr": training.step, "config": {**self.config.to_dict(), "mechanism": mechanism}}
        optims = (training.g_optim.state_dict(), training.d_optim.state_dict())
        checkpoint = published.Checkpoint(training.g, training.d, training.ema, *optims, state)
        published.save(folder / "biggan-pytorch", checkpoint)


def pairs_met(model: Any) -> float:
    """The share of pairs that meet in its first attention block, in an image or two."""
    found: list[float] = []

    def look(seen: Seen) -> None:
        plan = as_mechanism(seen.mechanism).plan(seen.q, seen.k, **seen.planning())
        found.append(float(plan.pairs_met().double().mean()) / (seen.q.shape[2] * seen.k.shape[2]))

    with coterie.observing(look):
        sample(model, 2, 0)
    return found[0] if found else 1.0


def settings_of(base: Settings, mechanism: str) -> Settings:
    """Of a mechanism: only SMYRF's rounds adapt."""
    chosen = None if mechanism == DENSE else as_mechanism(mechanism)
    adapts = isinstance(chosen, Smyrf) and isinstance(chosen.rounds, int)
    return replace(base, mechanism=mechanism, max_error=base.max_error if adapts else None)


def load_images(data: Path | None, count: int, resolution: int, resize: bool, conditional: bool, shown: Bar) -> Images:
    """A folder's images, or portraits."""
    if data is not None:
        shown.begin("reading images", 0)
        found = reading.load(data, resolution, resize=resize, tick=shown.tick)
        return found if conditional else found.unlabelled()
    if conditional:
        raise UserError("--conditional needs images with classes: give --data with a folder for each.")
    shown.begin("drawing portraits", count)
    return portraits.load(count, resolution, _PORTRAITS, tick=shown.tick)


def features_of(study: Study, train: Images, steps: int, shown: Bar) -> quality.Features:
    """The network that images are judged by: trained once in a study."""
    file = study.folder / "features.pt"
    missing = not file.exists()
    processes().wait_for_everyone()  # nobody writes it before all have looked
    if missing:
        shown.begin("a network to judge by", steps)
        made = quality.train(train, steps, tick=shown.tick)
        if processes().is_main_process:
            weights.write(file, made.state_dict())
        processes().wait_for_everyone()
    network = quality.Features()
    weights.fill(network, weights.read_state(file), file)
    return network.eval().requires_grad_(False)


def main(
    data: Annotated[
        Path | None, typer.Option(help="A folder of images, or of CIFAR-10's files; portraits are drawn by default.")
    ] = None,
    images: Annotated[int, typer.Option(min=8, help="How many portraits.")] = 4096,
    resolution: Annotated[int, typer.Option(help="Of the images: 32, 64, 128, 256 or 512.")] = 32,
    ch: Annotated[int, typer.Option(min=1, help="Width of the networks; the paper has 96.")] = 16,
    dim_z: Annotated[int, typer.Option(min=1)] = 120,
    attention: Annotated[
        list[int] | None, typer.Option(help="Resolutions with attention in the generator; the full one by default.")
    ] = None,
    d_attention: Annotated[
        list[int] | None, typer.Option(help="The same of the discriminator; none by default, as in the paper's code.")
    ] = None,
    conditional: Annotated[bool, typer.Option("--conditional", help="Use the classes of --data.")] = False,
    shared_dim: Annotated[int, typer.Option(min=0, help="Class embedding that all blocks share; 0: none.")] = 0,
    hierarchical: Annotated[bool, typer.Option("--hierarchical", help="Give each block its own part of z.")] = False,
    resize: Annotated[bool, typer.Option("--resize", help="Cut and shrink images of another size.")] = False,
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    steps: Annotated[int, typer.Option(min=1)] = 1500,
    batch: Annotated[int, typer.Option(min=2)] = 32,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts of a batch, one after the other in memory.")] = 1,
    d_steps: Annotated[int, typer.Option(min=1, help="Steps of the discriminator to each of the generator.")] = 2,
    ttur: Annotated[str, typer.Option(help="Rates of the supplement, or of its code, which are the reverse.")] = "code",
    rate_factor: Annotated[float, typer.Option(min=1e-3, help="Multiplies both rates; 1 is the paper's.")] = 4.0,
    ema: Annotated[float, typer.Option(min=0, max=0.99999, help="Moving average of the generator; 0: none.")] = 0.0,
    max_error: Annotated[
        float | None, typer.Option(help="Adapt SMYRF's rounds over training to this error of its map (§16.1).")
    ] = None,
    look: Annotated[int, typer.Option(min=1, help="Steps between two looks at that error.")] = 50,
    max_rounds: Annotated[int, typer.Option(min=1, help="The most rounds that it takes.")] = 8,
    recompute: Annotated[bool, typer.Option("--recompute", help="Activation checkpointing.")] = False,
    bf16: command.Bf16 = None,
    tests: Annotated[int, typer.Option(min=8, help="Images kept aside to judge by.")] = 1024,
    inception: Annotated[Path | None, typer.Option(help="Inception as TorchScript, for FID and KID.")] = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Train BigGAN with attention at full resolution, dense and clustered, and compare the images.

    SMYRF's supplement, §15.2: one class, hinge loss, two rates, 2 steps of D, no moving average. The default is a small
    one on portraits of 32² that are drawn here.
    """
    if quick:
        images, ch, steps, batch, tests = min(images, 96), min(ch, 4), min(steps, 6), min(batch, 8), min(tests, 32)
    if ttur not in TTUR:
        raise UserError(f"--ttur must be one of {', '.join(TTUR)}, got {ttur!r}.")
    size = resolution**2
    default = f"smyrf:rounds=4,cluster_size={max(1, size // 8)},resample=true"  # half of the pairs, as in the paper
    mechanisms = command.checked(mechanism or [default])
    base = Settings(
        steps=steps,
        batch=batch,
        accumulate=accumulate,
        d_steps=d_steps,
        ttur=ttur,
        rate_factor=rate_factor,
        ema=ema,
        bf16=in_bf16(bf16),
        recompute=recompute,
        max_error=max_error,
        look=look,
        max_rounds=max_rounds,
    )
    each = {name: settings_of(base, name) for name in mechanisms}
    if max_error is not None and all(one.max_error is None for one in each.values()):
        raise UserError("--max-error adapts the rounds of SMYRF, and no --mechanism is one of fixed rounds.")
    part_size(base, processes().num_processes)
    shapes = Config(
        resolution=resolution,
        ch=ch,
        dim_z=dim_z,
        attention=tuple(attention or [resolution]),
        d_attention=tuple(d_attention or ()),
        shared_dim=shared_dim,
        hierarchical=hierarchical,
    )
    if inception is not None:
        Inception(inception)
    with bar(seeds * len(mechanisms)) as shown:
        found = load_images(data, images, resolution, resize, conditional, shown)
        if len(found) <= tests + 1:
            raise UserError(f"there are {len(found)} images, of which --tests {tests} are kept aside: give fewer.")
        train, test = running.sets(found, tests)
        config = replace(shapes, classes=len(found.names))
        settings = {
            "recipe": "biggan",
            "data": None if data is None else str(data),
            "images": len(found),
            "data digest": found.digest(),
            "tests": tests,
            "mechanisms": mechanisms,
            "seeds": seeds,
            "config": config.to_dict(),
            "training": base.to_dict(),
            "processes": processes().num_processes,
            "inception": None if inception is None else of_file(inception),  # no run that is done has FID otherwise
        }
        study = Study.open(out_folder(out, f"biggan-{resolution}", quick), settings, fresh=fresh)
        features = features_of(study, train, 20 if quick else 600, shown)
        compared = Comparison(study, config, train, test, mechanisms, each, features, inception)
        results = [compared.run(name, seed, shown) for seed in range(seeds) for name in mechanisms]
    few = train.only(slice(None, tests))
    floor = quality.judge(quality.describe(features, test), quality.describe(features, few))._asdict()
    found_tables = [tables.trained_with(results, floor), tables.interchange(results), *tables.rounds(results)]
    finish(
        study.folder,
        found_tables,
        {"results": results, "floor": floor},
        partial(tables.draw, results=results),
        tables.summary(results, floor),
        panels=2,
    )
