"""Many threads at the same verb, and batches between commit, rewind and reap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from samplestore import Store
from samplestore.errors import LeaseLost, SampleStoreError, StepAlreadyCommitted, StepHeld
from samplestore.verbs import batches as batch_verbs
from tests.races.together import DEADLINE_S, Held, threads, waiting_for_locks
from tests.support import factory as f
from tests.support.processes import wait_until

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
