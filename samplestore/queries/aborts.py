"""What was interrupted in the middle: why, when, at which engine and worker, under which weights, and what it cost."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import Event, Request, Segment, Worker

event, request, segment, worker = (t.__table__ for t in (Event, Request, Segment, Worker))

KINDS = ("abort", "release", "reap", "fail")
BUCKETS = 12
MOST = 50  # rows of each list


def read(database: Database, run_id: int, since_s: float) -> dict[str, Any]:
    """Interruptions of a run's samples in the last `since_s` seconds.

    by_reason    events: an abort that a worker stored is one, and the release that gives its sample back another
    over_time    BUCKETS equal parts of the time
    by_engine, by_worker   requests that were cut short: generated = stored + lost tokens, but for `untold` of them, of
                 which nobody knows how much was generated: their worker died, or lost the sample
    by_version   segments that an abort ended, by the newest weights in them
    cost         tokens: `kept` were stored and carried over by a resume, `lost` were generated and not stored,
                 `prefilled_again` had to be computed anew by an engine that a resume came to
    Costs with what happened in that time, not with the run.
    """
    with database.reading() as connection:
        now = float(connection.execute(sa.select(db_now())).scalar_one())
        since = now - since_s
        happened = (event.c.run_id == run_id) & event.c.kind.in_(KINDS) & (event.c.at > since)
        return {
            "since": since,
            "until": now,
            "by_reason": _by_reason(connection, happened),
            "over_time": _over_time(connection, happened, since, since_s / BUCKETS),
            "by_engine": _requests(connection, happened, since, request.c.engine, "engine"),
            "by_worker": _workers(connection, _requests(connection, happened, since, request.c.worker_id, "worker")),
            "by_version": _versions(connection, happened, since),
            "cost": _cost(connection, happened, since),
        }


def _by_reason(connection: sa.Connection, happened: Any) -> list[dict[str, Any]]:
    """Reasons of failures are messages, no two alike: they are one."""
    reason = sa.case((event.c.kind == "fail", "an error"), else_=sa.func.coalesce(event.c.reason, "")).label("reason")
    n = sa.func.count().label("times")
    rows = connection.execute(
        sa.select(
            event.c.kind, reason, n, sa.func.coalesce(sa.func.sum(event.c.tokens), 0).label("tokens_so_far"),
            sa.func.max(event.c.at).label("last_at"),
        )
        .where(happened)
        .group_by(event.c.kind, reason)
        .order_by(n.desc(), event.c.kind, reason)
        .limit(MOST)
    )  # fmt: skip
    return [{**r._mapping, "reason": str(r.reason)[:300], "tokens_so_far": int(r.tokens_so_far)} for r in rows]


def _over_time(connection: sa.Connection, happened: Any, since: float, width: float) -> list[dict[str, Any]]:
    starts = [since + i * width for i in range(BUCKETS)]
    counts = [
        sa.func.count().filter(event.c.kind == kind, event.c.at > start, event.c.at <= start + width)
        for start in starts
        for kind in KINDS
    ]
    row = connection.execute(sa.select(*(c.label(f"c{i}") for i, c in enumerate(counts))).where(happened)).one()
    found = [int(n) for n in row]
    return [
        {"from": start, **dict(zip(KINDS, found[i * len(KINDS) : (i + 1) * len(KINDS)], strict=True))}
        for i, start in enumerate(starts)
    ]


def _of_samples(happened: Any, column: Any) -> Any:
    """Rows of samples that were interrupted in that time: an index leads from each to its requests and segments."""
    return column.in_(sa.select(event.c.sample_id).where(happened, event.c.sample_id.is_not(None)))


def _requests(connection: sa.Connection, happened: Any, since: float, column: Any, name: str) -> list[dict[str, Any]]:
    r = request.c
    cut = sa.or_(r.finish_reason == "abort", r.lost_reason.is_not(None))

    def total(of: Any) -> Any:
        return sa.func.coalesce(sa.func.sum(of), 0)

    n = sa.func.count().label("cut_short")
    rows = connection.execute(
        sa.select(
            column.label(name), n, total(r.generated_tokens).label("generated"), total(r.stored_tokens).label("stored"),
            total(r.lost_tokens).label("lost"), sa.func.count().filter(r.generated_tokens.is_(None)).label("untold"),
        )
        .where(_of_samples(happened, r.sample_id), cut, r.finished_at > since)
        .group_by(column)
        .order_by(n.desc(), column)
        .limit(MOST)
    )  # fmt: skip
    whole = ("cut_short", "generated", "stored", "lost", "untold")
    return [{name: row._mapping[name], **{k: int(row._mapping[k]) for k in whole}} for row in rows]


def _workers(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [row["worker"] for row in rows]
    query = sa.select(worker.c.id, worker.c.name, worker.c.state).where(worker.c.id.in_(ids))
    known = {r.id: r for r in connection.execute(query)}
    return [
        {
            **row,
            "name": known[row["worker"]].name if row["worker"] in known else None,
            "state": known[row["worker"]].state if row["worker"] in known else None,
        }
        for row in rows
    ]


def _versions(connection: sa.Connection, happened: Any, since: float) -> list[dict[str, Any]]:
    s = segment.c
    rows = connection.execute(
        sa.select(s.version_max.label("version"), sa.func.count().label("aborted"))
        .where(_of_samples(happened, s.sample_id), s.finish_reason == "abort", s.created_at > since)
        .group_by(s.version_max)
        .order_by(s.version_max.desc())
        .limit(MOST)
    )
    return [{"version": r.version, "aborted": int(r.aborted)} for r in rows]


def _cost(connection: sa.Connection, happened: Any, since: float) -> dict[str, int]:
    r = request.c
    resumed = r.resumed_tokens > 0

    def total(of: Any, *where: Any) -> Any:
        summed = sa.func.sum(of)
        return sa.func.coalesce(summed.filter(*where) if where else summed, 0)

    row = connection.execute(
        sa.select(
            sa.func.count().filter(resumed).label("resumes"), total(r.resumed_tokens).label("kept"),
            total(r.lost_tokens).label("lost"),
            total(r.prompt_tokens - sa.func.coalesce(r.cached_tokens, 0), resumed).label("prefilled_again"),
        ).where(_of_samples(happened, r.sample_id), r.started_at > since)
    ).one()  # fmt: skip
    return {name: int(n) for name, n in row._mapping.items()}
