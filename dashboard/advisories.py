"""What a run needs from its operator: alarms first, then what should be looked at, then hints for tuning. Each rule is
here, and nowhere else; each says where to look, or what to type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Any

from samplestore.dashboard import look
from samplestore.states import WorkerState
from samplestore.words import amount, which

BAD, WARN, HINT = "bad", "warn", "hint"
SETTLED_ENOUGH = 10  # groups, before a share of them says something
THROWN_AWAY = 0.25
FLAT = 0.5  # of the newest finished groups
TRUNCATED = 0.25
WASTED = 0.2  # of all generated tokens
WASTED_ENOUGH = 10_000
ERROR = 120  # characters of one that are told


@dataclass(frozen=True, slots=True)
class Advice:
    """level: BAD, WARN or HINT; page: where it can be seen (with query); command: what to type. Plain text,
    unescaped."""

    level: str
    text: str
    page: str | None = None
    query: tuple[tuple[str, str], ...] = ()
    command: str | None = None


def of(data: Any) -> list[Advice]:
    """Of an overview (overview_source.Overview): alarms first."""
    order = {BAD: 0, WARN: 1, HINT: 2}
    return sorted(_rules(data), key=lambda a: order[a.level])


def level(told: list[Advice]) -> str:
    """ "ok", "warn" or "bad": hints are no reason to look."""
    return next((a.level for a in told if a.level != HINT), "ok")


def _rules(data: Any) -> Iterator[Advice]:
    yield from _workers(data.status)
    yield from _ended(data.status)
    yield from _engines(data.status)
    yield from _run(data.status)
    yield from _ledger(data.ledger)
    yield from _recent(data.metrics)


def _workers(s: dict[str, Any]) -> Iterator[Advice]:
    live = [w for w in s["workers"] if w["state"] == "live"]
    if not live and s["workers"] and _all_left(s["workers"]):
        yield Advice(WARN, "nobody works on the run any more: its workers have all said goodbye", "fleet")
    elif not any(w["kind"] == "rollout" for w in live):
        yield Advice(
            BAD, "no rollout worker is connected", "fleet", command=f"samplestore worker --run {quote(s['run'])}"
        )
    if silent := sum(w["heartbeat_age_s"] > w["ttl_s"] for w in live):
        text = f"{silent} of {amount(len(live), 'worker')} stopped sending heartbeats"
        yield Advice(BAD, text, "fleet", command=f"samplestore reap --run {quote(s['run'])}")


def _all_left(workers: list[dict[str, Any]]) -> bool:
    """Whether the last of each kind ended in order: a run that is over is no alarm."""
    last = {w["kind"]: w for w in sorted(workers, key=lambda w: w["id"])}
    return all(w["state"] == WorkerState.GONE and not w["error"] for w in last.values())


def _ended(s: dict[str, Any]) -> Iterator[Advice]:
    """A kind of worker that is not there any more, since the last one ended with an error."""
    at_work = {w["kind"] for w in s["workers"] if w["state"] == "live"}
    last: dict[str, Any] = {}
    for w in s["workers"]:
        if w["state"] != "live" and w["kind"] not in at_work and w["id"] > last.get(w["kind"], {"id": 0})["id"]:
            last[w["kind"]] = w
    for kind, w in sorted(last.items()):
        if w["error"]:
            who = kind if kind == "trainer" else f"{kind} worker"
            text = f"no {who} is left; the last one, {w['name']}, ended with: {w['error'][:ERROR]}"
            yield Advice(BAD, text, "fleet")


def _engines(s: dict[str, Any]) -> Iterator[Advice]:
    known = s["engines"]
    if failed := sum(e["state"] == "failed" for e in known):
        yield Advice(BAD, f"{failed} of {amount(len(known), 'engine')} failed the last weight update", "fleet")
    current = s["current_version"]
    if behind := sum(e["state"] == "live" and e["version"] != current for e in known):
        serve = which(behind, "does not serve", "do not serve")
        yield Advice(WARN, f"{behind} of {amount(len(known), 'engine')} {serve} v{current} yet", "fleet")


def _run(s: dict[str, Any]) -> Iterator[Advice]:
    if s["state"] != "running":
        yield Advice(WARN, f"the run is {s['state']}", command=f"samplestore resume --run {quote(s['run'])}")
    lost = sum(s["groups"][state] for state in ("dropped", "stale"))
    settled = lost + s["groups"]["consumed"]
    if settled >= SETTLED_ENOUGH and lost > THROWN_AWAY * settled:
        state = "dropped" if s["groups"]["dropped"] >= s["groups"]["stale"] else "stale"
        yield Advice(WARN, f"{lost} of {settled} settled groups were thrown away", "groups", (("state", state),))
    for text in s["starving"]:
        yield Advice(WARN, text, "groups")


def _ledger(book: dict[str, Any]) -> Iterator[Advice]:
    if book["requests"]["unexplained_tokens"]:
        n = book["requests"]["unexplained_tokens"]
        text = f"{amount(n, 'token')} of engine calls {which(n, 'is', 'are')} neither stored nor known to be lost"
        yield Advice(WARN, text, command="samplestore check")
    wasted, total = sum(look.fates(book)[fate] for fate in look.WASTED), book["generated"]
    if total >= WASTED_ENOUGH and wasted > WASTED * total:
        text = f"{100 * wasted / total:.0f} % of all generated tokens were thrown away"
        yield Advice(HINT, f"{text}: a wider max_staleness or fewer groups in flight waste less", "aborts")


def _recent(m: dict[str, float]) -> Iterator[Advice]:
    flat = m.get("samplestore/recent/zero_std_ratio")
    if flat is not None and flat > FLAT:
        text = f"in {100 * flat:.0f} % of the newest finished groups all rewards are equal: they teach nothing"
        yield Advice(HINT, f"{text}: see group_filters", "groups", (("rewards", "all equal"),))
    cut = m.get("samplestore/recent/truncated_ratio")
    if cut is not None and cut > TRUNCATED:
        text = f"{100 * cut:.0f} % of the newest finished samples were cut at their length limit"
        yield Advice(HINT, f"{text}: max_new_tokens may be too small")
