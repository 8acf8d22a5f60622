"""Weight versions, and the engines that serve them."""

from __future__ import annotations

import os
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost, SampleStoreError
from samplestore.models import EngineRow, Run, WeightVersionRow
from samplestore.states import RunState
from samplestore.types import WeightVersion, choice, plain_text, whole
from samplestore.verbs import groups
from samplestore.verbs.tx import Tx

run, version, engine = Run.__table__, WeightVersionRow.__table__, EngineRow.__table__

FIRST_LABEL = "default"  # what an SGLang engine reports until it is told a version


def as_version(row: Any) -> WeightVersion:
    return WeightVersion(row.version, row.label, row.path, row.step, row.timeline, row.parent)


def row_of(tx: Tx, number: int) -> Any:
    return tx.execute(sa.select(version).where(version.c.run_id == tx.run_id, version.c.version == number)).one()


def publish(tx: Tx, path: str | None = None, step: int | None = None, label: str | None = None) -> WeightVersion:
    """Announce new weights: they become the run's current version. Repeating the call of one step and path on one
    timeline is harmless. `label`: what engines report for them; made up if not given, unique within the run."""
    path = None if path is None else plain_text("path", os.fspath(path))
    step = None if step is None else whole("step", step)
    label = None if label is None else plain_text("label", label, 200)
    row = tx.lock_run()
    last = row_of(tx, row.current_version)
    if step is not None and (known := _published(tx, row.timeline, step, path)) is not None:
        return as_version(known)
    taken = tx.execute(
        sa.select(version.c.version).where(version.c.run_id == tx.run_id, version.c.label == label)
    ).scalar()
    if taken is not None:
        raise InvalidSetting("label", label, f"one that version {taken} does not have")
    number = row.last_version + 1
    made = {
        "run_id": tx.run_id, "version": number, "timeline": row.timeline, "parent": last.version, "step": step,
        "depth": last.depth + 1, "common_depth": last.depth + 1, "path": path,
        "label": label or f"{row.uuid[:8]}-v{number}",
    }  # fmt: skip
    tx.execute(sa.insert(version).values(created_at=db_now(), **made))
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(current_version=number, last_version=number))
    groups.expire(tx)
    tx.event("publish", None, step=step, version=number, details={"path": path, "label": made["label"]})
    return as_version(row_of(tx, number))


def _published(tx: Tx, timeline: int, step: int, path: str | None) -> Any:
    """The version of this timeline that was announced for this step and path, also if newer ones followed: a trainer
    that says it again, late, must not move the run back to old weights."""
    same_path = version.c.path.is_(None) if path is None else version.c.path == path
    return tx.execute(
        sa.select(version)
        .where(version.c.run_id == tx.run_id, version.c.timeline == timeline, version.c.step == step, same_path)
        .where(version.c.version > 0)
        .order_by(version.c.version.desc())
        .limit(1)
    ).one_or_none()


def describe_first(tx: Tx, path: str | None, label: str) -> None:
    """Say where version 0 comes from: the weights that engines start with."""
    tx.execute(
        sa.update(version).where(version.c.run_id == tx.run_id, version.c.version == 0).values(path=path, label=label)
    )


def see_engine(tx: Tx, url: str, label: str | None) -> dict[str, Any]:
    """Record an engine and what it reports. A label that no version of this run has leaves its version unknown.
    Raises SampleStoreError where the engine belongs to another run that is alive."""
    label = None if label is None else codec.clean_text(label, 200)
    row = tx.execute(
        sa.select(engine).where(engine.c.url == url, engine.c.state != "gone").with_for_update(key_share=True)
    ).one_or_none()
    number = None if label is None else tx.execute(
        sa.select(version.c.version).where(version.c.run_id == tx.run_id, version.c.label == label)
    ).scalar()  # fmt: skip
    if row is not None and row.run_id != tx.run_id:
        name = tx.execute(sa.select(run.c.name).where(run.c.id == row.run_id)).scalar()
        raise SampleStoreError(
            f"engine {url} belongs to run {name!r}; an engine serves one run's weights. "
            f"Give it back with: samplestore engines forget {url}"
        )
    values = {"label": label, "version": number, "updated_at": db_now()}
    if row is None:
        # two workers see a new engine at the same moment
        insert: Any = postgresql.insert if tx.connection.dialect.name == "postgresql" else sqlite.insert
        new = insert(engine).values(run_id=tx.run_id, url=url, created_at=db_now(), **values)
        tx.execute(new.on_conflict_do_nothing(index_elements=["url"], index_where=sa.text("state <> 'gone'")))
    elif (row.label, row.version) != (label, number):
        tx.execute(sa.update(engine).where(engine.c.id == row.id).values(**values))
    return dict(tx.execute(sa.select(engine).where(engine.c.url == url, engine.c.state != "gone")).one()._mapping)


def forget_engine(tx: Tx, url: str) -> int:
    """An engine is no longer this run's."""
    return tx.execute(
        sa.update(engine)
        .where(engine.c.url == url, engine.c.state != "gone")
        .values(state="gone", owner=None, attempt=engine.c.attempt + 1, updated_at=db_now())
    ).rowcount


def claim_engine(tx: Tx, worker_id: int, url: str) -> dict[str, Any] | None:
    """Become the one process that brings this engine to the run's current version. None: it serves it already, or
    somebody else is at it, or it is backing off, or the current weights have no path to load from."""
    tx.require_live(worker_id)
    target = tx.execute(
        sa.select(version)
        .select_from(version.join(run, (run.c.id == version.c.run_id) & (run.c.current_version == version.c.version)))
        .where(run.c.id == tx.run_id)
    ).one()
    if target.path is None:
        return None
    row = tx.execute(
        sa.update(engine)
        .where(
            engine.c.run_id == tx.run_id,
            engine.c.url == url,
            engine.c.state != "gone",
            # its own claim again: the answer of the first was lost
            sa.or_(engine.c.owner.is_(None), engine.c.owner == worker_id),
            engine.c.not_before <= db_now(),
            sa.or_(engine.c.version.is_(None), engine.c.version != target.version),
        )
        .values(owner=worker_id, attempt=engine.c.attempt + 1, updated_at=db_now())
        .returning(engine.c.id, engine.c.attempt, engine.c.version, engine.c.label)
    ).one_or_none()
    if row is None:
        return None
    return {
        "engine_id": row.id, "attempt": row.attempt, "owner": worker_id, "url": url, "was": row.label,
        "version": target.version, "label": target.label, "path": target.path,
    }  # fmt: skip


def engine_updated(tx: Tx, held: dict[str, Any], label: str | None, error: str | None = None) -> None:
    """End an engine's update: it serves `label` now, or `error` says why not (it is tried again, ever more slowly).
    Raises LeaseLost."""
    label = None if label is None else codec.clean_text(label, 200)
    number = None if label is None else tx.execute(
        sa.select(version.c.version).where(version.c.run_id == tx.run_id, version.c.label == label)
    ).scalar()  # fmt: skip
    failures = engine.c.failures + 1
    changed = tx.execute(
        sa.update(engine)
        .where(engine.c.id == held["engine_id"], engine.c.owner == held["owner"], engine.c.attempt == held["attempt"])
        .values(
            owner=None,
            label=label,
            version=number,
            state="failed" if error else "live",
            failures=failures if error else 0,
            error=None if error is None else codec.clean_text(error),
            not_before=sa.case((failures > 5, db_now() + 30.0), else_=db_now() + failures) if error else 0.0,
            updated_at=db_now(),
        )
    ).rowcount
    if changed != 1:
        raise LeaseLost("engine", held["engine_id"], held["attempt"])
    tx.event("engine_failed" if error else "weight_update", error, worker_id=held["owner"], version=number,
             details={"url": held["url"], "label": label})  # fmt: skip


def set_state(tx: Tx, state: str, reason: str | None = None) -> None:
    """running, paused or draining."""
    wanted = choice("state", state, RunState)
    tx.lock_run()
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(state=wanted.value))
    tx.event(f"run_{wanted.value}", reason)


def abort_inflight(tx: Tx, reason: str) -> int:
    """Ask workers to abort what is in flight at the engines; they store the partials and release the samples, which
    stay resumable. Returns the number of the request, which workers follow."""
    if not reason:
        raise InvalidSetting("reason", reason, "a few words: why")
    row = tx.lock_run()
    said = codec.clean_text(reason, 200)
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(abort_seq=row.abort_seq + 1, abort_reason=said))
    tx.event("abort_inflight", said)
    return int(row.abort_seq) + 1
