"""Interruptions for the eye, beside the totals of queries/aborts.py: over time with the weight updates, which samples
were hit last, and how many of them went on."""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import Event, Sample, SampleGroup, Worker
from samplestore.queries.aborts import KINDS

event, sample, group, worker = (t.__table__ for t in (Event, Sample, SampleGroup, Worker))

BARS = 48  # of a chart, and one that is not full yet
MAX_REASONS = 6  # kinds and reasons that a chart tells apart; the rest is one
MAX_MARKS = 200  # weight updates drawn
MAX_ROWS = 200
OTHER = "other"


def over_time(database: Database, run_id: int, since_s: float) -> dict[str, Any]:
    """{"since", "until", "width_s", "bars": [{"at", "why", "times"}], "publishes": [{"at", "version", "step"}],
    "publishes_cut": bool}: what happened in the last since_s seconds in equal parts, a BARS-th of that time each, `at`
    the beginning of each. `since` is a whole number of parts after the epoch, up to one part earlier than asked for:
    else an event would move from part to part while the clock goes on.
    The MAX_REASONS most frequent reasons are told apart; a failure's message is not one of them."""
    with database.reading() as c:
        now = float(c.execute(sa.select(db_now())).scalar_one())
        width = since_s / BARS
        since = math.floor((now - since_s) / width) * width
        happened = (event.c.run_id == run_id) & event.c.kind.in_(KINDS) & (event.c.at >= since) & (event.c.at <= now)
        why = sa.case(
            (event.c.kind == "fail", "fail"),
            else_=event.c.kind + sa.literal(": ") + sa.func.substr(sa.func.coalesce(event.c.reason, ""), 1, 80),
        )
        # No negative numbers here, so that cutting the fraction off is rounding down on both databases.
        part = sa.cast(sa.func.floor((event.c.at - since) / width), sa.Integer)
        rows = c.execute(
            sa.select(part.label("part"), why.label("why"), sa.func.count().label("times"))
            .where(happened)
            .group_by("part", "why")
        ).fetchall()
        marks = c.execute(
            sa.select(event.c.at, event.c.version, event.c.step)
            .where(event.c.run_id == run_id, event.c.kind == "publish", event.c.at >= since)
            .order_by(event.c.at.desc())
            .limit(MAX_MARKS + 1)
        ).fetchall()
    totals: dict[str, int] = {}
    for r in rows:
        totals[r.why] = totals.get(r.why, 0) + int(r.times)
    told = sorted(totals, key=lambda w: (-totals[w], w))[:MAX_REASONS]
    bars: dict[tuple[int, str], int] = {}
    for r in rows:
        key = (min(BARS, int(r.part)), r.why if r.why in told else OTHER)
        bars[key] = bars.get(key, 0) + int(r.times)
    return {
        "since": since,
        "until": now,
        "width_s": width,
        "bars": [{"at": since + p * width, "why": w, "times": n} for (p, w), n in sorted(bars.items())],
        "publishes": [dict(r._mapping) for r in marks[:MAX_MARKS][::-1]],
        "publishes_cut": len(marks) > MAX_MARKS,
    }


def latest(
    database: Database,
    run_id: int,
    *,
    kind: str | None = None,
    before: tuple[float, int] | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """The last interruptions, the newest first, with the sample and what became of it since. `before`: (at, id) of
    the last row of the page before."""
    kinds = KINDS if kind is None else (kind,)
    size = max(1, min(limit, MAX_ROWS))

    def newest(one: str) -> sa.Select[Any]:
        """Of one kind: the index has them in order of time, so no more rows are read than are asked for."""
        query = sa.select(event.c.id, event.c.at).where(event.c.run_id == run_id, event.c.kind == one)
        if before is not None:
            query = query.where(event.c.at <= before[0], sa.or_(event.c.at < before[0], event.c.id < before[1]))
        inner = query.order_by(event.c.at.desc(), event.c.id.desc()).limit(size).subquery()
        return sa.select(inner.c.id)

    chosen = sa.union_all(*[newest(k) for k in kinds]).subquery("chosen")
    query = (
        sa.select(
            event.c.id, event.c.at, event.c.kind, sa.func.substr(event.c.reason, 1, 300).label("reason"),
            event.c.tokens, event.c.worker_id, worker.c.name.label("worker"), group.c.number.label("group"),
            sample.c.index, sample.c.status, sample.c.owner.is_not(None).label("in_flight"), sample.c.n_resumes,
        )
        .select_from(
            chosen.join(event, event.c.id == chosen.c.id)
            .outerjoin(sample, sample.c.id == event.c.sample_id)
            .outerjoin(group, group.c.id == sample.c.group_id)
            .outerjoin(worker, worker.c.id == event.c.worker_id)
        )
        .order_by(event.c.at.desc(), event.c.id.desc())
        .limit(size)
    )  # fmt: skip
    with database.reading() as c:
        return [dict(r._mapping) for r in c.execute(query)]


def resumed_after(database: Database, run_id: int, since_s: float) -> dict[str, int]:
    """Of the samples that were interrupted with tokens in the last since_s seconds: how many went on with what they had
    (`resumed`), and how many wait (`waiting`), out of `interrupted`; the rest ended, or began afresh."""
    with database.reading() as c:
        now = float(c.execute(sa.select(db_now())).scalar_one())
        hit = (
            sa.select(event.c.sample_id, sa.func.max(event.c.at).label("at"))
            .where(
                event.c.run_id == run_id, event.c.kind.in_(KINDS), event.c.at > now - since_s, event.c.tokens > 0,
                event.c.sample_id.is_not(None),
            )
            .group_by(event.c.sample_id)
            .subquery("hit")
        )  # fmt: skip
        resumes = (
            sa.select(event.c.sample_id, sa.func.max(event.c.at).label("at"))
            .where(event.c.run_id == run_id, event.c.kind == "resume", event.c.at > now - since_s)
            .group_by(event.c.sample_id)
            .subquery("resumes")
        )
        row = c.execute(
            sa.select(
                sa.func.count().label("interrupted"),
                sa.func.count().filter(resumes.c.at >= hit.c.at).label("resumed"),
                sa.func.count().filter(
                    sample.c.status == "aborted", sample.c.owner.is_(None), sample.c.closed == 0,
                    sa.func.coalesce(resumes.c.at, 0.0) < hit.c.at,
                ).label("waiting"),
            ).select_from(
                hit.join(sample, sample.c.id == hit.c.sample_id).outerjoin(
                    resumes, resumes.c.sample_id == hit.c.sample_id
                )
            )
        ).one()  # fmt: skip
    return {name: int(n) for name, n in row._mapping.items()}
