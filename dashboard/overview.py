"""The overview: is my run healthy? Everything on it is read at once, then drawn, and read again every few seconds."""

from __future__ import annotations

from shlex import quote

import streamlit as st

from samplestore.dashboard import charts, frame, look, overview_parts, overview_source, parts
from samplestore.words import amount

DEFINITION = (
    "**Staleness of a group**: the current weight version minus the version of its oldest trained token, counted in "
    "weight updates along the timeline, as of now. Oldest means: over all samples of the group that did not fail, and "
    "all their tokens with loss mask 1, before any masking by policy. Where a version is not known the staleness is "
    "unknown, and never 0. Batches, `samplestore status` and this page use this one definition."
)
OLD_S = 2.0
TITLE_PX = 44  # of a chart: one has a button beside it, and both should stand level


def page() -> None:
    of = frame.open_run()
    title, seconds, _ = frame.top()

    def draw(data: overview_source.Overview) -> None:
        as_of = look.clock(data.status["as_of"])
        told = f"as of {as_of} UTC, {frame.every(seconds)}"
        if data.status["as_of"] - data.status["totals_as_of"] > OLD_S:  # a large run is not counted at every look
            told += f", totals as of {look.clock(data.status['totals_as_of'])}"
        title.html(overview_parts.header(data, as_of=told))
        if data.status["prompts"]:
            _numbers(data)
        else:
            _no_prompts(data)

    frame.live(of, seconds, "overview", lambda: overview_source.read(of), draw)


def _no_prompts(data: overview_source.Overview) -> None:
    live = sum(w["state"] == "live" for w in data.status["workers"])
    st.html(
        f'<div class="ss"><div class="ss-empty">The run has no prompts yet; workers connected: {live}. '
        f"Add some with: samplestore add-prompts FILE --run {look.line(quote(data.status['run']), 300)}</div></div>"
    )
    st.html(overview_parts.workers(data))


def _numbers(data: overview_source.Overview) -> None:
    st.html(overview_parts.verdict(data))
    st.html(overview_parts.cards(data))
    st.html(overview_parts.states(data))
    st.html(overview_parts.token_ledger(data))
    if advice := overview_parts.advice(data):
        st.html(advice)
    left, right = st.columns(2, gap="large")
    with left:
        _staleness(data)
    with right:
        _aborts(data)
    left, right = st.columns(2, gap="large")
    left.html(overview_parts.workers(data))
    right.html(overview_parts.engines(data))
    sizes = overview_parts.arrays(data)
    latest, beside = st.columns([2.2, 1], gap="large") if sizes else (st.container(), None)
    latest.html(overview_parts.recent(data))
    if beside is not None:
        beside.html(sizes)


def _staleness(data: overview_source.Overview) -> None:
    counts, window = data.status["staleness"], data.settings["max_staleness"]
    note = f"{amount(sum(counts.values()), 'group')}; the window ends at {window} behind"
    with st.container(horizontal=True, vertical_alignment="center", gap="small", height=TITLE_PX, border=False):
        st.html('<div class="ss"><div class="ss-title">Staleness of ready groups</div></div>', width="content")
        with st.popover("What is staleness?", type="tertiary"):
            st.markdown(DEFINITION)
    st.html(f'<div class="ss dim ss-under">{note}</div>')
    if not counts:
        st.html('<div class="ss"><div class="ss-empty">No group is ready.</div></div>')
        return
    told = ", ".join(f"{amount(n, 'group')} {lag} behind" for lag, n in [*counts.items()][:64])
    frame.chart(charts.staleness(counts, window), "staleness", f"Staleness of ready groups: {told}")


def _aborts(data: overview_source.Overview) -> None:
    told = data.over_time
    total = amount(sum(b["times"] for b in told["bars"]), "event")
    with st.container(horizontal=True, vertical_alignment="center", height=TITLE_PX, border=False):
        st.html('<div class="ss"><div class="ss-title">Interruptions over time</div></div>')
    more = parts.link("aborts", "more", run=data.status["run"])
    st.html(
        f'<div class="ss dim ss-under">{total} since {look.clock(told["since"])} UTC; dashed: new weights; {more}</div>'
    )
    if not told["bars"]:
        ever = sum(data.status["aborts"].values())
        before = f" Before that: {amount(ever, 'event')}." if ever else ""
        frame.nothing(
            f"No sample was stopped in the middle in the last {look.age(overview_source.LOOK_BACK_S)}.{before}"
        )
        return
    said = ", ".join(f"{look.visible(why, 60)}: {n}" for why, n in data.status["aborts"].items())
    frame.chart(charts.over_time(told), "aborts", f"Interruptions over time; since the run began {said}")
    st.html(f'<div class="ss dim">{parts.ONE_STOP}</div>')
