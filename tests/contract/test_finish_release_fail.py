"""finish, release and fail: how an ownership ends, and what that does to the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import InvalidTransition, LeaseLost, NotInRun
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import samples
from samplestore.verbs.together import Write, perform

from ..support import factory as f


def test_the_last_finish_makes_the_group_ready(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    a, b = run.claim(f.register(run), 2)
    f.answer(run, a, 4)
    assert f.group(run, a.group_id)["state"] == "open"
    assert f.fates(run) == {"awaiting_stage": 4}
    f.answer(run, b, 6, reason="length")
    group = f.group(run, a.group_id)
    assert (group["state"], group["n_open"], group["n_tokens"], group["oldest_version"]) == ("ready", 0, 10, 0)
    assert (f.sample(run, a.sample_id)["status"], f.sample(run, b.sample_id)["status"]) == ("completed", "truncated")
    assert f.sample(run, a.sample_id)["owner"] is None
    assert f.fates(run) == {"ready": 10}
    f.sound(run)


@pytest.mark.parametrize(
    ("stored", "given", "status", "expected"),
    [
        ("stop", None, None, "completed"),
        ("length", None, None, "truncated"),
        (None, "length", None, "truncated"),
        ("length", None, "completed", "completed"),
        ("stop", None, "truncated", "truncated"),
    ],
)
def test_the_status_follows_the_finish_reason(
    store: Store, stored: str | None, given: str | None, status: str | None, expected: str
) -> None:
    run = f.make_run(store, prompts=1)
    claim, _ = run.claim(f.register(run), 2)
    f.add(run, claim, 2, 0, stored)
    run.finish(claim, status, finish_reason=given)
    assert f.sample(run, claim.sample_id)["status"] == expected


def test_release_keeps_tokens_and_counts_no_failure(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.add(run, a, 5)
    run.release(a, "weights")
    run.release(b, "weights")
    assert [
        (r["status"], r["owner"], r["failures"], r["n_aborts"])
        for r in (f.sample(run, a.sample_id), f.sample(run, b.sample_id))
    ] == [
        ("aborted", None, 0, 1),
        ("pending", None, 0, 0),
    ]
    assert f.fates(run) == {"resumable": 5}
    assert f.group(run, a.group_id)["n_open"] == 2
    again = run.claim(worker, 1)[0]
    assert f.tokens_of(again) == f.ids_of(5)
    assert f.fates(run) == {"in_flight": 5}
    f.sound(run)


def test_an_abort_is_counted_once(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    claim, _ = run.claim(f.register(run), 2)
    f.add(run, claim, 5, 0, "abort")
    run.release(claim, "weights")
    assert f.sample(run, claim.sample_id)["n_aborts"] == 1


def test_a_failure_is_counted_and_resumes_from_the_tokens(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=3)
    worker = f.register(run)
    claim = run.claim(worker, 2)[0]
    f.add(run, claim, 2)
    assert run.fail(claim, "engine said 500\x00", backoff_s=0.0) == "aborted"
    row = f.sample(run, claim.sample_id)
    assert (row["failures"], row["error"]) == (1, "engine said 500\\x00")
    again = run.claim(worker, 1)[0]
    assert (again.sample_id, again.n_tokens, again.failures) == (claim.sample_id, 2, 1)
    f.answer(run, again)
    assert f.sample(run, claim.sample_id)["error"] is None
    f.sound(run)


def test_backoff_doubles(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=9)
    worker = f.register(run)
    waits = []
    for _ in range(3):
        claim = run.claim(worker, 1)[0]
        run.fail(claim, "no", backoff_s=100.0)
        row = f.sample(run, claim.sample_id)
        waits.append(row["not_before"] - row["claimed_at"])
        f.execute(run, "UPDATE sample SET not_before = 0 WHERE id = :i", i=claim.sample_id)
        f.execute(run, "UPDATE sample SET priority = -1 WHERE id = :i", i=claim.sample_id)
    assert [round(w / 100) for w in waits] == [1, 2, 4]


def test_the_last_failure_drops_the_group_and_takes_it_from_others(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=1, samples_per_prompt=3)
    a, b, c = run.claim(f.register(run), 3)
    f.answer(run, a, 2)
    f.add(run, b, 3)
    f.add(run, c, 4)
    assert run.fail(c, "broken") == "failed"
    group = f.group(run, a.group_id)
    assert (group["state"], group["reason"], group["n_failed"]) == ("dropped", "sample failed", 1)
    assert f.fates(run) == {"dropped": 5, "failed": 4}
    assert run.ledger()["dropped_by_reason"] == {"sample failed": 5}
    with pytest.raises(LeaseLost):
        f.add(run, b)
    assert run.claim(b.owner, 9) == []
    assert f.sample(run, c.sample_id)["error"] == "broken"
    f.sound(run)


def test_on_failed_short_delivers_the_rest(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=1, on_failed="short", samples_per_prompt=3)
    a, b, c = run.claim(f.register(run), 3)
    run.fail(c, "broken")
    f.answer(run, a, 2)
    f.answer(run, b, 3)
    assert f.states(run) == ["ready"]
    trainer = f.register(run, "trainer")
    batch = f.lease(run, trainer, 0, 1)
    assert batch is not None
    assert f.value(run, "SELECT n_samples FROM batch") == 2
    f.commit(run, batch, trainer)
    assert {s.sample_id for s in run.replay(0).samples} == {a.sample_id, b.sample_id}
    f.sound(run)


def test_a_group_whose_samples_all_failed_is_dropped(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=1, on_failed="short")
    for claim in run.claim(f.register(run), 2):
        f.add(run, claim, 1)
        run.fail(claim, "broken")
    assert f.states(run) == ["dropped"]
    assert f.value(run, "SELECT reason FROM sample_group") == "all samples failed"
    f.sound(run)


def test_drop_closes_the_group(store: Store) -> None:
    run = f.make_run(store, prompts=2)
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.answer(run, a, 2)
    f.add(run, b, 3)
    assert run.drop([a.group_id], "bad\x00 prompt " * 500) == 1
    assert f.states(run) == ["dropped", "open"]
    assert f.fates(run) == {"dropped": 5}
    with pytest.raises(LeaseLost):
        run.finish(b)
    assert {c.group_number for c in run.claim(worker, 9)} == {1}
    assert run.drop([a.group_id], "again") == 1, "repeating it is harmless"
    assert len(f.events(run, "dropped")) == 1
    f.sound(run)


def test_groups_of_a_trainer_are_not_dropped(store: Store) -> None:
    run = f.make_run(store, prompts=2)
    f.finish_all(run, f.register(run))
    trainer = f.register(run, "trainer")
    batch = f.lease(run, trainer, 0)
    ids = [r["id"] for r in f.rows(run, "SELECT id FROM sample_group ORDER BY id")]
    before = f.snapshot(run)
    for write in (lambda: run.drop(ids[:1], "no"), lambda: run.requeue([1], "no")):
        with pytest.raises(InvalidTransition, match="leased"):
            write()
    assert f.snapshot(run) == before
    assert batch is not None
    f.commit(run, batch, trainer)
    with pytest.raises(InvalidTransition, match="consumed"):
        run.drop(ids[:1], "no")


def test_requeue_starts_afresh_and_supersedes(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"])
    worker = f.register(run)
    claims = f.finish_all(run, worker, 3, reward=0.5)
    assert f.states(run) == ["ready"]
    assert run.requeue([claims[0].sample_id], "look again") == 1
    row = f.sample(run, claims[0].sample_id)
    fresh = ("pending", 1, 0, 0, None, None, None, 0)
    names = ("status", "incarnation", "n_tokens", "n_segments", "reward", "version_min", "finish_reason", "failures")
    assert tuple(row[n] for n in names) == fresh
    assert f.states(run) == ["open"]
    assert f.fates(run) == {"superseded": 3, "awaiting_stage": 3}
    f.sound(run)
    f.finish_all(run, worker, 4, reward=1.5)
    assert f.states(run) == ["ready"]
    assert f.fates(run) == {"superseded": 3, "ready": 7}
    assert f.value(run, "SELECT reward_mean FROM sample_group") == 1.0
    f.sound(run)


def test_requeue_brings_a_dropped_group_back(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=1, stages=["reward"])
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.answer(run, a, 2)
    f.add(run, b, 1)
    run.fail(b, "broken")
    assert f.states(run) == ["dropped"]
    run.requeue([b.sample_id], "fixed")
    assert f.states(run) == ["open"]
    f.sound(run)
    f.finish_all(run, worker, 5)
    assert f.states(run) == ["ready"]
    assert f.fates(run) == {"ready": 7, "superseded": 1}
    f.sound(run)


def test_requeue_of_an_owned_sample_takes_it_away(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    claim, _ = run.claim(f.register(run), 2)
    f.add(run, claim, 2)
    run.requeue([claim.sample_id], "again")
    for write in (lambda: run.finish(claim), lambda: f.add(run, claim), lambda: run.release(claim, "x")):
        with pytest.raises(LeaseLost):
            write()
    f.sound(run)


def test_ids_of_other_runs_are_refused(store: Store) -> None:
    run, other = f.make_run(store), f.make_run(store, "other")
    before = f.snapshot(run)
    theirs = f.value(run, "SELECT min(id) FROM sample WHERE run_id = :r", r=other.id)
    group = f.value(run, "SELECT min(id) FROM sample_group WHERE run_id = :r", r=other.id)
    for write in (
        lambda: run.requeue([theirs], "x"),
        lambda: run.drop([group], "x"),
        lambda: run.drop([10**9], "x"),
        lambda: run.requeue([10**9], "x"),
    ):
        with pytest.raises(NotInRun):
            write()
    assert f.snapshot(run) == before


def test_one_end_after_another_at_the_same_attempt_is_refused(store: Store) -> None:
    """Only the same write again is harmless."""
    run = f.make_run(store, prompts=1, max_attempts=5)
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.answer(run, a)
    for late in (lambda: run.release(a, "x"), lambda: run.fail(a, "x")):
        with pytest.raises(LeaseLost):
            late()
    f.add(run, b)
    run.release(b, "x")
    with pytest.raises(LeaseLost):
        run.finish(b)
    f.sound(run)


@pytest.mark.parametrize("gave_back", ["fail", "release"])
def test_a_finish_of_what_was_given_back_and_then_given_up_is_refused(store: Store, gave_back: str) -> None:
    """Its worker let go at this attempt, and it is failed: so is a finished sample whose reward could not be had."""
    run = f.make_run(store, prompts=1, on_straggler="drop", group_deadline_s=10.0)
    a, b = run.claim(f.register(run), 2)
    f.answer(run, a)
    f.add(run, b)
    getattr(run, gave_back)(b, "x")
    f.execute(run, "UPDATE sample_group SET created_at = created_at - 100")
    run.reap()
    assert f.sample(run, b.sample_id)["status"] == "failed"
    before = f.snapshot(run)
    with pytest.raises(LeaseLost):
        run.finish(b)
    assert f.snapshot(run) == before


def test_a_finish_is_repeated_after_its_reward_could_not_be_had(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"], max_attempts=1)
    worker = f.register(run)
    a = run.claim(worker, 2)[0]
    f.answer(run, a)
    (stage,) = run.claim_stages(worker, 1)
    run.fail_stage(stage, "no reward")
    assert f.sample(run, a.sample_id)["status"] == "failed"
    before = f.snapshot(run)
    run.finish(a)
    assert f.snapshot(run) == before


def ends(run: Run, claim: Claim) -> dict[str, Callable[[], object]]:
    """Every call that ends a claim, and what makes it another one."""
    return {
        "finish": lambda: run.finish(claim),
        "finish, length": lambda: run.finish(claim, finish_reason="length"),
        "truncated": lambda: run.finish(claim, "truncated"),
        "release": lambda: run.release(claim, "weights"),
        "fail": lambda: run.fail(claim, "CUDA error"),
        "fail, another error": lambda: run.fail(claim, "out of memory"),
        "fail, refused": lambda: run.fail(claim, "CUDA error", prompt_refused=True),
    }


@pytest.mark.parametrize("max_attempts", [1, 5])
@pytest.mark.parametrize("first", list(ends(None, None)))  # type: ignore[arg-type]
def test_only_the_very_same_end_again_passes(store: Store, first: str, max_attempts: int) -> None:
    """Another one that passed would be acknowledged and not done: a failure not counted, a refused prompt served."""
    run = f.make_run(store, prompts=1, max_attempts=max_attempts, on_failed="short")
    claim, _ = run.claim(f.register(run), 2)
    f.add(run, claim, 2, 0, "stop")
    calls = ends(run, claim)
    said = calls[first]()
    before = f.snapshot(run)
    for name, call in calls.items():
        # a finish that gives no reason takes the stored one
        if name == first or (first == "finish, length" and name in ("finish", "truncated")):
            assert call() == said, "its acknowledgement was lost"
            continue
        with pytest.raises(LeaseLost):
            call()
            pytest.fail(f"{name} passed after {first}")
    assert f.snapshot(run) == before
    f.sound(run)


def test_a_refused_prompt_without_tokens_is_not_swallowed_by_a_release(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    a, b = run.claim(f.register(run), 2)
    run.release(a, "weights")
    run.fail(b, "too long")
    for claim in (a, b):
        with pytest.raises(LeaseLost):
            run.fail(claim, "too long", prompt_refused=True)
    assert f.states(run) == ["open"]


def test_a_release_is_repeated_whatever_came_after_it(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    worker = f.register(run)
    a = run.claim(worker, 2)[0]
    f.add(run, a)
    run.release(a, "weights")
    again = run.claim(worker, 1)[0]
    assert again.sample_id == a.sample_id
    run.release(a, "weights")
    assert f.sample(run, a.sample_id)["owner"] == worker
    with pytest.raises(LeaseLost):
        run.fail(a, "CUDA error")
    run.drop([a.group_id], "bad prompt")
    run.release(a, "weights")
    run.requeue([a.sample_id], "fixed")
    with pytest.raises(LeaseLost):
        run.release(a, "weights")  # of a life that is over


@pytest.mark.parametrize(
    ("status", "reason"),
    [(None, None), ("completed", None), ("truncated", None), (None, "length"), ("completed", "length")],
)
def test_only_the_same_finish_is_repeated_after_its_reward_could_not_be_had(
    store: Store, status: str | None, reason: str | None
) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"], max_attempts=1, on_failed="short")
    worker = f.register(run)
    a = run.claim(worker, 2)[0]
    f.add(run, a, 3, 0, "stop")
    run.finish(a, status, finish_reason=reason)
    was = f.sample(run, a.sample_id)["status"]
    run.fail_stage(run.claim_stages(worker, 1)[0], "no reward")
    assert f.sample(run, a.sample_id)["status"] == "failed"
    before = f.snapshot(run)
    run.finish(a, status, finish_reason=reason)
    other = "completed" if was == "truncated" else "truncated"
    for late in (
        lambda: run.finish(a, other),
        lambda: run.finish(a, was, finish_reason="another"),
        lambda: run.fail(a, "no reward"),
        lambda: run.fail(a, "engine died"),
        lambda: run.release(a, "x"),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert f.snapshot(run) == before


def test_ends_in_one_commit_are_repeated_alike(store: Store) -> None:
    """Several finishes are one statement: each keeps how it ended, and a wrong one among repetitions is found."""
    run = f.make_run(store, prompts=2)
    claims = run.claim(f.register(run), 4)
    for claim, reason in zip(claims, ("stop", "length", "stop", "length"), strict=True):
        f.add(run, claim, 2, 0, reason)
    writes = [write(samples.finish, claim) for claim in claims[:3]] + [write(samples.release, claims[3], "weights")]
    run.transact(lambda tx: perform(tx, writes[:3]))
    run.transact(lambda tx: perform(tx, writes[3:]))
    before = f.snapshot(run)
    for one in writes:
        run.transact(lambda tx, one=one: perform(tx, [one]))
    assert [f.sample(run, claim.sample_id)["status"] for claim in claims] == [
        "completed", "truncated", "completed", "aborted",
    ]  # fmt: skip
    for claim, status in ((claims[0], "truncated"), (claims[1], "completed"), (claims[3], "completed")):
        with pytest.raises(LeaseLost):
            run.transact(lambda tx, c=claim, s=status: perform(tx, [write(samples.finish, c, s)]))
    with pytest.raises(LeaseLost):
        run.transact(lambda tx: perform(tx, [write(samples.fail, claims[3], "x"), writes[0]]))
    assert f.snapshot(run) == before


def write(verb: Callable[..., Any], claim: Claim, *more: Any) -> Write:
    return Write(verb, ((claim, *more), {}), claim.group_id, claim.sample_id)
