"""simulate: another window over a recorded run, measured as it was at each lease."""

from __future__ import annotations

from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting
from samplestore.run import Run

from ..support import factory as f

Parts = list[tuple[int, int]]  # (weight version, tokens)


def recorded(store: Store, steps: list[list[Parts]], policy: dict[str, Any] | None = None) -> Run:
    """A run in which step i trained on one group, whose samples have these parts, when version i was current."""
    run = f.make_run(store, prompts=len(steps), samples_per_prompt=len(steps[0]), groups_per_step=1, max_staleness=9)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step, samples in enumerate(steps):
        while run.current_version < step:
            run.publish_weights(step=run.current_version)
        claims = sorted(run.claim(worker, len(samples)), key=lambda c: c.index)
        for claim, parts in zip(claims, samples, strict=True):
            for at, n in parts:
                f.add(run, claim, n, at)
            run.finish(claim)
        batch = f.lease(run, trainer, step, groups=1, **(policy or {}))
        assert batch is not None
        f.commit(run, batch, trainer)
    run.publish_weights(step=99)  # what is current today must not matter
    return run


def test_what_a_narrower_window_would_have_kept_back(store: Store) -> None:
    run = recorded(store, [[[(0, 4)], [(0, 2)]], [[(0, 3), (1, 5)], [(1, 2)]], [[(0, 6)], [(1, 1), (2, 1)]]])
    before = f.snapshot(run, leave_out=())
    told = run.simulate(1)
    assert f.snapshot(run, leave_out=()) == before, "it only reads"
    assert [s["by_staleness"] for s in told["steps"]] == [{"0": 1}, {"1": 1}, {"2": 1}]
    last = told["steps"][2]
    assert (last["groups_beyond"], last["tokens_beyond"], last["tokens_masked"]) == (1, 8, 6)
    total = told["total"]
    assert (total["groups"], total["tokens"], total["groups_beyond"], total["steps_short"]) == (3, 24, 1, 1)
    none = run.simulate(0)["total"]
    assert (none["groups_beyond"], none["tokens_beyond"], none["tokens_masked"]) == (2, 18, 10)
    assert run.simulate(2)["total"]["groups_beyond"] == 0


def test_it_counts_as_the_lease_did(store: Store) -> None:
    """For a batch by the run's own settings the numbers are those that were stored with it."""
    run = recorded(store, [[[(0, 4)]], [[(0, 3), (1, 1)]], [[(0, 1), (2, 3)]]])
    kept = f.rows(
        run, "SELECT b.step, g.staleness FROM batch_group g JOIN batch b ON b.id = g.batch_id ORDER BY b.step"
    )
    told = run.simulate(9)["steps"]
    assert [(s["step"], int(next(iter(s["by_staleness"])))) for s in told] == [
        (k["step"], k["staleness"]) for k in kept
    ]
    mean = [next(iter(s["by_staleness"])) for s in run.simulate(9, staleness_mode="mean")["steps"]]
    assert mean == ["0", "0.75", "0.5"]
    newest = [next(iter(s["by_staleness"])) for s in run.simulate(9, staleness_mode="newest")["steps"]]
    assert newest == ["0", "0", "0"]


def test_a_masks_counterfactual_is_what_the_batch_masks(store: Store) -> None:
    """Held against real batches by stale='mask': the same number of tokens in every step."""
    steps: list[list[Parts]] = [[[(0, 4)]], [[(0, 3), (1, 2)]], [[(0, 3), (1, 2), (2, 1)]]]
    run = recorded(store, steps, policy={"max_staleness": 1, "stale": "mask"})
    told = run.simulate(1, stale="mask")["steps"]
    masked = [sum(int(m == 0) for s in run.replay(step).samples for m in s.loss_mask) for step in range(3)]
    assert [s["tokens_masked"] for s in told] == masked == [0, 0, 3]


def test_nothing_committed_is_no_error_and_a_wrong_option_is(store: Store) -> None:
    run = f.make_run(store)
    assert run.simulate(1)["total"]["groups"] == 0
    with pytest.raises(InvalidSetting):
        run.simulate(-1)
    with pytest.raises(InvalidSetting, match="oldest"):
        run.simulate(1, staleness_mode="worst")


def test_what_the_run_has_closed_itself_is_told(store: Store) -> None:
    run = f.make_run(store, prompts=2, samples_per_prompt=1, groups_per_step=2, max_staleness=0)
    f.finish_all(run, f.register(run))
    run.publish_weights()
    assert f.states(run) == ["stale", "stale"]
    assert run.simulate(3)["closed_by_the_run"] == 2


def test_versions_that_are_equally_far_behind_are_added_up(store: Store) -> None:
    """After a rewind the restored weights have a version of their own, as far along as the one they stand for."""
    run = f.make_run(store, prompts=2, samples_per_prompt=1, groups_per_step=1, max_staleness=3)
    worker = f.register(run)
    run.publish_weights(step=0)
    f.answer(run, run.claim(worker, 1)[0], 3, run.current_version)
    with run.batch(step=1, timeout=10):
        pass
    run.publish_weights(step=1)
    (claim,) = run.claim(worker, 1)
    before = run.current_version
    f.add(run, claim, 5, before)
    restored = run.rewind(1).version
    assert restored != before
    f.answer(run, claim, 7, restored)
    with run.batch(step=2, timeout=10) as batch:
        trained = sum(int(s.loss_mask.sum()) for s in batch.samples)
    assert [s["tokens"] for s in run.simulate(0)["steps"]] == [3, trained] == [3, 12]


def test_groups_that_no_weights_of_the_run_made_are_counted(store: Store) -> None:
    """Imported samples lie in every window, and nothing masks them."""
    run = store.run("r", samples_per_prompt=1, groups_per_step=2, max_staleness=0)
    rows = [{"prompt_ids": [1, i], "response_ids": [7, 8], "log_probs": [-0.5, -0.5]} for i in range(2)]
    rows[1]["loss_mask"] = [0, 0]  # nothing of it is trained on
    run.import_samples(rows)
    with run.batch(step=1, timeout=10) as batch:
        trained = sum(int(s.loss_mask.sum()) for s in batch.samples)
    for mode in ("oldest", "mean", "newest"):
        total = run.simulate(0, staleness_mode=mode)["total"]
        assert (total["groups"], total["tokens"], total["by_staleness"]) == (2, trained, {"0": 2})
        assert (total["groups_beyond"], total["tokens_masked"], total["groups_all_masked"]) == (0, 0, 0)
