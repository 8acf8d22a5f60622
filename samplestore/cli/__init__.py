"""The `samplestore` command. samplestore/cli/app.py has the table of its commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code (`args`: without the program's name; default sys.argv)."""
    from samplestore.cli.app import run

    raise SystemExit(run(args))
