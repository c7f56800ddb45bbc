"""What `check_mechanism` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A rule that a mechanism breaks.

    Attributes:
        rule: its name.
        what: what happened, and with which input.
        mend: how to put it right.
    """

    rule: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}\n    → {self.mend}"


@dataclass(frozen=True)
class Checked:
    """What `check_mechanism` found.

    Attributes:
        mechanism: in its short form.
        broken: the rules that it breaks, each once, by the first input that showed it.
        kept: names of the rules that it keeps.
        skipped: rules, or parts of one, that were not run, and why.
    """

    mechanism: str
    broken: tuple[Broken, ...]
    kept: tuple[str, ...]
    skipped: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken

    def raise_if_broken(self) -> None:
        """Raise AssertionError with everything that is broken."""
        if self.broken:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        total = len(self.broken) + len(self.kept)
        if self.ok:
            lines = [f"{self.mechanism} keeps all {total} rules that were run: {', '.join(self.kept)}"]
        else:
            lines = [f"{self.mechanism} breaks {len(self.broken)} of {total} rules"]
        lines += [f"  {each}" for each in self.broken]
        lines += [f"  not run: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join(lines)
