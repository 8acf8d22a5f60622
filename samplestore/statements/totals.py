"""Kept totals of a run's requests and events, and the same counted from the rows.

A million samples have a million requests and more: to sum them takes a fifth of a second, which a page that is looked
at all day would take from every refresh. So the transaction that ends a request or writes an event adds it here, to a
row of its worker's, and whoever reads sums over workers, as with the token ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from samplestore.models import Event, EventTotal, Request, RequestTotal
from samplestore.statements.prepared import Prepared

request, event = Request.__table__, Event.__table__
of_requests, of_events = RequestTotal.__table__, EventTotal.__table__

# Kinds of events whose reasons are few. A failure's is a message, and no two are alike.
REASONED = ("abort", "release", "reap")
MAX_REASON = 200  # characters of a reason that tell it from others
# Reasons are free text: of a run's kind of events, and of its lost tokens, so many are told apart. What comes with
# another one later is counted under OTHER. A recount knows them all, and tells those with the most apart.
MAX_REASONS, OTHER = 50, "other"


Counts: TypeAlias = dict[tuple[str, ...], int]


class Amounts(NamedTuple):
    """What requests come to. `ended`: of which it is known how much an engine generated; `unknown`: those that ended
    without."""

    ended: int = 0
    unknown: int = 0
    generated: int = 0
    stored: int = 0
    prompt: int = 0
    cached: int = 0
    lost: int = 0
    resumes: int = 0
    resumed: int = 0

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        return Amounts(*(mine + times * yours for mine, yours in zip(self, other, strict=True)))


def counted_requests(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Amounts of these requests by the reason for which tokens were lost ("": none was, or nobody said why)."""
    r = request.c
    known = r.generated_tokens.is_not(None)
    lost = known & (r.lost_tokens != 0)
    text = sa.func.substr(sa.func.coalesce(r.lost_reason, ""), 1, MAX_REASON)
    reason = sa.case((lost, text), else_="").label("reason")

    def number(column: Any, *only: Any) -> Any:
        return sa.func.coalesce(sa.func.sum(column).filter(*only), 0)

    amounts: dict[str, Any] = {
        "ended": sa.func.count().filter(known),
        "unknown": sa.func.count().filter(~known, r.finished_at.is_not(None)),
        "generated": number(r.generated_tokens, known),
        "stored": number(r.stored_tokens, known),
        "prompt": number(r.prompt_tokens, known),
        "cached": number(r.cached_tokens, known),
        "lost": number(r.lost_tokens, known),
        "resumes": sa.func.count().filter(r.resumed_tokens > 0),
        "resumed": sa.func.coalesce(sa.func.sum(r.resumed_tokens), 0),
    }
    columns = [amounts[name].label(name) for name in Amounts._fields]
    return sa.select(reason, *columns, sa.func.max(r.finished_at).label("at")).where(*where).group_by(reason)


def counted_events(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """How many events there are of a kind and reason, and of how many tokens they tell."""
    e = event.c
    text = sa.func.substr(sa.func.coalesce(e.reason, ""), 1, MAX_REASON)
    reason = sa.case((e.kind.in_(REASONED), text), else_="").label("reason")
    tokens = sa.func.coalesce(sa.func.sum(e.tokens), 0).label("tokens")
    return sa.select(e.kind, reason, sa.func.count().label("n"), tokens).where(*where).group_by(e.kind, reason)


def reason_of(kind: str, reason: str | None) -> str:
    """As `counted_events` has it."""
    return (reason or "")[:MAX_REASON] if kind in REASONED else ""


def by_reason(rows: Iterable[Any]) -> dict[str, Amounts]:
    """Rows of `counted_requests` or `kept_requests` as amounts by reason, those that come to nothing left out. What
    resumed has none: it is counted as requests begin, when nobody knows yet how they end."""
    told: dict[str, Amounts] = {}
    for row in rows:
        amounts = Amounts(*(int(getattr(row, name)) for name in Amounts._fields))
        begun = Amounts(resumes=amounts.resumes, resumed=amounts.resumed)
        told[""] = told.get("", Amounts()).plus(begun)
        told[row.reason] = told.get(row.reason, Amounts()).plus(amounts).plus(begun, -1)
    return {reason: amounts for reason, amounts in told.items() if any(amounts)}


def names(amounts: Mapping[tuple[str, str], int], anew: bool) -> dict[tuple[str, str], str]:
    """Under which name each (kind, reason) is counted: its own, as far as there is room when it is written. Where a
    kind's are all counted at once, `anew`, the room goes to those with the most, of equals the first by name."""
    made, told = {}, Counter[str]()
    for kind, reason in sorted(amounts, key=lambda key: (-amounts[key], key)):
        free = reason in ("", OTHER)
        made[kind, reason] = reason if free or not anew or told[kind] < MAX_REASONS else OTHER
        told[kind] += not free
    return made


def kept_requests(run_id: int) -> sa.Select[Any]:
    t = of_requests.c
    sums = [sa.func.sum(t[name]).label(name) for name in Amounts._fields]
    return sa.select(t.reason, *sums, sa.func.max(t.at).label("at")).where(t.run_id == run_id).group_by(t.reason)


def kept_events(run_id: int, *where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    t = of_events.c
    sums = (sa.func.sum(t.n).label("n"), sa.func.sum(t.tokens).label("tokens"))
    return sa.select(t.kind, t.reason, *sums).where(t.run_id == run_id, *where).group_by(t.kind, t.reason)


def told_alike(kept: Counts, counted: Counts) -> tuple[Counts, Counts]:
    """Counts by (..., reason, what), as both can be compared: where OTHER is kept, nobody knows any more for which
    reasons, so that all that have one are one."""
    mixed = {(*key, what) for *key, reason, what in kept if reason == OTHER}

    def one(counts: Counts) -> Counts:
        made: Counts = {}
        for (*key, reason, what), n in counts.items():
            known = reason if not reason or (*key, what) not in mixed else OTHER
            made[*key, known, what] = made.get((*key, known, what), 0) + n
        return made

    return one(kept), one(counted)


def _upsert(table: sa.Table, amounts: tuple[str, ...], latest: str | None = None) -> dict[tuple[str, bool], Prepared]:
    """Add to a total, or start it: by dialect, whose constructs differ in name only, and by whether there is a reason,
    which may then have to become OTHER. latest: a column that keeps the larger value."""
    key = [column.name for column in table.primary_key]
    names = [*key, *amounts, *([latest] if latest else [])]
    made: dict[tuple[str, bool], Prepared] = {}
    for dialect, insert in (("postgresql", postgresql.insert), ("sqlite", sqlite.insert)):
        for reasoned in (False, True):
            statement: Any = insert(table)
            new = statement.excluded
            changes = {name: table.c[name] + new[name] for name in amounts}
            if latest is not None:
                changes[latest] = sa.case((new[latest] > table.c[latest], new[latest]), else_=table.c[latest])
            if reasoned:
                statement = statement.from_select(names, _bounded(table, names, key))
            added = statement.on_conflict_do_update(index_elements=key, set_=changes)
            made[dialect, reasoned] = Prepared(added, None if reasoned else names)
    return made


def _bounded(table: sa.Table, names: Sequence[str], key: Sequence[str]) -> sa.Select[Any]:
    """The row that is given, under OTHER if it would be one reason too many."""
    row: dict[str, Any] = {name: sa.bindparam(f"b_{name}", type_=table.c[name].type) for name in names}
    kept = table.alias("kept")
    alike = [kept.c[name] == row[name] for name in key if name not in ("worker_id", "reason")]
    there = sa.exists(sa.select(sa.literal(1)).where(*alike, kept.c.reason == row["reason"]))
    named = (kept.c.reason != "") & (kept.c.reason != OTHER)
    reasons = sa.select(sa.func.count(sa.distinct(kept.c.reason))).where(*alike, named)
    room = reasons.scalar_subquery() < MAX_REASONS
    row["reason"] = sa.case((there, row["reason"]), (room, row["reason"]), else_=OTHER)
    return sa.select(*(value.label(name) for name, value in row.items())).where(sa.literal_column("1 = 1"))


_ADD = {
    of_requests.name: _upsert(of_requests, Amounts._fields, "at"),
    of_events.name: _upsert(of_events, ("n", "tokens")),
}


def add(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a table of totals: those without a reason first, each kind in the order that is given. Reads no
    answer."""
    for reasoned in (False, True):
        if some := [row for row in rows if bool(row["reason"]) == reasoned]:
            prefix = "b_" if reasoned else ""
            statement = _ADD[table.name][connection.dialect.name, reasoned]
            statement.execute(connection, [{f"{prefix}{name}": value for name, value in row.items()} for row in some])
