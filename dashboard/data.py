"""Data: how large the database is, what is in it, and how far back a rewind can go."""

from __future__ import annotations

import time
from shlex import quote
from typing import Any

import streamlit as st

from samplestore import migrations
from samplestore.dashboard import frame, look, parts, source
from samplestore.run import Run
from samplestore.words import amount

BIG_WAL = 256 * 1024 * 1024


def page() -> None:
    of = frame.open_run()
    found = source.sizes(of)
    st.html(frame.head(of, "Data", f"as of {look.when(time.time())} UTC; {frame.STAYS}"))
    st.html(cards(of, found))
    if (found["wal_bytes"] or 0) > BIG_WAL:
        told = "The WAL is large: a reader with an old snapshot keeps it from starting afresh. See: samplestore doctor"
        st.html(f'<div class="ss warn">▲ {look.esc(told)}</div>')
    left, right = st.columns(2, gap="large")
    left.html(tables(found))
    right.html(arrays(found))
    right.html(retention(of, found))


def cards(of: Run, found: dict[str, Any]) -> str:
    free = found["free_bytes"]
    kind = "SQLite" if of.database.is_sqlite else "PostgreSQL"
    wal = "the log of recent writes" if of.database.is_sqlite else "not told"
    made = [
        ("Database", look.size(found["bytes"]), f"{kind}, schema {migrations.REVISION}", ""),
        ("Free in it", look.size(free), "prune leaves it; later rows use it" if free else "nothing to give back", ""),
        ("WAL", look.size(found["wal_bytes"]), wal, ""),
        ("Groups", look.count(found["run"]["n_groups"]), f"of {amount(found['run']['n_prompts'], 'prompt')}", ""),
    ]  # fmt: skip
    return '<div class="ss"><div class="ss-cards">' + "".join(parts.card(*c) for c in made) + "</div></div>"


def tables(found: dict[str, Any]) -> str:
    at_most = any(t["at_most"] for t in found["tables"])
    all_are = at_most and all(t["at_most"] or not t["rows"] for t in found["tables"])  # then it is said once
    rows_named = "rows, at most" if all_are else "rows, about"
    with_bytes = any(t["bytes"] is not None for t in found["tables"])
    columns = [("table", "n"), (rows_named, "r")] + ([("size", "r")] if with_bytes else [])
    rows = []
    for t in sorted(found["tables"], key=lambda t: (-(t["bytes"] or t["rows"] or 0), t["table"])):
        about = "not known" if t["rows"] is None else look.count(t["rows"])
        if t["at_most"] and not all_are:
            about = f"at most {about}"
        rows.append([look.esc(t["table"]), about, *([look.size(t["bytes"])] if with_bytes else [])])
    note = "of all runs"
    if at_most:
        note += "; row numbers are not used twice, so rows that were deleted count as well"
    if any(t["rows"] is None for t in found["tables"]):
        note += "; for what is not known: psql -c ANALYZE, with the database's URL"
    return parts.section("Tables", note, parts.table(columns, rows))


def arrays(found: dict[str, Any]) -> str:
    rows = [[look.line(a["name"], 64), look.count(a["arrays"]), look.size(a["bytes"])] for a in found["arrays"]]
    body = (
        parts.table([("array", ""), ("segments", "r"), ("size", "r")], rows)
        if rows
        else parts.empty("The run has none.")
    )
    return parts.section("Named arrays", "per-token arrays beside segments, in the database and in files", body)


def retention(of: Run, found: dict[str, Any]) -> str:
    step = found["retention_step"]
    if step < 0:
        told = "Nothing was pruned: a rewind can go back to any step."
    else:
        told = f"Tokens of steps up to {step} were pruned; a rewind can not go below it."
    ask = f"samplestore prune --keep-steps N --run {quote(of.name)}"
    body = f'<div class="ss-text">{look.line(told)}</div><div class="dim">To free space: {look.line(ask, 200)}</div>'
    return parts.section("Retention", "", body)
