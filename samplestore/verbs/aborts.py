"""Asking workers to abort what is in flight at the engines: everything of a run, some groups, or some samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from samplestore import codec
from samplestore.errors import InvalidSetting, NotInRun
from samplestore.models import Event, Request, Run, Sample, Worker
from samplestore.verbs.tx import Tx, in_parts

run, sample, event, request, worker = (t.__table__ for t in (Run, Sample, Event, Request, Worker))

KIND = "abort_inflight"


class Asked(NamedTuple):
    """One request to abort: why, and which samples (None: all of the run)."""

    reason: str
    samples: frozenset[int] | None


def abort_inflight(
    tx: Tx,
    reason: str,
    samples: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    by: str | None = None,
) -> tuple[int, set[tuple[int, int]]]:
    """Ask workers to abort what is in flight at the engines; they store the partials and release the samples, which
    stay resumable. `by`: who asks. Returns the number of the request, which workers follow, and the (sample id,
    attempt) that it concerns. Raises InvalidSetting, NotInRun."""
    if not isinstance(reason, str) or not reason:
        raise InvalidSetting("reason", reason, "a few words: why")
    row = tx.lock_run()
    named = None if samples is None and groups is None else _named(tx, samples or (), groups or ())
    number = ask(tx, row, codec.clean_text(reason, 200), named, by)
    return number, in_flight(tx.connection, tx.run_id, named)


def ask(tx: Tx, row: Any, reason: str, samples: list[int] | None, by: str | None, worker_id: int | None = None) -> int:
    """Tell the workers, and note who wants what aborted, and why. row: the run's, locked. Returns the number."""
    number = int(row.abort_seq) + 1
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(abort_seq=number, abort_reason=reason))
    details = {"number": number, "samples": samples, "by": by}
    tx.event(KIND, reason, worker_id=worker_id or None, details=details)
    return number


def _named(tx: Tx, samples: Sequence[int], groups: Sequence[int]) -> list[int]:
    found: set[int] = set()
    for what, column, wanted in (("sample", sample.c.id, samples), ("group", sample.c.group_id, groups)):
        if not wanted:
            continue
        mine = sample.c.run_id == tx.run_id
        rows = tx.execute(sa.select(sample.c.id, column.label("named")).where(mine, column.in_(list(wanted)))).all()
        if missing := sorted({*wanted} - {row.named for row in rows}):
            raise NotInRun(what, missing)
        found |= {row.id for row in rows}
    return sorted(found)


def asked_since(connection: sa.Connection, run_id: int, number: int, now: int) -> list[Asked]:
    """The requests to abort after `number`, up to `now`."""
    rows = connection.execute(
        sa.select(event.c.reason, event.c.details)
        .where(event.c.run_id == run_id, event.c.kind == KIND)
        .order_by(event.c.id.desc())
    )
    # By their numbers: another one may have come since `now` was read, and the clock may have been set back.
    found = []
    for row in rows:
        asked = (row.details or {}).get("number", 0)
        if asked <= number:
            break
        if asked <= now:
            found.append(_as_asked(row.reason, row.details or {}))
    return found


def _as_asked(reason: str | None, details: dict[str, Any]) -> Asked:
    samples = details.get("samples")
    return Asked(reason or "asked to", None if samples is None else frozenset(samples))


def in_flight(connection: sa.Connection, run_id: int, samples: Sequence[int] | None = None) -> set[tuple[int, int]]:
    """(sample id, attempt) of samples that a worker holds now, of all or of those named."""
    query = sa.select(sample.c.id, sample.c.attempt).where(sample.c.run_id == run_id, sample.c.owner.is_not(None))
    if samples is not None:
        query = query.where(sample.c.id.in_(list(samples)))
    return {(row.id, row.attempt) for row in connection.execute(query)}


def held_at(connection: sa.Connection, samples: Sequence[int]) -> list[tuple[str, int]]:
    """(where, how many) of these samples, the most first: the engine that generates for them, as their open requests
    say; the router, where it does not tell which; the worker alone, where no request is open."""
    found: Counter[str] = Counter()
    for part in in_parts(samples):
        rows = connection.execute(
            sa.select(worker.c.id, worker.c.host, worker.c.pid, worker.c.info, request.c.engine, request.c.rid)
            .select_from(sample.join(worker, worker.c.id == sample.c.owner))
            .outerjoin(
                request,
                (request.c.sample_id == sample.c.id) & request.c.finished_at.is_(None)
                & (request.c.worker_id == sample.c.owner),
            )
            .where(sample.c.id.in_(part))
        )  # fmt: skip
        for row in rows:
            by = f"worker {row.id} (pid {row.pid} on {row.host})"
            where = row.engine or f"an engine behind {(row.info or {}).get('router') or 'a router'}"
            found[f"{where}, for {by}" if row.rid else f"{by}, without a request"] += 1
    return found.most_common()
