"""What the commands print: tables on stdout, JSON, times, and text of untrusted origin made harmless."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

SCHEMA_VERSION = 1
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # control, format (bidi!), surrogates, private, separators


def printable(value: object, *, lines: bool = False) -> str:
    """Text that does nothing to a terminal: control, bidi and other invisible characters are shown as escapes.
    `lines`: newlines and tabs stay."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") or not _hidden(c) else _escape(c) for c in text)


def _hidden(char: str) -> bool:
    return unicodedata.category(char) in _INVISIBLE


def _escape(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def when(seconds: float | None) -> str:
    """UTC, ISO 8601."""
    return "" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def shown(value: Any) -> str:
    """A cell: numbers grouped, None empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(value)


def emit_json(told: dict[str, Any]) -> None:
    """One object on one line. ASCII only, so that no text in it can reach the terminal raw."""
    sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **_finite(told)}, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    """JSON has no NaN; a damaged row must not make the whole answer unreadable."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def say(text: str = "", *, lines: bool = False) -> None:
    """A line of data."""
    sys.stdout.write(printable(text, lines=lines) + "\n")


def note(text: str, *, lines: bool = False) -> None:
    """A line for people, on stderr."""
    sys.stdout.flush()
    sys.stderr.write(printable(text, lines=lines) + "\n")
    sys.stderr.flush()


def fancy() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class _Frame(io.StringIO):
    """A picture of what a command writes to a terminal."""

    def isatty(self) -> bool:
        return True


def framed(work: Callable[[], None]) -> Any:
    """What `work` would write to this terminal, as a rich Text."""
    from rich.text import Text

    frame = _Frame()
    with contextlib.redirect_stdout(frame):
        work()
    return Text.from_ansi(frame.getvalue())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """A table: rich on a terminal, plain aligned text elsewhere. A column of numbers is aligned to the right."""
    listed = [list(row) for row in rows]
    right = [_numeric([row[i] for row in listed]) for i in range(len(columns))]
    cells = [[shown(value) for value in row] for row in listed]
    if fancy():
        _rich(columns, cells, right, title)
        return
    if title:
        say(title)
    widths = [max(map(_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    for row in ([*columns], *cells):
        padded = (_padded(cell, widths[i], right[i]) for i, cell in enumerate(row))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def pairs(rows: Iterable[tuple[str, Any]]) -> None:
    """name   value, one a line; on a terminal long values are folded below their beginning."""
    listed = [(name, shown(value)) for name, value in rows]
    if fancy():
        _rich_pairs(listed)
        return
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        sys.stdout.write(f"{name:<{width}}  {value}".rstrip() + "\n")


def counts(values: dict[str, int], *, zero: bool = False) -> str:
    """open 3, ready 1"""
    return ", ".join(f"{name} {n:,}" for name, n in values.items() if n or zero) or "none"


def _numeric(values: list[Any]) -> bool:
    known = [v for v in values if v is not None]
    return bool(known) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)


def _width(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int, right: bool) -> str:
    blank = " " * (width - _width(text))
    return blank + text if right else text + blank


def _rich_pairs(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, 2, 0, 0))
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in rows:
        drawn.add_row(Text(name, style="bold"), Text(value))
    Console(file=sys.stdout).print(drawn)


FOLDED = 20  # characters: narrower columns, times among them, are never folded
WORD = 48  # nor are words, the names of metrics and URLs among them, where there is room for it


def _rich(columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str | None) -> None:
    """A table that is legible on this terminal: where it is too narrow, columns without a value go, then long texts are
    folded, and in the end each row is a paragraph of names and values."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    shown = list(range(len(columns)))
    widths = [max(map(_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]

    def needs(most: int) -> int:
        return sum(min(widths[i], most) for i in shown) + GAP * (len(shown) - 1)

    if needs(sys.maxsize) > console.width:
        shown = [i for i in shown if any(row[i] for row in cells)]
    if needs(FOLDED) > console.width:
        _paragraphs(console, columns, cells, shown)
        return
    words = [max((len(word) for row in cells for word in row[i].split()), default=0) for i in range(len(columns))]
    floors = [max(min(widths[i], FOLDED), min(words[i], WORD)) for i in range(len(columns))]
    if sum(floors[i] for i in shown) + GAP * (len(shown) - 1) > console.width:
        floors = [min(width, FOLDED) for width in widths]
    drawn = Table(
        box=SIMPLE_HEAD,
        title=None if title is None else Text(title),
        title_justify="left",
        pad_edge=False,
        show_edge=False,
    )
    for i in shown:
        how: Any = "right" if right[i] else "left"
        # What need not be folded says so: rich makes all others narrower first, and min_width comes after that.
        whole = widths[i] <= floors[i]
        drawn.add_column(Text(columns[i]), justify=how, overflow="fold", min_width=floors[i], no_wrap=whole)
    for row in cells:
        drawn.add_row(*(Text(row[i]) for i in shown))  # Text, not str: a model's "[red]" is no markup
    console.print(drawn)


GAP = 3  # between two columns that rich draws


def _paragraphs(console: Any, columns: Sequence[str], cells: list[list[str]], shown: list[int]) -> None:
    from rich.text import Text

    for row in cells:
        told = Text(f"{columns[shown[0]]} {row[shown[0]]}", style="bold") if shown else Text()
        for i in shown[1:]:
            if row[i]:
                told.append(", ", style="not bold")
                told.append(f"{columns[i]} ", style="not bold dim")
                told.append(row[i], style="not bold")
        console.print(told)
