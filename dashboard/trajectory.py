"""A sample: which tokens were written under which weights, what happened to it meanwhile, and why it got its reward.

The address names it: ?run=NAME&sample=GROUP/INDEX, with /INCARNATION for a former life; &at=POSITION is the window of
tokens, &colour=..., &find=... what is shown of them. The page never moves by itself.
"""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from samplestore.dashboard import actions, conversation, frame, lane, look, parts, sample_parts, source, token_page
from samplestore.queries import browse
from samplestore.queries.trajectory import Trajectory
from samplestore.run import Run

PAGE_TOKENS = token_page.PAGE_TOKENS
TOKENS, TURNS = "tokens", "conversation"
GROUPS_SHOWN = 15
NAME = re.compile(r"(\d{1,15})/(\d{1,9})(?:/(\d{1,9}))?", re.ASCII)  # what a browser's numbers hold exactly


def page() -> None:
    of = frame.open_run()
    asked = st.query_params.get("sample", "")
    name = parse(asked)
    if asked and name is None:
        text = f"{asked[:60]!r} does not name one; use ?sample=GROUP/INDEX, for example ?sample=0/3"
        frame.show_problem(source.Problem("other", "There is no such sample", text))
    if name is None:
        latest = browse.recent(of.database, of.id, 60)
        if not latest:
            st.html('<div class="ss"><div class="ss-empty">No sample has tokens yet. They appear here as soon as a '
                    "worker stores the first segment (samplestore worker).</div></div>")  # fmt: skip
            return
        # One that spans weights shows most.
        chosen = max(latest, key=lambda r: (r["version_max"] or 0) - (r["version_min"] or 0))
        name = (chosen["group"], chosen["index"], None)
    head = st.empty()
    _choose(of, name)
    _show(of, name, head)


def parse(text: str) -> tuple[int, int, int | None] | None:
    """(group, index, incarnation or None) of "GROUP/INDEX[/INCARNATION]"; None for anything else."""
    found = NAME.fullmatch(text)
    if found is None:
        return None
    return int(found[1]), int(found[2]), None if found[3] is None else int(found[3])


def _go(group: int, index: int) -> None:
    st.query_params["sample"] = f"{group}/{index}"
    frame.forget("at", "find")


def _choose(of: Run, name: tuple[int, int, int | None]) -> None:
    """Group and sample as numbers; a table to browse, which opens by itself only when asked."""
    group, index, _ = name
    siblings = browse.samples(of.database, of.id, group)
    numbers, sample, table = st.columns([1, 4, 1.2], vertical_alignment="bottom")
    wanted = numbers.number_input("Group", min_value=0, value=group, step=1, key=f"group-{group}-{index}")
    if wanted != group:
        _go(int(wanted), 0)
        st.rerun()
    indexes = [s["index"] for s in siblings]
    if indexes:
        marks = {"completed": "✓", "truncated": "✂", "failed": "✗", "aborted": "‖", "pending": "…"}
        told = {s["index"]: f"{s['index']} {'▶' if s['in_flight'] else marks[s['status']]}" for s in siblings}
        picked = sample.segmented_control(
            "Sample", indexes, default=index if index in indexes else indexes[0], key=f"sample-{group}-{index}",
            format_func=lambda i: told.get(i, str(i)), required=True,
            help="✓ completed  ✂ truncated  ✗ failed  ‖ aborted, resumable  ▶ in flight  … pending",
        )  # fmt: skip
        if picked is not None and picked != index:
            _go(group, picked)
            st.rerun()
    with table.popover("Browse groups", width="stretch"):
        _browse(of)


def _browse(of: Run) -> None:
    """Groups, newest first, by keyset: the page after a million groups costs what the first one costs."""
    below = st.session_state.get("groups_below")
    rows = browse.groups(of.database, of.id, below=below, limit=GROUPS_SHOWN + 1)
    older, shown = len(rows) > GROUPS_SHOWN, rows[:GROUPS_SHOWN]
    cells = [
        [
            parts.link("trajectory", str(r["number"]), run=of.name, sample=f"{r['number']}/0"), look.esc(r["state"]),
            f"{r['n_samples'] - r['n_open']}/{r['n_samples']}", "–" if r["staleness"] is None else str(r["staleness"]),
            "–" if r["reward_mean"] is None else f"{r['reward_mean']:.2f} ± {r['reward_std'] or 0:.2f}",
            look.line(r["reason"] or "", 60),
        ]
        for r in shown
    ]  # fmt: skip
    columns = [("group", "r"), ("state", "n"), ("finished", "r"), ("staleness", "r"), ("reward", "r"), ("reason", "")]
    st.html(f'<div class="ss">{parts.table(columns, cells)}</div>')
    with st.container(horizontal=True):
        if st.button("Newest", disabled=below is None):
            st.session_state.pop("groups_below", None)
            st.rerun()
        if st.button("Older", disabled=not older):
            st.session_state["groups_below"] = shown[-1]["number"]
            st.rerun()


def _show(of: Run, name: tuple[int, int, int | None], head: Any) -> None:
    start = st.query_params.get("at", "")
    try:
        found: Trajectory | None = source.read_trajectory(
            of, *name, int(start) if start.isdecimal() and len(start) < 16 else None, PAGE_TOKENS
        )
    except ValueError as error:
        raise source.Problem("other", "This sample can't be shown", str(error)) from error
    if found is None:
        text = f"Run {of.name} has no sample {name[0]}/{name[1]}. Choose another group or sample above."
        raise source.Problem("other", "There is no such sample", text)
    head.html(sample_parts.title(of, found))
    st.html(sample_parts.summary(of, found))
    if not found.n_response:
        where = "under this incarnation" if found.incarnation != found.sample["incarnation"] else "yet"
        st.html(
            f'<div class="ss"><div class="ss-empty">No token was generated {where}; this is its prompt.</div></div>'
        )
    if found.pruned:
        told = "The response was pruned; its prompt and its segments are left."
        st.html(f'<div class="ss"><div class="ss-empty">{told}</div></div>')
    evidence = source.evidence(of, found)
    st.html(lane.html(found, evidence))
    if actions.allowed():
        actions.of_sample(of, found)
    view = st.segmented_control(
        "View", [TOKENS, TURNS], default=TOKENS, key="view", bind="query-params", required=True,
        label_visibility="collapsed",
    )  # fmt: skip
    if view == TURNS:
        _conversation(of, found)
    else:
        token_page.show(of, found, evidence.arrays)
    st.html(parts.section("Reward", "what its stages said", parts.stages(evidence.stages, found.as_of)))
    st.html(sample_parts.segments(found))
    st.html(sample_parts.events(found))
    if evidence.calls:
        st.html(conversation.calls(evidence.calls))
    st.html(sample_parts.requests(evidence.requests, found.as_of))


def _conversation(of: Run, found: Trajectory) -> None:
    decoder, why_not = source.tokenizer()
    st.html(conversation.html(found, source.all_ids(of, found), decoder))
    if why_not:
        st.html(f'<div class="ss dim">{look.line(why_not, 400)}</div>')
