"""What every page has in common: the run that is open, the refresh choice, and errors as pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from samplestore.dashboard import look, source
from samplestore.dashboard.style import CSS
from samplestore.run import Run

INTERVALS = {"2 s": 2.0, "5 s": 5.0, "15 s": 15.0, "60 s": 60.0, "Paused": None}
OVERVIEW_PAGE, TRAJECTORY_PAGE = "page_overview.py", "page_trajectory.py"


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
        listed = names[::-1][:200]
        chosen = st.sidebar.selectbox("Run", listed, index=listed.index(of.name) if of.name in listed else 0)
        if chosen != of.name:
            st.query_params["run"] = chosen
            for gone in ("sample", "at"):  # they belong to the other run
                st.query_params.pop(gone, None)
            st.rerun()
    elif asked != of.name:
        st.query_params["run"] = of.name
    return of


def refresh_choice() -> float | None:
    """Seconds between two looks, or None when paused. Kept in the address."""
    chosen: Any = st.segmented_control(
        "Refresh", list(INTERVALS), default="5 s", key="refresh", bind="query-params", required=True,
        label_visibility="collapsed", help="How often the numbers are read again. A trajectory never moves by itself.",
    )  # fmt: skip
    return INTERVALS.get(chosen or "5 s", 5.0)
