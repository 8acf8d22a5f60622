"""The overview: is my run healthy? Everything on it is read at once, then drawn, and read again every few seconds."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from samplestore.dashboard import charts, frame, look, parts, source
from samplestore.run import Run

DEFINITION = (
    "**Staleness of a group**: the current weight version minus the version of its oldest trained token, counted in "
    "weight updates along the timeline, as of now. Oldest means: over all samples of the group that did not fail, and "
    "all their tokens with loss mask 1, before any masking by policy. Where a version is not known the staleness is "
    "unknown, and never 0. Batches, `samplestore status` and this page use this one definition."
)
KEPT = "last_overview"
TITLE_PX = 44  # of a chart: one has a button beside it, and both should stand level


def page() -> None:
    of = frame.open_run()
    head, control = st.columns([4, 1.3], vertical_alignment="center")
    with control:
        seconds = frame.refresh_choice()
    # Only the numbers are drawn again; the rest of the page, and the reader's place in it, stays.
    st.fragment(run_every=seconds)(_live)(of, seconds, head.empty())


def _live(of: Run, seconds: float | None, head: Any) -> None:
    try:
        data = source.overview(of)
        st.session_state[KEPT] = (of.name, data)
    except source.EXPECTED as error:
        problem = source.problem_of(error)
        kept = st.session_state.get(KEPT)
        if problem.kind not in ("locked", "unreachable") or kept is None or kept[0] != of.name:
            frame.show_problem(problem)
            return
        # The last good numbers, with their age, say more than an empty page.
        data = kept[1]
        frame.show_problem(problem)
        old = look.age(time.time() - data.status["as_of"])
        st.html(f'<div class="ss warn">▲ These numbers are {old} old.</div>')
    every = "paused" if seconds is None else f"every {seconds:g} s"
    head.html(parts.header(data, as_of=f"as of {look.clock(data.status['as_of'])} UTC, {every}"))
    if not data.status["prompts"]:
        return _no_prompts(data)
    _numbers(data)
    return None


def _no_prompts(data: source.Overview) -> None:
    live = sum(w["state"] == "live" for w in data.status["workers"])
    st.html(
        f'<div class="ss"><div class="ss-empty">The run has no prompts yet; workers connected: {live}. '
        f"Add some with: samplestore add-prompts FILE --run {look.line(data.status['run'])}</div></div>"
    )
    st.html(parts.workers(data))


def _numbers(data: source.Overview) -> None:
    st.html(parts.verdict(data))
    st.html(parts.cards(data))
    st.html(parts.states(data))
    st.html(parts.token_ledger(data))
    if advice := parts.advice(data):
        st.html(advice)
    left, right = st.columns(2, gap="large")
    with left:
        _staleness(data)
    with right:
        _aborts(data)
    left, right = st.columns(2, gap="large")
    left.html(parts.workers(data))
    right.html(parts.engines(data))
    if sizes := parts.arrays(data):
        st.html(sizes)
    st.html(parts.recent(data))


def _staleness(data: source.Overview) -> None:
    counts, window = data.status["staleness"], data.settings["max_staleness"]
    note = f"{look.count(sum(counts.values()))} groups; the window ends at {window} behind"
    title = f'<div class="ss-title">Staleness of ready groups<span class="dim">{note}</span></div>'
    with st.container(horizontal=True, vertical_alignment="center", gap="small", height=TITLE_PX, border=False):
        st.html(f'<div class="ss">{title}</div>', width="content")
        with st.popover("What is staleness?", type="tertiary"):
            st.markdown(DEFINITION)
    if not counts:
        st.html('<div class="ss"><div class="ss-empty">No group is ready.</div></div>')
        return
    told = ", ".join(f"{n} groups {lag} behind" for lag, n in counts.items())
    st.altair_chart(charts.staleness(counts, window), key="staleness", alt=f"Staleness of ready groups: {told}")


def _aborts(data: source.Overview) -> None:
    counts = data.status["aborts"]
    total = look.count(sum(counts.values()))
    with st.container(horizontal=True, vertical_alignment="center", height=TITLE_PX, border=False):
        st.html(
            '<div class="ss"><div class="ss-title">Abort reasons<span class="dim">'
            f"{total} events; one stop can be two: the engine's abort and the worker's release</span></div></div>"
        )
    if not counts:
        st.html('<div class="ss"><div class="ss-empty">No sample was stopped in the middle.</div></div>')
        return
    told = ", ".join(f"{look.visible(why, 60)}: {n}" for why, n in counts.items())
    st.altair_chart(charts.aborts(counts), key="aborts", alt=f"Abort reasons: {told}")
