"""The row that a process has as a trainer: one heart, of this process, whichever thread asks."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from samplestore import Store, batches
from samplestore.run import Run
from tests.support import factory as f

WAIT_S = 60.0


def ready(store: Store) -> Run:
    run = f.make_run(store, groups_per_step=1, max_staleness=9)
    f.finish_all(run, f.register(run))
    return run


def lease_and_close(store: Store, run: Run, answer: Any) -> None:
    owner = run.batch(2, timeout=WAIT_S)._worker_id
    store.close()
    answer.put(owner)


def test_a_forked_process_is_another_trainer(store: Store) -> None:
    """What its parent has leased is not given back when it closes its store, nor is what it leases its parent's."""
    run = ready(store)
    batch = run.batch(1, timeout=WAIT_S)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=lease_and_close, args=(store, run, answer))
    child.start()
    owner = answer.get(timeout=WAIT_S)
    child.join(WAIT_S)
    assert owner not in (None, batch._worker_id)
    assert [r["state"] for r in f.rows(run, "SELECT state FROM batch ORDER BY step")] == ["leased", "released"]
    batch.commit()
    assert f.states(run).count("consumed") == 1
    f.sound(run)


def test_a_thread_that_hears_late_of_a_death_stops_no_living_heart(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ready(store)
    first = run.batch(1, timeout=WAIT_S)
    assert first._worker_id is not None
    f.kill(run, first._worker_id)
    second = run.batch(2, timeout=WAIT_S)
    heart = run.database.hearts[run.id]
    known, asked = batches.trainer_id, [first._worker_id]
    monkeypatch.setattr(batches, "trainer_id", lambda run: asked.pop() if asked else known(run))
    third = run.batch(3, timeout=WAIT_S)
    assert asked == [] and third._worker_id == second._worker_id == heart.worker_id
    assert run.database.hearts[run.id] is heart and heart._thread.is_alive(), "or both leases would end unseen"
    f.sound(run)
