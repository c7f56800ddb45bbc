"""What Whisper's tokens stand for, from the file of ranks that openai-whisper has for its tokenizer."""

from __future__ import annotations

import base64
import binascii
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from coterie.cli.inputs import UserError
from recipes.common.reading import read_text

_TASKS = 5  # translate, transcribe, a language model's start, the prompt's start, no speech
_TIMES = 1501  # 0.00 to 30.00 s
_MULTILINGUAL = 51_865  # tokens of the smallest vocabulary of several languages
_GET = "pip install --no-deps openai-whisper, or give its whisper/assets/*.tiktoken as --tokens"


class Special(NamedTuple):
    """The tokens that are no text.

    Attributes:
        end: of a transcript; all tokens from here on are special.
        start: of a transcript.
        languages: the first language's token, and how many follow it.
        no_times: after it come no times.
    """

    end: int
    start: int
    languages: range
    transcribe: int
    no_times: int


def special(texts: int, size: int) -> Special:
    """Special tokens come after the tokens of texts: end, start, languages, tasks, and times.

    Args:
        texts: how many tokens stand for text.
        size: of the whole vocabulary.

    >>> special(50256, 51864).no_times, special(50257, 51866).transcribe
    (50362, 50360)
    """
    languages = size - texts - 2 - _TASKS - 1 - _TIMES
    if languages < 1:
        raise UserError(f"the model has {size:,} tokens, too few for {texts:,} tokens of text: another --tokens file.")
    first = texts + 2
    return Special(texts, texts + 1, range(first, first + languages), first + languages + 1, first + languages + _TASKS)


def multilingual(size: int) -> bool:
    """Whether a vocabulary of this size is one of several languages."""
    return size >= _MULTILINGUAL


def prompt(found: Special, size: int, language: str) -> list[int]:
    """What a transcript in a language begins with; a model of English alone is told neither language nor task.

    >>> prompt(special(50256, 51864), 51864, "en"), prompt(special(50257, 51865), 51865, "de")
    ([50257, 50362], [50258, 50261, 50359, 50363])
    """
    if not multilingual(size):
        if language != "en":
            raise UserError(f"--language {language}: the model speaks English alone.")
        return [found.start, found.no_times]
    known = list(LANGUAGES)[: len(found.languages)]
    if language not in known:
        raise UserError(f"--language {language}: expected one of {', '.join(known)}.")
    return [found.start, found.languages[known.index(language)], found.transcribe, found.no_times]


class Tokens(NamedTuple):
    """The bytes that each token of text stands for."""

    texts: list[bytes]

    def decode(self, ids: list[int]) -> str:
        """A text; special tokens are left out, and bytes that are no UTF-8 are replaced."""
        return b"".join(self.texts[i] for i in ids if i < len(self.texts)).decode("utf-8", errors="replace")


def read(file: Path) -> Tokens:
    """A file with a token in base64 and its number on each line."""
    found: dict[int, bytes] = {}
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"{file}, line {number}: expected a token in base64 and its number.") from error
    if not found or sorted(found) != list(range(len(found))):
        raise UserError(f"{file}: expected the tokens 0, 1, 2 …, each once.")
    return Tokens([found[rank] for rank in range(len(found))])


def assets(name: str) -> Path | None:
    """A file of the installed package openai-whisper."""
    spec = find_spec("whisper")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = (Path(folder) / name for folder in folders)
    return next((file for file in files if file.exists()), None)


def of_vocabulary(size: int, file: Path | None) -> Tokens:
    """The tokens of a model with so many of them; None is the file of the installed package."""
    name = f"assets/{'multilingual' if multilingual(size) else 'gpt2'}.tiktoken"
    found = file or assets(name)
    if found is None:
        raise UserError(f"what the model's tokens stand for is not known: {_GET}.")
    return read(found)
