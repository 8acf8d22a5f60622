"""The token ledger, read: kept totals, and the exact recount that can prove them wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import EngineRow, Request, Worker
from samplestore.statements import ledger as st
from samplestore.statements import totals
from samplestore.statements.totals import Amounts
from samplestore.states import Fate
from samplestore.words import amount, amount_is

request, engine, worker = Request.__table__, EngineRow.__table__, Worker.__table__

Key = tuple[str, str, int]


def kept_totals(connection: sa.Connection, run_id: int) -> dict[Key, int]:
    return {(r.fate, r.reason, r.version): int(r.amount) for r in connection.execute(st.kept(run_id))}


def recounted(connection: sa.Connection, run_id: int) -> dict[Key, int]:
    return {(r.fate, r.reason, r.version): int(r.amount) for r in connection.execute(st.recount(run_id))}


def read(database: Database, run_id: int, exact: bool) -> dict[str, Any]:
    """Generated tokens by fate; per request, generated = stored + lost; and what engines counted themselves.

    `closed` is None without `exact`: only a recount from the payloads can tell.
    """
    with database.reading() as connection:
        kept = kept_totals(connection, run_id)
        counted = recounted(connection, run_id) if exact else None
        of_requests = kept_of_requests = kept_requests(connection, run_id)
        if exact:
            of_requests = counted_requests(connection, run_id)
        requests = _requests(connection, run_id, of_requests)
        engines = _engines(connection, run_id, requests)
    by_fate: Counter[str] = Counter({fate.value: 0 for fate in Fate})
    reasons: Counter[str] = Counter()
    for (fate, reason, _), n in kept.items():
        by_fate[fate] += n
        if reason:
            reasons[reason] += n
    told = {
        "generated": sum(kept.values()),
        "by_fate": dict(by_fate),
        "dropped_by_reason": dict(reasons),
        "kept_by_resuming": requests.pop("kept_by_resuming"),
        "resumes": requests.pop("resumes"),
        "requests": requests,
        "engines": engines,
        "closed": None,
    }
    if counted is not None:
        differences = {key: counted.get(key, 0) - kept.get(key, 0) for key in {*kept, *counted}}
        wrong = {key: d for key, d in differences.items() if d}
        told["recounted"] = sum(counted.values())
        told["differences"] = [
            {"fate": f, "reason": r, "version": v, "recounted_minus_kept": d} for (f, r, v), d in sorted(wrong.items())
        ]
        told["request_differences"] = list(_differences(kept_of_requests, of_requests))
        told["closed"] = not wrong and not told["request_differences"] and requests["unexplained_tokens"] == 0
    return told


def kept_requests(connection: sa.Connection, run_id: int) -> dict[str, Amounts]:
    return totals.by_reason(connection.execute(totals.kept_requests(run_id)))


def counted_requests(connection: sa.Connection, run_id: int) -> dict[str, Amounts]:
    return totals.by_reason(connection.execute(totals.counted_requests(request.c.run_id == run_id)))


def by_amount(by_reason: dict[str, Amounts]) -> totals.Counts:
    """Counts by (reason, what)."""
    return {(reason, of): n for reason, amounts in by_reason.items() for of, n in amounts._asdict().items()}


def _differences(kept: dict[str, Amounts], counted: dict[str, Amounts]) -> Iterator[dict[str, Any]]:
    told, there = totals.told_alike(by_amount(kept), by_amount(counted))
    for key in sorted({*told, *there}):
        if n := there.get(key, 0) - told.get(key, 0):
            yield {"reason": key[0], "of": key[1], "recounted_minus_kept": n}


def _requests(connection: sa.Connection, run_id: int, by_reason: dict[str, Amounts]) -> dict[str, Any]:
    """Tokens of engine calls: what engines say they generated, what was stored, what was lost and why, and what
    resumes kept."""
    r = request.c
    total = Amounts()
    for amounts in by_reason.values():
        total = total.plus(amounts)
    # By workers: an index leads from each to what it has open.
    mine = sa.select(worker.c.id).where(worker.c.run_id == run_id)
    in_flight = sa.select(sa.func.count()).where(r.worker_id.in_(mine), r.finished_at.is_(None), r.run_id == run_id)
    at = totals.of_requests.c.at
    last = sa.select(sa.func.max(at)).where(totals.of_requests.c.run_id == run_id, at > 0)
    lost = {reason: amounts.lost for reason, amounts in by_reason.items() if amounts.lost}
    return {
        "finished": total.ended,
        "generated": total.generated,
        "stored": total.stored,
        "prompt_tokens": total.prompt,
        "cached_tokens": total.cached,
        "worker_died_before_it_knew": total.unknown,
        "in_flight": int(connection.execute(in_flight).scalar_one()),
        "kept_by_resuming": total.resumed,
        "resumes": total.resumes,
        "lost_by_reason": {reason: n for reason, n in lost.items() if reason},
        "unexplained_tokens": lost.get("", 0),
        "last_finished_at": connection.execute(last).scalar(),
    }


def _engines(connection: sa.Connection, run_id: int, requests: dict[str, Any]) -> dict[str, Any]:
    """Tokens by the engines' own counters, since the run knows each, beside those of the run's requests.

    unaccounted   what engines generated and no request of the run was told of: answers that a router threw away and
                  asked for again, requests of others. Below 0 where counters lag behind. None: no engine has told
    inexact       why `unaccounted` may be off; empty: it is exact
    """
    rows = connection.execute(
        sa.select(engine.c.url, engine.c.counter_at, engine.c.generated_tokens)
        .where(engine.c.run_id == run_id)
        .order_by(engine.c.id)
    ).fetchall()
    told = [row for row in rows if row.counter_at is not None]
    generated = sum(int(row.generated_tokens) for row in told) if told else None
    return {
        "engines": len(rows),
        "counted": len(told),
        "generated": generated,
        "requests_generated": requests["generated"],
        "stored": requests["stored"],
        "lost_by_reason": requests["lost_by_reason"],
        "unaccounted": None if generated is None else generated - requests["generated"],
        "inexact": list(_inexact(rows, requests)),
    }


def _inexact(rows: Sequence[Any], requests: dict[str, Any]) -> Iterator[str]:
    if not rows:
        yield "no engine is known"
    if requests["in_flight"]:
        yield f"{amount_is(requests['in_flight'], 'request')} in flight"
    if unknown := requests["worker_died_before_it_knew"]:
        yield f"of {amount(unknown, 'request')} nobody knows how much was generated"
    if silent := [row.url for row in rows if row.counter_at is None]:
        yield f"no counter is told by {_some(silent)}"
    last = requests["last_finished_at"]
    if late := [row.url for row in rows if row.counter_at is not None and last is not None and row.counter_at < last]:
        yield f"not read since the last request ended: {_some(late)}"


def _some(urls: list[str]) -> str:
    return ", ".join(urls[:3]) + (f" and {len(urls) - 3} more" if len(urls) > 3 else "")
