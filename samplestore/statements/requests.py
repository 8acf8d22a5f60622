"""The statements on calls to engines, built once."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.dialects import postgresql

from samplestore.clock import db_now
from samplestore.models import Json, Request, Sample
from samplestore.statements.prepared import Over, Prepared, given

request, sample = Request.__table__, Sample.__table__


BEGUN: dict[str, Any] = {
    "rid": sa.Text, "sample_id": sa.BigInteger, "worker_id": sa.BigInteger, "attempt": sa.BigInteger,
    "incarnation": sa.BigInteger, "engine": sa.Text, "temperature": sa.Double, "resumed_tokens": sa.BigInteger,
    "sampling_seed": sa.BigInteger, "greedy": sa.BigInteger,
}  # fmt: skip


def _begin() -> Over:
    """Record requests of samples' owners, each once. The samples are locked, in the order of their ids: without, a row
    could be written for a worker that a reap has just freed of its sample. A rid that is there adds no row, also where
    another row of this statement, or a transaction that was under way, has it."""
    new = given(BEGUN)
    held = (
        sa.select(sample.c.id, sample.c.run_id, sample.c.owner, sample.c.attempt, sample.c.incarnation)
        .where(sample.c.id.in_(sa.select(new.c.sample_id)))
        .order_by(sample.c.id)
        .with_for_update(key_share=True)
        .cte("held")
    )
    none_yet: Any = sa.literal_column("0")
    row: dict[str, Any] = {
        **{name: new.c[name] for name in BEGUN}, "run_id": held.c.run_id, "started_at": db_now(),
        "stored_tokens": none_yet,
    }  # fmt: skip
    rows = (
        sa.select(*row.values())
        .select_from(new.join(held, held.c.id == new.c.sample_id))
        .where(
            held.c.owner == new.c.worker_id,
            held.c.attempt == new.c.attempt,
            held.c.incarnation == new.c.incarnation,
        )
    )
    # SQLite writes this clause as PostgreSQL does
    insert = postgresql.insert(request).from_select(list(row), rows).inline()
    return Over(new, insert.on_conflict_do_nothing(index_elements=["rid"]))


STORED_MORE: dict[str, Any] = {"rid": sa.Text, "sample_id": sa.BigInteger, "n": sa.BigInteger}


def _stored() -> Over:
    """Count tokens that were stored of requests, which only the owners of their samples write. One that has ended is in
    the totals with what it had stored by then."""
    more = given(STORED_MORE)
    return Over(
        more,
        sa.update(request)
        .where(request.c.rid == more.c.rid, request.c.sample_id == more.c.sample_id, request.c.finished_at.is_(None))
        .values(stored_tokens=request.c.stored_tokens + more.c.n),
    )


BEGIN, STORED = _begin(), _stored()
WHOSE = ("sample_id", "worker_id", "attempt", "incarnation", "resumed_tokens")  # what never changes of a request
OF = Prepared(sa.select(*(request.c[name] for name in WHOSE)).where(request.c.rid == bindparam("of_rid")))
ENDED = Prepared(sa.select(request.c.finished_at).where(request.c.rid == bindparam("of_rid")))

TOLD: dict[str, Any] = {
    "rid": sa.Text, "run_id": sa.BigInteger, "engine": sa.Text, "prompt_tokens": sa.BigInteger,
    "cached_tokens": sa.BigInteger, "generated_tokens": sa.BigInteger, "lost_reason": sa.Text,
    "retractions": sa.BigInteger, "queue_s": sa.Double, "e2e_s": sa.Double, "finish_reason": sa.Text, "spec": Json,
}  # fmt: skip


def _end(*which: sa.ColumnElement[bool]) -> Over:
    """Close requests with what their engines told; gives what the totals need of each that it closed."""
    told = given(TOLD)
    of_request = {
        **{name: told.c[name] for name in TOLD if name not in ("rid", "run_id")},
        "engine": sa.func.coalesce(told.c.engine, request.c.engine),
        "lost_tokens": told.c.generated_tokens - request.c.stored_tokens,
        "finished_at": db_now(),
    }
    return Over(
        told,
        sa.update(request)
        .where(request.c.rid == told.c.rid, request.c.run_id == told.c.run_id, *which)
        .values(of_request)
        .returning(
            request.c.rid, request.c.generated_tokens, request.c.stored_tokens, request.c.prompt_tokens,
            request.c.cached_tokens, request.c.lost_tokens, request.c.lost_reason, request.c.worker_id,
            request.c.finished_at,
        ),
    )  # fmt: skip


# What is known stays: whoever tells it again adds nothing to the totals. What a reap closed unknown may become known,
# when the worker was only thought to be dead.
END = _end(request.c.finished_at.is_(None))
END_LATE = _end(request.c.finished_at.is_not(None), request.c.generated_tokens.is_(None))
