"""Interleavings of rewind, publish, admission and leases with what workers do meanwhile.

Where PostgreSQL is named, an interleaving is built: a transaction is held open at the critical place. SQLite's writers
come one after the other, so it has no such place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from samplestore import Store
from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.models import SampleGroup
from samplestore.run import Run
from samplestore.statements import staleness
from samplestore.verbs import appends, prompts
from samplestore.verbs import groups as group_verbs
from samplestore.verbs import rewind as rewind_verbs
from samplestore.verbs.tx import Tx
from tests.races.together import DEADLINE_S, Held, threads, waiting_for_locks
from tests.support import factory as f
from tests.support.processes import wait_until


def meet(run: Run, held: Held, work: object, what: str) -> object:
    """Run `work` until it waits for the held transaction (or ends without), let that one commit, and return."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)  # type: ignore[call-overload]
        wait_until(lambda: waiting_for_locks(run) or other.done(), what=what)
        held.let_go()
        return other.result(DEADLINE_S)


# -- publish closes groups that are too old: only if they still are when it holds them


@pytest.mark.parametrize("stale", ["expire", "regenerate"])
def test_a_group_that_is_started_afresh_meanwhile_is_not_closed(postgres: Store, stale: str) -> None:
    run = f.make_run(postgres, prompts=1, max_staleness=0, stale=stale)
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.add(run, a, 3), f.add(run, b, 3)
    requeue = Held(run, lambda tx: group_verbs.requeue(tx, [a.sample_id, b.sample_id], "operator"))
    meet(run, requeue, lambda: run.publish_weights(step=1), "the publish meets the requeue")
    assert f.states(run) == ["open"]
    assert [f.sample(run, c.sample_id)["incarnation"] for c in (a, b)] == [1, 1]
    f.sound(run)


def test_a_group_that_is_leased_meanwhile_is_not_closed(postgres: Store) -> None:
    from samplestore.verbs import batches

    run = f.make_run(postgres, prompts=1, max_staleness=0)
    f.finish_all(run, f.register(run))
    trainer = f.register(run, "trainer")
    rules = {**f.POLICY, "max_staleness": 0}
    lease = Held(run, lambda tx: batches.lease(tx, trainer, 0, 1, rules))
    meet(run, lease, lambda: run.publish_weights(step=1), "the publish meets the lease")
    assert f.states(run) == ["leased"]
    f.sound(run)


# -- a rewind counts staleness anew, and appends go on meanwhile


def branched(store: Store) -> tuple[Run, int]:
    """Versions 0-1-2-3; the weights of version 1 can be restored with rewind(1): then 3 is staler than 0."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=5)
    for step in (1, 2, 3):
        run.publish_weights(path=f"/w/{step}", step=step)
    return run, f.register(run)


def test_an_append_under_way_counts_in_a_rewind(postgres: Store) -> None:
    """The sample holds a token of version 0; one of version 3 is being stored. From the restored weights on, 3 is the
    staler one, and the rewind must see it."""
    run, worker = branched(postgres)
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 2, 0)
    append = Held(run, lambda tx: appends.append(tx, claim, 1, f.ids_of(2), f.logprobs_of(2), 3))
    meet(run, append, lambda: run.rewind(1), "the rewind meets the append")
    assert f.sample(run, claim.sample_id)["oldest_version"] == 3
    f.sound(run)


def test_an_append_that_waits_for_a_rewind_is_judged_by_the_new_timeline(postgres: Store) -> None:
    """The append began before the rewind committed, so it compared versions as they were before."""
    run, worker = branched(postgres)
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 2, 0)
    rewind = Held(run, lambda tx: rewind_verbs.rewind(tx, 1))

    def append() -> int:
        return run.append(claim, f.ids_of(2), f.logprobs_of(2), 3, seq=1, finish_reason="stop")

    meet(run, rewind, append, "the append meets the rewind")
    run.finish(claim)
    assert f.group(run, claim.group_id)["oldest_version"] == 3, "3 lies on the branch that was left"
    assert f.lease(run, f.register(run, "trainer"), 9, 1) is not None
    assert f.value(run, "SELECT staleness FROM batch_group") == 2
    f.sound(run)


def test_a_group_that_is_dropped_during_a_rewind_stays_dropped(postgres: Store) -> None:
    run, worker = branched(postgres)
    f.finish_all(run, worker)
    group = f.value(run, "SELECT id FROM sample_group")
    drop = Held(run, lambda tx: group_verbs.drop(tx, [group], "unwanted"))
    meet(run, drop, lambda: run.rewind(1), "the rewind meets the drop")
    assert f.states(run) == ["dropped"]
    f.sound(run)


# -- admission


NEW = """SELECT id FROM sample_group WHERE run_id = :run AND state IN ('open', 'scoring', 'ready')
         AND NOT EXISTS (SELECT 1 FROM batch_group WHERE group_id = sample_group.id)"""


def occupied_by_new(tx: Tx) -> int:
    """What admission counts, but for the groups that some lease has held."""
    new = {row.id for row in tx.execute(sa.text(NEW), {"run": tx.run_id})}
    if tx.settings.stale == "skip":  # keeps ready groups beyond the window, and counts them no more
        source, lag, ready = staleness.ready_groups(tx.run_id, tx.settings.staleness_mode)
        beyond = sa.select(SampleGroup.id).select_from(source).where(ready, lag > tx.settings.max_staleness)
        new -= {row.id for row in tx.execute(beyond)}
    return len(new)


@pytest.mark.parametrize("stale", ["expire", "regenerate", "skip"])
def test_racing_workers_never_overshoot_and_never_stand_still(store: Store, stale: str) -> None:
    """Workers that admit, generate and die; a trainer whose groups age out in the queue; leases that expire. The
    window is never passed by an admission, and training goes on to its last step.

    What a lease held is not counted: it can come back on top of a full window (then nothing is admitted), on
    PostgreSQL also between an admission and its count here."""
    steps, window = 12, 4
    run = f.make_run(
        store, prompts=40, epochs=None, admit=False, samples_per_prompt=2, groups_per_step=2, max_staleness=1,
        stale=stale,
    )  # fmt: skip
    over: list[int] = []

    def worker(_: int) -> None:
        while f.value(run, "SELECT current_version FROM run") < steps:
            me = f.register(run)
            made, held = run.transact(lambda tx: (prompts.admit(tx), occupied_by_new(tx)))
            over.extend([held] if made and held > window else [])
            for claim in run.claim(me, 3):
                try:
                    f.answer(run, claim, 2, run.current_version)
                except LeaseLost:
                    continue
            run.claim(me, 1)
            run.goodbye(me)

    def train(_: int) -> None:
        step = 0
        while step < steps:
            me = f.register(run, "trainer")
            batch = f.lease(run, me, step, 2)
            if batch is None:
                run.admit()
            elif step % 4 == 3 and f.value(run, "SELECT count(*) FROM batch WHERE step = :s", s=step) == 1:
                f.kill(run, me)  # the lease expires: the groups are ready again
                continue
            else:
                f.commit(run, batch, me)
                run.publish_weights(step=step)
                step += 1
            run.goodbye(me)

    with threads(4) as together:
        told = together(lambda i: train(i) if i == 3 else worker(i))
    assert told == [None] * 4
    assert over == []
    assert f.value(run, "SELECT count(*) FROM batch WHERE state = 'committed'") == steps
    run.reap()
    f.sound(run)


@pytest.mark.parametrize("stale", ["expire", "regenerate", "skip", "mask"])
def test_two_trainers_and_two_workers_under_every_policy(store: Store, stale: str) -> None:
    """Leases that close or restart groups, against claims, appends, finishes, publishes and rewinds."""
    run = f.make_run(
        store, prompts=8, epochs=None, samples_per_prompt=2, groups_per_step=2, max_staleness=1, stale=stale
    )

    def worker(i: int) -> None:
        me = f.register(run)
        for turn in range(10):
            run.admit()
            for n, claim in enumerate(run.claim(me, 3)):
                try:
                    f.add(run, claim, 2, max(0, run.current_version - (n + i) % 2))
                    run.release(claim, "abort") if (turn + n) % 4 == 0 else run.finish(claim)
                except LeaseLost:
                    continue

    def train(i: int) -> None:
        me = f.register(run, "trainer")
        for turn in range(10):
            try:
                batch = f.lease(run, me, 100 * i + turn, 1, max_staleness=turn % 2)
                if batch is not None and turn % 3:
                    f.commit(run, batch, me)
                    run.publish_weights(path=f"/w/{i}", step=100 * i + turn)
                elif batch is not None:
                    f.release(run, batch, me)
                if turn == 6:
                    run.rewind(0 if i == 2 else 1)
            except SampleStoreError:
                continue

    with threads(4) as together:
        told = together(lambda i: worker(i) if i < 2 else train(i))
    assert told == [None] * 4
    run.reap()
    f.sound(run)
