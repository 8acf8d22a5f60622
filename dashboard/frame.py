"""What every page has in common: the run that is open, its heading, the refresh choice, and errors as pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import streamlit as st

from samplestore.dashboard import look, parts, source
from samplestore.dashboard.style import CHART, CSS, RUN_CHOICE
from samplestore.run import Run

INTERVALS = {"2 s": 2.0, "5 s": 5.0, "15 s": 15.0, "60 s": 60.0, "Paused": None}
OF_RUN = ("sample", "at", "group", "after", "a", "b", "batch", "find")  # of the address: they belong to one run
EMPTY = {"a": "–", "b": "–", "find": ""}  # those that a widget holds, and what it holds when nothing was chosen
STAYS = "it stays until you load it again"  # a page that a reader clicks in
RUNS = 200  # the newest ones, to choose from
SPANS = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21_600.0, "24 h": 86_400.0}


def begin() -> None:
    st.html(CSS)


def show_problem(problem: source.Problem) -> None:
    """An error as something to act on: never a traceback, never markdown from untrusted text."""
    st.html(
        f'<div class="ss"><div class="ss-verdict bad">■ <b>{look.esc(problem.title)}</b><br>'
        f"<span>{look.line(problem.text, 1000)}</span></div></div>"
    )


def guarded(page: Callable[[], None]) -> None:
    """Run a page. What a reader can act on becomes a message; anything else is a bug and is shown as one."""
    begin()
    try:
        page()
    except source.EXPECTED as error:
        show_problem(source.problem_of(error))


def open_run() -> Run:
    """The run that the address names (?run=...), or the newest; a choice where there are several."""
    asked = st.query_params.get("run")
    of = source.run(asked)
    names = source.store().run_names()
    if len(names) > 1:
        listed = names[::-1][:RUNS]
        if of.name not in listed:
            listed.insert(0, of.name)
        with st.container(key=RUN_CHOICE):  # beside the names of the pages, where it takes no room
            chosen = st.selectbox(
                "Run", listed, index=listed.index(of.name), label_visibility="collapsed",
                format_func=lambda name: look.visible(name, 200),
            )  # fmt: skip
        if chosen != of.name:
            st.query_params["run"] = chosen
            forget(*OF_RUN)
            st.rerun()
    elif asked != of.name:
        st.query_params["run"] = of.name
    return of


def forget(*names: str) -> None:
    """Take these out of the address. What a widget holds can only be changed through its state."""
    for name in names:
        if name in EMPTY and name in st.session_state:
            st.session_state[name] = EMPTY[name]
        else:
            st.query_params.pop(name, None)


def head(of: Run, title: str, note: str) -> str:
    return parts.heading(title, f"run {look.line(of.name, 200)} · {look.line(of.database.shown_url, 300)} · {note}")


def refresh_choice() -> float | None:
    """Seconds between two looks, or None when paused. Kept in the address."""
    chosen: Any = st.segmented_control(
        "Refresh", list(INTERVALS), default="5 s", key="refresh", bind="query-params", required=True,
        label_visibility="collapsed", help="How often the numbers are read again. A trajectory never moves by itself.",
    )  # fmt: skip
    return INTERVALS.get(chosen or "5 s", 5.0)


def span_choice() -> float:
    """How far back a page looks, in seconds. Kept in the address."""
    chosen: Any = st.segmented_control(
        "Time", list(SPANS), default="1 h", key="span", bind="query-params", required=True,
        label_visibility="collapsed",
    )  # fmt: skip
    return SPANS.get(chosen or "1 h", 3600.0)


def top(*, looks_back: bool = False) -> tuple[Any, float | None, float]:
    """The head of a page that is read again and again, its choices as wide as their words: (the title's place, seconds
    between two looks, seconds to look back: 0 where the page doesn't)."""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        with st.container(width="stretch"):
            title = st.empty()
        since_s = span_choice() if looks_back else 0.0
        seconds = refresh_choice()
    return title, seconds, since_s


def turn_pages(newest: str, older: str | None) -> None:
    """Buttons to the first page of a list, and to the one after this: `older` is what its address has as `after`, None
    where this is the last. Nothing where there is one page."""
    first = "after" not in st.query_params
    if first and older is None:
        return
    with st.container(horizontal=True):
        if st.button(f"◂ {newest}", disabled=first):
            st.query_params.pop("after", None)
            st.rerun()
        if st.button("Older ▸", disabled=older is None):
            st.query_params["after"] = str(older)
            st.rerun()


def every(seconds: float | None) -> str:
    return "paused" if seconds is None else f"every {seconds:g} s"


def live(of: Run, seconds: float | None, page: str, ask: Callable[[], Any], draw: Callable[[Any], None]) -> None:
    """Ask and draw, again every few seconds; the rest of the page, and the reader's place in it, stays. While the
    database can't be read the last answer is shown, with its age."""

    def again() -> None:
        kept = f"last_{page}"
        try:
            data = ask()
            st.session_state[kept] = (of.name, time.time(), data)
        except source.EXPECTED as error:
            problem = source.problem_of(error)
            before = st.session_state.get(kept)
            show_problem(problem)
            if problem.kind not in ("locked", "unreachable") or before is None or before[0] != of.name:
                return
            data = before[2]
            st.html(f'<div class="ss warn">▲ These numbers are {look.age(time.time() - before[1])} old.</div>')
        draw(data)

    st.fragment(run_every=seconds)(again)()


def chart(drawn: Any, key: str, alt: str) -> None:
    """A chart in a container that has its height from the beginning, so that nothing below it jumps."""
    with st.container(key=f"{CHART}{key}"):
        st.altair_chart(drawn, key=key, alt=alt)


def in_address(name: str, low: int = 0) -> int | None:
    """A whole number from the address, or None: whoever wrote it may have written anything."""
    text = str(st.query_params.get(name, ""))
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 and int(text) >= low else None


def nothing(text: str) -> None:
    """An empty state, with what to do. `text` is escaped here."""
    st.html(f'<div class="ss"><div class="ss-empty">{look.esc(text)}</div></div>')
