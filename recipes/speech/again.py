"""Run recognisers that a study has trained with other mechanisms.

python -m recipes.speech.again out/recipes/speech/models/*.pt --data fsdd --mechanism clustered:clusters=1
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import print_table
from coterie.cli.inputs import UserError
from recipes.common import command
from recipes.common.precision import in_bf16
from recipes.common.progress import bar
from recipes.common.scores import shown
from recipes.common.trying import trying
from recipes.speech import kept, loading
from recipes.speech.corpus import Corpus
from recipes.speech.network import attend_by
from recipes.speech.run import DIGITS, FIRST, Targets, digit_range, speakers
from recipes.speech.testing import Reader, errors, hear
from recipes.speech.training import Settings

Errors = dict[tuple[int, str], dict[str, list[float]]]  # by layers and training, and by what it runs with: of each seed


def measured(
    models: list[Path],
    corpus: Corpus,
    running: list[str],
    *,
    bf16: bool,
    done: Callable[[], None] = lambda: None,
) -> Errors:
    """The errors of models on the test of a corpus, run with each mechanism."""
    found: Errors = {}
    for file in models:
        model, about = kept.load(file)
        if about["symbols"] != corpus.symbols:
            raise UserError(f"{file} writes {about['symbols']!r}, and {corpus.name} is written in other symbols.")
        mine = found.setdefault((model.config.layers, about["mechanism"]), {})
        for name in running:
            with trying(name, "in this model"):
                heard = hear(attend_by(model, name), corpus.test, Settings.frames, bf16=bf16)
            mine.setdefault(name, []).append(float(errors(corpus, heard, Reader(corpus))[corpus.unit]))
        done()
    return found


def main(
    models: Annotated[list[Path], typer.Argument(help="Files of a study's folder 'models'.")],
    data: Annotated[str, typer.Option(help="What they were tested on: a folder or a hub name, as in the study.")],
    mechanism: command.Mechanisms = None,
    digits: Annotated[str, typer.Option(help="FSDD: strings of so many.")] = DIGITS,
    held_out: Annotated[str, typer.Option(help="FSDD: 'recordings', or speakers.")] = "recordings",
    targets: Annotated[Targets, typer.Option(help="FSDD: how digits are written.")] = Targets.DIGITS,
    bf16: command.Bf16 = None,
    debug: command.Debug = False,
) -> None:
    """Run trained recognisers with mechanisms that their study did not have, on the same test."""
    running = command.checked(mechanism or [])
    corpus = loading.load(
        data,
        first=digit_range("--first", FIRST),
        last=digit_range("--digits", digits),
        held_out=speakers(held_out),
        spelled=targets is Targets.CHARACTERS,
    )
    with bar(len(models)) as told:
        found = measured(models, corpus, running, bf16=in_bf16(bf16), done=told.done)
    title = f"{corpus.name}, trained ↓, run with →: {corpus.unit} error, %"
    rows = [[str(layers), trained, *map(shown, mine.values())] for (layers, trained), mine in found.items()]
    print_table(title, ["layers", "trained with", *running], rows)


if __name__ == "__main__":
    command.run("speech.again", main)
