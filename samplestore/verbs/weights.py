"""Weight versions, and the engines that serve them."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from samplestore import codec
from samplestore.arguments import choice, location, optional, plain_text, whole
from samplestore.clock import db_now
from samplestore.errors import EngineInUse, EngineUpdating, InvalidSetting, LeaseLost
from samplestore.models import EngineRow, Event, Run, WeightVersionRow, Worker
from samplestore.states import RolloutMode, RunState, WorkerKind, WorkerState
from samplestore.types import EngineFacts, WeightVersion
from samplestore.verbs import flow, stale
from samplestore.verbs.tx import Tx

run, version, engine, worker, event = (t.__table__ for t in (Run, WeightVersionRow, EngineRow, Worker, Event))

FIRST_LABEL = "default"  # what an SGLang engine reports until it is told a version
MAX_COUNTER = 2**53  # beyond it a counter that was sent as a float is not exact, and no engine comes near
KNOWN = engine.c.state != sa.literal_column("'gone'")  # literal: SQLite finds the row by its partial index only then


def as_version(row: Any) -> WeightVersion:
    return WeightVersion(row.version, row.label, row.path, row.step, row.timeline, row.parent)


def row_of(tx: Tx, number: int) -> Any:
    return tx.execute(sa.select(version).where(version.c.run_id == tx.run_id, version.c.version == number)).one()


def publish(
    tx: Tx, path: str | None = None, step: int | None = None, label: str | None = None, call: str | None = None
) -> WeightVersion:
    """As run.publish_weights says.

    call    names this call, so that without a step too its repetition after a lost acknowledgement is known
    """
    path = optional(location, "path", path)
    step = None if step is None else whole("step", step)
    label = None if label is None else plain_text("label", label, 200)
    row = tx.lock_run()
    last = row_of(tx, row.current_version)
    if (before := tx.done_before("publish", call)) is not None:
        return as_version(row_of(tx, before["version"]))
    if step is not None and (known := _published(tx, row, step, path, label)) is not None:
        return as_version(known)
    same = step is not None and (last.timeline, last.step, last.path) == (row.timeline, step, path)
    if same and label is not None and _names(tx, label, last):
        return as_version(last)
    _require_free(tx, label)
    number = row.last_version + 1
    depth = last.depth + (0 if same else 1)
    made = {
        "run_id": tx.run_id, "version": number, "timeline": row.timeline, "parent": last.version, "step": step,
        "depth": depth, "common_depth": depth, "path": path,
        "label": label or made_label(row.uuid, number),
    }  # fmt: skip
    tx.execute(sa.insert(version).values(created_at=db_now(), **made))
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(current_version=number, last_version=number))
    # other weights: what failed was not these
    tx.execute(
        sa.update(engine)
        .where(engine.c.run_id == tx.run_id, KNOWN, engine.c.not_before > 0.0)
        .values(not_before=0.0, failures=0)
    )
    stale.sweep(tx)
    tx.event("publish", None, step=step, version=number, details={"path": path, "label": made["label"], "call": call})
    return as_version(row_of(tx, number))


def made_label(uuid: str, number: int) -> str:
    """For weights whose trainer names none. Its end is never the same: after an older backup was restored numbers come
    again, and an engine that still has the former version of a number must not be taken for one that has the new."""
    return f"{uuid[:8]}-v{number}-{secrets.token_hex(3)}"


def _require_free(tx: Tx, label: str | None) -> None:
    """Raises InvalidSetting for a label that another version of the run has: engines could not tell them apart."""
    taken = _version_of(tx, label)
    if taken is not None:
        raise InvalidSetting("label", label, f"one that version {taken} does not have")


def _published(tx: Tx, row: Any, step: int, path: str | None, label: str | None) -> Any:
    """The version of this timeline that was announced so, also if newer ones followed: a trainer that says it again,
    late, must not move the run back to old weights. Those that came with an import are others: their run's trainer
    announced them."""
    same_path = version.c.path.is_(None) if path is None else version.c.path == path
    same_label = sa.true() if label is None else version.c.label == label
    told_here = (
        sa.select(event.c.id)
        .where(event.c.run_id == tx.run_id, event.c.kind.in_(("publish", "rewind")))
        .where(event.c.version == version.c.version)
        .exists()
    )
    return tx.execute(
        sa.select(version)
        .where(version.c.run_id == tx.run_id, version.c.timeline == row.timeline, version.c.step == step, same_path)
        .where(version.c.version > 0, same_label)
        .where((version.c.version == row.current_version) | told_here)
        .order_by(version.c.version.desc())
        .limit(1)
    ).one_or_none()


def _names(tx: Tx, label: str, current: Any) -> bool:
    """Whether the label is that of the current weights from before a rewind restored them: what an engine that reports
    it generates is as fresh, and a trainer that names weights by their step says it again."""
    return (
        tx.execute(
            sa.select(version.c.version)
            .where(version.c.run_id == tx.run_id, version.c.label == label, version.c.abandoned_at.is_(None))
            .where(version.c.step == current.step, version.c.path.is_not_distinct_from(current.path))
            .where(version.c.depth == current.depth, version.c.common_depth == current.depth)
        ).scalar()
        is not None
    )


def describe_first(tx: Tx, path: str | None, label: str) -> None:
    """Say where version 0 comes from: the weights that engines start with. Raises InvalidSetting."""
    path = optional(location, "path", path)
    label = plain_text("label", label, 200)
    tx.lock_run()
    if _version_of(tx, label) != 0:
        _require_free(tx, label)
    tx.execute(
        sa.update(version).where(version.c.run_id == tx.run_id, version.c.version == 0).values(path=path, label=label)
    )


def see_engine(
    tx: Tx, url: str, label: str | None, *, facts: EngineFacts | None = None, counter_seen_at: float | None = None
) -> dict[str, Any]:
    """Record an engine and what it reports. A label that no version of this run has leaves its version unknown.

    facts            what else it told; None in it keeps what is known
    counter_seen_at  counter_base, asked before the engine was: its counter is added up only if nobody else's reading
                     came between, or tokens would count twice
    Returns the engine's row. Raises InvalidSetting, EngineInUse where it belongs to another run.
    """
    label = None if label is None else codec.clean_text(label, 200)
    row = _engine_locked(tx, url)
    number = _version_of(tx, label)
    new: dict[str, Any] = {}
    if (row.label, row.version) != (label, number):
        new = {"label": label, "version": number, "updated_at": db_now()}
        if row.state == "failed" and row.label and label:
            new |= {"failures": 0, "not_before": 0.0}  # other weights: what failed was not these
    if facts is not None:
        told = {
            "context_length": facts.context_length, "running": facts.running, "queued": facts.queued,
            "release": None if facts.release is None else codec.clean_text(facts.release, 100),
        }  # fmt: skip
        for name in ("context_length", "running", "queued"):
            whole(name, told[name]) if told[name] is not None else None
        new |= {name: value for name, value in told.items() if value is not None and value != row._mapping[name]}
        if facts.counter is not None and counter_seen_at == row.counter_at:
            new |= _counted(row, whole("counter", facts.counter, 0, MAX_COUNTER))
    if new:
        row = tx.execute(sa.update(engine).where(engine.c.id == row.id).values(**new).returning(engine)).one()
    return dict(row._mapping)


def _engine_locked(tx: Tx, url: str) -> Any:
    """The row of an engine that is this run's, or is nobody's and becomes it; locked."""
    query = sa.select(engine).where(engine.c.url == url, KNOWN).with_for_update(key_share=True)
    row = tx.execute(query).one_or_none()
    if row is None:
        # two workers see a new engine at the same moment
        insert: Any = postgresql.insert if tx.connection.dialect.name == "postgresql" else sqlite.insert
        new = insert(engine).values(run_id=tx.run_id, url=url, created_at=db_now(), updated_at=db_now())
        tx.execute(new.on_conflict_do_nothing(index_elements=["url"], index_where=sa.text("state <> 'gone'")))
        row = tx.execute(query).one()
    if row.run_id != tx.run_id:
        name = tx.execute(sa.select(run.c.name).where(run.c.id == row.run_id)).scalar_one()
        raise EngineInUse(url, name, users(tx, row.run_id, url))
    return row


def users(connection: Tx | sa.Connection, run_id: int, url: str) -> list[tuple[int, str, int]]:
    """(id, host, pid) of a run's live workers that were given this engine, or a router, which may list it."""
    rows = connection.execute(
        sa.select(worker.c.id, worker.c.host, worker.c.pid, worker.c.info)
        .where(worker.c.run_id == run_id, worker.c.kind == WorkerKind.ROLLOUT.value)
        .where(worker.c.state == WorkerState.LIVE.value, worker.c.heartbeat >= db_now() - worker.c.ttl_s)
        .order_by(worker.c.id)
    ).fetchall()
    given = [(row, row.info or {}) for row in rows]
    return [(row.id, row.host, row.pid) for row, info in given if info.get("router") or url in info.get("engines", ())]


def _version_of(tx: Tx, label: str | None) -> int | None:
    if label is None:
        return None
    return tx.execute(
        sa.select(version.c.version).where(version.c.run_id == tx.run_id, version.c.label == label)
    ).scalar()


def _counted(row: Any, counter: int) -> dict[str, Any]:
    """A reading of an engine's counter, taken in. The first is the base: what came before was not for this run. A
    lower one than before is that of a new process, which began at 0. counter_at rises even where the clock stands
    still or goes back: two readings on the same base would both count."""
    before = row.counter
    step = 0 if before is None else counter - before if counter >= before else counter
    at = db_now() if row.counter_at is None else sa.case(
        (db_now() > row.counter_at, db_now()), else_=row.counter_at + 0.001
    )  # fmt: skip
    return {"counter": counter, "counter_at": at, "generated_tokens": row.generated_tokens + step}


def known_engine(connection: Tx | sa.Connection, url: str) -> tuple[str | None, int | None]:
    """(label, owner): what an engine reported when it was last looked at, by whomever, and who drives its update."""
    row = connection.execute(sa.select(engine.c.label, engine.c.owner).where(engine.c.url == url, KNOWN)).one_or_none()
    return (None, None) if row is None else (row.label, row.owner)


def counter_base(connection: Tx | sa.Connection, url: str) -> float | None:
    """What see_engine needs as counter_seen_at; take it before the engine is asked."""
    at = connection.execute(sa.select(engine.c.counter_at).where(engine.c.url == url, KNOWN)).scalar()
    return None if at is None else float(at)


def failed_engines(connection: Tx | sa.Connection, run_id: int) -> list[str]:
    """URLs of a run's engines that failed: to be looked at also where the router lists them no more."""
    failed = (engine.c.run_id == run_id) & (engine.c.state == "failed") & KNOWN
    return list(connection.execute(sa.select(engine.c.url).where(failed).order_by(engine.c.url)).scalars())


def engine_broken(tx: Tx, worker_id: int, url: str, error: str, label: str | None = None) -> bool:
    """An engine turned out to be unfit, seen by a worker that does not drive its update: it fails, until an update of
    it succeeds or engine_recovered says that it is fit again.

    label   under which weights that was seen; if it reports others by now, nothing is done
    Returns whether this changed anything: many samples find the same engine broken, and that is one failure.
    """
    known = engine.c.label == codec.clean_text(label, 200) if label is not None else sa.true()
    failures = engine.c.failures + 1
    row = tx.execute(
        sa.update(engine)
        .where(engine.c.run_id == tx.run_id, engine.c.url == url, KNOWN, known)
        # failures is 0 where a failed engine got other weights, which are now found unfit too
        .where(sa.or_(engine.c.state != "failed", engine.c.failures == 0))
        .values(
            state="failed", failures=failures, error=codec.clean_text(error), not_before=_backoff(failures),
            updated_at=db_now(),
        )
        .returning(engine.c.version, engine.c.label)
    ).one_or_none()  # fmt: skip
    if row is None:
        return False
    tx.event("engine_failed", error, worker_id=worker_id, version=row.version, details={"url": url, "label": row.label})
    return True


def engine_recovered(tx: Tx, url: str, label: str | None = None) -> bool:
    """A probe found a failed engine fit again. The back-off of its updates stays: a probe loads no weights.

    label   under which weights it is; if it has others by now, or somebody drives its update, nothing is done
    Returns whether this changed anything.
    """
    known = engine.c.label == codec.clean_text(label, 200) if label is not None else sa.true()
    row = tx.execute(
        sa.update(engine)
        .where(engine.c.run_id == tx.run_id, engine.c.url == url, KNOWN, engine.c.state == "failed", known)
        .where(engine.c.owner.is_(None))
        .values(state="live", error=None, updated_at=db_now())
        .returning(engine.c.version, engine.c.label)
    ).one_or_none()
    if row is not None:
        tx.event("engine_recovered", None, version=row.version, details={"url": url, "label": row.label})
    return row is not None


def _backoff(failures: sa.ColumnElement[int]) -> sa.ColumnElement[float]:
    """When to try again after so many failures: a second later for each, 30 at most."""
    return sa.case((failures > 5, db_now() + 30.0), else_=db_now() + failures)


def forget_engine(tx: Tx, url: str, anyway: bool = False) -> int:
    """An engine is no longer this run's. Raises EngineInUse while live workers of it would take it back at once, unless
    `anyway`."""
    if not anyway and (found := users(tx, tx.run_id, url)):
        name = tx.execute(sa.select(run.c.name).where(run.c.id == tx.run_id)).scalar_one()
        raise EngineInUse(url, name, found)
    return tx.execute(
        sa.update(engine)
        .where(engine.c.url == url, KNOWN)
        .values(state="gone", owner=None, attempt=engine.c.attempt + 1, updated_at=db_now())
    ).rowcount


def claim_engine(tx: Tx, worker_id: int, url: str) -> dict[str, Any] | None:
    """Become the one process that brings this engine to the run's current version. None: it serves it already, or
    somebody else is at it, or it is backing off, or the current weights have no path to load from, or, in mode sync,
    samples are in flight."""
    tx.require_live(worker_id)
    if tx.settings.mode == RolloutMode.SYNC:
        tx.lock_run()  # before the engine, and against claims: none may come between this look and the update
        if flow.in_flight(tx):
            return None
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
            KNOWN,
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


def claim_engines(tx: Tx, worker_id: int, urls: Collection[str]) -> list[dict[str, Any]]:
    """Become the one process that drives the updates of all these engines, whatever they serve and are to serve: what
    somebody does by hand. All of them or none. Raises EngineUpdating, which names who is at one; EngineInUse."""
    tx.require_live(worker_id)
    held = []
    for url in sorted(set(urls)):  # in one order: two such claims wait for each other only one way round
        row = _engine_locked(tx, url)
        if row.owner not in (None, worker_id):
            by = tx.execute(sa.select(worker).where(worker.c.id == row.owner)).one()
            for_s = tx.execute(sa.select(db_now() - row.updated_at)).scalar_one()
            raise EngineUpdating(url, (by.id, by.name, by.host, by.pid), float(for_s))
        values = {"owner": worker_id, "attempt": row.attempt + 1, "updated_at": db_now()}
        tx.execute(sa.update(engine).where(engine.c.id == row.id).values(**values))
        held.append({"engine_id": row.id, "attempt": row.attempt + 1, "owner": worker_id, "url": url})
    return held


def engine_updated(tx: Tx, held: dict[str, Any], label: str | None, error: str | None = None) -> None:
    """End an engine's update: it serves `label` now, or `error` says why not (it is tried again, ever more slowly).
    Repeating it is harmless. Raises LeaseLost."""
    label = None if label is None else codec.clean_text(label, 200)
    number = _version_of(tx, label)
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
            not_before=_backoff(failures) if error else 0.0,
            updated_at=db_now(),
        )
    ).rowcount
    if changed != 1:
        row = tx.execute(sa.select(engine).where(engine.c.id == held["engine_id"])).one()
        # Whoever else ends an ownership raises attempt: this holder ended it itself, and the answer was lost.
        if row.owner is None and row.attempt == held["attempt"]:
            return
        raise LeaseLost("engine", held["engine_id"], held["attempt"], row.owner, row.attempt)
    tx.event("engine_failed" if error else "weight_update", error, worker_id=held["owner"], version=number,
             details={"url": held["url"], "label": label})  # fmt: skip


def set_state(tx: Tx, state: str, reason: str | None = None) -> None:
    """running, paused or draining."""
    wanted = choice("state", state, RunState)
    tx.lock_run()
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(state=wanted.value))
    tx.event(f"run_{wanted.value}", reason)
