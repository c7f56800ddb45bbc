"""The `coterie` command."""

import sys


def main() -> None:
    """The entry point, which is installed even where what the command is made of is not."""
    try:
        from coterie.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command needs {error.name}: pip install 'coterie[cli]'.")
    app.main()


__all__ = ["main"]
