"""Who works for a run, and where: workers and trainers with what they hold, engines with the weights they serve."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import EngineRow, Run, Sample, Stage, Worker
from samplestore.states import COPIED_WORKER, WorkerState

run, worker, engine, sample, stage = (t.__table__ for t in (Run, Worker, EngineRow, Sample, Stage))

MAX_LIVE = 1000
MAX_ENDED = 200
MAX_ENGINES = 1000
TEXT = 400
OWN = worker.c.info[COPIED_WORKER].as_boolean().is_(None)  # of a copied run: not those of its original
LIVE = worker.c.state == sa.literal_column(repr(WorkerState.LIVE.value))  # written out: a partial index has them


def _held(table: Any) -> Any:
    return sa.select(sa.func.count()).where(table.c.owner == worker.c.id).correlate(worker).scalar_subquery()


def workers(database: Database, run_id: int, *, ended_below: int | None = None, ended: int = 20) -> dict[str, Any]:
    """{"as_of", "live": [...], "ended": [...]}: live ones, at most MAX_LIVE, and those that ended last by falling id,
    from `ended_below` (exclusive) on. heartbeat_age_s by the database's clock; samples, stages: what it holds now."""
    columns = (
        worker.c.id, worker.c.kind, worker.c.name, worker.c.host, worker.c.pid, worker.c.state, worker.c.started_at,
        (db_now() - worker.c.heartbeat).label("heartbeat_age_s"), worker.c.heartbeat, worker.c.ttl_s,
        worker.c.ended_at, sa.func.substr(worker.c.error, 1, TEXT).label("error"), worker.c.info,
    )  # fmt: skip
    with database.reading() as c:
        as_of = float(c.execute(sa.select(db_now())).scalar_one())
        live = c.execute(
            sa.select(*columns, _held(sample).label("samples"), _held(stage).label("stages"))
            .where(worker.c.run_id == run_id, LIVE)
            .order_by(worker.c.id)
            .limit(MAX_LIVE)
        ).fetchall()
        query = sa.select(*columns).where(worker.c.run_id == run_id, ~LIVE, OWN)
        if ended_below is not None:
            query = query.where(worker.c.id < ended_below)
        gone = c.execute(query.order_by(worker.c.id.desc()).limit(max(1, min(ended, MAX_ENDED)))).fetchall()
    return {"as_of": as_of, "live": [dict(r._mapping) for r in live], "ended": [dict(r._mapping) for r in gone]}


def engines(database: Database, run_id: int) -> list[dict[str, Any]]:
    """A run's engines that are not gone: version served and `current_version`, label told, who drives an update
    (owner), failures, error, requests running and queued when last seen, tokens counted (None: it does not tell)."""
    counted = sa.case((engine.c.counter_at.is_not(None), engine.c.generated_tokens)).label("generated_tokens")
    query = (
        sa.select(
            engine.c.url, engine.c.state, engine.c.version, run.c.current_version, engine.c.label, engine.c.owner,
            engine.c.failures, sa.func.substr(engine.c.error, 1, TEXT).label("error"), engine.c.updated_at,
            (db_now() - engine.c.updated_at).label("age_s"), engine.c.release, engine.c.running, engine.c.queued,
            engine.c.context_length, counted,
        )
        .select_from(engine.join(run, run.c.id == engine.c.run_id))
        .where(engine.c.run_id == run_id, engine.c.state != sa.literal_column("'gone'"))
        .order_by(engine.c.url)
        .limit(MAX_ENGINES)
    )  # fmt: skip
    with database.reading() as c:
        return [dict(r._mapping) for r in c.execute(query)]
