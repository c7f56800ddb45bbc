"""`coterie report`: stored fits as a page, one by itself or several side by side."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import Json, out, print_json, print_table, wrote
from coterie.cli.inputs import UserError
from coterie.cli.stored import read_fit
from coterie.files import expect_writable, shown
from coterie.fitting.result import Fit


def report(
    files: Annotated[list[Path], typer.Argument(help="What 'fit --save' wrote: of one model.")],
    out_file: Annotated[Path, typer.Option("--out", help="Where the page goes (HTML).")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a report on stored fits: several of one model are compared, with a plot of fidelity against speed."""
    from coterie.report.comparison import expect_one_model, summary_table, write_several

    expect_writable(out_file)
    fits, names = [read_fit(file) for file in files], _names(files)
    try:
        expect_one_model(fits, names)
    except ValueError as error:
        raise UserError(f"these fits cannot be compared: {error}.") from error
    command = shlex.join(["coterie", *sys.argv[1:]])
    write_several(out_file, fits, model=", ".join(names), command=command, names=names)
    if as_json:
        print_json([_facts(found, name) for found, name in zip(fits, names, strict=True)])
        return
    print_table("fits", *summary_table(fits, names))
    for found, name in zip(fits, names, strict=True):
        out.print(shown(f"{name}: {found.promise} {found.decode_promise}".strip()), markup=False, highlight=False)
    wrote(out_file)


def _names(files: list[Path]) -> list[str]:
    """Files by their names without folder and suffix, as far as that tells them apart; a file given twice is refused.

    Example:
        >>> from pathlib import Path
        >>> _names([Path("fits/a.json"), Path("fits/b.json")]), _names([Path("x/a.json"), Path("y/a.json")])
        (['a', 'b'], ['x/a.json', 'y/a.json'])
    """
    if len(set(files)) < len(files):
        raise UserError("the same file was given twice.")
    stems = [file.stem for file in files]
    return stems if len(set(stems)) == len(stems) else [str(file) for file in files]


def _facts(found: Fit, name: str) -> dict[str, Any]:
    """The row of a fit for programs."""
    from coterie.report.words import lowest

    at, (attention, whole) = lowest(found), found.speedups
    return {
        "fit": name,
        "fidelity": found.fidelity,
        "held_out": found.held_out,
        "bound": None if at is None else at.bound,
        "confidence": found.confidence,
        "share": found.share,
        "certified": found.certified,
        "model_speedup": whole,
        "attention_speedup": attention,
        "modules": found.choices,
    } | _decoding_facts(found)


def _decoding_facts(found: Fit) -> dict[str, Any]:
    if found.decode is None:
        return {}
    before, after = found.decode.rates
    known = {"held_out": found.decode.held_out, "certified": found.decode.certified, "modules": found.decode.choices}
    return {"decode": known | {"tokens_a_second_before": before, "tokens_a_second": after}}
