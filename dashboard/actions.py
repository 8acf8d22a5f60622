"""What an operator may do from a page, only where the dashboard was started with --allow-actions: the verbs of the
command line, each with a reason, and with an event that says who did it, in one transaction. Pages themselves only
read."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

import samplestore
from samplestore.dashboard import frame, look, source
from samplestore.dashboard.readonly import ENV_ACTIONS
from samplestore.queries.group_page import GroupView
from samplestore.queries.trajectory import Trajectory
from samplestore.run import Run
from samplestore.states import IN_WINDOW, GroupState
from samplestore.verbs import aborts, groups
from samplestore.verbs.tx import Tx
from samplestore.words import amount

KIND = "operator"  # of the event
MAX_REASON = 200
REQUEUE, ABORT, DROP = "requeue", "abort", "drop"
MEANS = {
    REQUEUE: "starts afresh as a new incarnation; what it has generated is superseded, and who holds it loses it",
    ABORT: "what is in flight is stored and released; it stays resumable, and is resumed unless the run is paused",
    DROP: "will not be trained on; who generates for it is told to stop",
}


def allowed() -> bool:
    return os.environ.get(ENV_ACTIONS) == "1"


def who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user} on {socket.gethostname()}, by the dashboard"


def perform(run_name: str, action: str, ids: Sequence[int], reason: str) -> int:
    """Do it: `ids` are those of samples (requeue) or groups (abort, drop). Returns how many. Raises
    SampleStoreError."""
    if not allowed():
        raise source.Problem(
            "other", "This dashboard only reads", "Start it with: samplestore dashboard --allow-actions"
        )
    call = uuid.uuid4().hex
    verbs: dict[str, Callable[[Tx], Any]] = {
        REQUEUE: lambda tx: groups.requeue(tx, ids, reason, call),
        ABORT: lambda tx: aborts.abort_inflight(tx, reason, groups=ids, by=who()),
        DROP: lambda tx: groups.drop(tx, ids, reason),
    }

    def work(tx: Tx) -> None:
        verbs[action](tx)
        if tx.done_before(KIND, call) is None:
            of = {"group_id": ids[0]} if len(ids) == 1 and action != REQUEUE else {}
            of |= {"sample_id": ids[0]} if len(ids) == 1 and action == REQUEUE else {}
            tx.event(KIND, reason, **of, details={"action": action, "by": who(), "n": len(ids), "call": call})

    # Opened for this one transaction: what pages read with can't write.
    with samplestore.open(source.database_url()) as store:
        store.existing_run(run_name).transact(work)
    return len(ids)


def offer(of: Run, action: str, ids: Sequence[int], what: str, where: str) -> None:
    """A button that opens what it means, asks for the reason, and only then does it. `where`: makes its keys unique."""
    if not ids:
        return
    with st.popover(f"{action.capitalize()} …"):
        st.html(f'<div class="ss"><b>{look.esc(action.capitalize())} {look.esc(what)}</b>: {MEANS[action]}.</div>')
        reason = st.text_input("Reason", key=f"reason-{action}-{where}", max_chars=MAX_REASON)
        # A callback has the ids of the drawing that was clicked in; after the click the page is read anew, and other
        # groups may stand in the list by then.
        st.button(
            f"{action.capitalize()} {what}", key=f"do-{action}-{where}", disabled=not reason.strip(),
            on_click=_act, args=(of.name, action, tuple(ids), f"reason-{action}-{where}", what),
        )  # fmt: skip


def _act(run_name: str, action: str, ids: Sequence[int], reason_key: str, what: str) -> None:
    reason = str(st.session_state.get(reason_key) or "").strip()
    if not reason:  # deleted since the button could be pressed
        return
    try:
        done = perform(run_name, action, ids, reason)
    except source.EXPECTED as error:
        st.session_state["undone"] = source.problem_of(error)
        return
    st.cache_data.clear()
    st.session_state["done"] = f"{action}: {done} of {what}; the event says who and why"


def said() -> None:
    """What was just done, or why it was not, once."""
    if told := st.session_state.pop("done", None):
        st.html(f'<div class="ss ok">● {look.line(told, 300)}</div>')
    if problem := st.session_state.pop("undone", None):
        frame.show_problem(problem)


def of_group(of: Run, found: GroupView) -> None:
    said()
    g = found.group
    state, number = GroupState(g["state"]), g["number"]
    with st.container(horizontal=True):
        if state in IN_WINDOW:
            offer(of, DROP, [g["id"]], f"group {number}", f"g{number}")
        if any(s["in_flight"] for s in found.samples):
            offer(of, ABORT, [g["id"]], f"group {number}", f"g{number}")


def of_sample(of: Run, t: Trajectory) -> None:
    said()
    state = GroupState(t.group["state"])
    if state in (*IN_WINDOW, GroupState.DROPPED) and t.incarnation == t.sample["incarnation"]:
        name = f"{t.group['number']}/{t.sample['index']}"
        offer(of, REQUEUE, [t.sample["id"]], f"sample {name}", f"s{name}")


def of_list(of: Run, rows: Sequence[dict[str, Any]]) -> None:
    """The groups that a list shows: those of them that can be dropped. They are the ones that are dropped, also when
    the run has gone on meanwhile."""
    said()
    ids = [r["id"] for r in rows if r["state"] in IN_WINDOW]
    offer(of, DROP, ids, f"{amount(len(ids), 'group')} shown above", "list")
