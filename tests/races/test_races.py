"""Interleavings that break naive code on PostgreSQL READ COMMITTED, with the real verbs and real threads.

Where a test needs an interleaving it builds it: a transaction is held open at the critical place until the other side
has been seen to wait or to end. Where it does not, many threads start at one barrier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from samplestore import Store, engine
from samplestore.errors import LeaseLost, WorkerDead
from samplestore.verbs import appends, liveness, samples, steps
from tests.races.together import DEADLINE_S, Held, threads, waiting_for_locks
from tests.support import factory as f
from tests.support.processes import wait_until

# -- E1


def test_two_last_finishes_never_strand_a_group(postgres: Store) -> None:
    """Both samples are finished before either commits: the second finish waits, and then sees the first."""
    run = f.make_run(postgres, prompts=1)
    a, b = run.claim(f.register(run), 2)
    f.add(run, a), f.add(run, b)
    first = Held(run, lambda tx: samples.finish(tx, a))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(run.finish, b)
        wait_until(lambda: waiting_for_locks(run), what="the second finish waits for the group")
        first.let_go()
        second.result(DEADLINE_S)
    assert f.states(run) == ["ready"]
    f.sound(run)


def test_many_finishes_at_once_make_every_group_ready(store: Store) -> None:
    run = f.make_run(store, prompts=4, samples_per_prompt=4, groups_per_step=2, stages=["reward"])
    worker = f.register(run)
    claims = run.claim(worker, 100)
    for claim in claims:
        f.add(run, claim)
    with threads(4) as together:
        # thread i has the i-th sample of every group, so that all four end each group at once
        together(lambda i: [run.finish(c) for c in claims[i::4]])
        assert f.states(run) == ["scoring"] * 4
        stages_ = run.claim_stages(worker, 100)
        together(lambda i: [run.score(s, 1.0) for s in stages_[i::4]])
    assert f.states(run) == ["ready"] * 4
    f.sound(run)


# -- E2


def test_a_heartbeat_that_comes_first_wins(postgres: Store) -> None:
    """The reap finds the row silent and waits for the heartbeat that is under way: it must look again."""
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    claim, _ = run.claim(worker, 2)
    f.silence(run, worker)
    beat = Held(run, lambda tx: liveness.heartbeat(tx, worker))
    with ThreadPoolExecutor(1) as pool:
        reap = pool.submit(run.reap)
        wait_until(lambda: reap.done() or waiting_for_locks(run), what="the reap meets the heartbeat")
        beat.let_go()
        assert worker not in reap.result(DEADLINE_S).workers
    assert run.reap().workers == []
    f.add(run, claim)
    f.sound(run)


def test_a_reap_that_comes_first_is_final(postgres: Store) -> None:
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    claim, _ = run.claim(worker, 2)
    f.silence(run, worker)
    reap = Held(run, lambda tx: liveness.reap(tx))
    with ThreadPoolExecutor(2) as pool:
        beat, late = pool.submit(run.heartbeat, worker), pool.submit(f.add, run, claim)
        wait_until(lambda: waiting_for_locks(run) == 2, what="heartbeat and append wait for the reap")
        assert reap.let_go().workers == [worker]
        with pytest.raises(WorkerDead):
            beat.result(DEADLINE_S)
        with pytest.raises(LeaseLost):
            late.result(DEADLINE_S)
    f.sound(run)


def test_an_append_under_way_is_not_lost_by_a_reap(postgres: Store) -> None:
    """The reap passes over the locked sample; the append is stored; the next reap frees it with these tokens."""
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    claim, other = run.claim(worker, 2)
    f.silence(run, worker)
    append = Held(run, lambda tx: appends.append(tx, claim, 0, f.ids_of(3), f.logprobs_of(3), 0))
    assert run.reap().samples == 1
    append.let_go()
    assert f.sample(run, claim.sample_id)["owner"] == worker
    assert run.reap().samples == 1
    assert f.fates(run) == {"resumable": 3}
    with pytest.raises(LeaseLost):
        f.add(run, claim, seq=1)
    with pytest.raises(LeaseLost):
        f.add(run, other)
    f.sound(run)


def test_a_claim_under_way_keeps_its_worker_alive(postgres: Store) -> None:
    """E2b: a claim that commits during a reap must not belong to a worker that does not exist any more."""
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    f.silence(run, worker)
    claim = Held(run, lambda tx: samples.claim(tx, worker, 2))
    assert run.reap().workers == []
    assert len(claim.let_go()) == 2
    reaped = run.reap()
    assert (reaped.workers, reaped.samples) == ([worker], 2)
    f.sound(run)


def test_a_claim_that_meets_a_reap_is_refused(postgres: Store) -> None:
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    f.silence(run, worker)
    reap = Held(run, lambda tx: liveness.reap(tx))
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(run.claim, worker, 2)
        wait_until(lambda: waiting_for_locks(run), what="the claim waits for the reap")
        reap.let_go()
        with pytest.raises(WorkerDead):
            claim.result(DEADLINE_S)
    f.sound(run)


def test_claims_and_reaps_at_once_leave_no_orphan(store: Store) -> None:
    run = f.make_run(store, prompts=8, groups_per_step=4)
    with threads(4) as together:
        for _ in range(5):
            workers = [f.register(run) for _ in range(3)]
            for worker in workers:
                f.silence(run, worker)
            together(lambda i, w=workers: run.reap() if i == 3 else run.claim(w[i], 3))
            run.reap()
            f.sound(run)
    assert f.value(run, "SELECT count(*) FROM sample WHERE owner IS NOT NULL") == 0


# -- a group is closed while its samples move


@pytest.mark.parametrize("way", ["drop", "requeue", "publish", "straggler", "fail"])
def test_closing_a_group_counts_an_append_under_way(postgres: Store, way: str) -> None:
    """Appends lock no group: one that commits while the group is closed must be counted where it ends."""
    run = f.make_run(
        postgres,
        prompts=1,
        max_attempts=1,
        samples_per_prompt=3,
        max_staleness=0,
        group_deadline_s=0.001,
        on_straggler="drop",
    )
    a, b, c = run.claim(f.register(run), 3)
    f.add(run, a, 5), f.add(run, c, 1)
    if way == "straggler":
        f.answer(run, b)
        f.execute(run, "UPDATE sample_group SET created_at = created_at - 10")
    close = {
        "drop": lambda: run.drop([a.group_id], "unwanted"),
        "requeue": lambda: run.requeue([a.sample_id], "again"),
        "publish": lambda: run.publish_weights(step=1),
        "straggler": lambda: run.reap(),
        "fail": lambda: run.fail(c, "broken"),
    }[way]
    append = Held(run, lambda tx: appends.append(tx, a, 1, f.ids_of(7), f.logprobs_of(7), 0))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(close)
        wait_until(lambda: waiting_for_locks(run) or closing.done(), what=f"{way} meets the append")
        append.let_go()
        closing.result(DEADLINE_S)
    assert f.value(run, "SELECT sum(n_tokens) FROM segment WHERE sample_id = :i", i=a.sample_id) == 12
    f.sound(run)


def test_closing_a_group_takes_it_from_a_claim_under_way(postgres: Store) -> None:
    run = f.make_run(postgres, prompts=1)
    worker = f.register(run)
    first = run.claim(worker, 2)
    f.add(run, first[0], 3)
    for held in first:
        run.release(held, "over")
    claim = Held(run, lambda tx: samples.claim(tx, worker, 2))
    with ThreadPoolExecutor(1) as pool:
        drop = pool.submit(run.drop, [first[0].group_id], "unwanted")
        wait_until(lambda: waiting_for_locks(run) or drop.done(), what="the drop meets the claim")
        claims = claim.let_go()
        drop.result(DEADLINE_S)
    for claimed in claims:
        with pytest.raises(LeaseLost):
            f.add(run, claimed)
    f.sound(run)


def test_claims_of_a_run_in_steps_with_a_limit_wait_in_a_row(postgres: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that first shares the run's row, and then wants it alone, waits for another that does the same."""
    run = f.make_run(postgres, prompts=30, mode="sync", groups_per_step=30, max_inflight_samples=1000)
    workers = [f.register(run) for _ in range(6)]
    conflicts: list[bool] = []
    original = engine._is_conflict
    monkeypatch.setattr(engine, "_is_conflict", lambda error: conflicts.append(original(error)) or conflicts[-1])
    with threads(len(workers)) as together:

        def work(i: int) -> list[int]:
            return [c.sample_id for _ in range(8) for c in run.transact(lambda tx: steps.claim(tx, workers[i], 1, 0))]

        got = together(work)
    assert sorted(map(len, got)) == [8] * len(workers)
    assert conflicts.count(True) == 0
    f.sound(run)
