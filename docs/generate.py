"""Writes docs/reference/*.md from the code: python docs/generate.py

Each page has a module in docs/making. A test compares the files with what this script makes, so that they can't go out
of date unnoticed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from making import api, cli, errors, schema, settings

FOLDER = Path(__file__).parent / "reference"
PAGES = {
    "cli.md": cli.cli,
    "python-api.md": api.api,
    "schema.md": schema.schema,
    "settings.md": settings.settings,
    "errors.md": errors.errors,
}


def made() -> dict[str, str]:
    """Name of each page -> its text."""
    return {name: make() for name, make in PAGES.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in made().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")


if __name__ == "__main__":
    main()
