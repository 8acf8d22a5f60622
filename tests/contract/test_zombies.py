"""The half-alive: hearts that beat in a stuck process, reapers that were away, owners that come back, and identities
that look the same. Every order of heartbeat, reap, append and claim."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import Store, batches
from samplestore.errors import LeaseLost, SampleStoreError, WorkerDead
from samplestore.heart import Heart
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import appends, liveness, samples
from samplestore.verbs.tx import Tx

from ..support import factory as f
from ..support.processes import wait_until

TTL_S = 0.4
DEADLINE_S = 30.0

# -- a heart in a process that does nothing


def test_a_heart_whose_loop_is_stuck_lets_its_worker_die(store: Store) -> None:
    """The heart's thread lives on, and yet others take over what the worker held; what it writes then is refused."""
    run = f.make_run(store, heartbeat_ttl_s=TTL_S)
    stuck, healthy = f.register(run), f.register(run)
    claim = run.claim(stuck, 1)[0]
    f.add(run, claim, 2)
    dead = threading.Event()
    ticks = itertools.count()
    hearts = [
        Heart(run, stuck, ticked=lambda: 1.0, on_dead=dead.set, interval_s=0.02),  # the loop has ticked once
        Heart(run, healthy, ticked=lambda: float(next(ticks)), interval_s=0.02),
    ]
    try:
        wait_until(lambda: f.sample(run, claim.sample_id)["owner"] is None, what="the healthy one reaps it")
        assert f.value(run, "SELECT state FROM worker WHERE id = :w", w=stuck) == "dead"
        assert hearts[0]._thread.is_alive() and not dead.is_set(), "a heart that does not beat hears nothing"
        with pytest.raises(LeaseLost):
            f.add(run, claim)
        taken = next(c for c in run.claim(healthy, 9) if c.sample_id == claim.sample_id)
        assert taken.n_tokens == 2
        f.answer(run, taken)
        assert f.value(run, "SELECT state FROM worker WHERE id = :w", w=healthy) == "live"
    finally:
        for heart in hearts:
            heart.stop()
    f.sound(run)


def test_a_loop_that_turns_again_hears_that_it_is_dead(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    turning, dead, looks = threading.Event(), threading.Event(), threading.Semaphore(0)
    ticks = itertools.count()

    def ticked() -> float:
        looks.release()
        return float(next(ticks)) if turning.is_set() else -1.0

    heart = Heart(run, worker, ticked=ticked, on_dead=dead.set, interval_s=0.01)
    for _ in range(2):  # at its second look it has beaten and reaped; a reap that is under way would hold the row
        assert looks.acquire(timeout=DEADLINE_S)
    f.kill(run, worker)
    assert not dead.is_set()
    turning.set()
    assert dead.wait(DEADLINE_S)
    heart.stop()


# -- a reaper that was away


def test_a_heart_that_was_suspended_reaps_nobody_until_the_others_could_beat(store: Store) -> None:
    """The whole machine slept: its own heartbeat and all others have expired. The first that wakes must not take the
    work of the rest."""
    run = f.make_run(store, heartbeat_ttl_s=60.0)
    sleeper, other = f.register(run), f.register(run)
    claim = run.claim(other, 1)[0]
    for worker in (sleeper, other):
        f.silence(run, worker)
    told: list[Any] = []
    beats = threading.Semaphore(0)
    heart = Heart(run, sleeper, on_beat=lambda beat: (told.append(beat), beats.release()), interval_s=0.01)
    for _ in range(5):
        assert beats.acquire(timeout=DEADLINE_S)
    heart.stop()
    assert told[0].late and not told[1].late
    assert not heart.may_reap
    run.heartbeat(other)
    f.add(run, claim)
    assert f.value(run, "SELECT count(*) FROM worker WHERE state = 'live'") == 2


def test_a_reaper_that_sleeps_between_its_heartbeat_and_its_reap_reaps_nobody(store: Store) -> None:
    run = f.make_run(store)
    reaper, other = f.register(run), f.register(run)
    run.claim(other, 1)
    assert not run.heartbeat(reaper).late
    for worker in (reaper, other):
        f.silence(run, worker)
    assert run.reap(reaper) == run.reap(reaper)
    assert f.value(run, "SELECT count(*) FROM worker WHERE state = 'live'") == 2


# -- an owner whose sample was taken over


def writes(run: Run, claim: Claim) -> dict[str, Callable[[], Any]]:
    """Every write that the owner of a sample can make."""
    return {
        "append": lambda: f.add(run, claim),
        "the last append": lambda: f.add(run, claim, 1, 0, "stop"),
        "finish": lambda: run.finish(claim),
        "release": lambda: run.release(claim, "late"),
        "fail": lambda: run.fail(claim, "late"),
        "attach": lambda: run.attach(claim, "values", np.zeros(3, np.float32)),
        "begin_request": lambda: run.begin_request(claim, "late"),
        "note_abort": lambda: run.transact(lambda tx: appends.note_abort(tx, claim, "late")),
    }


@pytest.mark.parametrize("taken", ["reaped", "claimed", "has tokens", "finished", "requeued", "dropped"])
def test_every_late_write_is_refused_and_changes_nothing(store: Store, taken: str) -> None:
    """However far the next owner has come."""
    run = f.make_run(store, prompts=1)
    zombie = f.register(run)
    claim = run.claim(zombie, 1)[0]
    f.add(run, claim, 2)
    f.kill(run, zombie)
    if taken == "requeued":
        run.requeue([claim.sample_id], "afresh")
    if taken == "dropped":
        run.drop([claim.group_id], "unwanted")
    if taken in ("claimed", "has tokens", "finished", "requeued"):
        after = next(c for c in run.claim(f.register(run), 9) if c.sample_id == claim.sample_id)
        if taken != "claimed":
            f.add(run, after)
        if taken == "finished":
            run.finish(after)
    before = f.snapshot(run, leave_out=())
    for name, write in writes(run, claim).items():
        with pytest.raises(LeaseLost):
            write()
        assert f.snapshot(run, leave_out=()) == before, name
    f.sound(run)


def test_every_late_write_on_a_stage_is_refused(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"])
    worker, zombie = f.register(run), f.register(run)
    for claim in run.claim(worker, 9):
        f.answer(run, claim)
    stage = run.claim_stages(zombie, 1)[0]
    f.kill(run, zombie)
    again = next(s for s in run.claim_stages(worker, 9) if s.stage_id == stage.stage_id)
    run.score(again, 0.5)
    before = f.snapshot(run, leave_out=())
    for write in (
        lambda: run.score(stage, 1.0),
        lambda: run.fail_stage(stage, "late"),
        lambda: run.release_stage(stage),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert f.snapshot(run, leave_out=()) == before
    f.sound(run)


def test_the_dead_claim_nothing(store: Store) -> None:
    run = f.make_run(store, stages=["reward"])
    zombie = f.register(run)
    f.kill(run, zombie)
    for claim in (run.claim, run.claim_stages):
        with pytest.raises(WorkerDead):
            claim(zombie, 1)
    with pytest.raises(WorkerDead):
        f.lease(run, zombie, 1)


# -- identities


def test_a_restart_under_the_same_host_name_and_pid_is_somebody_else(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers: every start is "rollout-0", host "node", pid 1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run = f.make_run(store)
    first = run.register("rollout", "rollout-0")
    claim = run.claim(first, 1)[0]
    second = run.register("rollout", "rollout-0")
    assert second != first
    assert len(f.rows(run, "SELECT DISTINCT host, pid, name FROM worker")) == 1
    f.silence(run, first)
    run.heartbeat(second)
    assert run.reap(second).workers == [first], "the second's heartbeat does not keep the first alive"
    assert f.sample(run, claim.sample_id)["owner"] is None
    with pytest.raises(WorkerDead):
        run.heartbeat(first)
    run.heartbeat(second)
    with pytest.raises(LeaseLost):
        f.add(run, claim)


def test_the_id_of_a_worker_is_never_used_again(store: Store) -> None:
    """Not even when its row is gone, as after a prune: a late write of the old one must not be the new one's."""
    run = f.make_run(store)
    gone = f.register(run)
    f.execute(run, "DELETE FROM worker WHERE id = :w", w=gone)
    assert f.register(run) > gone


# -- every order of heartbeat, reap, append and claim

VERBS = ("heartbeat", "reap", "append", "claim")


class Scene:
    """A worker that is silent, with a sample and another to claim."""

    def __init__(self, run: Run) -> None:
        self.run, self.worker = run, f.register(run)
        self.claim = run.claim(self.worker, 1)[0]
        f.silence(run, self.worker)
        self.verbs: dict[str, Callable[[Tx], Any]] = {
            "heartbeat": lambda tx: liveness.heartbeat(tx, self.worker),
            "reap": lambda tx: liveness.reap(tx),
            "append": lambda tx: appends.append(tx, self.claim, 0, f.ids_of(3), f.logprobs_of(3), 0),
            "claim": lambda tx: samples.claim(tx, self.worker, 9),
        }

    def judge(self, told: dict[str, Any]) -> None:
        """Whatever came first, the answers agree with each other and with what is stored."""
        run, claim = self.run, self.claim
        reaped = self.worker in told["reap"].workers
        state = f.value(run, "SELECT state FROM worker WHERE id = :w", w=self.worker)
        assert state == ("dead" if reaped else "live")
        assert reaped or not isinstance(told["heartbeat"], SampleStoreError)
        assert not isinstance(told["heartbeat"], SampleStoreError) or isinstance(told["heartbeat"], WorkerDead)
        stored = told["append"] == 3
        assert stored or isinstance(told["append"], LeaseLost)
        assert f.sample(run, claim.sample_id)["n_tokens"] == 3 * stored
        assert isinstance(told["claim"], list | WorkerDead)
        assert reaped or isinstance(told["claim"], list)
        run.reap()
        owned = f.rows(run, "SELECT id FROM sample WHERE owner = :w", w=self.worker)
        assert bool(owned) != reaped
        f.sound(run)


def orders(first: str) -> list[tuple[str, ...]]:
    return [order for order in itertools.permutations(VERBS) if order[0] == first]


@pytest.mark.parametrize("first", VERBS)
def test_one_after_the_other(store: Store, first: str) -> None:
    for order in orders(first):
        scene = Scene(f.make_run(store, "-".join(order), prompts=1))
        told: dict[str, Any] = {}
        for name in order:
            try:
                told[name] = scene.run.transact(scene.verbs[name])
            except SampleStoreError as error:
                told[name] = error
        dies = order.index("reap") < order.index("heartbeat")
        assert (scene.worker in told["reap"].workers) == dies, order
        scene.judge(told)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Store]:
    store = samplestore.open(postgres_url)
    yield store
    store.close()


@pytest.mark.parametrize("first", VERBS)
def test_all_at_once(postgres: Store, first: str) -> None:
    """The first is done and not yet committed when the others begin, in every order: each of them waits for a lock, or
    ends, before the next one begins. On SQLite there is no such moment: its writers are one after the other."""
    for order in orders(first):
        scene = Scene(f.make_run(postgres, "-".join(order), prompts=1))
        scene.judge(overlapping(scene, order))


def overlapping(scene: Scene, order: tuple[str, ...]) -> dict[str, Any]:
    done, go = threading.Event(), threading.Event()

    def first(tx: Tx) -> Any:
        result = scene.verbs[order[0]](tx)
        done.set()
        assert go.wait(DEADLINE_S)
        return result

    with ThreadPoolExecutor(len(order)) as pool:
        running: dict[str, Future[Any]] = {order[0]: pool.submit(scene.run.transact, first)}
        assert done.wait(DEADLINE_S)
        for name in order[1:]:
            running[name] = pool.submit(scene.run.transact, scene.verbs[name])
            begun = list(running.values())[1:]
            wait_until(
                lambda begun=begun: _waiting(scene.run) == sum(not one.done() for one in begun),  # type: ignore[misc]
                what=f"{name} of {order} waits or has ended",
            )
        go.set()
        return {name: one.exception(DEADLINE_S) or one.result() for name, one in running.items()}


def _waiting(run: Run) -> int:
    return int(
        f.value(
            run, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


# -- a trainer


def test_a_trainer_that_slept_on_its_lease_gets_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended between the commit of its lease and its answer, and reaped: it must not train on groups that are
    somebody else's, and find at the end that there is nothing to commit."""
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    read, slept = batches.row_of, []

    def sleepy(of: Run, batch_id: int) -> Any:
        if not slept:
            slept.append(batch_id)
            owner = f.value(run, "SELECT owner FROM batch WHERE id = :b", b=batch_id)
            f.kill(run, owner)
        return read(of, batch_id)

    monkeypatch.setattr(batches, "row_of", sleepy)
    with run.batch(1) as batch:
        held = [group.group_id for group in batch.groups]
    assert f.rows(run, "SELECT id, state FROM batch ORDER BY id") == [
        {"id": slept[0], "state": "released"},
        {"id": batch.id, "state": "committed"},
    ]
    assert [f.group(run, id)["state"] for id in held] == ["consumed"] * 2
    f.sound(run)


def test_a_trainer_whose_batch_is_gone_hears_so_at_the_commit(store: Store) -> None:
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    with pytest.raises(LeaseLost):
        with run.batch(1):
            f.kill(run, f.value(run, "SELECT owner FROM batch"))
    assert f.states(run)[:2] == ["ready"] * 2
    f.sound(run)
