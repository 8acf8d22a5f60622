"""The database's clock is the one clock. It is moved here by moving all times that are stored the other way."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from samplestore import Store
from samplestore.models import Base
from samplestore.run import Run
from samplestore.verbs import liveness
from tests.support import factory as f

HOUR = 3600.0
TIMES = (
    "created_at",
    "heartbeat",
    "started_at",
    "progress_at",
    "claimed_at",
    "finished_at",
    "settled_at",
    "ready_at",
    "at",
)


def move_clock(store: Store, seconds: float) -> None:
    """As if the clock of the database's machine were set on by `seconds` (below 0: back)."""
    with store.database.writing() as connection:
        for table in Base.metadata.sorted_tables:
            for column in table.columns:
                if column.name in TIMES:
                    connection.execute(sa.update(table).where(column.is_not(None)).values({column: column - seconds}))


def beat(run: Run, worker: int) -> bool:
    """A heartbeat; whether it came late."""
    return run.transact(lambda tx: liveness.heartbeat(tx, worker)).late


def test_set_on_by_an_hour(store: Store) -> None:
    """Everybody's heartbeat seems to have stopped: whoever beats hears it, judges nobody yet, and keeps its work."""
    run = f.make_run(store)
    one, two = f.register(run), f.register(run)
    [claim] = run.claim(one, 1)
    f.add(run, claim)
    move_clock(store, HOUR)
    assert run.reap(two).workers == [], "a reaper whose own heartbeat seems old judges nobody"
    assert beat(run, two) and beat(run, one), "and both hear that they were late"
    f.add(run, claim, finish_reason="stop")  # as its stream goes on, while a heart that was late judges nobody
    done = run.reap(two)
    assert (done.workers, done.samples) == ([], 0)
    run.finish(claim)
    f.sound(run)


@pytest.mark.parametrize("alive", [True, False])
def test_set_back_by_an_hour(store: Store, alive: bool) -> None:
    """Heartbeats lie ahead. Without care the dead would count as alive for an hour; the living must not suffer."""
    run = f.make_run(store, heartbeat_ttl_s=10)
    worker, reaper = f.register(run), f.register(run)
    [claim] = run.claim(worker, 1)
    f.add(run, claim)
    move_clock(store, -HOUR)
    beat(run, reaper)
    assert run.reap(reaper).workers == [], "first everybody may beat"
    ahead = f.value(
        run, "SELECT count(*) FROM worker WHERE heartbeat > (SELECT heartbeat + 60 FROM worker WHERE id = :r)", r=reaper
    )
    assert ahead == 0
    move_clock(store, 9)
    if alive:
        beat(run, worker)
    beat(run, reaper)
    move_clock(store, 5)
    assert run.reap(reaper).workers == ([] if alive else [worker])
    if alive:
        f.add(run, claim)
    else:
        [again] = run.claim(reaper, 1)
        assert again.sample_id == claim.sample_id and len(f.tokens_of(again)) == 3, "not an hour later"
    f.sound(run)


def test_no_progress_is_seen_after_the_clock_was_set_back(store: Store) -> None:
    run = f.make_run(store, progress_deadline_s=100)
    worker = f.register(run)
    [claim] = run.claim(worker, 1)
    f.add(run, claim)
    move_clock(store, -HOUR)
    beat(run, worker)
    assert run.reap(worker).samples == 0
    move_clock(store, 101)
    beat(run, worker)
    assert run.reap(worker).samples == 1, "the deadline began to count when the clock was set back"
    f.sound(run)
