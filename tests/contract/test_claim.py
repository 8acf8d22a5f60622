"""claim: one owner at a time, resumable first, siblings together, and a fence that rises."""

from __future__ import annotations

import pytest

from samplestore import Store
from samplestore.errors import LeaseLost, WorkerDead

from ..support import factory as f


def test_siblings_go_together_in_creation_order(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    claims = run.claim(worker, 5)
    assert [(c.group_number, c.index) for c in claims] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert all((c.owner, c.attempt, c.seq, c.n_tokens) == (worker, 1, 0, 0) for c in claims)
    assert len(run.claim(worker, 100)) == 3
    assert run.claim(worker, 100) == []


def test_a_claim_carries_its_prompt(store: Store) -> None:
    run = store.run("r", samples_per_prompt=1)
    run.add_prompts([{"prompt_ids": [5, 6], "label": {"answer": [1]}, "metadata": {"k": "v"}}])
    run.admit()
    (claim,) = run.claim(f.register(run), 1)
    assert (claim.prompt_ids.tolist(), claim.label, claim.metadata) == ([5, 6], {"answer": [1]}, {"k": "v"})
    assert claim.prompt_ids.dtype == "int32"


def test_siblings_share_no_values(store: Store) -> None:
    """An episode that adds to its messages must not add to those of its siblings, nor to what a trainer reads."""
    run = store.run("r", samples_per_prompt=2, groups_per_step=1)
    run.add_prompts(
        [{"messages": [{"role": "user", "content": "x"}], "prompt_ids": [5], "label": [1], "metadata": {"k": ["v"]}}]
    )
    run.admit()
    one, other = run.claim(f.register(run), 2)
    said = repr((other.prompt, other.label, other.metadata))
    one.prompt.append({"role": "assistant", "content": "y"})
    one.label.append(2)
    one.metadata["k"].append("w")
    assert repr((other.prompt, other.label, other.metadata)) == said
    for claim in (one, other):
        f.answer(run, claim)
    with run.batch(step=0, timeout=30) as batch:
        first, second = batch.samples
        first.metadata["k"].append("w")
        first.label.append(2)
        assert (second.label, second.metadata) == ([1], {"k": ["v"]})


def test_resumable_samples_come_first_with_their_tokens(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    last = run.claim(worker, 8)[-1]
    f.add(run, last, 4)
    f.add(run, last, 2, finish_reason="abort")
    for claim in (*run.claim(worker, 0), last):
        run.release(claim, "abort")
    f.kill(run, worker)
    again = run.claim(f.register(run), 2)
    assert again[0].sample_id == last.sample_id
    assert again[0].resumable and again[0].response_ids.tolist() == [*f.ids_of(4), *f.ids_of(2)]
    assert (again[0].seq, again[0].n_tokens, again[0].budget(10), again[0].budget(6)) == (2, 6, 4, 0)
    assert not again[1].resumable
    f.sound(run)


def test_priority_goes_before_everything(store: Store) -> None:
    run = f.make_run(store)
    f.execute(run, "UPDATE sample SET priority = -1 WHERE id = (SELECT max(id) FROM sample)")
    first, second = run.claim(f.register(run), 2)
    assert (first.group_number, second.group_number) == (3, 0)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_claims_nothing(store: Store, limit: int) -> None:
    run = f.make_run(store)
    assert run.claim(f.register(run), limit) == []


def test_only_a_running_run_is_claimed_from(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    run.pause()
    assert run.claim(worker, 1) == []
    run.drain()
    assert run.claim(worker, 1) == []
    run.resume()
    assert len(run.claim(worker, 1)) == 1


def test_dead_gone_and_foreign_workers_claim_nothing(store: Store) -> None:
    run, other = f.make_run(store), f.make_run(store, "other")
    dead, gone, foreign = f.register(run), f.register(run), f.register(other)
    f.kill(run, dead)
    run.goodbye(gone)
    for worker in (dead, gone, foreign, 10**6):
        with pytest.raises(WorkerDead):
            run.claim(worker, 1)
        with pytest.raises(WorkerDead):
            run.claim_stages(worker, 1)
    assert f.value(run, "SELECT count(*) FROM sample WHERE owner IS NOT NULL") == 0


def test_runs_do_not_see_each_other(store: Store) -> None:
    run, other = f.make_run(store, prompts=1), f.make_run(store, "other", prompts=1)
    mine = {c.sample_id for c in run.claim(f.register(run), 100)}
    theirs = {c.sample_id for c in other.claim(f.register(other), 100)}
    assert len(mine) == len(theirs) == 2
    assert not mine & theirs


def test_a_failed_attempt_waits_before_it_is_claimed_again(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    worker = f.register(run)
    claim, _ = run.claim(worker, 2)
    run.fail(claim, "no", backoff_s=1000.0)
    assert run.claim(worker, 9) == []
    f.execute(run, "UPDATE sample SET not_before = 0")
    (again,) = run.claim(worker, 9)
    assert (again.sample_id, again.failures) == (claim.sample_id, 1)


def test_attempt_rises_at_every_change_of_owner(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_attempts=9)
    seen = []

    def take() -> tuple[int, f.Claim]:
        worker = f.register(run)
        claim = next(c for c in run.claim(worker, 9) if c.index == 0)
        seen.append(claim.attempt)
        return worker, claim

    _, claim = take()
    run.release(claim, "over")
    _, claim = take()
    run.fail(claim, "broken", backoff_s=0.0)
    worker, claim = take()
    f.kill(run, worker)
    _, claim = take()
    run.requeue([claim.sample_id], "again")
    _, claim = take()
    run.drop([claim.group_id], "unwanted")
    seen.append(f.sample(run, claim.sample_id)["attempt"])
    assert seen == sorted(set(seen)), seen


def test_who_is_no_longer_owner_changes_nothing(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"])
    first = f.register(run)
    claim, sibling = run.claim(first, 2)
    f.add(run, claim, 3)
    f.kill(run, first)
    second = f.register(run)
    new = next(c for c in run.claim(second, 2) if c.sample_id == claim.sample_id)
    for held in ("owned by another", "at rest"):
        before = f.snapshot(run)
        for c in (claim, sibling):
            for write in (
                lambda c=c: f.add(run, c, 2),
                lambda c=c: run.finish(c),
                lambda c=c: run.release(c, "late"),
                lambda c=c: run.fail(c, "late"),
                lambda c=c: run.begin_request(c, "rid"),
                lambda c=c: run.attach(c, "values", [1.0]),
            ):
                with pytest.raises(LeaseLost) as caught:
                    write()
                assert (caught.value.id, caught.value.attempt) == (c.sample_id, c.attempt)
        assert f.snapshot(run) == before, held
        if held == "owned by another":
            run.release(new, "over")
    f.sound(run)


def test_the_right_worker_at_the_wrong_attempt_is_refused(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    worker = f.register(run)
    claim, _ = run.claim(worker, 2)
    run.release(claim, "over")
    (again,) = run.claim(worker, 2)
    assert again.sample_id == claim.sample_id and again.owner == claim.owner
    with pytest.raises(LeaseLost):
        f.add(run, claim)
    f.add(run, again)
