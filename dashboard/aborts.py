"""Aborts: what was interrupted, why, when weights changed, at which engine and worker, and what it cost."""

from __future__ import annotations

from typing import Any

import streamlit as st

from samplestore.dashboard import charts, frame, look, parts, source
from samplestore.queries import abort_list
from samplestore.queries.aborts import KINDS
from samplestore.run import Run
from samplestore.words import amount

ROWS = 30
VERSIONS = 12  # that are listed; beside them stand three short lists
ALL = "all"


def page() -> None:
    of = frame.open_run()
    title, seconds, since_s = frame.top(looks_back=True)

    def draw(data: source.Aborts) -> None:
        until = look.clock(data.over_time["until"])
        title.html(frame.head(of, "Aborts", f"as of {until} UTC, {frame.every(seconds)}"))
        _draw(data, since_s)

    frame.live(of, seconds, f"aborts-{since_s}", lambda: source.interruptions(of, since_s), draw)
    _latest(of)


def _draw(data: source.Aborts, since_s: float) -> None:
    if not data.totals["by_reason"]:
        frame.nothing(f"No sample was interrupted in the last {look.age(since_s)}. Choose a longer time above.")
        return
    st.html(cards(data))
    told = data.over_time
    more = f"; the last {len(told['publishes'])} weight updates are drawn" if told["publishes_cut"] else ""
    note = f"stacked by reason, {look.duration(told['width_s'])} a bar; dashed lines are weight updates{more}"
    st.html(parts.section("Over time (UTC)", note, ""))
    alt = "Interruptions over time: " + ", ".join(f"{r['kind']} {r['times']}" for r in data.totals["by_reason"][:12])
    frame.chart(charts.over_time(told, columns=4), "over_time", alt)
    left, right = st.columns([1.5, 1], gap="large")
    left.html(by_reason(data))
    left.html(_cut_short("By engine", "engine", data.totals["by_engine"]))
    left.html(_cut_short("By worker", "name", data.totals["by_worker"]))
    right.html(by_version(data))


def cards(data: source.Aborts) -> str:
    cost, resumed = data.totals["cost"], data.resumed
    n = resumed["interrupted"]
    rate = "–" if not n else f"{100 * resumed['resumed'] / n:.0f} <small>%</small>"
    ended = max(0, n - resumed["resumed"] - resumed["waiting"])
    tokens = "<small>tokens</small>"
    made = [
        ("Kept by resuming", f"{look.count(cost['kept'])} {tokens}", f"in {amount(cost['resumes'], 'resume')}"),
        ("Prefilled again", f"{look.count(cost['prefilled_again'])} {tokens}", "prompt and answer, not in a cache"),
        ("Lost at engines", f"{look.count(cost['lost'])} {tokens}", "generated for these samples, never stored"),
        (
            "Resumed after", rate,
            f"{look.count(resumed['resumed'])} of {amount(n, 'sample')}; {look.count(resumed['waiting'])} waiting, "
            f"{look.count(ended)} ended otherwise",
        ),
    ]  # fmt: skip
    return '<div class="ss"><div class="ss-cards">' + "".join(parts.card(*c, "") for c in made) + "</div></div>"


def by_reason(data: source.Aborts) -> str:
    columns = [("what", "n"), ("reason", ""), ("times", "r"), ("tokens so far", "r"), ("last (UTC)", "n")]
    rows = [
        [look.esc(r["kind"]), look.line(r["reason"] or "–", 120), look.count(r["times"]),
         look.count(r["tokens_so_far"]), look.moment(r["last_at"], data.over_time["until"])]
        for r in data.totals["by_reason"]
    ]  # fmt: skip
    return parts.section("By reason", parts.ONE_STOP, parts.table(columns, rows))


def by_version(data: source.Aborts) -> str:
    found = data.totals["by_version"]
    rows = [[look.version_key(r["version"]), look.count(r["aborted"])] for r in found[:VERSIONS]]
    body = (
        parts.table([("weights", "n"), ("segments that an abort ended", "r")], rows) if rows else parts.empty("None.")
    )
    note = f"the newest {VERSIONS} of {len(found)}" if len(found) > VERSIONS else "the newest of the segment"
    return parts.section("By weight version", note, body)


CUT_SHORT = "requests that were cut short, and their tokens; not told: requests of which only the stored ones are known"


def _cut_short(title: str, key: str, found: list[dict[str, Any]]) -> str:
    columns = [
        (key if key != "name" else "worker", ""),
        ("cut short", "r"),
        ("generated", "r"),
        ("stored", "r"),
        ("lost", "r"),
        ("not told", "r"),
    ]
    rows = [
        [parts.url(r[key] or "–"), *[look.count(r[k]) for k in ("cut_short", "generated", "stored", "lost", "untold")]]
        for r in found
    ]  # fmt: skip
    return parts.section(title, CUT_SHORT, parts.table(columns, rows) if rows else parts.empty("None."))


def _latest(of: Run) -> None:
    """The list that a reader clicks in does not move by itself."""
    st.html(parts.section("Latest", frame.STAYS, ""))
    chosen = st.segmented_control(
        "Kind", [ALL, *KINDS], default=ALL, key="kind", bind="query-params", required=True,
        label_visibility="collapsed",
        on_change=_restart,
    )  # fmt: skip
    before = _before(str(st.query_params.get("after", "")))
    kind = None if chosen in (None, ALL) else chosen
    rows = abort_list.latest(source.store().database, of.id, kind=kind, before=before, limit=ROWS + 1)
    if rows:
        st.html(f'<div class="ss">{table(of, rows[:ROWS])}</div>')
    else:
        frame.nothing("Nothing of this kind has happened.")
    frame.turn_pages("Latest", f"{rows[ROWS - 1]['at']!r}~{rows[ROWS - 1]['id']}" if len(rows) > ROWS else None)


def _restart() -> None:
    st.query_params.pop("after", None)


def _before(text: str) -> tuple[float, int] | None:
    at, _, id = text.partition("~")
    try:
        return (float(at), int(id)) if abs(float(at)) < 1e12 and 0 < int(id) < 2**62 else None
    except ValueError:
        return None


def table(of: Run, rows: list[dict[str, Any]]) -> str:
    columns = [("at (UTC)", "n"), ("what", "n"), ("reason", ""), ("sample", "r"), ("tokens", "r"), ("worker", ""),
               ("now", "n")]  # fmt: skip
    made = []
    for r in rows:
        name = None if r["group"] is None else f"{r['group']}/{r['index']}"
        made.append(
            [
                look.when(r["at"]), look.esc(r["kind"]), look.line(r["reason"] or "–", 160),
                "–" if name is None else parts.link("trajectory", name, run=of.name, sample=name),
                "–" if r["tokens"] is None else look.count(r["tokens"]), look.line(r["worker"] or "–", 60),
                "–" if name is None else parts.status(r),
            ]
        )  # fmt: skip
    return parts.table(columns, made)
