"""Pieces of pages as HTML. Pure functions: data in, escaped text out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from samplestore.dashboard import look
from samplestore.dashboard.look import age, count, esc, line
from samplestore.states import EVALUATED, TAKEN, GroupState

KEPT = 48  # characters of an address that is not broken
LATE = 0.5  # of a worker's time to live: its heartbeat should have come twice by then

ICONS = {"ok": "●", "warn": "▲", "bad": "■"}


def link(page: str, text: str, **query: object) -> str:
    told = {key: value for key, value in query.items() if value is not None}
    return f'<a href="{esc(page)}?{esc(urlencode(told))}" target="_self">{esc(text)}</a>'


def heading(title: str, meta: str) -> str:
    """The head of a page. title is escaped here, meta is HTML already."""
    named = f'<span class="name">{line(title, 200)}</span><span class="meta">{meta}</span>'
    return f'<div class="ss"><div class="ss-head">{named}</div></div>'


ONE_STOP = "one stop can be two: the abort that a worker stored, and the release"


def section(title: str, note: str, body: str) -> str:
    """A titled piece of a page; all but the title is HTML already."""
    return f'<div class="ss"><div class="ss-title">{esc(title)}<span class="dim">{note}</span></div>{body}</div>'


def empty(text: str) -> str:
    return f'<div class="ss-empty">{esc(text)}</div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values in a row; values are HTML already."""
    made = "".join(f'<span><span class="dim">{esc(k)}</span> <b>{v}</b></span>' for k, v in pairs)
    return f'<div class="ss"><div class="ss-legend ss-facts">{made}</div></div>'


def card(name: str, value: str, below: str, level: str) -> str:
    icon = f"{ICONS[level]} " if level else ""
    return (
        f'<div class="ss-card"><div class="k">{esc(name)}</div><div class="v">{value}</div>'
        f'<div class="s {level}">{icon}{esc(below)}</div></div>'
    )


def bar(
    counts: Mapping[str, int],
    colours: Mapping[str, str],
    *,
    hatched: Sequence[str] = (),
    tall: bool = False,
    names: str = "",
) -> str:
    """A stacked bar with its legend. Every part is in the legend, also the empty ones."""
    total = sum(counts.values())
    parts, legend = [], []
    for name, n in counts.items():
        waste = " waste" if name in hatched else ""
        colour, label = colours.get(name, look.GREY), name.replace("_", " ")
        share = f" ({100 * n / total:.1f} %)" if total and n else ""
        if n:
            style, title = f"flex:{n} 0 0;background-color:{colour}", f"{esc(label)}: {count(n)}{share}"
            parts.append(f'<i class="{waste.strip()}" style="{style}" title="{title}"></i>')
        zero = "" if n else ' class="zero"'
        dot = f'<span class="ss-dot{waste}" style="background-color:{colour}"></span>'
        legend.append(f"<span{zero}>{dot}{esc(label)} <b>{count(n)}</b></span>")
    told = ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in counts.items() if n)
    return (
        f'<div class="ss-bar{" tall" if tall else ""}" role="img" aria-label="{esc(names + ": " + (told or "none"))}">'
        f'{"".join(parts)}</div><div class="ss-legend">{"".join(legend)}</div>'
    )


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], *, on: int | None = None) -> str:
    """A table of cells that are HTML already. columns: (title, class)."""
    head = "".join(f'<th class="{css}">{esc(title)}</th>' for title, css in columns)
    body = "".join(
        f"<tr{' class=on' if i == on else ''}>"
        + "".join(f'<td class="{css}">{cell}</td>' for (_, css), cell in zip(columns, row, strict=True))
        + "</tr>"
        for i, row in enumerate(rows)
    )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="ss-scroll"><table class="ss-table">{inner}</table></div>'


def state(name: str, reason: str | None = None) -> str:
    """A group's state in its colour, and as a word. One that was there to be evaluated is no group that was thrown
    away, though that is how it is kept out of batches."""
    if (name, reason) == (GroupState.DROPPED, EVALUATED):
        return f'<span class="ss-dot" style="background-color:{look.GREY}"></span>evaluated'
    return f'<span class="ss-dot" style="background-color:{look.GROUP_COLOURS.get(name, look.GREY)}"></span>{esc(name)}'


def staleness_of(state: str) -> str:
    """Of a group in this state: what its staleness is of."""
    return "staleness at the lease" if state in TAKEN else "staleness now"


STATUS_MARKS = {"completed": "✓", "truncated": "✂", "failed": "✗", "aborted": "‖", "pending": "…"}


def status(s: Mapping[str, Any]) -> str:
    """Of a sample's row: its status, or that somebody generates it now, with a sign and a colour."""
    flying = s["in_flight"] if "in_flight" in s else s["owner"] is not None
    name = "in flight" if flying else s["status"]
    colour = look.SKY if flying else look.STATUS_COLOURS.get(name, look.GREY)
    sign = "▶" if flying else STATUS_MARKS.get(name, "")
    return f'<span class="ss-dot" style="background-color:{colour}"></span>{sign} {esc(name)}'


def stages(rows: Sequence[Mapping[str, Any]], as_of: float) -> str:
    """What rewards, filters and teachers said. Their errors and details are untrusted."""
    if not rows:
        return empty("No stage has worked on it.")
    columns = [("stage", "n"), ("status", "n"), ("outcome", "n"), ("value", "r"), ("took", "r"), ("failures", "r"),
               ("settled (UTC)", "n"), ("evidence", "")]  # fmt: skip
    return table(columns, [_stage(r, as_of) for r in rows])


def _stage(r: Mapping[str, Any], as_of: float) -> list[str]:
    good = r["outcome"] in (None, "ok")
    outcome = esc(r["outcome"] or "–") if good else mark("bad", str(r["outcome"]))
    details = "" if not r["details"] else line(json.dumps(r["details"], ensure_ascii=False, default=str), 2000)
    error = f'<span class="bad">{line(r["error"], 400)}</span> ' if r["error"] else ""
    return [
        line(r["name"], 60), esc(r["status"]), outcome, "–" if r["value"] is None else f"{r['value']:.4g}",
        "–" if r["elapsed_s"] is None else look.duration(r["elapsed_s"]), count(r["failures"]),
        look.moment(r["settled_at"], as_of), error + details or "–",
    ]  # fmt: skip


_CONTENT = re.compile(r'"content":\s*"((?:[^"\\]|\\.)*)')


def prompt_text(stored: str | None, *, cut: bool = False) -> str:
    """The words of a prompt that is stored as JSON: a text, or messages. With `cut` the JSON may end anywhere."""
    if not stored:
        return ""
    try:
        return _words(json.loads(stored))
    except ValueError:
        if not cut:
            return stored
    pieces = _CONTENT.findall(stored) or [stored.lstrip('[{"')]
    return " ⏵ ".join(_unescaped(p) for p in pieces)


def _words(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return " ⏵ ".join(_words(m.get("content") if isinstance(m, dict) else m) for m in prompt)
    if isinstance(prompt, dict) and "text" in prompt:
        return _words(prompt["text"])
    return json.dumps(prompt, ensure_ascii=False)


def _unescaped(piece: str) -> str:
    """A JSON string that ends anywhere, even in an escape."""
    for drop in range(7):
        try:
            return str(json.loads(f'"{piece[: len(piece) - drop]}"'))
        except ValueError:
            continue
    return piece


def url(text: str) -> str:
    """An address in one piece, as long as it is of usual length."""
    return f'<span class="keep">{line(text, 80)}</span>' if len(text) <= KEPT else line(text, 80)


def mark(level: str, text: str) -> str:
    return f'<span class="{level}">{ICONS[level]} {esc(text)}</span>'


def beat(w: Mapping[str, Any]) -> str:
    """The age of a live worker's heartbeat, judged by its own time to live."""
    late = w["heartbeat_age_s"]
    level = "bad" if late > w["ttl_s"] else "warn" if late > LATE * w["ttl_s"] else "ok"
    return mark(level, f"{age(late)} ago")


def serving(e: Mapping[str, Any]) -> str:
    """Whether an engine serves its run's current weights."""
    if e["state"] == "failed":
        return mark("bad", "failed")
    if e["version"] is None:
        return mark("warn", f"reports {look.visible(str(e['label']), 40)}, unknown to this run")
    return (
        mark("ok", "current")
        if e["version"] == e["current_version"]
        else mark("warn", f"current is v{e['current_version']}")
    )
