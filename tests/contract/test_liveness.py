"""Heartbeats, reaping, goodbyes, stragglers: nobody keeps what nobody works on."""

from __future__ import annotations

import threading

import pytest

from samplestore import Store
from samplestore.errors import LeaseLost, WorkerDead
from samplestore.heart import Heart
from samplestore.verbs import weights

from ..support import factory as f


def test_a_heartbeat_tells_what_to_follow(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    run.publish_weights(step=1)
    run.abort_inflight("batch complete")
    run.pause()
    beat = run.heartbeat(worker)
    assert (beat.run_state, beat.current_version, beat.abort_seq, beat.abort_reason) == (
        "paused",
        1,
        1,
        "batch complete",
    )
    assert beat.revision == f.value(run, "SELECT version_num FROM alembic_version")


def test_a_heartbeat_moves_the_row_only(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    f.silence(run, worker, 5.0)
    before = f.value(run, "SELECT heartbeat FROM worker")
    run.heartbeat(worker)
    assert f.value(run, "SELECT heartbeat FROM worker") > before + 4
    assert run.reap().workers == []


def test_dead_is_final(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    f.kill(run, worker)
    with pytest.raises(WorkerDead):
        run.heartbeat(worker)
    assert f.register(run) != worker


def test_reap_frees_everything_of_the_dead(store: Store) -> None:
    run = f.make_run(store, prompts=3, stages=["reward"])
    worker, other, trainer = f.register(run), f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    run.requeue([1, 2], "more work")
    claims = run.claim(worker, 1)
    kept = run.claim(other, 1)
    f.add(run, claims[0], 3)
    run.begin_request(claims[0], "rid")
    batch = f.lease(run, trainer, 0, 1)
    for w in (worker, trainer):
        f.silence(run, w)
    told = run.reap()
    assert (set(told.workers), told.samples, told.batches) == ({worker, trainer}, 1, 1)
    assert f.value(run, "SELECT state FROM batch WHERE id = :b", b=batch) == "released"
    assert f.sample(run, claims[0].sample_id)["status"] == "aborted"
    assert f.rows(run, "SELECT lost_reason FROM request") == [{"lost_reason": "worker dead"}]
    assert f.sample(run, kept[0].sample_id)["owner"] == other
    with pytest.raises(LeaseLost):
        f.commit(run, batch or 0, trainer)
    assert {e["worker_id"] for e in f.events(run, "worker_dead")} == {worker, trainer}
    assert (
        f.rows(run, "SELECT DISTINCT worker_id FROM ledger_total WHERE worker_id IN (:a, :b)", a=worker, b=trainer)
        == []
    )
    assert run.reap() == type(told)([], 0, 0, 0, 0, 0)
    f.sound(run)


def test_runs_reap_their_own(store: Store) -> None:
    run, other = f.make_run(store), f.make_run(store, "other")
    worker = f.register(other)
    other.claim(worker, 1)
    f.silence(other, worker)
    assert run.reap().workers == []
    assert other.reap().workers == [worker]


def test_a_reaper_that_is_silent_itself_skips_the_round(store: Store) -> None:
    run = f.make_run(store)
    reaper, worker = f.register(run), f.register(run)
    run.claim(worker, 1)
    for w in (reaper, worker):
        f.silence(run, w)
    assert run.reap(reaper).workers == []
    run.heartbeat(reaper)
    assert run.reap(reaper).workers == [worker]


def test_a_sample_without_progress_is_taken_from_a_live_worker(store: Store) -> None:
    run = f.make_run(store, progress_deadline_s=60.0)
    worker = f.register(run)
    stuck, moving = run.claim(worker, 2)
    f.add(run, stuck, 2)
    f.execute(run, "UPDATE sample SET progress_at = progress_at - 100")
    f.add(run, moving, 2)
    assert run.reap(worker).samples == 1
    with pytest.raises(LeaseLost):
        f.add(run, stuck)
    f.add(run, moving)
    assert [e["reason"] for e in f.events(run, "reap")] == ["no progress"]
    f.sound(run)


def test_goodbye_frees_at_once(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, 2)
    run.goodbye(worker)
    assert f.fates(run) == {"resumable": 2}
    with pytest.raises(WorkerDead):
        run.heartbeat(worker)
    f.sound(run)


def test_disown_frees_what_a_lost_answer_claimed(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    known, *lost = run.claim(worker, 3)
    f.add(run, known)
    assert run.disown(worker, [known.sample_id]) == 2
    f.add(run, known)
    with pytest.raises(LeaseLost):
        f.add(run, lost[0])
    f.sound(run)


@pytest.mark.parametrize("policy", ["wait", "drop", "short"])
@pytest.mark.parametrize("scored", [True, False])
def test_stragglers_are_settled_as_the_run_says(store: Store, policy: str, scored: bool) -> None:
    run = f.make_run(store, prompts=1, group_deadline_s=60.0, on_straggler=policy, stages=["reward"])
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.answer(run, a, 2)
    f.add(run, b, 3)
    if scored:
        run.score(run.claim_stages(worker, 1)[0], 1.0)
    assert run.reap().stragglers == 0
    f.execute(run, "UPDATE sample_group SET created_at = created_at - 100")
    assert run.reap().stragglers == 1
    assert run.reap().stragglers == 0, "said once"
    assert [e["reason"] for e in f.events(run, "straggler")] == [policy]
    f.sound(run)
    if policy == "wait":
        f.answer(run, b, 1)
    else:
        with pytest.raises(LeaseLost):
            f.add(run, b)
    for stage in run.claim_stages(worker, 9):
        run.score(stage, 1.0)
    assert f.states(run) == ["dropped" if policy == "drop" else "ready"]
    f.sound(run)


def test_a_group_that_has_not_begun_is_no_straggler(store: Store) -> None:
    run = f.make_run(store, prompts=1, group_deadline_s=60.0, on_straggler="drop")
    f.execute(run, "UPDATE sample_group SET created_at = created_at - 100")
    assert run.reap().stragglers == 0


def test_a_heart_beats_while_its_loop_ticks(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    ticks, beats, stuck = [0.0], threading.Semaphore(0), threading.Event()

    def ticked() -> float:
        if not stuck.is_set():
            ticks[0] += 1.0
        else:
            asked.release()
        return ticks[0]

    asked = threading.Semaphore(0)
    heart = Heart(run, worker, ticked=ticked, on_beat=lambda _: beats.release(), interval_s=0.01)
    assert beats.acquire(timeout=30) and beats.acquire(timeout=30)
    stuck.set()
    for _ in range(3):
        assert asked.acquire(timeout=30)
    f.silence(run, worker, 5.0)
    before = f.value(run, "SELECT heartbeat FROM worker WHERE id = :w", w=worker)
    for _ in range(3):
        assert asked.acquire(timeout=30)
    assert f.value(run, "SELECT heartbeat FROM worker WHERE id = :w", w=worker) == before
    heart.stop()


def test_a_heart_says_when_it_was_declared_dead(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    told = threading.Event()
    f.kill(run, worker)
    heart = Heart(run, worker, on_dead=told.set, interval_s=0.01)
    assert told.wait(30)
    assert heart.dead.is_set()
    heart.stop()


def test_who_was_away_hears_so_before_judging_others(store: Store) -> None:
    """After an outage everybody's heartbeat has expired; the first to come back must not reap the rest."""
    run = f.make_run(store)
    worker = f.register(run)
    assert not run.heartbeat(worker).late
    f.silence(run, worker)
    assert run.heartbeat(worker).late
    assert not run.heartbeat(worker).late


def test_stages_whose_claim_was_not_heard_are_freed(store: Store) -> None:
    run = f.make_run(store, stages=("reward",))
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, 3)
    run.finish(claim)
    (heard,) = run.claim_stages(worker, 1)
    assert run.disown(worker, [], [heard.stage_id]) == 0
    assert run.disown(worker, [], []) == 1
    assert [stage.stage_id for stage in run.claim_stages(worker, 1)] == [heard.stage_id]
    f.sound(run)


def test_an_engine_whose_claim_was_not_heard_is_claimed_again(store: Store) -> None:
    run = f.make_run(store)
    worker, other = f.register(run), f.register(run)
    run.transact(lambda tx: weights.see_engine(tx, "http://127.0.0.1:1", "default"))
    run.publish_weights(path="/w/1", step=1)
    first = run.transact(lambda tx: weights.claim_engine(tx, worker, "http://127.0.0.1:1"))
    assert run.transact(lambda tx: weights.claim_engine(tx, other, "http://127.0.0.1:1")) is None
    again = run.transact(lambda tx: weights.claim_engine(tx, worker, "http://127.0.0.1:1"))
    assert first is not None and again is not None and again["attempt"] == first["attempt"] + 1


def test_groups_of_unknown_staleness_do_not_fill_the_window(store: Store) -> None:
    run = f.make_run(store, prompts=8, epochs=None, max_staleness=0)
    worker = f.register(run)
    for claim in run.claim(worker, 100):
        run.append(claim, [1], [-0.1], None)
        run.finish(claim)
    assert run.admit() == run.settings.window_groups
    assert f.fates(run)["stale"] > 0
    f.sound(run)
