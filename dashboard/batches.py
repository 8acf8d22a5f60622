"""Batches: what each trainer step consumed, how stale it was, and where training was rewound."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from samplestore.dashboard import evaluated, frame, look, parts, source
from samplestore.queries import batch_list
from samplestore.run import Run
from samplestore.words import amount

ROWS = 40
STATES = {"leased": ("warn", "with the trainer"), "committed": ("ok", "committed")}


def page() -> None:
    of = frame.open_run()
    below = frame.in_address("after", 1)
    found, timelines = source.batches(of, below, ROWS + 1)
    st.html(frame.head(of, "Batches", f"as of {look.when(time.time())} UTC; {frame.STAYS}"))
    if len(timelines) > 1:
        st.html(rewinds(timelines))
    if not found:
        frame.nothing("No trainer has taken a batch yet. It does with: with run.batch(step=0) as batch")
    else:
        _list(of, found)
    if evaluations := source.evaluations(of):
        st.html(evaluated.html(of.name, evaluations, time.time()))


def _list(of: Run, found: list[dict[str, Any]]) -> None:
    chosen = frame.in_address("batch", 1)
    if chosen is not None:  # above the list: below it nobody would see that something was opened
        _groups(of, chosen)
    else:
        st.html('<div class="ss dim">A step opens its groups.</div>')
    st.html(f'<div class="ss">{table(of, found[:ROWS])}</div>')
    frame.turn_pages("Newest", str(found[ROWS - 1]["id"]) if len(found) > ROWS else None)


def table(of: Run, found: list[dict[str, Any]]) -> str:
    columns = [
        ("step", "r"), ("timeline", "r"), ("state", "n"), ("weights then", "n"), ("groups", "r"), ("samples", "r"),
        ("tokens", "r"), ("staleness, mean", "r"), ("max", "r"), ("reward", "r"), ("all equal", "r"), ("took", "r"),
        ("leased (UTC)", "n"), ("trainer", "n"), ("reason", ""),
    ]  # fmt: skip
    rows = []
    for b in found:
        level, said = STATES.get(b["state"], ("", b["state"]))
        unknown = f' <span class="warn">{b["staleness_unknown"]} unknown</span>' if b["staleness_unknown"] else ""
        rows.append(
            [
                parts.link("batches", str(b["step"]), **_open(of, b["id"])),
                str(b["timeline"]), parts.mark(level, said) if level else look.esc(said),
                look.version_key(b["current_version"]), look.count(b["n_groups"]), look.count(b["n_samples"]),
                look.count(b["n_tokens"]), "–" if b["staleness_mean"] is None else f"{b['staleness_mean']:.2f}",
                ("–" if b["staleness_max"] is None else str(b["staleness_max"])) + unknown,
                "–" if b["reward_mean"] is None else f"{b['reward_mean']:.3f}",
                str(b["zero_std"]),
                "–" if b["settled_at"] is None else look.duration(b["settled_at"] - b["created_at"]),
                look.when(b["created_at"]), look.line(b["trainer"] or "–", 40), look.line(b["reason"] or "–", 100),
            ]
        )  # fmt: skip
    on = frame.in_address("batch", 1)
    return parts.table(columns, rows, on=next((i for i, b in enumerate(found) if b["id"] == on), None))


def rewinds(found: list[dict[str, Any]]) -> str:
    rows = [
        [str(t["number"]), "–" if t["parent"] is None else str(t["parent"]),
         "–" if t["forked_at_step"] is None else str(t["forked_at_step"]), look.when(t["created_at"])]
        for t in found
    ]  # fmt: skip
    columns = [("timeline", "r"), ("branched off", "r"), ("at step", "r"), ("since (UTC)", "n")]
    note = "each rewind starts a timeline; batches after its step on the timeline before do not count any more"
    return parts.section("Rewinds", note, parts.table(columns, rows))


def _groups(of: Run, id: int) -> None:
    found = batch_list.groups(source.store().database, of.id, id)
    if not found:
        frame.nothing(f"The run has no batch {id}, or its groups are gone.")
        return
    columns = [("group", "r"), ("in the batch", "n"), ("now", "n"), ("staleness at the lease", "r"),
               ("oldest weights", "n"), ("reward", "r"), ("spread", "r"), ("tokens", "r")]  # fmt: skip
    rows = [
        [
            parts.link("group", str(g["number"]), run=of.name, group=g["number"]), look.esc(g["state"]),
            parts.state(g["group_state"]), "–" if g["staleness"] is None else str(g["staleness"]),
            "–" if g["oldest_version"] is None else look.version_key(g["oldest_version"]),
            "–" if g["reward_mean"] is None else f"{g['reward_mean']:.3f}",
            "–" if g["reward_std"] is None else f"± {g['reward_std']:.3f}" + (" ≡" if g["reward_std"] == 0 else ""),
            "–" if g["n_tokens"] is None else look.count(g["n_tokens"]),
        ]
        for g in found
    ]  # fmt: skip
    step, timeline = found[0]["step"], found[0]["timeline"]
    close = parts.link("batches", "close", **_open(of))
    note = f"timeline {timeline}; {amount(len(found), 'group')}, in its order; {close}"
    st.html(parts.section(f"Step {step}", note, parts.table(columns, rows)))


def _open(of: Run, batch: int | None = None) -> dict[str, Any]:
    """The address of this page of the list, with or without a batch that is open."""
    return {"run": of.name, "batch": batch, "after": st.query_params.get("after")}
