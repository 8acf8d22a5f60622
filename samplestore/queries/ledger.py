"""The token ledger, read: kept totals, and the exact recount that can prove them wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import Request
from samplestore.statements import ledger as st
from samplestore.states import Fate

request = Request.__table__

Key = tuple[str, str, int]


def kept_totals(connection: sa.Connection, run_id: int) -> dict[Key, int]:
    return {(r.fate, r.reason, r.version): int(r.amount) for r in connection.execute(st.kept(run_id))}


def recounted(connection: sa.Connection, run_id: int) -> dict[Key, int]:
    return {(r.fate, r.reason, r.version): int(r.amount) for r in connection.execute(st.recount(run_id))}


def read(database: Database, run_id: int, exact: bool) -> dict[str, Any]:
    """Generated tokens by fate, and, per request, generated = stored + lost.

    `closed` is None without `exact`: only a recount from the payloads can tell.
    """
    with database.reading() as connection:
        kept = kept_totals(connection, run_id)
        counted = recounted(connection, run_id) if exact else None
        requests = _requests(connection, run_id)
        resumed = connection.execute(
            sa.select(
                sa.func.coalesce(sa.func.sum(request.c.resumed_tokens), 0),
                sa.func.count().filter(request.c.resumed_tokens > 0),
            ).where(request.c.run_id == run_id)
        ).one()
    by_fate: Counter[str] = Counter({fate.value: 0 for fate in Fate})
    reasons: Counter[str] = Counter()
    for (fate, reason, _), amount in kept.items():
        by_fate[fate] += amount
        if reason:
            reasons[reason] += amount
    told = {
        "generated": sum(kept.values()),
        "by_fate": dict(by_fate),
        "dropped_by_reason": dict(reasons),
        "kept_by_resuming": int(resumed[0]),
        "resumes": int(resumed[1]),
        "requests": requests,
        "closed": None,
    }
    if counted is not None:
        differences = {key: counted.get(key, 0) - kept.get(key, 0) for key in {*kept, *counted}}
        wrong = {key: d for key, d in differences.items() if d}
        told["recounted"] = sum(counted.values())
        told["differences"] = [
            {"fate": f, "reason": r, "version": v, "recounted_minus_kept": d} for (f, r, v), d in sorted(wrong.items())
        ]
        told["closed"] = not wrong and requests["unexplained_tokens"] == 0
    return told


def _requests(connection: sa.Connection, run_id: int) -> dict[str, Any]:
    """Tokens of engine calls: what engines say they generated, what was stored, what was lost and why."""
    of_run = request.c.run_id == run_id
    known = of_run & request.c.generated_tokens.is_not(None)
    row = connection.execute(
        sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.sum(request.c.generated_tokens), 0),
            sa.func.coalesce(sa.func.sum(request.c.stored_tokens), 0),
            sa.func.coalesce(sa.func.sum(request.c.prompt_tokens), 0),
            sa.func.coalesce(sa.func.sum(request.c.cached_tokens), 0),
        ).where(known)
    ).one()
    lost = {
        r[0] or "": int(r[1])
        for r in connection.execute(
            sa.select(request.c.lost_reason, sa.func.sum(request.c.lost_tokens))
            .where(known, request.c.lost_tokens != 0)
            .group_by(request.c.lost_reason)
        )
    }
    unknown = connection.execute(
        sa.select(sa.func.count()).where(
            of_run, request.c.generated_tokens.is_(None), request.c.finished_at.is_not(None)
        )
    ).scalar_one()
    return {
        "finished": int(row[0]),
        "generated": int(row[1]),
        "stored": int(row[2]),
        "prompt_tokens": int(row[3]),
        "cached_tokens": int(row[4]),
        "lost_by_reason": {k: v for k, v in lost.items() if k},
        "unexplained_tokens": lost.get("", 0),
        "worker_died_before_it_knew": int(unknown),
    }
