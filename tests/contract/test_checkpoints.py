"""Trainers that die between optimizer step and commit, checkpoints that are restored, and verbs that are said twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, StepAlreadyCommitted, WorkerFailed
from samplestore.run import Run
from samplestore.verbs import tx as transactions
from samplestore.verbs import weights

from ..support import factory as f
from ..support.processes import Processes, wait_until
from .test_batches_rewind import consumed, trained
from .test_lost_ack import lost_acknowledgements

# -- a trainer dies

TRAINER = """
import json, pathlib, sys, threading
import samplestore
url, folder, where = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
run = samplestore.open(url).existing_run("r")
seen = []

def die(at, step):
    if where == f"{at} {step}":
        print("here", flush=True)
        threading.Event().wait()

for step in range(6):
    with run.batch(step=step, groups=1, timeout=60) as batch:
        seen += [g.number for g in batch.groups]
        die("trained", step)
        (folder / f"{step}.json").write_text(json.dumps(seen))
        die("saved", step)
    die("committed", step)
    run.publish_weights(path=str(folder / f"{step}.json"), step=step)
    die("published", step)
"""


@pytest.mark.parametrize("where", ["trained", "saved", "committed", "published"])
def test_a_killed_trainer_goes_on_without_skipping_or_doubling(
    store: Store, db_url: str, processes: Processes, tmp_path: Path, where: str
) -> None:
    """A real trainer is killed around step 2. It restores the newest checkpoint whose batch was committed, and what is
    consumed in the end is exactly what the checkpoints say was seen."""
    run = f.make_run(store, prompts=8, groups_per_step=8, max_staleness=9, heartbeat_ttl_s=1.0)
    f.finish_all(run, f.register(run))
    first = processes.start([sys.executable, "-c", TRAINER, db_url, tmp_path, f"{where} 2"], name="trainer")
    first.wait_for_log("here")
    first.kill()
    wait_until(lambda: run.reap().batches or "leased" not in f.states(run), what="the lease ends with its trainer")

    committed = max(r["step"] for r in f.rows(run, "SELECT step FROM batch WHERE state = 'committed'"))
    checkpoints = {int(p.stem): json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert committed == (2 if where in ("committed", "published") else 1)
    assert max(checkpoints) == (1 if where == "trained" else 2)
    restored = max(step for step in checkpoints if step <= committed)  # one beyond was never settled: discarded
    run.rewind(restored)
    assert sorted(n for groups in consumed(run).values() for n in groups) == sorted(checkpoints[restored])
    assert f.states(run).count("ready") == 8 - len(checkpoints[restored]), "what it has not seen, and only that"

    trainer, seen = f.register(run, "trainer"), list(checkpoints[restored])
    for step in range(restored + 1, 8):
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        seen += f.groups_of(run, batch)
        f.commit(run, batch, trainer)
    assert sorted(seen) == list(range(8)), "every group once"
    f.sound(run)


def test_a_lost_checkpoint_of_a_committed_step(store: Store) -> None:
    """Committed, but the file is gone: the groups of that step come back, and only they."""
    run, _, trainer = trained(store, 3)
    before = consumed(run)
    run.rewind(1)
    batch = f.lease(run, trainer, 2, 1)
    assert batch is not None
    assert f.groups_of(run, batch) == before[2]
    f.sound(run)


def test_a_fatal_error_reaches_a_trainer_that_waits(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: run.batch(step=0, timeout=60))
        wait_until(lambda: f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'"), what="the trainer waits")
        run.goodbye(worker, "RuntimeError: CUDA error: an illegal memory access")
        error = waiting.exception(60)
    assert isinstance(error, WorkerFailed)
    assert (error.worker_id, error.error) == (worker, "RuntimeError: CUDA error: an illegal memory access")
    assert "CUDA error" in str(error)


def test_the_last_worker_to_go_is_the_one_that_counts(store: Store) -> None:
    run = f.make_run(store)
    first, second = f.register(run), f.register(run)
    run.goodbye(second)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: run.batch(step=0, timeout=60))
        wait_until(lambda: f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'"), what="the trainer waits")
        run.goodbye(first, "out of memory")
        error = waiting.exception(60)
    assert isinstance(error, WorkerFailed) and error.worker_id == first


def test_a_worker_that_was_killed_before_is_not_the_last_to_go(store: Store) -> None:
    """Only its reap comes later."""
    run = f.make_run(store)
    killed, failed = f.register(run), f.register(run)
    f.silence(run, killed, 1000.0)
    run.goodbye(failed, "out of memory")
    with pytest.raises(WorkerFailed) as caught:
        run.batch(step=0, timeout=10)
    assert caught.value.worker_id == failed
    assert f.value(run, "SELECT state FROM worker WHERE id = :w", w=killed) == "dead"


# -- progress is never pinned


def test_what_is_left_over_stays_ready_and_goes_first(store: Store) -> None:
    run = f.make_run(store, prompts=5, groups_per_step=5, max_staleness=0)
    f.finish_all(run, f.register(run))
    trainer = f.register(run, "trainer")
    for step, expected in enumerate(([0, 1], [2, 3])):
        batch = f.lease(run, trainer, step, 2)
        assert batch is not None
        assert f.groups_of(run, batch) == expected
        f.commit(run, batch, trainer)
    assert f.states(run) == ["consumed"] * 4 + ["ready"]
    assert f.lease(run, trainer, 2, 1) is not None


@pytest.mark.parametrize("way", ["drop", "stale", "fail"])
def test_groups_that_are_given_up_pin_nothing(store: Store, way: str) -> None:
    """The first groups in order never come: the ones behind them are trained on, and others are admitted."""
    run = f.make_run(store, prompts=8, max_attempts=1, max_staleness=0, groups_per_step=2)
    worker, trainer = f.register(run), f.register(run, "trainer")
    first = run.claim(worker, 4)
    if way == "drop":
        run.drop(sorted({c.group_id for c in first}), "unwanted")
    elif way == "stale":
        for claim in first:
            f.add(run, claim, 2, 0)
        run.publish_weights(step=0)
    else:
        for claim in first:
            if claim.index == 0:
                run.fail(claim, "broken")
    assert run.admit() == 2
    f.finish_all(run, worker)
    batch = f.lease(run, trainer, 1, 2)
    assert batch is not None
    assert f.groups_of(run, batch) == [2, 3]
    f.sound(run)


# -- timelines


def test_versions_that_were_left_behind_are_marked_and_never_current(store: Store) -> None:
    run, worker, trainer = trained(store, 4, max_staleness=0)  # versions 1 to 4, of steps 0 to 3
    labels = {v.version: v.label for v in run.weight_versions()}
    run.transact(lambda tx: weights.see_engine(tx, "http://e", labels[4]))
    restored = run.rewind(1)
    marked = f.rows(run, "SELECT version FROM weight_version WHERE abandoned_at IS NOT NULL ORDER BY version")
    assert [r["version"] for r in marked] == [3, 4]
    assert run.current_version == restored.version == 5
    # an engine that still serves version 4 has to load the restored weights
    held = run.transact(lambda tx: weights.claim_engine(tx, worker, "http://e"))
    assert held is not None and (held["was"], held["version"], held["path"]) == (labels[4], 5, "/w/1")
    # and what it wrote meanwhile is two updates away, not none
    run.drop([f.group_id(run, n) for n, state in enumerate(f.states(run)) if state == "ready"], "not these")
    assert run.admit() == 1
    for claim in run.claim(worker, 2):
        f.answer(run, claim, 3, 4)
    assert f.states(run)[-1] == "ready"
    assert f.lease(run, trainer, 9, 1) is None
    assert f.states(run)[-1] == "stale"
    assert run.why(1, max_staleness=1).ready_in_window == 0
    assert run.rewind(1).version == 5, "and the same weights are restored again"
    f.sound(run)


def test_a_checkpoint_of_a_timeline_that_was_left_is_refused(store: Store) -> None:
    """Step 3 is a step of the run, but not of this line: restoring it would publish the weights of step 1 for it."""
    run, _, _ = trained(store, 4)
    run.rewind(1)
    before = f.snapshot(run)
    with pytest.raises(InvalidSetting, match="to 1, the newest of this timeline"):
        run.rewind(3)
    assert f.snapshot(run) == before


def test_a_step_that_was_leased_but_never_committed_is_no_checkpoint(store: Store) -> None:
    run, _, trainer = trained(store, 2)
    run.admit()
    f.finish_all(run, f.register(run))
    assert f.lease(run, trainer, 2, 1) is not None
    with pytest.raises(InvalidSetting, match="to 1, the newest"):
        run.rewind(2)


def test_a_rewind_of_more_groups_than_a_statement_takes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = trained(store, 6)
    monkeypatch.setattr(transactions, "PART", 2)
    run.rewind(-1)
    assert consumed(run) == {}
    assert f.states(run).count("consumed") == 0
    f.sound(run)


# -- said twice


def test_a_rewind_said_again_starts_no_second_timeline(store: Store) -> None:
    run, _, trainer = trained(store, 3)
    restored = run.rewind(1)
    before = f.snapshot(run)
    assert run.rewind(1) == restored
    assert f.snapshot(run) == before
    batch = f.lease(run, trainer, 2, 1)
    assert batch is not None
    assert run.rewind(1).version == restored.version + 1, "what was leased since is undone"
    assert f.value(run, "SELECT state FROM batch WHERE id = :b", b=batch) == "released"
    run.publish_weights(path="/w/2b", step=2)
    assert run.rewind(1).timeline == 3, "and so is what was published since"
    f.sound(run)


VERBS: dict[str, Callable[[Run], Any]] = {
    "publish": lambda run: run.publish_weights(),
    "publish a label": lambda run: run.publish_weights(path="/w", label="mine"),
    "publish a step": lambda run: run.publish_weights(path="/w", step=7),
    "rewind": lambda run: run.rewind(1),
    "requeue": lambda run: run.requeue([first_ready(run)], "again"),
    "admit": lambda run: run.admit(),
    "describe": lambda run: run.describe_first_weights("/w/first", "first"),
}
COUNTED = (
    "SELECT (SELECT count(*) FROM weight_version) AS versions, (SELECT count(*) FROM timeline) AS timelines, "
    "(SELECT sum(incarnation) FROM sample) AS lives, (SELECT count(*) FROM sample_group) AS groups, "
    "(SELECT count(*) FROM event) AS events"
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_lost_acknowledgement_changes_nothing_more(store: Store, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    told, counted = [], []
    for lost in (False, True):
        run = prepared(store, f"lost-{lost}")
        before = f.rows(run, COUNTED)[0]
        if lost:
            with lost_acknowledgements(monkeypatch) as repeated:
                told.append(VERBS[verb](run))
            assert repeated[0] == 1
        else:
            told.append(VERBS[verb](run))
        counted.append({k: v - before[k] for k, v in f.rows(run, COUNTED)[0].items()})
        f.sound(run)
    assert counted[0] == counted[1]
    if verb in ("publish", "publish a label", "publish a step", "rewind"):
        assert (told[0].version, told[0].timeline, told[0].step) == (told[1].version, told[1].timeline, told[1].step)
    elif verb == "requeue":
        assert told[0] == told[1]


def first_ready(run: Run) -> int:
    query = "SELECT min(s.id) FROM sample s JOIN sample_group g ON g.id = s.group_id WHERE g.state = 'ready'"
    return int(f.value(run, query + " AND g.run_id = :r", r=run.id))


def prepared(store: Store, name: str) -> Run:
    run = f.make_run(store, name, prompts=10, groups_per_step=1, max_staleness=3)
    f.train(run, f.register(run), f.register(run, "trainer"), 3)
    return run


def test_two_publishes_without_a_step_are_two(store: Store) -> None:
    run = f.make_run(store)
    assert [run.publish_weights().version for _ in range(3)] == [1, 2, 3]


def test_labels_stay_apart_and_are_checked(store: Store) -> None:
    run = f.make_run(store)
    run.publish_weights(label="one")
    with pytest.raises(InvalidSetting, match="label"):
        run.publish_weights(label="one")
    with pytest.raises(InvalidSetting, match="label"):
        run.describe_first_weights("/w", "one")
    with pytest.raises(InvalidSetting, match="path"):
        run.describe_first_weights("/w\x00")
    run.describe_first_weights("/w", "zero"), run.describe_first_weights("/w", "zero")


# -- replay


@pytest.mark.parametrize("advantages", ["grpo", "rloo", "dr_grpo", "none"])
def test_a_replay_is_the_batch_bit_for_bit(store: Store, advantages: str) -> None:
    """Uneven groups, environment tokens, rewards, several weights, and the batch's own method of advantages."""
    run = f.make_run(
        store, prompts=6, samples_per_prompt=3, max_staleness=4, stages=["reward"], on_failed="short", max_attempts=1
    )
    worker = f.register(run)
    for n, claim in enumerate(run.claim(worker, 12)):
        f.add(run, claim, 1 + n, 0)
        if n == 1:
            run.fail(claim, "broken")
            continue
        if n % 3 == 0:
            run.append(claim, [7, 8], None, None, kind="environment")
        if n == 4:
            run.publish_weights(path="/w/0", step=0)
        f.add(run, claim, 2, run.current_version, "stop")
        run.finish(claim)
    for n, stage in enumerate(run.claim_stages(worker, 99)):
        run.score(stage, 0.1 * n - 0.3)
    with run.batch(step=1, groups=3, timeout=0, advantages=advantages, stale="mask", max_staleness=0) as batch:
        was = {layout: batch.arrays(layout=layout) for layout in ("packed", "padded")}
        samples = batch.samples
    assert {len(g.samples) for g in batch.groups} == {2, 3} and was["packed"]["loss_mask"].min() == 0
    run.publish_weights(path="/w/1", step=1)
    f.finish_all(run, worker)
    with run.batch(step=2, groups=1, timeout=0):
        pass
    for change in (lambda: run.publish_weights(), lambda: run.rewind(1), lambda: run.publish_weights(step=2)):
        change()
        again = run.replay(1)
        assert (again.id, again.policy, again.n_tokens) == (batch.id, batch.policy, batch.n_tokens)
        assert [(g.group_id, g.number, g.staleness) for g in again.groups] == [
            (g.group_id, g.number, g.staleness) for g in batch.groups
        ]
        assert [(s.sample_id, s.index, s.label, s.metadata, s.status) for s in again.samples] == [
            (s.sample_id, s.index, s.label, s.metadata, s.status) for s in samples
        ]
        for layout, arrays in was.items():
            f.same_arrays(again.arrays(layout=layout), arrays)
    with pytest.raises(StepAlreadyCommitted):
        run.batch(step=1, groups=3, timeout=0)
    f.sound(run)
