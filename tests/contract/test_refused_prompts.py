"""A prompt that no engine can take ends once, with its reason, and is not served again."""

from __future__ import annotations

from typing import Any

import pytest

from samplestore import Store
from samplestore.run import Run

from ..support import factory as f

WHY = "a prompt of 9,000 tokens leaves no room in a context of 4,096"


def served(run: Run) -> list[int]:
    """Positions of the prompts of all groups, in order."""
    found = f.rows(run, "SELECT p.position FROM sample_group g JOIN prompt p ON p.id = g.prompt_id ORDER BY g.number")
    return [row["position"] for row in found]


def refuse(run: Run, worker: int, position: int) -> None:
    """Answer all groups that are open, and refuse that of one prompt."""
    for claim in run.claim(worker, 100):
        at = f.value(
            run, "SELECT p.position FROM sample_group g JOIN prompt p ON p.id = g.prompt_id WHERE g.id = :g",
            g=claim.group_id,
        )  # fmt: skip
        if at != position:
            f.answer(run, claim)
        elif f.group(run, claim.group_id)["state"] == "open":
            assert run.fail(claim, WHY, prompt_refused=True) == "failed"


def consume(run: Run, step: int) -> None:
    with run.batch(step, groups=1, timeout=0):
        pass


def test_the_group_ends_at_once(store: Store) -> None:
    """Whatever max_attempts says, and its siblings with it: none of them could fare better."""
    run = f.make_run(store, prompts=1, samples_per_prompt=3, max_attempts=5, on_failed="short")
    refuse(run, f.register(run), 0)
    [group] = f.rows(run, "SELECT * FROM sample_group")
    assert (group["state"], group["reason"]) == ("dropped", f"prompt refused: {WHY}")
    rows = f.rows(run, "SELECT status, owner, failures FROM sample ORDER BY id")
    assert [r["status"] for r in rows] == ["failed", "pending", "pending"] and {r["owner"] for r in rows} == {None}
    assert len(f.rows(run, "SELECT 1 FROM event WHERE kind = 'fail'")) == 1
    f.sound(run)


@pytest.mark.parametrize("how", [{}, {"datasets": {"default": {"weight": 1.0}}}])
def test_it_is_served_once_in_all_epochs(store: Store, how: dict[str, Any]) -> None:
    run = f.make_run(store, prompts=3, groups_per_step=3, max_staleness=0, epochs=3, **how)
    worker, refused = f.register(run), 1
    step = 0
    while True:
        refuse(run, worker, refused)
        if run.why(groups=1).ready_in_window == 0:
            break
        consume(run, step)
        step += 1
        run.admit()
    assert sorted(served(run)) == [0, 0, 0, 1, 2, 2, 2]
    assert dict(run.why().reasons)["refused_prompts"].startswith("1 prompt of 3 was refused")
    f.sound(run)


def test_a_curriculum_that_puts_it_first_for_ever(store: Store) -> None:
    """It is asked for as many more as it names in vain, so that the others are served as fast as before."""
    first = "SELECT id FROM prompt ORDER BY position LIMIT :n"
    run = f.make_run(store, prompts=5, groups_per_step=2, max_staleness=0, curriculum=first)
    worker = f.register(run)
    for refused in (0, 1, 2):
        refuse(run, worker, refused)
        run.drop([r["id"] for r in f.rows(run, "SELECT id FROM sample_group WHERE state = 'ready'")], "enough")
        run.admit()
    assert served(run)[-2:] == [3, 4] and served(run)[:2] == [0, 1]
    assert [served(run).count(position) for position in (0, 1)] == [1, 2]


def test_all_prompts_refused_end_the_search(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With epochs without end there is always a next prompt to look at: a call looks at a bounded number."""
    monkeypatch.setattr("samplestore.verbs.serve.MOST_PASSED_OVER", 10)
    run = f.make_run(store, prompts=2, groups_per_step=2, max_staleness=0, epochs=None)
    worker = f.register(run)
    for claim in run.claim(worker, 100):
        if f.group(run, claim.group_id)["state"] == "open":
            run.fail(claim, WHY, prompt_refused=True)
    assert run.admit() == 0 and len(served(run)) == 2
    told = dict(run.why().reasons)["refused_prompts"]
    assert told.startswith("2 prompts of 2 were refused") and WHY in told and "samplestore requeue" in told


def test_requeued_it_is_served_again(store: Store) -> None:
    """Engines with a longer context may have come."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=0, epochs=None)
    worker = f.register(run)
    refuse(run, worker, 0)
    assert run.admit() == 0
    run.requeue([f.value(run, "SELECT id FROM sample")], "longer context")
    refuse(run, worker, -1)
    consume(run, 0)
    assert run.admit() == 1 and "refused_prompts" not in dict(run.why().reasons)
    f.sound(run)


def test_an_evaluation_counts_it_as_failed(store: Store) -> None:
    """Its group is not dropped before all its samples have ended: an evaluation counts what there is."""
    run = f.make_run(store, prompts=0)
    run.add_prompts([{"prompt_ids": [9]}, {"prompt_ids": [8]}], dataset="test", evaluation=True)
    run.start_evaluation("test", samples=2)
    claims = run.claim(f.register(run), 100)
    assert [run.fail(claim, WHY, prompt_refused=True) for claim in claims[:2]] == ["failed", "failed"]
    for claim in claims[2:]:
        f.answer(run, claim)
    assert {r["reason"] for r in f.rows(run, "SELECT reason FROM sample_group")} == {"evaluation"}
    f.sound(run)
