"""Who is alive: registration, heartbeats, and the reaping of those who are not."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.arguments import choice, id_of_worker
from samplestore.clock import db_now
from samplestore.errors import WorkerDead
from samplestore.migrations import REVISION
from samplestore.models import BatchRow, EngineRow, Request, Run, Sample, Stage, Worker
from samplestore.statements import samples as st
from samplestore.statements.totals import Amounts
from samplestore.states import BatchState, Fate, StageStatus, WorkerKind, WorkerState
from samplestore.types import Heartbeat, Reaped
from samplestore.verbs import batches, deadlines, deaths, groups, samples
from samplestore.verbs.tx import SHARED, Tx

run, worker, sample, stage, batch, engine, request = (
    t.__table__ for t in (Run, Worker, Sample, Stage, BatchRow, EngineRow, Request)
)

# Written out, and expressions have no index: so SQLite finds what is leased by ix_batch_owned. Given the choice it
# takes an index that starts with the run, and reads all batches that it ever had.
LEASED = batch.c.state == sa.literal_column(repr(BatchState.LEASED.value))
NOTHING = sa.literal_column("0", sa.BigInteger)


def register(tx: Tx, kind: str, name: str | None = None, info: dict[str, Any] | None = None) -> int:
    """A row for this process start; returns its id, which is never used again."""
    host, pid = socket.gethostname(), os.getpid()
    return int(
        tx.execute(
            sa.insert(worker)
            .values(
                run_id=tx.run_id, kind=choice("kind", kind, WorkerKind).value, name=name or f"{host}-{pid}",
                host=host, pid=pid,
                started_at=db_now(), heartbeat=db_now(), ttl_s=tx.settings.heartbeat_ttl_s, info=info or {},
            )
            .returning(worker.c.id)
        ).scalar_one()
    )  # fmt: skip


def heartbeat(tx: Tx, worker_id: int) -> Heartbeat:
    """Say that a worker lives, and learn what it must follow. Raises WorkerDead: dead is final; UnknownWorker."""
    if tx.connection.dialect.name == "postgresql":
        # A lost heartbeat costs nothing, so it need not wait for the disk. Nothing else may do this.
        tx.execute(sa.text("SET LOCAL synchronous_commit = off"))
    id_of_worker(worker_id)
    late = tx.execute(
        sa.select(worker.c.heartbeat < db_now() - worker.c.ttl_s).where(worker.c.id == worker_id)
    ).scalar()
    beaten = tx.execute(
        sa.update(worker)
        .where(worker.c.id == worker_id, worker.c.run_id == tx.run_id, worker.c.state == WorkerState.LIVE.value)
        .values(heartbeat=db_now())
    ).rowcount
    if beaten != 1:
        tx.state_of(worker_id)
        raise WorkerDead(worker_id)
    row = tx.execute(sa.select(run).where(run.c.id == tx.run_id)).one()
    revision = tx.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() or REVISION
    return Heartbeat(row.state, row.current_version, row.abort_seq, row.abort_reason, str(revision), bool(late))


def goodbye(tx: Tx, worker_id: int, error: str | None = None) -> None:
    """A worker leaves. What it still holds is freed; a fatal `error` reaches waiting trainers."""
    id_of_worker(worker_id)
    said = None if error is None else codec.clean_text(error)
    tx.execute(
        sa.update(worker)
        .where(worker.c.id == worker_id, worker.c.run_id == tx.run_id, worker.c.state == WorkerState.LIVE.value)
        .values(state=WorkerState.GONE.value, ended_at=db_now(), error=said)
    )
    if said:
        tx.event("worker_failed", said, worker_id=worker_id)
    _free(tx, sa.literal(False), "worker left")
    tx.fold([worker_id])


def reap(tx: Tx, reaper_id: int | None = None) -> Reaped:
    """Free what belongs to workers whose heartbeat stopped, and samples that make no progress. By anyone.

    A reaper whose own heartbeat has expired skips the round: after an outage or a suspended machine, everyone's has.
    """
    nothing = Reaped([], 0, 0, 0, 0, 0)
    fresh = worker.c.heartbeat >= db_now() - worker.c.ttl_s
    if reaper_id is not None:
        me = (worker.c.id == id_of_worker(reaper_id)) & (worker.c.state == WorkerState.LIVE.value) & fresh
        if tx.execute(sa.select(worker.c.id).where(me)).scalar() is None:
            return nothing
    _clock_set_back(tx)
    # The row check lets a heartbeat that came first win: PostgreSQL evaluates it again on the row it waited for.
    silent = (
        sa.select(worker.c.id)
        .where(worker.c.run_id == tx.run_id, worker.c.state == WorkerState.LIVE.value, ~fresh)
        .order_by(worker.c.id)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("silent")
    )
    dead = [
        row.id
        for row in tx.rows(
            sa.update(worker)
            .where(worker.c.id.in_(sa.select(silent.c.id)), worker.c.state == WorkerState.LIVE.value, ~fresh)
            .values(state=WorkerState.DEAD.value, ended_at=db_now())
            .returning(worker.c.id)
        )
    ]
    for id in dead:
        tx.event("worker_dead", "heartbeat stopped", worker_id=id)
    late = deadlines.settle(tx)
    stragglers = groups.settle_stragglers(tx)
    stuck = sample.c.progress_at < db_now() - tx.settings.progress_deadline_s
    freed = _free(tx, stuck, "worker dead")
    if dead:
        tx.fold(dead)
    return Reaped(dead, freed[0] + late, *freed[1:], stragglers)


def _clock_set_back(tx: Tx) -> None:
    """Times that lie ahead were written before the clock was set back. They begin to count now: whoever lives beats
    again within its ttl, and without this the dead would hold their samples for as long as the clock was moved."""
    ahead = db_now() + 1.0
    live = (worker.c.run_id == tx.run_id) & (worker.c.state == WorkerState.LIVE.value)
    for table, column, mine, order in (
        (worker, worker.c.heartbeat, live, worker.c.id),
        (sample, sample.c.progress_at, deaths.owned(tx.run_id), deaths.BY_ID),
    ):
        picked = (
            sa.select(table.c.id)
            .where(mine, column > ahead)
            .order_by(order)
            .with_for_update(skip_locked=True, key_share=True)
            .cte("picked")
        )
        tx.execute(
            sa.update(table).where(table.c.id.in_(sa.select(picked.c.id)), column > ahead).values({column: db_now()})
        )


def _gone(owner: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """The owner exists and is not live. Asked of each owned row, since nearly all workers of a long run are gone. Never
    "not among the live": a worker that registered and claimed after this statement began would be robbed."""
    return sa.exists().where(worker.c.id == owner, worker.c.state != WorkerState.LIVE.value)


def _free(tx: Tx, stuck: sa.ColumnElement[bool], reason: str) -> tuple[int, int, int, int]:
    """Free everything that is owned by a worker which is not live. Groups and batches first, then samples, then
    stages: the lock order."""
    held = tx.rows(
        sa.select(batch.c.id)
        .where(LEASED, batch.c.run_id + NOTHING == tx.run_id, _gone(batch.c.owner))
        .order_by(batch.c.id + NOTHING)
        .with_for_update(skip_locked=True, key_share=True)
    )
    for row in held:
        batches.give_back(tx, row.id, BatchState.RELEASED, "trainer dead")
    tx.as_worker(SHARED)
    given_up, suspects = deaths.settle(tx, deaths.count(tx))
    samples_freed = given_up + _free_samples(tx, stuck, reason, suspects)
    stages_freed = tx.execute(_free_owned(stage, tx.run_id, stage.c.status == StageStatus.PENDING.value)).rowcount
    engines_freed = tx.execute(_free_owned(engine, tx.run_id)).rowcount
    # Not of samples that were passed over, locked: an append that holds them is the owner's, and would be refused.
    kept = sa.exists().where(sample.c.id == request.c.sample_id, sample.c.owner == request.c.worker_id)
    closed = tx.rows(
        sa.update(request)
        .where(request.c.finished_at.is_(None), _gone(request.c.worker_id), ~kept, request.c.run_id == tx.run_id)
        .values(finished_at=db_now(), lost_reason="worker dead")
        .returning(request.c.finished_at)
    )
    for row in closed:
        tx.requests("", Amounts(unknown=1), row.finished_at)
    return samples_freed, stages_freed, len(held), engines_freed


def _free_owned(table: sa.Table, run_id: int, *more: sa.ColumnElement[bool]) -> Any:
    """Ordered and SKIP LOCKED: an unordered update of many rows deadlocks with group commits."""
    picked = (
        sa.select(table.c.id)
        .where(table.c.run_id == run_id, table.c.owner.is_not(None), _gone(table.c.owner), *more)
        .order_by(table.c.id)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("picked")
    )
    return (
        sa.update(table)
        .where(table.c.id.in_(sa.select(picked.c.id)), _gone(table.c.owner))
        .values(owner=None, attempt=table.c.attempt + 1)
    )


def _free_samples(tx: Tx, stuck: sa.ColumnElement[bool], reason: str, suspects: Mapping[int, deaths.Death]) -> int:
    """`suspects`: those whose owner died of them, perhaps."""
    found = tx.rows(
        sa.select(sample.c.id, sample.c.owner, sample.c.group_id, sample.c.n_tokens, stuck.label("stuck"))
        .where(deaths.owned(tx.run_id), sa.or_(_gone(sample.c.owner), stuck))
        .order_by(deaths.BY_ID)
        .with_for_update(skip_locked=True, key_share=True, of=sample)
    )
    if not found:
        return 0
    ids = [row.id for row in found]
    tx.execute(
        sa.update(sample)
        .where(sample.c.id.in_(ids))
        .values(status=st.STATUS_AT_REST, n_aborts=sample.c.n_aborts + st.STOPPED, **st.LET_GO)
    )
    for row in found:
        samples.shift(tx, [row.id], Fate.IN_FLIGHT, Fate.RESUMABLE)
        suspect = suspects.get(row.id)
        if suspect is not None and suspect.wait_s:
            tx.execute(sa.update(sample).where(sample.c.id == row.id).values(not_before=db_now() + suspect.wait_s))
        tx.event("reap", "no progress" if row.stuck else reason, worker_id=row.owner, sample_id=row.id,
                 group_id=row.group_id, tokens=row.n_tokens, details=suspect and suspect.details)  # fmt: skip
    return len(ids)


def disown(tx: Tx, worker_id: int, held: Sequence[int], held_stages: Sequence[int] | None = None) -> int:
    """Free samples and stages that this worker owns without knowing: a claim that was committed, its answer lost.
    `held`, `held_stages`: the ids that it does know (None: leave stages alone). Returns how many were freed.
    Raises UnknownWorker."""
    tx.state_of(worker_id)
    strays = tx.rows(
        sa.select(sample.c.id)
        .where(sample.c.owner == worker_id, sample.c.id.not_in(list(held)))
        .order_by(sample.c.id)
        .with_for_update(key_share=True)
    )
    for row in strays:
        tx.execute(sa.update(sample).where(sample.c.id == row.id).values(status=st.STATUS_AT_REST, **st.LET_GO))
        samples.shift(tx, [row.id], Fate.IN_FLIGHT, Fate.RESUMABLE)
    if held_stages is None:
        return len(strays)
    freed = tx.execute(
        sa.update(stage)
        .where(stage.c.owner == worker_id, stage.c.status == StageStatus.PENDING.value)
        .where(stage.c.id.not_in(list(held_stages)))
        .values(**st.STAGE_LET_GO)
    )
    return len(strays) + int(freed.rowcount)
