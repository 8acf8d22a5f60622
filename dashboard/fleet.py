"""Workers and engines: who is alive, what it holds, and whether it serves the weights that the trainer published."""

from __future__ import annotations

from shlex import quote
from typing import Any

import streamlit as st

from samplestore.dashboard import frame, look, parts, source
from samplestore.queries import fleet
from samplestore.run import Run

ENDED = 20
Data = tuple[dict[str, Any], list[dict[str, Any]]]


def page() -> None:
    of = frame.open_run()
    title, seconds, _ = frame.top()

    def draw(data: Data) -> None:
        as_of = look.clock(data[0]["as_of"])
        title.html(frame.head(of, "Workers and engines", f"as of {as_of} UTC, {frame.every(seconds)}"))
        st.html(workers(of.name, data[0]))
        st.html(engines(data[1], data[0]["as_of"]))

    frame.live(of, seconds, "fleet", lambda: source.workers_and_engines(of), draw)
    _ended(of)


def workers(run: str, found: dict[str, Any]) -> str:
    columns = [("id", "r"), ("worker", ""), ("kind", "n"), ("host", "n"), ("heartbeat", "n"), ("samples", "r"),
               ("stages", "r"), ("up for", "r"), ("error", "")]  # fmt: skip
    live = found["live"]
    silent = sum(w["heartbeat_age_s"] > w["ttl_s"] for w in live)
    note = f"{len(live)} live" + (f", {silent} of them silent" if silent else "")
    if silent:
        note += f"; what they hold is freed by: samplestore reap --run {look.line(quote(run), 300)}"
    if not live:
        body = parts.empty(
            f"No worker is connected. Start one with: samplestore worker --run {quote(run)} --engine URL"
        )
    else:
        order = sorted(live, key=lambda w: (w["heartbeat_age_s"] <= w["ttl_s"], w["id"]))
        body = parts.table(columns, [_worker(w, found["as_of"]) for w in order])
    return parts.section("Workers", note, body)


def _worker(w: dict[str, Any], as_of: float) -> list[str]:
    return [
        str(w["id"]), look.line(w["name"], 60), look.esc(w["kind"]), look.line(f"{w['host']}, pid {w['pid']}", 60),
        parts.beat(w), look.count(w["samples"]), look.count(w["stages"]), look.age(as_of - w["started_at"]),
        f'<span class="bad">{look.line(w["error"], 200)}</span>' if w["error"] else "–",
    ]  # fmt: skip


def engines(found: list[dict[str, Any]], as_of: float) -> str:
    columns = [("engine", ""), ("serves", "n"), ("weights", "n"), ("running", "r"), ("queued", "r"), ("generated", "r"),
               ("release", "n"), ("failures", "r"), ("changed", "n"), ("error", "")]  # fmt: skip

    def number(value: int | None) -> str:
        return "–" if value is None else look.count(value)

    rows = []
    for e in found:
        updating = f' <span class="dim">worker {e["owner"]} updates it</span>' if e["owner"] else ""
        rows.append(
            [
                parts.url(e["url"]), look.version_key(e["version"]), parts.serving(e) + updating,
                number(e["running"]),
                number(e["queued"]), number(e["generated_tokens"]), look.line(e["release"] or "–", 30),
                str(e["failures"]), f"{look.age(as_of - e['updated_at'])} ago",
                f'<span class="bad">{look.line(e["error"], 200)}</span>' if e["error"] else "–",
            ]
        )  # fmt: skip
    behind = sum(e["state"] == "live" and e["version"] != e["current_version"] for e in found)
    note = f"{len(found)} known" + (f", {behind} not on the current weights" if behind else "")
    if found:
        note += "; requests running and queued when last looked at, tokens generated for this run"
    body = (
        parts.table(columns, rows)
        if rows
        else parts.empty("No engine is registered yet. A worker registers those that it sends to: samplestore worker")
    )
    return parts.section("Engines", note, body)


def _ended(of: Run) -> None:
    below = frame.in_address("after", 1)
    rows = fleet.workers(source.store().database, of.id, ended_below=below, ended=ENDED + 1)["ended"]
    if not rows and below is None:
        return
    columns = [
        ("id", "r"),
        ("worker", ""),
        ("kind", "n"),
        ("host", "n"),
        ("end", "n"),
        ("last heartbeat (UTC)", "n"),
        ("error", ""),
    ]
    made = [
        [
            str(w["id"]), look.line(w["name"], 60), look.esc(w["kind"]), look.line(f"{w['host']}, pid {w['pid']}", 60),
            parts.mark("bad", "dead: its heartbeat stopped") if w["state"] == "dead" else "said goodbye",
            look.when(w["heartbeat"]), f'<span class="bad">{look.line(w["error"], 200)}</span>' if w["error"] else "–",
        ]
        for w in rows[:ENDED]
    ]  # fmt: skip
    st.html(parts.section("Ended", "newest first", parts.table(columns, made)))
    frame.turn_pages("Newest", str(rows[ENDED - 1]["id"]) if len(rows) > ENDED else None)
