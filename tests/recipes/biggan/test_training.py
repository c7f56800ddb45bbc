"""Training: determinism, resume, accumulation, several processes, and what is looked at as it goes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recipes.biggan.config import Config
from recipes.biggan.draws import Order, truncated
from recipes.biggan.training import Settings, Training, part_size
from recipes.common.draws import generator
from recipes.common.progress import Bar

from coterie.cli.inputs import UserError
from recipes.biggan import collapse, running, sheets
from tests.recipes.biggan.conftest import SMYRF, TINY

QUICK = Settings(steps=4, batch=4, mechanism=f"{SMYRF},resample=true", ttur="code")


def weights(training):
    return {**training.g.state_dict(), **{f"d.{name}": value for name, value in training.d.state_dict().items()}}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize(
    "settings",
    [
        QUICK,
        replace(QUICK, ema=0.9, mechanism="dense", bf16=True),
        replace(QUICK, max_error=0.2, look=2, max_rounds=3, recompute=True),
    ],
    ids=["smyrf", "dense-ema-bf16", "adaptive-recompute"],
)
def test_resumed_it_has_the_same_bits(images, settings, tmp_path):
    whole = Training(TINY, settings, images.unlabelled(), seed=5)
    for _ in range(4):
        whole.advance()
    first = Training(TINY, settings, images.unlabelled(), seed=5)
    for _ in range(2):
        first.advance()
    torch.save(first.state(), tmp_path / "state")
    torch.rand(17)  # what was drawn elsewhere must not matter
    resumed = Training(TINY, settings, images.unlabelled(), seed=5)
    resumed.restore(torch.load(tmp_path / "state", weights_only=True))
    for _ in range(2):
        resumed.advance()
    assert equal(weights(resumed), weights(whole))
    assert resumed.losses == whole.losses
    assert equal(resumed.shown.state_dict(), whole.shown.state_dict())
    if settings.max_error is not None:
        assert whole.rounds is not None
        assert resumed.rounds is not None
        assert resumed.rounds.log == whole.rounds.log
        assert [chosen.step for chosen in whole.rounds.log] == [1, 3]
        assert str(resumed.g.blocks[2][1].mechanism) == str(whole.g.blocks[2][1].mechanism)


def test_another_seed_is_another_run(images):
    one, other = (Training(TINY, QUICK, images.unlabelled(), seed) for seed in (0, 1))
    assert not torch.equal(one.g.linear.weight, other.g.linear.weight)
    assert one.advance() != other.advance()


def test_losses_move_and_images_with_classes(images):
    config = Config(32, 2, 8, 2, (32,), (16,), shared_dim=4, hierarchical=True)
    training = Training(config, replace(QUICK, mechanism="dense"), images, 0)
    first = training.advance()
    for _ in range(7):
        last = training.advance()
    assert last.real - last.fake > first.real - first.fake  # it tells them apart better


def test_parts_of_a_batch_give_the_discriminators_gradient_of_the_whole(images, monkeypatch):
    """Batch norms see parts, so generated images differ: with those held fixed, gradients are the same."""
    found = []
    for parts in (1, 2):
        training = Training(TINY, replace(QUICK, accumulate=parts), images.unlabelled(), 3)
        fixed = iter(torch.linspace(-1, 1, 4 * 3 * 32 * 32).view(4, 3, 32, 32).split(4 // parts))
        monkeypatch.setattr(
            training, "_fake", lambda fixed=fixed: (x := next(fixed), torch.zeros(len(x), dtype=torch.long))
        )
        monkeypatch.setattr(training.d_optim, "step", lambda: None)
        monkeypatch.setattr("recipes.biggan.discriminator.iterate", lambda model: None)
        training._d_step(0)
        found.append({name: p.grad for name, p in training.d.named_parameters()})
    for name, grad in found[0].items():
        apart = float((grad - found[1][name]).norm())  # sums in another order: single entries may nearly cancel
        assert apart <= 1e-4 * float(grad.norm()) + 1e-8, name


def test_rates_and_what_both_sources_say():
    assert Settings(ttur="supplement").rates == (2e-4, 5e-5)
    assert Settings(ttur="code").rates == (5e-5, 2e-4)


def test_a_moving_average_is_one(images):
    training = Training(TINY, replace(QUICK, ema=0.5), images.unlabelled(), 0)
    assert training.ema is not None
    key = "blocks.0.0.conv1.weight"
    kept = training.ema.state_dict()[key].clone()
    for step in range(1, 4):
        training.advance()
        decay = min(0.5, step / (step + 10))
        kept = decay * kept + (1 - decay) * training.g.state_dict()[key]
    torch.testing.assert_close(training.ema.state_dict()[key], kept)
    assert torch.equal(training.ema.state_dict()["linear.u0"], training.g.state_dict()["linear.u0"])


def test_broken_down(images):
    training = Training(TINY, QUICK, images.unlabelled(), 0)
    with torch.no_grad():
        training.g.linear.weight[0] = torch.nan
    with pytest.raises(UserError, match="training broke down at step 1: its losses are no numbers"):
        training.advance()


@pytest.mark.parametrize(
    ("settings", "processes", "said"),
    [
        (Settings(batch=10, accumulate=4), 1, "--batch 10 cannot be cut into 4 equal parts"),
        (Settings(batch=8, accumulate=2), 3, "--batch 8 cannot be cut into 6 equal parts"),
        (Settings(batch=4, accumulate=4), 1, "leaves fewer than 2 images a part"),
    ],
)
def test_batches_that_cannot_be_cut(settings, processes, said):
    with pytest.raises(UserError, match=said):
        part_size(settings, processes)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_every_image_once_in_an_epoch():
    order = Order(7, seed=3)
    rows = order.take(0, 21)
    for epoch in rows.split(7):
        assert sorted(epoch.tolist()) == list(range(7))
    assert torch.equal(Order(7, seed=3).take(12, 5), rows[12:17])  # wherever one starts
    assert rows[:7].tolist() != rows[7:14].tolist()


def test_truncated_numbers_have_the_distribution_of_those_drawn_anew():
    found = truncated(40_000, 1, 0.8, generator(0, "test"))[:, 0]
    drawn = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    kept = drawn[drawn.abs() <= 0.8]
    shares = torch.tensor([0.05, 0.25, 0.5, 0.9])
    torch.testing.assert_close(found.quantile(shares), kept[:100_000].quantile(shares), atol=0.02, rtol=0)


# --- looking ----------------------------------------------------------------------------------------------------------


def test_images_that_resemble_each_other_are_warned_about():
    torch.manual_seed(0)
    various = torch.rand(20, 3, 1, 1).expand(-1, -1, 32, 32)
    same = various[:1] + 0.1 * torch.randn(20, 3, 32, 32)  # noise is no variety
    share = collapse.spread(same) / collapse.spread(various)
    said = collapse.warning(40, share)
    assert said is not None
    assert said.startswith("step 40: generated images vary ")
    assert collapse.warning(40, 0.5) is None


def test_a_run_writes_what_there_is_to_see(images, tmp_path):
    bar = Bar(lambda *_: None, 1)
    training = Training(TINY, replace(QUICK, steps=2), images.unlabelled(), 0)
    with torch.no_grad():  # all images are grey, which must be noticed
        training.g.output_layer[0].gain.zero_()
    found = running.train(training, tmp_path / "work", tmp_path / "pictures", bar)
    assert [Path(file).name for file in sorted((tmp_path / "pictures").glob("*.png"))] == [
        "film.png",
        "losses.png",
        "step-000000.png",
        "step-000001.png",
        "step-000002.png",
    ]
    assert len(found["losses"]) == 2
    assert "looks like mode collapse" in found["warnings"][0]
    assert found["variety"][0][1] == 0


def test_tensorboard_gets_what_there_is_if_it_is_installed(images, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            assert folder.endswith("tensorboard")

        def add_scalar(self, name, value, step):
            written.append((name, step))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    training = Training(TINY, replace(QUICK, steps=1), images.unlabelled(), 0)
    running.train(training, tmp_path / "work", tmp_path / "pictures", Bar(lambda *_: None, 1))
    assert written == [(name, 1) for name in ("d", "g", "real", "fake", "variety")]


def test_sheets(tmp_path):
    pixels = torch.arange(5).view(5, 1, 1, 1).expand(5, 3, 4, 4).to(torch.uint8)
    sheet = sheets.grid(pixels, 3)
    assert sheet.size == (3 * 6 + 2, 2 * 6 + 2)
    assert sheet.getpixel((2, 8)) == (3, 3, 3)
    assert sheet.getpixel((0, 0)) == (255, 255, 255)
    assert sheets.to_bytes(torch.tensor([-2.0, -1.0, 0.0, 1.0, torch.nan])).tolist() == [0, 0, 128, 255, 128]
    for step in range(2):
        sheets.write(tmp_path / f"{step}.png", pixels + 10 * step, 3)
    sheets.strip(tmp_path / "film.png", [tmp_path / "0.png", tmp_path / "1.png"], 3)
    from PIL import Image

    with Image.open(tmp_path / "film.png") as film, Image.open(tmp_path / "0.png") as first:
        assert film.width == first.width
        zoom = 96 // 4
        assert film.getpixel((3 * zoom, 3 * zoom)) == (0, 0, 0)
        assert film.getpixel((3 * zoom, film.height // 2 + 3 * zoom)) == (10, 10, 10)


# --- several processes ------------------------------------------------------------------------------------------------

WORKER = """
import sys, torch
from accelerate import PartialState
from recipes.biggan.config import Config
from recipes.biggan.images import Images
from recipes.biggan.training import Settings, Training
torch.set_num_threads(1)
pixels = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
images = Images(pixels, torch.zeros(16, dtype=torch.long), ["image"])
settings = Settings(batch=8, mechanism="smyrf:rounds=2,cluster_size=128", max_error=0.1, look=1, max_rounds=3)
training = Training(Config(32, 2, 6, attention=(32,)), settings, images, 0)
before = training.d.linear.weight.clone()
for _ in range(2):
    training.advance()
found = {**training.g.state_dict(), **{f"d.{k}": v for k, v in training.d.state_dict().items()}}
found = {"weights": found, "seen": training._real(0, 0)[0], "moved": bool((training.d.linear.weight != before).any())}
found["mechanism"] = str(training.g.blocks[2][1].mechanism)
torch.save(found, f"{sys.argv[1]}/{PartialState().process_index}.pt")
"""


def test_two_processes_take_the_same_steps(tmp_path):
    """As `accelerate launch` starts them: each sees its own images, and both end with the same weights."""
    (tmp_path / "worker.py").write_text(WORKER)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "worker.py", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"{process}.pt", weights_only=True) for process in range(2))
    assert one["moved"]
    assert not torch.equal(one["seen"], two["seen"])
    assert one["mechanism"] == two["mechanism"]
    assert equal(one["weights"], two["weights"])
