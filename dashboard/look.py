"""How things look, once: colours by meaning, texts made safe and visible, the style sheet. No Streamlit here."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from samplestore.states import EVALUATED

# Okabe and Ito's palette: told apart with every kind of colour vision. Never the only cue.
ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#8A8F98"
VERSION_COLOURS = (SKY, ORANGE, GREEN, PURPLE, BLUE, VERMILLION, YELLOW)
UNDERLINES = (
    "solid",
    "dashed",
    "dotted",
    "double",
)  # the second cue: four styles and seven colours meet again after 28

STATUS_COLOURS = {
    "pending": GREY, "aborted": ORANGE, "completed": GREEN, "truncated": PURPLE, "failed": VERMILLION,
}  # fmt: skip
GROUP_COLOURS = {
    "open": SKY, "scoring": PURPLE, "ready": GREEN, "leased": ORANGE, "consumed": BLUE, "dropped": VERMILLION,
    "stale": YELLOW, "superseded": GREY,
}  # fmt: skip
FATE_COLOURS = {
    "consumed": BLUE, "leased": ORANGE, "ready": GREEN, "awaiting_stage": PURPLE, "in_flight": SKY, "resumable": GREY,
    "evaluated": "#7FA8A0", "dropped": VERMILLION, "stale": YELLOW, "failed": "#8C2D04", "superseded": "#5F6570",
}  # fmt: skip
WASTED = ("dropped", "stale", "failed", "superseded")  # hatched in the bar: generated, and not trained on

DAY_S = 86_400.0
MARKS = {"\n": "⏎\n", "\t": "⇥\t", "\r": "⟨CR⟩", "\x1b": "⟨ESC⟩"}


def fates(book: Mapping[str, Any]) -> dict[str, int]:
    """Tokens by fate, in the order of a bar. Those of evaluations are apart, where there are any: they are kept as
    dropped, since no batch may have them, but nothing was wasted."""
    told = dict(book["by_fate"])
    evaluated = min(book["dropped_by_reason"].get(EVALUATED, 0), told.get("dropped", 0))
    if evaluated:
        told |= {"dropped": told["dropped"] - evaluated, "evaluated": evaluated}
    names = [name for name in FATE_COLOURS if name in told or name != "evaluated"]
    return {name: told.get(name, 0) for name in [*names, *(set(told) - set(names))]}


def esc(value: object) -> str:
    return html.escape(str(value), quote=True)


def visible(text: str, limit: int | None = None) -> str:
    """Text of untrusted origin with what can't be seen, or would turn the line around, spelled out; not yet escaped.

    Newlines and tabs are marked and kept.
    """
    cut = text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_shown(c) for c in cut)


def _shown(c: str) -> str:
    if c in MARKS:
        return MARKS[c]
    # Cc control, Cf format (bidi, zero width), Cs surrogate, Co private use, Cn unassigned, Zl and Zp separators
    if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{ord(c):04X}⟩"
    return c


def line(value: object, limit: int = 120) -> str:
    """One escaped line of untrusted text."""
    return esc(visible(str(value), limit).replace("⏎\n", "⏎").replace("⇥\t", "⇥"))


def version_name(low: int | None, high: int | None = None) -> str:
    if low is None:
        return "v?"
    return f"v{low}" if high is None or high == low else f"v{low}–{high}"


def count(n: float) -> str:
    return f"{n:,.0f}"


def size(n: float | None) -> str:
    """Bytes for people."""
    if n is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if abs(n) < 1000:
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1000
    return f"{n:,.1f} GB"


def clock(at: float | None) -> str:
    """HH:MM:SS in UTC: the reader's zone is not known on the server, and a mixed one would mislead."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def moment(at: float | None, now: float) -> str:
    """HH:MM:SS in UTC, of another day than that of `now` with its date: a page may be left open, and a run lasts."""
    if at is None or at // DAY_S == now // DAY_S:
        return clock(at)
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def when(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    s = max(0.0, seconds)
    if s < 120:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.0f} h" if s < 172_800 else f"{s / 86_400:.0f} d"


def duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else age(seconds)


def version_style(version: int | None, alpha: str = "38") -> str:
    """Inline style of a token of this version. A constant per version, whatever else is on the page."""
    if version is None:
        return f"background:{GREY}{alpha};border-bottom-color:{GREY};border-bottom-style:double"
    colour = VERSION_COLOURS[version % len(VERSION_COLOURS)]
    return f"background:{colour}{alpha};border-bottom-color:{colour};border-bottom-style:{UNDERLINES[version % 4]}"


def version_key(low: int | None, high: int | None = None) -> str:
    """A small label in the version's colours, for tables and legends."""
    style = f"{version_style(low)};border-bottom-width:3px"
    return f'<span class="ss-vkey" style="{style}">{esc(version_name(low, high))}</span>'
