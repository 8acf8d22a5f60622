"""Batches: leased whole, settled once, and given back by a rewind exactly where the checkpoint has not seen them."""

from __future__ import annotations

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import (
    BatchTimeout,
    InvalidSetting,
    LeaseLost,
    MissingLogprobs,
    RewindTooFar,
    SampleStoreError,
    StepAlreadyCommitted,
    StepHeld,
    WorkerDead,
    WorkerFailed,
)
from samplestore.run import Run

from ..support import factory as f


def ready(store: Store, prompts: int = 4, **settings: object) -> tuple[Run, int, int]:
    run = f.make_run(store, prompts=prompts, **settings)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    return run, worker, trainer


def test_a_batch_takes_the_first_groups_in_order(store: Store) -> None:
    run, _, trainer = ready(store)
    first, second = f.lease(run, trainer, 0), f.lease(run, trainer, 1)
    assert first is not None and second is not None
    assert (f.groups_of(run, first), f.groups_of(run, second)) == ([0, 1], [2, 3])
    assert f.states(run) == ["leased"] * 4
    assert f.lease(run, trainer, 2) is None
    f.sound(run)


def test_too_few_groups_lease_nothing(store: Store) -> None:
    run, _, trainer = ready(store, 3)
    assert f.lease(run, trainer, 0, 4) is None
    assert f.states(run) == ["ready"] * 3
    assert f.rows(run, "SELECT id FROM batch") == []


@pytest.mark.parametrize("groups", [0, -1, 1.5, True])
def test_a_batch_has_groups(store: Store, groups: int) -> None:
    run, _, trainer = ready(store, 1)
    with pytest.raises(InvalidSetting, match="groups"):
        f.lease(run, trainer, 0, groups)
    with pytest.raises(InvalidSetting, match="step"):
        f.lease(run, trainer, -1, 1)
    with pytest.raises(InvalidSetting, match="staleness"):
        f.lease(run, trainer, 0, 1, staleness="middle")


def test_commit_settles_once(store: Store) -> None:
    run, _, trainer = ready(store)
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.commit(run, batch, trainer)
    before = f.snapshot(run)
    f.commit(run, batch, trainer)
    assert f.snapshot(run) == before
    assert f.states(run) == ["consumed", "consumed", "ready", "ready"]
    assert f.fates(run) == {"consumed": 12, "ready": 12}
    with pytest.raises(StepAlreadyCommitted, match=r"run\.replay"):
        f.lease(run, trainer, 0)
    with pytest.raises(LeaseLost):
        f.release(run, batch, trainer)
    f.sound(run)


def test_release_gives_all_back(store: Store) -> None:
    run, _, trainer = ready(store)
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.release(run, batch, trainer, "out of memory\x00")
    f.release(run, batch, trainer)
    assert f.states(run) == ["ready"] * 4
    with pytest.raises(LeaseLost):
        f.commit(run, batch, trainer)
    again = f.lease(run, trainer, 0)
    assert again not in (None, batch)
    f.sound(run)


def test_a_step_belongs_to_one_trainer(store: Store) -> None:
    run, _, trainer = ready(store)
    other = f.register(run, "trainer")
    batch = f.lease(run, trainer, 0)
    assert f.lease(run, trainer, 0) == batch, "get or create"
    with pytest.raises(StepHeld):
        f.lease(run, other, 0)
    assert batch is not None
    for write in (f.commit, f.release):
        with pytest.raises(LeaseLost):
            write(run, batch, other)
    f.kill(run, trainer)
    with pytest.raises(WorkerDead):
        f.lease(run, trainer, 1)
    assert f.lease(run, other, 0) is not None


def test_the_window_is_counted_at_the_lease(store: Store) -> None:
    run, _, trainer = ready(store, 4, max_staleness=1, stale="mask")
    run.publish_weights(step=1)
    assert f.lease(run, trainer, 0, 1, stale="skip") is not None
    run.publish_weights(step=2)
    assert f.lease(run, trainer, 1, 1, stale="skip") is None
    assert f.lease(run, trainer, 1, 1, stale="mask") is not None
    assert [r["staleness"] for r in f.rows(run, "SELECT staleness FROM batch_group ORDER BY batch_id")] == [1, 2]


def test_the_batch_is_what_was_stored(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"])
    worker = f.register(run)
    run.publish_weights(step=1)
    a, b = run.claim(worker, 2)
    f.add(run, a, 2, 0)
    run.append(a, [7, 8], None, None, kind="environment")
    f.add(run, a, 1, 1, "stop")
    run.finish(a)
    f.answer(run, b, 4, 1, "length")
    for stage in run.claim_stages(worker, 2):
        run.score(stage, 0.5)
    with run.batch(step=0, groups=1, timeout=0) as batch:
        (view,) = batch.groups
        one, two = view.samples
        assert one.prompt_ids.tolist() == [1, 2, 0]
        assert one.response_ids.tolist() == [*f.ids_of(2), 7, 8, *f.ids_of(1)]
        assert one.loss_mask.tolist() == [1, 1, 0, 0, 1]
        assert one.versions.tolist() == [0, 0, -1, -1, 1]
        expected = np.array([*f.logprobs_of(2), 0, 0, *f.logprobs_of(1)], np.float32)
        assert np.array_equal(one.logprobs, expected)
        assert (one.reward, two.status, two.finish_reason, two.label) == (0.5, "truncated", "length", "0")
        assert (batch.n_groups, batch.n_samples, batch.n_tokens) == (1, 2, 9)
        arrays = batch.arrays()
        assert arrays["cu_seqlens"].tolist() == [0, 8, 15]
    assert f.states(run) == ["consumed"]
    again = run.replay(0)
    assert [s.sample_id for s in again.samples] == [a.sample_id, b.sample_id]
    with pytest.raises(SampleStoreError, match="read-only"):
        again.commit()
    f.sound(run)


def test_an_error_in_the_block_releases(store: Store) -> None:
    run, _, _ = ready(store, 2)
    with pytest.raises(ZeroDivisionError):
        with run.batch(step=0, groups=2, timeout=0):
            raise ZeroDivisionError("x\x00y")
    assert f.states(run) == ["ready"] * 2
    assert "ZeroDivisionError" in f.value(run, "SELECT reason FROM batch")


def test_masking_is_derived_and_never_stored(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, stale="mask", max_staleness=1)
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, 2, 0)
    for step in (1, 2):
        run.publish_weights(step=step)
    f.add(run, claim, 3, 2, "stop")
    run.finish(claim)
    before = [dict(s) for s in f.segments(run, claim.sample_id)]
    with run.batch(step=0, groups=1, timeout=0) as batch:
        assert batch.samples[0].loss_mask.tolist() == [0, 0, 1, 1, 1]
    for step in (3, 4):
        run.publish_weights(step=step)
    assert run.replay(0).samples[0].loss_mask.tolist() == [0, 0, 1, 1, 1], "as it was trained"
    assert f.segments(run, claim.sample_id) == before


def test_logprobs_that_are_missing_are_refused_unless_accepted(store: Store) -> None:
    run, _, _ = ready(store, 1)
    f.execute(run, "UPDATE segment SET payload = :p, n_tokens = 3", p=bytes([2]) + np.arange(3, dtype="<i4").tobytes())
    with pytest.raises(MissingLogprobs, match="need_logprobs=False"):
        with run.batch(step=0, groups=1, timeout=0) as batch:
            _ = batch.groups
    with run.batch(step=0, groups=1, timeout=0, need_logprobs=False) as batch:
        assert batch.samples[0].logprobs.tolist() == [0.0] * 3


def test_a_timeout_says_why(store: Store) -> None:
    run = store.run("empty", groups_per_step=3)
    with pytest.raises(BatchTimeout, match=r"0 of 3 groups are ready.*no prompts"):
        run.batch(step=0, timeout=0.05)


def test_a_worker_s_fatal_error_reaches_the_waiting_trainer(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    run.goodbye(worker, "no engine answers\x00")
    with pytest.raises(WorkerFailed, match="no engine answers"):
        run.batch(step=0, timeout=20)


# -- rewind


def trained(store: Store, steps: int = 4, **settings: object) -> tuple[Run, int, int]:
    """A run that has trained `steps` steps of one group, each followed by its weights; step s made version s + 1."""
    run = f.make_run(store, prompts=10, groups_per_step=1, **{"max_staleness": 1, **settings})
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.train(run, worker, trainer, steps)
    return run, worker, trainer


def consumed(run: Run) -> dict[int, list[int]]:
    """Step -> group numbers, of the batches that count."""
    found = f.rows(
        run,
        "SELECT b.step, g.number FROM batch b JOIN batch_group bg ON bg.batch_id = b.id "
        "JOIN sample_group g ON g.id = bg.group_id WHERE b.state = 'committed' ORDER BY b.step, g.number",
    )
    told: dict[int, list[int]] = {}
    for r in found:
        told.setdefault(r["step"], []).append(r["number"])
    return told


def test_rewind_returns_exactly_what_the_checkpoint_has_not_seen(store: Store) -> None:
    run, _, trainer = trained(store)
    before = consumed(run)
    held = f.lease(run, trainer, 4, 1)
    restored = run.rewind(1)
    assert (restored.step, restored.path, restored.parent, restored.timeline, restored.version) == (1, "/w/1", 2, 1, 5)
    assert run.current_version == 5
    assert consumed(run) == {s: before[s] for s in (0, 1)}
    assert f.value(run, "SELECT count(*) FROM batch WHERE state = 'rewound'") == 2
    if held is not None:
        with pytest.raises(LeaseLost):
            f.commit(run, held, trainer)
    f.sound(run)
    # what comes next: the groups of steps 2 and 3 first, none skipped, none doubled
    for step in (2, 3):
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        assert f.groups_of(run, batch) == before[step]
        f.commit(run, batch, trainer)
    assert consumed(run) == before
    f.sound(run)


@pytest.mark.parametrize("stale", ["regenerate", "mask"])
def test_a_rewind_further_than_the_window_skips_nothing(store: Store, stale: str) -> None:
    """Where the run's policy closes nothing. "expire" closes what is now beyond the window, and says so."""
    run, worker, trainer = trained(store, 6, stale=stale)
    run.admit()
    f.finish_all(run, worker)  # one that is ready, and no batch has taken
    before = consumed(run)
    run.rewind(0)
    assert "stale" not in f.states(run)
    f.sound(run)
    for step in range(1, 6):
        f.finish_all(run, worker)
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.publish_weights(path=f"/again/{step}", step=step)
    assert consumed(run) == before
    f.sound(run)


def test_a_rewind_to_the_start_returns_everything(store: Store) -> None:
    run, _, _trainer = trained(store, 2)
    restored = run.rewind(-1)
    assert (restored.step, restored.parent) == (None, 0)
    assert consumed(run) == {}
    f.sound(run)


def test_steps_that_the_checkpoint_contains_stay_settled(store: Store) -> None:
    run, _, trainer = trained(store, 3)
    run.rewind(1)
    for step in (0, 1):
        with pytest.raises(StepAlreadyCommitted):
            f.lease(run, trainer, step, 1)
        assert run.replay(step).step == step
    with pytest.raises(SampleStoreError, match="no committed batch of step 2"):
        run.replay(2)


def test_versions_are_never_reused_and_staleness_counts_along_the_timeline(store: Store) -> None:
    run, _worker, _trainer = trained(store, 4, max_staleness=2, stale="mask")
    run.rewind(1)  # version 5 = weights of version 2; versions 3 and 4 lie on the branch that was left
    run.publish_weights(path="/w/2b", step=2)
    assert [v.version for v in run.weight_versions()] == [0, 1, 2, 3, 4, 5, 6]
    import sqlalchemy as sa

    from samplestore.statements import staleness

    table = staleness.version
    with run.database.reading() as connection:
        lag = sa.select(table.c.version, staleness.behind(run.id, table.c.version)).order_by(table.c.version)
        # 6 is one update after 5 (= 2); 3 is one update from 2 on the other branch: two steps apart
        assert {version: n for version, n in connection.execute(lag)} == {0: 3, 1: 2, 2: 1, 3: 2, 4: 3, 5: 1, 6: 0}


def test_a_rewind_brings_stale_groups_back_into_the_window(store: Store) -> None:
    run, worker, _trainer = trained(store, 2, max_staleness=0)
    run.admit()
    f.finish_all(run, worker)  # made by version 2
    run.publish_weights(path="/w/x", step=2)
    assert f.states(run)[-1] == "stale"
    run.rewind(1)
    assert f.states(run)[-1] == "ready", "version 2 is current again"
    assert f.fates(run).get("stale", 0) == 0
    f.sound(run)


def test_a_rewind_twice_to_the_same_step(store: Store) -> None:
    run, _, trainer = trained(store, 3)
    before = consumed(run)
    for _ in range(3):
        run.rewind(0)
        f.sound(run)
        assert consumed(run) == {0: before[0]}
        batch = f.lease(run, trainer, 1, 1)
        assert batch is not None
        assert f.groups_of(run, batch) == before[1]
        f.commit(run, batch, trainer)
        run.publish_weights(path="/w/again", step=1)
    assert run.rewind(1).path == "/w/again"


def test_a_rewind_below_what_was_pruned_is_refused(store: Store) -> None:
    run, _, _ = trained(store, 3)
    f.execute(run, "UPDATE run SET retention_step = 1")
    before = f.snapshot(run)
    with pytest.raises(RewindTooFar, match=r"cannot rewind to step 0.* 1$"):
        run.rewind(0)
    assert f.snapshot(run) == before
    run.rewind(1)


def test_work_in_flight_survives_a_rewind(store: Store) -> None:
    run, worker, _ = trained(store, 2, max_staleness=3)
    run.admit()
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, 3, run.current_version)
    run.rewind(0)
    f.add(run, claim, 2, run.current_version)
    assert f.sample(run, claim.sample_id)["n_tokens"] == 5
    f.sound(run)
