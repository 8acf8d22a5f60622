"""Time limits of samples and groups, attempts and back-off, poison samples, short groups."""

from __future__ import annotations

import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, LeaseLost

from ..support import factory as f


def late(run: object, sample_id: int) -> None:
    f.execute(run, "UPDATE sample SET claimed_at = claimed_at - 100 WHERE id = :i", i=sample_id)  # type: ignore[arg-type]


def test_an_attempt_past_the_sample_deadline_is_a_failure_and_its_tokens_are_kept(store: Store) -> None:
    run = f.make_run(store, prompts=1, sample_deadline_s=10.0, max_attempts=2, on_failed="short")
    worker = f.register(run)
    slow, quick = run.claim(worker, 2)
    f.add(run, slow, 3)
    assert run.reap().samples == 0, "neither is late"
    late(run, slow.sample_id)
    assert run.reap().samples == 1 and run.reap().samples == 0
    row = f.sample(run, slow.sample_id)
    assert (row["status"], row["owner"], row["failures"], row["n_tokens"]) == ("aborted", None, 1, 3)
    assert row["error"] == "passed the sample deadline of 10 s" and row["not_before"] > row["created_at"]
    with pytest.raises(LeaseLost):
        f.add(run, slow, 1)
    f.answer(run, quick)
    assert run.claim(worker, 2) == [], "it waits before it is tried again"
    f.execute(run, "UPDATE sample SET not_before = 0")
    (again,) = run.claim(worker, 2)
    assert (again.sample_id, again.n_tokens, again.failures) == (slow.sample_id, 3, 1)
    late(run, again.sample_id)
    run.reap()
    assert f.sample(run, slow.sample_id)["status"] == "failed"
    assert f.states(run) == ["ready"], "delivered short"
    assert [e["reason"] for e in f.events(run, "fail")] == ["passed the sample deadline of 10 s"] * 2
    f.sound(run)


@pytest.mark.parametrize("max_attempts", [1, 5])
def test_the_owner_learns_of_the_deadline_from_whatever_it_writes_next(store: Store, max_attempts: int) -> None:
    """It has not let go itself: no end of its own is a repetition, not even of the same text."""
    run = f.make_run(store, prompts=1, sample_deadline_s=10.0, max_attempts=max_attempts, on_failed="short")
    slow, _ = run.claim(f.register(run), 2)
    f.add(run, slow, 3)
    late(run, slow.sample_id)
    assert run.reap().samples == 1
    before = f.snapshot(run)
    error = f.sample(run, slow.sample_id)["error"]
    for end in (
        lambda: run.release(slow, "weights"),
        lambda: run.fail(slow, "CUDA error"),
        lambda: run.fail(slow, error),
        lambda: run.fail(slow, error, prompt_refused=True),
        lambda: run.finish(slow),
    ):
        with pytest.raises(LeaseLost):
            end()
    assert f.snapshot(run) == before


def test_a_deadline_leaves_an_earlier_end_to_be_repeated(store: Store) -> None:
    run = f.make_run(store, prompts=1, sample_deadline_s=10.0, max_attempts=5)
    worker = f.register(run)
    first = run.claim(worker, 2)[0]
    f.add(run, first, 3)
    run.release(first, "weights")
    again = run.claim(worker, 1)[0]
    assert again.sample_id == first.sample_id
    late(run, again.sample_id)
    assert run.reap().samples == 1
    before = f.snapshot(run)
    run.release(first, "weights")
    with pytest.raises(LeaseLost):
        run.release(again, "weights")
    assert f.snapshot(run) == before


def test_samples_of_many_groups_are_late_at_once(store: Store) -> None:
    run = f.make_run(store, prompts=4, sample_deadline_s=10.0, max_attempts=1)
    worker = f.register(run)
    claims = run.claim(worker, 8)
    for claim in claims[::2]:
        late(run, claim.sample_id)
    assert run.reap().samples == 4
    assert f.states(run) == ["dropped"] * 4
    with pytest.raises(LeaseLost):
        f.add(run, claims[1], 1)
    f.sound(run)


def test_without_a_deadline_nothing_is_late(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    (claim, _) = run.claim(f.register(run), 2)
    late(run, claim.sample_id)
    assert run.reap().samples == 0


@pytest.mark.parametrize("bad", [0, -1, "10", float("nan"), True])
def test_a_deadline_is_seconds(store: Store, bad: object) -> None:
    with pytest.raises(InvalidSetting, match="sample_deadline_s"):
        store.run("r", sample_deadline_s=bad)
