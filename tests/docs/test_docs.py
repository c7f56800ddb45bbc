"""Every Python block of the README and the docs runs, and the README's figures name the command that prints them."""

import re
from pathlib import Path

import pytest
import torch
from docs.check_links import broken
from docs.pictures import PICTURES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


WIDTH = 88  # characters that fit into the site's column


def given(folder):
    """What the first block of the README and the site takes for granted: the path of a model, and batches of text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(folder)
    return {"path": folder, "batches": [{"input_ids": torch.randint(50, (1, 100))} for _ in range(3)]}


def given_sentences():
    """What the page on sentence-transformers takes for granted: the path of MiniLM, and documents."""
    from coterie.cli.inputs import UserError, demo_folder, documentation

    try:
        folder = str(demo_folder())
    except UserError as error:
        pytest.skip(str(error))
    text = documentation()
    return {"path": folder, "documents": [text[start : start + 1500] for start in (0, 5000, 10000)]}


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_the_blocks_run(page, code, tmp_path, monkeypatch):
    names = given(tmp_path) if "from_pretrained(path)\n" in code else {}
    if "SentenceTransformer(path)\n" in code:
        names = given_sentences()
        monkeypatch.chdir(tmp_path)  # it saves
    exec(compile(code, str(page), "exec"), {"__name__": "docs"} | names)


def test_the_readme_starts_with_three_lines():
    assert BLOCKS[0][0].name == "README.md"
    assert [call in BLOCKS[0][1] for call in (".from_pretrained(", "coterie.fit(", ".apply(model)")] == [True] * 3


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_code_fits_its_column(page):
    for code in re.findall(r"```(?:python|sh)\n(.*?)```", page.read_text(), re.DOTALL):
        assert [line for line in code.splitlines() if len(line) > WIDTH] == []


def test_the_readme_starts_with_two_commands():
    first = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    commands = [line.partition("#")[0].strip() for line in first[1].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE) for command in commands)


def test_links_inside_the_repo_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^):]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), (page.name, link)
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], link


@pytest.mark.parametrize("name", PICTURES)
def test_drawings_are_up_to_date(name):
    """`python -m docs.pictures` draws them, bars from the tables of docs/numbers.md."""
    assert (ROOT / "docs" / "_static" / name).read_text(encoding="utf-8") == PICTURES[name]()


def test_a_built_site_with_a_broken_link_is_noticed(tmp_path):
    """The check that `make docs` runs."""
    (tmp_path / "style.css").write_text("")
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a><a href="https://x.org">x</a><link href="style.css">')
    (tmp_path / "b.html").write_text('<p id="here"><a href="#here">me</a>')
    assert broken(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="#gone">me</a><a href="c.html">c</a><img src="d.png">')
    assert broken(tmp_path) == ["a.html → b.html#here", "b.html → #gone", "b.html → c.html", "b.html → d.png"]
