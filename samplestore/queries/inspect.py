"""What the command line looks up: runs, engines, and what a typed id names. Bounded, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import EngineRow, Request, Run, Sample, SampleGroup, Worker

run, group, sample, worker, engine, request = (
    t.__table__ for t in (Run, SampleGroup, Sample, Worker, EngineRow, Request)
)

MAX_ROWS = 1000


def _all(database: Database, query: sa.Select[Any]) -> list[dict[str, Any]]:
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


def runs(database: Database, limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """The runs of a database, newest first."""
    live = (
        sa.select(sa.func.count())
        .where(worker.c.run_id == run.c.id, worker.c.state == "live")
        .correlate(run)
        .scalar_subquery()
    )
    return _all(
        database,
        sa.select(
            run.c.name, run.c.state, run.c.n_prompts.label("prompts"), run.c.n_groups.label("groups"),
            run.c.current_version, run.c.timeline, run.c.epoch, live.label("live_workers"),
            run.c.created_at, run.c.uuid,
        )
        .order_by(run.c.id.desc())
        .limit(min(limit, MAX_ROWS)),
    )  # fmt: skip


def engines(database: Database, run_name: str | None = None) -> list[dict[str, Any]]:
    """Engines that runs drive, and whether they serve their run's current weights."""
    counted = sa.case((engine.c.counter_at.is_not(None), engine.c.generated_tokens)).label("generated_tokens")
    query = (
        sa.select(
            run.c.name.label("run"), engine.c.url, engine.c.state, engine.c.version,
            run.c.current_version, engine.c.label, engine.c.failures, engine.c.error, engine.c.updated_at,
            engine.c.release, engine.c.context_length, engine.c.running, engine.c.queued, counted,
        )
        .select_from(engine.join(run, run.c.id == engine.c.run_id))
        .where(engine.c.state != "gone")
        .order_by(run.c.name, engine.c.url)
        .limit(MAX_ROWS)
    )  # fmt: skip
    return _all(database, query if run_name is None else query.where(run.c.name == run_name))


def silent_workers(database: Database) -> list[dict[str, Any]]:
    """Workers that count as live and have sent no heartbeat for their ttl."""
    age = (db_now() - worker.c.heartbeat).label("silent_s")
    return _all(
        database,
        sa.select(run.c.name.label("run"), worker.c.id, worker.c.name, worker.c.ttl_s, age)
        .select_from(worker.join(run, run.c.id == worker.c.run_id))
        .where(worker.c.state == "live", worker.c.heartbeat < db_now() - worker.c.ttl_s)
        .order_by(worker.c.id)
        .limit(MAX_ROWS),
    )


def waiting_workers(database: Database) -> int:
    """Live rollout workers of runs for which no engine has ever answered."""
    engines = sa.exists().where(engine.c.run_id == worker.c.run_id, engine.c.state != "gone")
    live = (worker.c.state == "live", worker.c.kind == "rollout", ~engines)
    return int(database.read(lambda c: c.execute(sa.select(sa.func.count()).where(*live)).scalar_one()))


_SAMPLE = (
    sa.select(
        sample.c.id, run.c.name.label("run"), run.c.uuid, sample.c.run_id, group.c.id.label("group_id"),
        group.c.number, sample.c.index,
    )
    .select_from(sample.join(group, group.c.id == sample.c.group_id).join(run, run.c.id == sample.c.run_id))
)  # fmt: skip


def samples_by_id(database: Database, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Where samples are: run, group id and number, index. Ids that name nothing are missing from the answer."""
    return _all(database, _SAMPLE.where(sample.c.id.in_(list(ids)[:MAX_ROWS])).order_by(sample.c.id))


def sample_at(
    database: Database, number: int, index: int, *, run_id: int | None = None, uuid: str = ""
) -> list[dict[str, Any]]:
    """samples_by_id for a place: group number and index, in a run given by its id or its uuid."""
    of_run = run.c.uuid == uuid if run_id is None else run.c.id == run_id
    return _all(database, _SAMPLE.where(of_run, group.c.number == number, sample.c.index == index))


def groups_by_id(database: Database, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Where groups are: run, number, state."""
    return _all(
        database,
        sa.select(group.c.id, run.c.name.label("run"), group.c.number, group.c.state)
        .select_from(group.join(run, run.c.id == group.c.run_id))
        .where(group.c.id.in_(list(ids)[:MAX_ROWS]))
        .order_by(group.c.id),
    )


def groups_by_number(database: Database, run_id: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Groups of a run: id, number, state. Numbers that name nothing are missing from the answer."""
    return _all(
        database,
        sa.select(group.c.id, group.c.number, group.c.state)
        .where(group.c.run_id == run_id, group.c.number.in_(list(numbers)[:MAX_ROWS]))
        .order_by(group.c.number),
    )


def requests(database: Database, sample_id: int, incarnation: int, limit: int) -> list[dict[str, Any]]:
    """Engine calls for one life of a sample, oldest first: generated = stored + lost(reason), None where not told."""
    r = request.c
    return _all(
        database,
        sa.select(
            r.rid, r.engine, r.worker_id, r.attempt, r.prompt_tokens, r.cached_tokens, r.generated_tokens,
            r.stored_tokens, r.lost_tokens, r.lost_reason, r.resumed_tokens, r.retractions, r.spec, r.temperature,
            r.queue_s, r.e2e_s, r.finish_reason, r.started_at, r.finished_at,
        )
        .where(r.sample_id == sample_id, r.incarnation == incarnation)
        .order_by(r.id)
        .limit(min(limit, MAX_ROWS)),
    )  # fmt: skip
