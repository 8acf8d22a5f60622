"""What all made pages share: their head, tables, and docstrings as prose."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

NOTE = "<!-- Made by docs/generate.py. Do not edit: change the code and run `python docs/generate.py`. -->"


def page(title: str, lead: str, body: Iterator[str]) -> str:
    return "\n".join([NOTE, f"# {title}", "", lead, "", *body]).rstrip() + "\n"


def cell(value: object) -> str:
    """Text for a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{cell(value)}`" if str(value) else ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def paragraphs(doc: str | None) -> Iterator[str]:
    """A docstring: prose as prose, what is aligned in columns as it stands."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")):
        if not part:
            continue
        aligned = any(re.search(r"\S {2,}\S", line) for line in part.splitlines()) or part.startswith(" ")
        yield from (["```text", part, "```"] if aligned else [part])
        yield ""
