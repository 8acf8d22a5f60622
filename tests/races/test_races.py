"""Interleavings that break naive code on PostgreSQL READ COMMITTED, with the real verbs and real threads.

Where a test needs an interleaving it builds it: a transaction is held open at the critical place until the other side
has been seen to wait or to end. Where it does not, many threads start at one barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import samplestore
from samplestore import Store
from samplestore.errors import LeaseLost, SampleStoreError, StepAlreadyCommitted, StepHeld, WorkerDead
from samplestore.run import Run
from samplestore.verbs import batches as batch_verbs
from samplestore.verbs import liveness, samples
from samplestore.verbs.tx import Tx
from samplestore.writer import Writer
from tests.support import factory as f
from tests.support.processes import wait_until

DEADLINE_S = 30.0


class Held:
    """`work(tx)` in a transaction of another thread, which stays open before its commit until `let_go`."""

    def __init__(self, run: Run, work: Callable[[Tx], Any]) -> None:
        self._release, self._done_work = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)

        def hold(tx: Tx) -> Any:
            result = work(tx)
            self._done_work.set()
            if not self._release.wait(DEADLINE_S):
                raise TimeoutError("nobody let go")
            return result

        self.future: Future[Any] = self._pool.submit(run.transact, hold)
        wait_until(lambda: self._done_work.is_set() or self.future.done(), what="the held transaction's work")

    def let_go(self) -> Any:
        self._release.set()
        try:
            return self.future.result(DEADLINE_S)
        finally:
            self._pool.shutdown()


@contextmanager
def threads(n: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """A function that runs `work(i)` in n threads from one barrier on; results or errors in order."""
    with ThreadPoolExecutor(n) as pool:

        def together(work: Callable[[int], Any]) -> list[Any]:
            barrier = threading.Barrier(n)

            def one(i: int) -> Any:
                barrier.wait(DEADLINE_S)
                try:
                    return work(i)
                except SampleStoreError as error:
                    return error

            return [future.result(2 * DEADLINE_S) for future in [pool.submit(one, i) for i in range(n)]]

        yield together


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Store]:
    store = samplestore.open(postgres_url)
    yield store
    store.close()


def waiting_for_locks(run: Run) -> int:
    return int(
        f.value(
            run, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )


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
    append = Held(run, lambda tx: samples.append(tx, claim, 0, f.ids_of(3), f.logprobs_of(3), 0))
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
    append = Held(run, lambda tx: samples.append(tx, a, 1, f.ids_of(7), f.logprobs_of(7), 0))
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


# -- E3


def test_group_commits_of_two_workers_against_reaps(store: Store) -> None:
    """Two writers on the same groups, failures and finishes among their writes, and a reaper: no error but a lost
    lease reaches a caller, and every acknowledged token is there."""
    run = f.make_run(store, prompts=6, samples_per_prompt=4, groups_per_step=3, max_attempts=50, stages=["reward"])
    workers = [f.register(run) for _ in range(2)]
    held: list[list[Any]] = [[], []]
    while got := run.claim(workers[len(held[0]) > len(held[1])], 1):
        held[got[0].owner == workers[1]].append(got[0])
    writers = [Writer(run), Writer(run)]
    stop = threading.Event()
    reaps, errors = [0], []

    def reaper() -> None:
        while not stop.is_set():
            try:
                run.reap()
                reaps[0] += 1
            except Exception as error:  # shown by the test
                errors.append(error)
                return

    def work(i: int) -> int:
        acknowledged = 0
        for round_ in range(6):
            order = held[i] if (i + round_) % 2 else held[i][::-1]  # submitted in opposite orders
            futures = [
                writers[i].submit(samples.append, c, c.seq + round_, f.ids_of(2), f.logprobs_of(2), 0) for c in order
            ]
            acknowledged += sum(future.result(DEADLINE_S) for future in futures)
        futures = [
            writers[i].submit(samples.fail, c, "again", 0.0) if c.index == 0 else writers[i].submit(samples.finish, c)
            for c in reversed(held[i])
        ]
        for future in futures:
            future.result(DEADLINE_S)
        return acknowledged

    reaping = threading.Thread(target=reaper)
    reaping.start()
    try:
        with threads(2) as together:
            done = together(work)
    finally:
        stop.set()
        reaping.join(DEADLINE_S)
        for writer in writers:
            writer.close()
    assert errors == [] and reaps[0] > 0
    assert done == [12 * len(h) for h in held]
    assert run.ledger()["generated"] == sum(done)
    assert sum(w.commits for w in writers) < 14 * len(held[0]), "writes shared commits"
    f.sound(run)


def test_one_refused_write_fails_alone(store: Store) -> None:
    run = f.make_run(store, prompts=4)
    claims = run.claim(f.register(run), 8)
    run.requeue([claims[3].sample_id], "away")
    writer = Writer(run)
    blocker = Held(run, lambda tx: tx.lock_groups([claims[0].group_id]))
    first = writer.submit(samples.finish, claims[0])  # keeps the writer busy while the others queue up
    futures = [writer.submit(samples.append, c, 0, f.ids_of(2), f.logprobs_of(2), 0) for c in claims[1:]]
    futures.append(writer.submit(samples.append, claims[1], 1, [1], [float("nan")], 0))
    blocker.let_go()
    assert isinstance(first.exception(DEADLINE_S), SampleStoreError)  # nothing generated
    told = [future.exception(DEADLINE_S) for future in futures]
    writer.close()
    assert [type(e).__name__ for e in told] == ["NoneType"] * 2 + ["LeaseLost"] + ["NoneType"] * 4 + ["InvalidSegment"]
    assert run.ledger()["generated"] == 12
    f.sound(run)


def test_a_writer_outlives_waiters_that_went_away(store: Store) -> None:
    run = f.make_run(store, prompts=2)
    a, b = run.claim(f.register(run), 2)
    writer = Writer(run)
    gone = writer.submit(samples.append, a, 0, [1], [-0.1], 0)
    gone.cancel()
    assert writer.submit(samples.append, b, 0, [1], [-0.1], 0).result(DEADLINE_S) == 1
    writer.close()
    assert f.sample(run, a.sample_id)["n_tokens"] == 1, "tokens of a cancelled task are kept"


def test_a_request_is_closed_after_the_appends_of_its_commit(store: Store) -> None:
    from samplestore.types import RequestInfo

    run = f.make_run(store, prompts=2)
    a, b = run.claim(f.register(run), 2)
    run.begin_request(a, "rid")
    writer = Writer(run)
    blocker = Held(run, lambda tx: tx.lock_groups([b.group_id]))
    busy = writer.submit(samples.finish, b)
    last = writer.submit(samples.append, a, 0, f.ids_of(3), f.logprobs_of(3), 0, rid="rid")
    ended = writer.submit(samples.end_request, RequestInfo("rid", generated_tokens=3))
    blocker.let_go()
    busy.exception(DEADLINE_S), last.result(DEADLINE_S), ended.result(DEADLINE_S)
    writer.close()
    (row,) = f.rows(run, "SELECT stored_tokens, lost_tokens FROM request")
    assert row == {"stored_tokens": 3, "lost_tokens": 0}
    f.sound(run)


# -- many at once


def test_eight_threads_never_claim_the_same_sample(store: Store) -> None:
    run = f.make_run(store, prompts=20, samples_per_prompt=4, groups_per_step=10)
    workers = [f.register(run) for _ in range(8)]

    def work(i: int) -> list[tuple[int, int]]:
        mine = []
        while got := run.claim(workers[i], 3):
            mine.extend((c.sample_id, c.attempt) for c in got)
        return mine

    with threads(8) as together:
        claimed = [item for mine in together(work) for item in mine]
    assert len(claimed) == len(set(claimed)) == 80
    assert {attempt for _, attempt in claimed} == {1}
    f.sound(run)


def test_eight_threads_never_claim_the_same_stage(store: Store) -> None:
    run = f.make_run(store, prompts=10, groups_per_step=5, stages=["reward", "length"])
    worker = f.register(run)
    for claim in run.claim(worker, 100):
        f.answer(run, claim)

    def work(_: int) -> list[int]:
        mine: list[int] = []
        while got := run.claim_stages(worker, 3):
            mine.extend(s.stage_id for s in got)
        return mine

    with threads(8) as together:
        claimed = [s for mine in together(work) for s in mine]
    assert len(claimed) == len(set(claimed)) == 40


def test_two_trainers_never_lease_a_group_twice(store: Store) -> None:
    run = f.make_run(store, prompts=12, groups_per_step=12, max_staleness=0)
    f.finish_all(run, f.register(run))
    trainers = [f.register(run, "trainer") for _ in range(4)]

    def work(i: int) -> list[int]:
        mine = []
        for step in range(4):
            try:
                if (batch := f.lease(run, trainers[i], 10 * i + step, 2)) is not None:
                    mine.append(batch)
            except StepHeld:
                pass
        return mine

    with threads(4) as together:
        batches = [b for mine in together(work) for b in mine]
    assert len(set(batches)) == 6, "12 groups make 6 batches of 2; none is leased by halves"
    held = f.rows(run, "SELECT batch_id, count(*) AS n FROM batch_group GROUP BY batch_id")
    assert {r["n"] for r in held} == {2} and len(held) == 6
    assert f.value(run, "SELECT count(DISTINCT group_id) FROM batch_group") == 12
    f.sound(run)


def test_one_step_has_one_batch(store: Store) -> None:
    run = f.make_run(store, prompts=12, groups_per_step=12, max_staleness=0)
    f.finish_all(run, f.register(run))
    trainers = [f.register(run, "trainer") for _ in range(4)]

    def work(i: int) -> int | None:
        batch = f.lease(run, trainers[i], 7, 2)
        if batch is not None:
            f.commit(run, batch, trainers[i])
        return batch

    with threads(4) as together:
        told = together(work)
    assert sum(isinstance(t, int) for t in told) == 1
    assert all(isinstance(t, int | StepHeld | StepAlreadyCommitted) for t in told)
    assert f.states(run).count("consumed") == 2
    f.sound(run)


def test_admissions_never_overshoot_the_window(store: Store) -> None:
    run = f.make_run(store, prompts=200, admit=False, groups_per_step=3, max_staleness=2)
    with threads(8) as together:
        assert sum(together(lambda _: run.admit())) == 9
        assert sum(together(lambda _: run.admit())) == 0
    numbers = [r["number"] for r in f.rows(run, "SELECT number FROM sample_group ORDER BY number")]
    assert numbers == list(range(9))


def test_one_run_however_many_create_it(store: Store) -> None:
    with threads(8) as together:
        runs = together(lambda _: store.run("same", samples_per_prompt=3))
    assert len({r.id for r in runs}) == len({r.uuid for r in runs}) == 1


def test_prompts_added_at_once_are_stored_once(store: Store) -> None:
    run = store.run("r")
    with threads(4) as together:
        told = together(lambda _: run.add_prompts([{"prompt_ids": [1, i]} for i in range(30)]))
    assert sum(t.added for t in told) == 30
    assert sorted(r["position"] for r in f.rows(run, "SELECT position FROM prompt")) == list(range(30))


def test_an_engine_that_many_see_at_once_is_one_engine(store: Store) -> None:
    from samplestore.verbs import weights

    run = store.run("r")
    with threads(8) as together:
        told = together(lambda _: run.transact(lambda tx: weights.see_engine(tx, "http://e", "default")))
    assert {t["id"] for t in told} == {told[0]["id"]}
    assert f.value(run, "SELECT count(*) FROM engine") == 1


def test_one_process_drives_the_update_of_an_engine(store: Store) -> None:
    from samplestore.verbs import weights

    run = store.run("r")
    run.transact(lambda tx: weights.see_engine(tx, "http://e", "default"))
    run.publish_weights(path="/w/1", step=1)
    workers = [f.register(run) for _ in range(8)]
    with threads(8) as together:
        got = together(lambda i: run.transact(lambda tx: weights.claim_engine(tx, workers[i], "http://e")))
    assert sum(g is not None for g in got) == 1


# -- commit against rewind and reap


@pytest.mark.parametrize("step", [5, 4])
def test_a_commit_under_way_is_settled_before_a_rewind(postgres: Store, step: int) -> None:
    """The checkpoint of step 5 has seen batch 5 (that of step 4 has not): its groups must not come back (must)."""
    run = f.make_run(postgres, prompts=2)
    f.finish_all(run, f.register(run))
    trainer = f.register(run, "trainer")
    batch = f.lease(run, trainer, 5, 2)
    assert batch is not None
    commit = Held(run, lambda tx: batch_verbs.commit(tx, batch, trainer))
    with ThreadPoolExecutor(1) as pool:
        rewind = pool.submit(run.rewind, step)
        wait_until(lambda: waiting_for_locks(run) or rewind.done(), what="the rewind meets the commit")
        commit.let_go()
        rewind.result(DEADLINE_S)
    assert f.states(run) == ["consumed" if step == 5 else "ready"] * 2
    assert f.value(run, "SELECT state FROM batch") == ("committed" if step == 5 else "rewound")
    f.sound(run)


def test_a_commit_and_a_reap_settle_a_batch_once(store: Store) -> None:
    run = f.make_run(store, prompts=20, groups_per_step=20, max_staleness=0)
    f.finish_all(run, f.register(run))
    with threads(3) as together:
        for step in range(6):
            trainer = f.register(run, "trainer")
            batch = f.lease(run, trainer, step, 2)
            assert batch is not None
            f.silence(run, trainer)
            told = together(lambda i, b=batch, t=trainer: f.commit(run, b, t) if i == 0 else run.reap())
            committed = told[0] is None
            assert committed or isinstance(told[0], LeaseLost)
            assert f.value(run, "SELECT state FROM batch WHERE id = :b", b=batch) == (
                "committed" if committed else "released"
            )
    f.sound(run)


def test_everything_at_once_ends_sound(store: Store) -> None:
    """Workers, scorers, a trainer that publishes, an operator who drops and requeues, a reaper."""
    run = f.make_run(
        store,
        prompts=10,
        epochs=None,
        samples_per_prompt=2,
        groups_per_step=2,
        max_staleness=1,
        stages=["reward"],
        max_attempts=3,
    )
    published = [0]

    def worker(i: int) -> None:
        me = f.register(run)
        for turn in range(12):
            run.admit()
            for n, claim in enumerate(run.claim(me, 3)):
                try:
                    f.add(run, claim, 2, run.current_version)
                    if (turn + n + i) % 5 == 0:
                        run.release(claim, "abort")
                    elif (turn + n + i) % 7 == 0:
                        run.fail(claim, "broken", backoff_s=0.0)
                    else:
                        run.finish(claim)
                except LeaseLost:
                    continue
            for stage in run.claim_stages(me, 4):
                try:
                    run.fail_stage(stage, "no", backoff_s=0.0) if turn % 6 == 5 else run.score(stage, 1.0)
                except LeaseLost:
                    continue

    def train(_: int) -> None:
        me = f.register(run, "trainer")
        for step in range(15):
            batch = f.lease(run, me, step, 2)
            if batch is not None and step % 3:
                f.commit(run, batch, me)
                run.publish_weights(step=step)
                published[0] += 1
            elif batch is not None:
                f.release(run, batch, me)

    def operate(_: int) -> None:
        for turn in range(8):
            open_ = f.rows(run, "SELECT id FROM sample_group WHERE state = 'open' ORDER BY id LIMIT 1")
            for row in open_:
                try:
                    if turn % 2:
                        run.drop([row["id"]], "operator")
                    else:
                        first = f.value(run, "SELECT min(id) FROM sample WHERE group_id = :g", g=row["id"])
                        run.requeue([first], "operator")
                except SampleStoreError:
                    continue
            run.reap()

    with threads(5) as together:
        told = together(lambda i: (worker, worker, worker, train, operate)[i](i))
    assert told == [None] * 5
    run.reap()
    f.sound(run)
