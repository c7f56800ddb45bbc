"""`make recipes`: every recipe is found, and one without its data is named."""

from recipes import __main__ as every
from tests.command import _said


def test_every_recipe_has_what_the_others_have():
    root = every._HERE
    assert "glue" in every.names()
    for name in every.names():
        assert {"README.md", "__main__.py", "run.py", "__init__.py"} <= {file.name for file in (root / name).iterdir()}
        page = (root / name / "README.md").read_text(encoding="utf-8")
        assert page.startswith("# ")
        assert f"python -m recipes.{name}" in page
        assert len(page.splitlines()) < 80, "a page"
        assert every.quick(name, root)


def test_data_that_are_not_there_are_named(tmp_path):
    row = every.run_one("glue", ["--data", f"{tmp_path}/glue"], tmp_path, tmp_path / "out")
    assert row[1:] == ["–", f"not run: there is no {tmp_path}/glue"]


def test_an_unknown_recipe_is_refused():
    import typer

    from coterie.cli.sentences import run_command

    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(every.main)
    said = _said(lambda: run_command(app, "recipes", memory=""), ("pie",), fails=1)
    assert "there is no recipe 'pie': expected some of" in said
