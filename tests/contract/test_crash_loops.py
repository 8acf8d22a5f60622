"""A sample that kills its workers is given up; those that were beside it are not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from samplestore import Store
from samplestore.run import Run

from ..support import factory as f


def die(run: Run, limit: int = 100) -> list[Any]:
    """A worker claims `limit` samples and dies of one; its claims."""
    worker = f.register(run)
    claims = run.claim(worker, limit)
    f.kill(run, worker)
    return claims


def due(run: Run) -> None:
    """Time passes: everything that waits may be claimed."""
    f.execute(run, "UPDATE sample SET not_before = 0")


@pytest.mark.parametrize("policy", ["drop", "short"])
def test_a_sample_that_kills_every_worker_is_given_up(store: Store, policy: str) -> None:
    run = f.make_run(store, prompts=1, max_deaths=3, on_failed=policy)
    first, second = run.claim(f.register(run), 2)
    f.answer(run, first)
    run.release(second, "weights")
    for _ in range(2):
        assert len(die(run)) == 1
        assert f.sample(run, second.sample_id)["status"] == "pending"
    die(run)
    row = f.sample(run, second.sample_id)
    assert (row["status"], row["owner"], row["failures"]) == ("failed", None, 0)
    assert "3 workers in a row died" in row["error"]
    assert f.states(run) == ["dropped" if policy == "drop" else "ready"]
    (told,) = f.events(run, "fail")
    assert told["sample_id"] == second.sample_id and "3 workers in a row died" in told["reason"]
    assert run.claim(f.register(run), 9) == []
    f.sound(run)


def test_a_stored_token_begins_the_count_anew(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_deaths=2)
    for _ in range(4):
        worker = f.register(run)
        (claim,) = run.claim(worker, 1)
        f.add(run, claim, 2)
        f.kill(run, worker)
    die(run)
    assert f.states(run) == ["open"], "it got tokens before each death but the last"
    die(run)
    assert f.states(run) == ["dropped"]
    f.sound(run)


def test_a_worker_that_lets_go_does_not_count(store: Store) -> None:
    """Neither a goodbye, nor a release, nor a sample that made no progress in time."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_deaths=2, progress_deadline_s=60.0)
    die(run)
    for _ in range(3):
        worker = f.register(run)
        (claim,) = run.claim(worker, 1)
        run.release(claim, "weights")
        run.claim(worker, 1)
        run.goodbye(worker)
        other = f.register(run)
        run.claim(other, 1)
        f.execute(run, "UPDATE sample SET progress_at = progress_at - 100")
        assert run.reap(other).samples == 1
    assert f.states(run) == ["open"]
    die(run)
    assert f.states(run) == ["dropped"]
    f.sound(run)


def test_an_operator_who_requeues_it_gives_it_all_its_lives_again(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_deaths=2)
    (claim,) = die(run)
    die(run)
    assert f.states(run) == ["dropped"]
    run.requeue([claim.sample_id], "the driver was broken")
    die(run)
    assert f.states(run) == ["open"]
    die(run)
    assert f.states(run) == ["dropped"]
    f.sound(run)


def test_who_is_beside_the_killer_is_set_apart_and_not_punished(store: Store) -> None:
    """Four prompts are claimed together, again and again, and each time their worker dies before any has a token: it
    can't be told which one it was. They come back one after the other, and the one that kills alone is given up."""
    run = f.make_run(store, prompts=4, groups_per_step=4, max_staleness=0, max_deaths=3, heartbeat_ttl_s=30.0)
    for _ in range(3):
        assert len(die(run)) == 8
    assert f.states(run) == ["open"] * 4, "nobody is given up on suspicion"
    assert run.claim(f.register(run), 9) == [], "they wait"
    waits = f.rows(
        run, "SELECT s.group_id, min(s.not_before) AS a, max(s.not_before) AS b FROM sample s GROUP BY 1 ORDER BY 1"
    )
    assert all(row["a"] == pytest.approx(row["b"], abs=1.0) for row in waits), "siblings come back together"
    gaps = [later["a"] - earlier["a"] for earlier, later in itertools.pairwise(waits)]
    assert gaps == pytest.approx([30.0] * 3, abs=1.0)
    killer = waits[1]["group_id"]
    for row in waits:
        f.execute(run, "UPDATE sample SET not_before = 0 WHERE group_id = :g", g=row["group_id"])
        worker = f.register(run)
        claims = run.claim(worker, 9)
        assert {c.group_id for c in claims} == {row["group_id"]}
        if row["group_id"] == killer:
            f.kill(run, worker)
        else:
            for claim in claims:
                f.answer(run, claim)
    assert f.states(run) == ["ready", "dropped", "ready", "ready"]
    f.sound(run)


def test_ordinary_deaths_cost_the_others_nothing(store: Store) -> None:
    """A worker that is killed comes back to what it had at once: below the limit nothing waits."""
    run = f.make_run(store, prompts=2, max_deaths=3)
    for _ in range(2):
        assert len(die(run)) == 4
    assert len(run.claim(f.register(run), 9)) == 4


def test_a_death_is_counted_once_however_many_reap(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_deaths=2)
    die(run)
    for _ in range(3):
        run.reap()
    assert f.states(run) == ["open"]
    assert [e["details"] for e in f.events(run, "reap")] in ([{"deaths": 1, "life": 0}], ['{"deaths": 1, "life": 0}'])
