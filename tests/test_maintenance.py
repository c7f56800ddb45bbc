"""What maintainers rely on: `make help`, the workflows, and files that the documents for contributors name."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE)
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/stability.md")]
PLACES = (ROOT, ROOT / "src" / "coterie", ROOT / "native")  # what paths in those pages start from
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path):
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def make(*arguments):
    """What make prints, also if a make of its own (`make test`) runs this."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_help_lists_every_target():
    shown = make("help")
    listed = dict(line.split(maxsplit=1) for line in shown.splitlines())
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(listed) == set(phony.split()) == set(TARGETS)


def test_make_alone_sets_up_and_torch_is_pinned_unless_asked_otherwise():
    def would_run(*arguments):
        return make("--dry-run", "--always-make", *arguments)

    assert TARGETS[0] == "setup"
    assert re.search(r"pip install --quiet 'torch==[\d.]+'$", would_run(), re.MULTILINE)
    assert re.search(r"pip install --quiet 'torch'$", would_run("TORCH=torch"), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_what_exists(path):
    found = yaml.safe_load(path.read_text())
    assert found[True], "YAML reads the key `on` as true"
    assert found["permissions"] == {"contents": "read"}
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        for target in re.findall(r"\bmake ([a-z]+)", step.get("run", "")):
            assert target in TARGETS
        for file in re.findall(r"(?<!\S)(?:\./)?(\.ci/\S+)", step.get("run", "")):
            assert (ROOT / file).stat().st_mode & 0o111


def test_every_push_runs_what_developers_run():
    [run] = [step["run"] for step in steps(ROOT / ".github/workflows/ci.yml") if "run" in step]
    assert run == ".ci/run"
    for target in re.findall(r"^make ([a-z]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE):
        assert target in TARGETS


def test_the_weekly_run_takes_the_newest_torch():
    job = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())["jobs"]["newest"]
    assert job["env"]["TORCH"] == "torch"
    assert re.search(r"^TORCH +\?= torch==", MAKEFILE, re.MULTILINE)


def test_wheels_are_built_for_every_architecture_that_pyproject_names():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    wanted = {arch for system in ("linux", "macos", "windows") for arch in settings[system]["archs"].split()}
    matrix = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]["wheels"]["strategy"]["matrix"]
    assert {each["arch"] for each in matrix["include"]} == wanted


def named(text):
    """Files and folders in `code`, without those that are a reader's own or stand for any."""
    found = re.findall(r"`([\w./-]+(?:\.(?:py|h|cpp|txt|json|yml|md)|/))`", text)
    return [
        name for name in found if not re.search(r"NAME|VERSION", name) and name not in ("coterie.json", "config.json")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_for_maintainers_name_what_exists(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^):#]+)\)", text):
        assert (page.parent / link).exists(), link
    if page.name == "CHANGELOG.md":  # which may tell of what is gone
        return
    assert named(text)
    for name in named(text):
        assert any((place / name).exists() for place in PLACES), name
    for target in re.findall(r"`make ([a-z]+)", text):
        assert target in TARGETS
    for test in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {test}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), test


def test_the_pictures_are_what_their_script_draws_and_follow_the_layers():
    from docs.draw_architecture import LAYERS, PICTURES

    from tests.test_layers import LEVEL

    for name, picture in PICTURES.items():
        assert (ROOT / "docs" / "_static" / name).read_text(encoding="utf-8") == picture
    drawn = [box.name.removesuffix("/").removesuffix(".py") for row in LAYERS for box in row]
    assert drawn.pop() == "native"
    assert {*drawn, "_version", "__main__"} == set(LEVEL)
    levels = [LEVEL[name] for name in drawn]
    assert levels == sorted(levels, reverse=True)
