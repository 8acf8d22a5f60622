"""Groups: which ones differ in reward, which are flat, stale, dropped. Every filter is in the address, and all
combine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import streamlit as st

from samplestore.dashboard import actions, frame, look, parts, source
from samplestore.queries import group_list
from samplestore.queries.group_list import GroupFilter, GroupPage
from samplestore.run import Run
from samplestore.states import EVALUATED, GroupState
from samplestore.words import amount

ROWS = 50
REASON = 30  # characters of one that a row has room for
ANY, FLAT, SPREAD = "any", "all equal", "differ"
ORDERS = {"newest first": group_list.NEWEST, "widest spread first": group_list.SPREAD}
AGES = {"any age": None, "10 min": 10, "1 h": 60, "6 h": 360, "24 h": 1440}
DEFAULTS: dict[str, Any] = {
    "state": [], "rewards": ANY, "order": "newest first", "stale_from": None, "stale_to": None, "reward_from": None,
    "reward_to": None, "version": None, "worker": None, "dataset": "", "text": "", "age": "any age",
}  # fmt: skip
COLUMNS = [
    ("group", "r"), ("state", "n"), ("samples", "r"), ("reward", "r"), ("spread", "r"), ("", "n"), ("weights", "n"),
    ("staleness", "r"), ("tokens", "r"), ("created (UTC)", "n"), ("data set", "n"), ("prompt", "cut"),
]  # fmt: skip


def page() -> None:
    of = frame.open_run()
    head = st.empty()
    where, order = _filter()
    after = str(st.query_params.get("after", "")) or None
    found = source.group_page(of, where, order, after, ROWS)
    head.html(frame.head(of, "Groups", f"as of {look.when(found.as_of)} UTC; {frame.STAYS}"))
    if found.page.total:
        st.html(f'<div class="ss dim">{told(found.page, order)}</div>')
    if found.page.rows:
        st.html(f'<div class="ss">{parts.table(COLUMNS, [row(of, r, found.as_of) for r in found.page.rows])}</div>')
    else:
        _none(found.page, where)
    _turn(found.page, where, after)
    if actions.allowed():
        actions.of_list(of, found.page.rows)


def _restart() -> None:
    """Another filter has other pages."""
    st.query_params.pop("after", None)


def _clear() -> None:
    for key, value in DEFAULTS.items():
        st.session_state[key] = list(value) if isinstance(value, list) else value
    _restart()


def _filter() -> tuple[GroupFilter, str]:
    bound: dict[str, Any] = {"bind": "query-params", "on_change": _restart}
    first = st.container(horizontal=True, vertical_alignment="bottom", gap="medium")
    states = first.multiselect(
        "State", [s.value for s in GroupState], key="state", placeholder="any", width=280, **bound
    )
    rewards = first.segmented_control(
        "Rewards of its samples", [ANY, FLAT, SPREAD], default=ANY, key="rewards", required=True, **bound,
        help="All equal: a standard deviation of 0, so that group advantages are 0 and nothing is learned.",
    )  # fmt: skip
    order = first.selectbox("Order", list(ORDERS), key="order", width=200, **bound)
    text = first.text_input(
        "Prompt contains", key="text", max_chars=200, width=280, **bound,
        help=f"Reads the prompts of {group_list.LOOK_TEXT:,} groups at a time.",
    )  # fmt: skip
    with st.expander("More filters: staleness, reward, weights, worker, data set, age"):
        second = st.columns(8, vertical_alignment="bottom")
        whole: dict[str, Any] = {"min_value": 0, "max_value": 2**53 - 1, "value": None, "step": 1, **bound}
        number: dict[str, Any] = {"value": None, "step": 0.1, "format": "%.3f", **bound}
        stale_from = second[0].number_input("Staleness from", key="stale_from", **whole)
        stale_to = second[1].number_input("to", key="stale_to", **whole)
        reward_from = second[2].number_input("Mean reward from", key="reward_from", **number)
        reward_to = second[3].number_input("to ", key="reward_to", **number)
        version = second[4].number_input("Weight version", key="version", **whole)
        worker = second[5].number_input("Worker id", key="worker", **whole)
        dataset = second[6].text_input("Data set", key="dataset", max_chars=200, **bound)
        age = second[7].selectbox("Created within", list(AGES), key="age", **bound)
    minutes = AGES.get(age or "")
    since = None if minutes is None else (datetime.now(UTC) - timedelta(minutes=minutes)).timestamp()
    where = GroupFilter(
        states=tuple(states), zero_std={FLAT: True, SPREAD: False}.get(rewards or ANY), text=text or None,
        staleness_min=stale_from, staleness_max=stale_to, reward_min=reward_from, reward_max=reward_to, version=version,
        worker=worker, dataset=dataset or None, since=None if since is None else since // 60 * 60,
    )  # fmt: skip
    return where, ORDERS.get(order or "", group_list.NEWEST)


def told(found: GroupPage, order: str) -> str:
    """How many there are, and how far was looked: a cap never hides in silence."""
    shown = f"showing <b>{look.count(len(found.rows))}</b>"
    if found.matching is None:
        return f"{shown} of a run of {amount(found.total, 'group')}"
    among = f"groups {look.count(found.low)} to {look.count(max(found.low, found.high - 1))}"
    if order == group_list.SPREAD:
        among = f"the scored ones of the newest {amount(found.high - found.low, 'group')}"
    rest = "" if found.low == 0 else f" of a run of {look.count(found.total)}; older ones were not looked through"
    return f"{shown} of <b>{look.count(found.matching)}</b> that fit, among {among}{rest}"


def row(of: Run, r: dict[str, Any], as_of: float) -> list[str]:
    flat = r["reward_std"] == 0
    reason = ""
    if r["reason"] and r["reason"] != EVALUATED:
        reason = f' <span class="dim" title="{look.line(r["reason"], 400)}">{look.line(r["reason"], REASON)}</span>'
    done = f"{r['n_samples'] - r['n_open']}/{r['n_samples']}" + (f", {r['n_failed']} failed" if r["n_failed"] else "")
    return [
        parts.link("group", str(r["number"]), run=of.name, group=r["number"]),
        parts.state(r["state"], r["reason"]) + reason,
        done,
        "–" if r["reward_mean"] is None else f"{r['reward_mean']:.3f}",
        "–" if r["reward_std"] is None else f"± {r['reward_std']:.3f}",
        '<span class="warn" title="standard deviation 0: nothing is learned">≡ all equal</span>' if flat else "",
        "–" if r["oldest_version"] is None else look.version_key(r["oldest_version"]),
        "–" if r["staleness"] is None else str(r["staleness"]),
        "–" if r["n_tokens"] is None else look.count(r["n_tokens"]),
        look.moment(r["created_at"], as_of),
        look.line(r["dataset"], 30),
        _prompt(parts.prompt_text(r["prompt_head"], cut=True)),
    ]


def _prompt(text: str) -> str:
    """As much of it as the window has room for; the rest when pointed at."""
    return f'<span title="{look.line(text, 400)}">{look.line(text, 250)}</span>'


def _none(found: GroupPage, where: GroupFilter) -> None:
    if not found.total:
        frame.nothing("The run has no groups yet. A worker admits them: samplestore worker")
    elif where == GroupFilter():
        frame.nothing("There are no older groups.")
    else:
        frame.nothing("No group here fits all the filters. Clear them, or look further back below.")


def _turn(found: GroupPage, where: GroupFilter, after: str | None) -> None:
    with st.container(horizontal=True):
        if after is not None or found.after is not None:
            if st.button("◂ First page", disabled=after is None):
                _restart()
                st.rerun()
            if st.button("Next page ▸", disabled=found.after is None):
                st.query_params["after"] = str(found.after)
                st.rerun()
        if where != GroupFilter():
            st.button("Clear filters", on_click=_clear, type="tertiary")
