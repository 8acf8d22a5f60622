"""Retention: what goes, what stays, what a rewind still finds, and that a prune can be killed at any slice."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from samplestore import Store, retention
from samplestore.errors import InvalidSetting, RewindTooFar, RunInUse, TokensPruned
from samplestore.run import Run

from ..support import factory as f
from ..support.processes import Processes, wait_until

N = 700  # tokens of an answer: more than a page, so that space is given back


def trained(store: Store, steps: int = 6, **settings: Any) -> tuple[Run, int, int]:
    """A run with `steps` committed steps of two groups each: step s was trained on weights s. (run, worker, trainer)"""
    run = f.make_run(store, prompts=40, admit=False, **{"max_staleness": 1, **settings})
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(steps):
        run.admit()
        one_step(run, worker, trainer, step)
    return run, worker, trainer


def one_step(run: Run, worker: int, trainer: int, step: int) -> None:
    for claim in run.claim(worker, 4):
        f.answer(run, claim, N, run.current_version)
    f.commit(run, f.lease(run, trainer, step) or 0, trainer)
    run.publish_weights(f"/weights/{step}", step=step)


def payloads(run: Run) -> dict[int, set[int]]:
    """Lengths of payloads by step of the committed batch that holds them; -1: in none."""
    found = f.rows(
        run,
        "SELECT coalesce(max(b.step), -1) AS step, length(s.payload) AS n FROM segment s"
        " JOIN sample p ON p.id = s.sample_id LEFT JOIN batch_group g ON g.group_id = p.group_id"
        " LEFT JOIN batch b ON b.id = g.batch_id AND b.state = 'committed'"
        " GROUP BY s.sample_id, s.incarnation, s.seq, s.payload",
    )
    told: dict[int, set[int]] = {}
    for row in found:
        told.setdefault(row["step"], set()).add(row["n"])
    return told


WHOLE, EMPTY = {1 + 8 * N}, {1}


def test_tokens_of_old_steps_go_and_everything_else_stays(store: Store) -> None:
    run, _, _ = trained(store)
    before, ledger = f.snapshot(run), run.ledger(exact=True)
    kept = run.replay(4).arrays()
    done = run.prune(keep_steps=2)
    assert (done.retention_step, done.groups, done.segments) == (3, 8, 16)
    assert done.freed_bytes == 16 * (1 + 8 * N)
    assert payloads(run) == {0: EMPTY, 1: EMPTY, 2: EMPTY, 3: EMPTY, 4: WHOLE, 5: WHOLE}
    f.sound(run)
    assert run.ledger(exact=True) == ledger, "the same tokens, with the same fates"
    after = f.snapshot(run)
    allowed = {"segment": {"payload"}, "sample_group": {"pruned_at"}, "run": {"retention_step"}}
    for table, rows in after.items():
        for old, new in zip(before[table], rows, strict=True):
            assert {k for k in new if new[k] != old[k]} <= allowed.get(table, set()), table
    for name, array in run.replay(4).arrays().items():
        assert np.array_equal(array, kept[name]), "what is kept is kept bit for bit"


def test_a_pruned_step_is_refused_and_says_so(store: Store) -> None:
    run, _, _ = trained(store)
    retention.prune(run, 2)
    with pytest.raises(TokensPruned, match=r"step 3 .*up to 3") as pruned:
        run.replay(3)
    assert pruned.value.limit == 3
    with pytest.raises(RewindTooFar, match=r"step 2: .* step 3\. .*samplestore rewind 3") as far:
        run.rewind(2)
    assert (far.value.step, far.value.limit) == (2, 3)
    f.sound(run)


def test_a_rewind_inside_the_window_finds_all_it_needs(store: Store) -> None:
    run, _, _ = trained(store)
    want = {step: sorted(s.sample_id for s in run.replay(step).samples) for step in (4, 5)}
    kept = run.replay(4).arrays()
    retention.prune(run, 2)
    run.rewind(3)
    for step in (4, 5):
        batch = run.batch(step, 2, timeout=5)
        assert sorted(s.sample_id for s in batch.samples) == want[step], "the very same groups, with their tokens"
        if step == 4:
            assert all(np.array_equal(array, kept[name]) for name, array in batch.arrays().items())
        batch.commit()
    f.sound(run)
    assert retention.prune(run, 2).groups == 0, "retention_step is monotone, and the same steps are kept"
    assert f.value(run, "SELECT retention_step FROM run") == 3


def test_retention_never_falls(store: Store) -> None:
    run, _, _ = trained(store)
    assert retention.prune(run, 1).retention_step == 4
    assert retention.prune(run, 4).retention_step == 4
    run.rewind(4)
    assert retention.prune(run, 3).retention_step == 4
    with pytest.raises(RewindTooFar):
        run.rewind(3)
    f.sound(run)


def test_given_up_groups_go_when_they_are_old(store: Store) -> None:
    """Dropped, and dropped for a failed sample; those of the kept steps stay whole."""
    run, worker, trainer = trained(store, steps=1, max_staleness=8)
    run.admit()
    old, young = (run.claim(worker, 2) for _ in range(2))
    for claim in [*old, *young]:
        f.add(run, claim, N)
    run.drop([old[0].group_id], "bad prompt")
    one_step_of_rest(run, worker, trainer, 1)
    one_step_of_rest(run, worker, trainer, 2)
    run.drop([young[0].group_id], "bad prompt")
    retention.prune(run, 1)
    assert {len(s["payload"]) for c in old for s in f.segments(run, c.sample_id)} == EMPTY
    assert {len(s["payload"]) for c in young for s in f.segments(run, c.sample_id)} == WHOLE
    f.sound(run)
    with pytest.raises(TokensPruned, match="requeued too"):
        run.requeue([old[0].sample_id], "try again")
    assert run.requeue([c.sample_id for c in old], "both afresh") == 2
    assert f.group(run, old[0].group_id)["pruned_at"] is None
    f.sound(run)


def one_step_of_rest(run: Run, worker: int, trainer: int, step: int) -> None:
    run.admit()
    for claim in run.claim(worker, 100):
        f.answer(run, claim, N, run.current_version)
    f.commit(run, f.lease(run, trainer, step) or 0, trainer)


def test_former_incarnations_go_and_the_present_one_stays(store: Store) -> None:
    run, worker, trainer = trained(store, steps=1, max_staleness=8)
    run.admit()
    claims = run.claim(worker, 2)
    for claim in claims:
        f.add(run, claim, N)
        run.attach(claim, "values", np.zeros(N, np.float32))
    run.requeue([claims[0].sample_id], "tool was broken")
    one_step_of_rest(run, worker, trainer, 1)
    one_step_of_rest(run, worker, trainer, 2)
    done = retention.prune(run, 0)
    assert len(f.segments(run, claims[0].sample_id)[0]["payload"]) == 1
    assert {len(s["payload"]) for s in f.segments(run, claims[1].sample_id)} == WHOLE, "its group is open"
    assert f.rows(run, "SELECT sample_id FROM segment_array") == [{"sample_id": claims[1].sample_id}]
    assert done.freed_bytes > 0
    f.sound(run)


def test_stale_groups_that_a_rewind_would_bring_back_are_kept(store: Store) -> None:
    """A group that went stale at step 5 is in the window again after a rewind to step 3."""
    run, worker, _ = trained(store, steps=4, max_staleness=1)
    run.admit()
    first = run.claim(worker, 2)
    for claim in first:
        f.answer(run, claim, N, run.current_version)
    for step in range(4, 8):
        run.publish_weights(None, step=step)
    run.admit()
    assert f.group(run, first[0].group_id)["state"] == "stale"
    retention.prune(run, 0)  # up to step 3
    assert {len(s["payload"]) for c in first for s in f.segments(run, c.sample_id)} == WHOLE
    run.rewind(3)
    assert f.group(run, first[0].group_id)["state"] == "ready"
    f.sound(run)
    # trained on meanwhile: beyond every rewind that is left
    batch = run.batch(4, 1, timeout=5)
    assert {s.sample_id for s in batch.samples} == {c.sample_id for c in first}


def test_stale_groups_beyond_every_rewind_go(store: Store) -> None:
    run, worker, trainer = trained(store, steps=2, max_staleness=1)
    run.admit()
    late = run.claim(worker, 2)
    for claim in late:
        f.answer(run, claim, N, run.current_version)
    for step in range(2, 6):
        run.publish_weights(None, step=step)
    run.admit()
    assert f.group(run, late[0].group_id)["state"] == "stale"
    one_step(run, worker, trainer, 6)
    one_step(run, worker, trainer, 7)
    retention.prune(run, 1)  # up to step 6
    assert {len(s["payload"]) for c in late for s in f.segments(run, c.sample_id)} == EMPTY
    run.rewind(6)
    assert f.group(run, late[0].group_id)["state"] == "stale"
    f.sound(run)


def test_a_prefix_that_another_group_needs_is_kept(store: Store) -> None:
    run, worker, _ = trained(store, steps=3)
    run.admit()
    child = run.claim(worker, 1)[0]
    parent = f.value(run, "SELECT min(id) FROM sample")
    f.execute(run, "UPDATE sample SET parent_id = :p, parent_upto = 5 WHERE id = :c", p=parent, c=child.sample_id)
    retention.prune(run, 0)
    assert {len(s["payload"]) for s in f.segments(run, parent)} == WHOLE
    assert payloads(run)[1] == EMPTY
    f.sound(run)


def test_a_run_without_a_committed_step_loses_nothing(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    claims = run.claim(worker, 4)
    for claim in claims:
        f.add(run, claim, N)
    run.drop([claims[0].group_id], "bad")
    done = retention.prune(run, 0)
    assert (done.retention_step, done.groups, done.segments) == (-1, 0, 0)
    with pytest.raises(InvalidSetting):
        retention.prune(run, -1)


def test_check_sees_what_must_not_be_gone(store: Store) -> None:
    run, _, _ = trained(store, steps=3)
    retention.prune(run, 1)
    f.execute(run, "UPDATE run SET retention_step = 0")
    assert {x.code for x in run.check()} == {"pruned_but_needed"}
    f.execute(run, "UPDATE run SET retention_step = 1")
    f.execute(run, "UPDATE sample_group SET pruned_at = NULL")
    assert {x.code for x in run.check()} == {"pruned_by_halves"}
    f.execute(run, "UPDATE segment SET n_tokens = n_tokens + 1 WHERE sample_id = 1")
    assert "ledger" in {x.code for x in run.check()}, "a pruned row that was changed is still found"


def test_space_is_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)  # tokens that do not compress, as real ones
    monkeypatch.setattr(f, "ids_of", lambda n: random.integers(0, 150_000, n).tolist())
    monkeypatch.setattr(f, "logprobs_of", lambda n: (-random.random(n)).tolist())
    monkeypatch.setitem(globals(), "N", 20_000)
    run, worker, trainer = trained(store, steps=8)
    before = retention.disk_bytes(run.database)
    done = retention.prune(run, 1)
    after = retention.disk_bytes(run.database)
    assert done.after == after and done.freed_bytes == 28 * 160_001
    if run.database.is_sqlite:
        assert before - after > 0.95 * done.freed_bytes, "the file shrank by nearly all"
    else:
        # what was freed lies before what is kept: it is used again, and given back when the tables are written anew
        run.admit()
        for step in range(8, 13):
            one_step(run, worker, trainer, step)
            run.admit()
        assert retention.disk_bytes(run.database) - after < 0.2 * 20 * 160_001
        run.goodbye(worker), run.goodbye(trainer)
        retention.prune(run, 1)
        retention.rewrite(run.database)
        assert before - retention.disk_bytes(run.database) > 0.8 * done.freed_bytes
    f.sound(run)


def test_a_file_from_before_shrinks_when_it_is_written_anew(store: Store) -> None:
    run, worker, trainer = trained(store, steps=8)
    with pytest.raises(RunInUse, match="samplestore reap"):
        retention.rewrite(run.database)
    run.goodbye(worker), run.goodbye(trainer)
    retention.prune(run, 0)
    before = retention.disk_bytes(run.database)
    retention.rewrite(run.database)
    assert retention.disk_bytes(run.database) <= before
    f.sound(run)


def test_workers_append_while_a_prune_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice by slice: between any two of them appends of somebody else commit."""
    run, worker, _ = trained(store, steps=8, max_staleness=8)
    run.admit()
    claim = run.claim(worker, 1)[0]
    stop, appended, failed = threading.Event(), [0], []

    def append() -> None:
        try:
            while not stop.is_set():
                f.add(run, claim, 3)
                appended[0] += 1
        except Exception as error:
            failed.append(error)

    slices = [0]

    def between(point: str) -> None:
        if point != "pruning":
            return  # an append's own
        before = appended[0]
        wait_until(lambda: failed or appended[0] > before, what="an append is acknowledged", timeout=60)
        slices[0] += 1

    monkeypatch.setattr(retention.faults, "reached", between)
    monkeypatch.setattr(retention, "SLICE_S", {True: 1e-6, False: 1e-6})  # slices of one group
    thread = threading.Thread(target=append)
    thread.start()
    try:
        done = retention.prune(run, 1)
    finally:
        stop.set()
        thread.join()
    assert not failed and slices[0] >= done.slices >= 5
    f.sound(run)


KILLED = """
import sys, samplestore
from samplestore import retention
retention.SLICE_S = {True: 1e-6, False: 1e-6}
with samplestore.open(sys.argv[1]) as store:
    run = store.existing_run("r")
    print("began", flush=True)
    getattr(retention, sys.argv[2])(*([run, 1] if sys.argv[2] == "prune" else [run]))
    print("ended", flush=True)
"""


@pytest.mark.parametrize("what", ["prune", pytest.param("remove", marks=pytest.mark.slow)])
def test_kill_9_between_slices_is_harmless(store: Store, db_url: str, processes: Processes, what: str) -> None:
    run, worker, trainer = trained(store, steps=5)
    run.goodbye(worker), run.goodbye(trainer)
    other = f.make_run(store, "other")
    f.finish_all(other, f.register(other))
    for arrival in (2, 1):
        process = processes.start(
            [sys.executable, "-c", KILLED, db_url, what], env={"SAMPLESTORE_FAULTS": f"pruning=kill@{arrival}"}
        )
        assert process.wait(60) == -9, process.log()
        f.sound(run), f.sound(other)
        if what == "prune":
            assert f.value(run, "SELECT retention_step FROM run WHERE name = 'r'") == 3
            with pytest.raises(RewindTooFar):
                run.rewind(2)
    last = processes.start([sys.executable, "-c", KILLED, db_url, what])
    assert last.wait(60) == 0, last.log()
    if what == "prune":
        assert payloads(run) == {**dict.fromkeys(range(4), EMPTY), 4: WHOLE, -1: {1 + 8 * 3}}
        f.sound(run)
    else:
        assert store.run_names() == ["other"]
    f.sound(other)


def test_a_whole_run_goes_with_all_it_has(store: Store) -> None:
    run, worker, trainer = trained(store, steps=3)
    f.lease(run, trainer, 3, groups=1)
    run.add_prompts([{"prompt_ids": [5, 6], "label": "x"}])
    other = f.make_run(store, "other")
    f.finish_all(other, f.register(other))
    before = {k: [r for r in v if r.get("run_id") == other.id] for k, v in f.snapshot(other).items()}
    with pytest.raises(RunInUse, match="2 live workers"):
        retention.remove(run)
    run.goodbye(worker), run.goodbye(trainer)
    done = retention.remove(run)
    assert done.retention_step is None and done.groups >= 6
    after = f.snapshot(other)
    assert {k: [r for r in v if r.get("run_id") == other.id] for k, v in after.items()} == before
    for table, rows in f.snapshot(other, leave_out=()).items():
        assert not [r for r in rows if r.get("run_id", other.id) != other.id], table
    assert len(after["segment"]) == 8 and store.run_names() == ["other"]
    f.sound(other)
