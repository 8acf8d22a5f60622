"""Exports that come back into their own run: groups that are there still, and groups that only have the same number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store, retention
from samplestore.errors import ImportConflict
from samplestore.portable import exports, slime_samples
from samplestore.portable.exports import Selection
from samplestore.run import Run

from ..support import factory as f
from .exporting import forked, lived


def begun(store: Store, name: str, first: int = 0, **settings: Any) -> tuple[Run, int]:
    """A run of two groups with one sample each, as two restored copies of one backup have it: nothing generated."""
    run = store.run(name, **{"samples_per_prompt": 1, "groups_per_step": 2, "epochs": 1, **settings})
    run.add_prompts([{"prompt_ids": [1, 2, first + i]} for i in range(2)])
    run.admit()
    return run, f.register(run)


def answered(run: Run, worker: int, n: int = 3, probs: float = -0.5, reward: float | None = None) -> Run:
    for claim in run.claim(worker, 9):
        run.append(claim, f.ids_of(n), [probs] * n, 0, "stop")
        run.finish(claim)
    if reward is not None:
        for stage in run.claim_stages(worker, 9):
            run.score(stage, reward)
    return run


def brought(there: Run, here: Run, tmp_path: Path) -> Any:
    """The export of a copy that went on elsewhere: the same run, by its uuid."""
    path = tmp_path / there.name / "out.jsonl"
    there.export(path, format="jsonl")
    for file in path.parent.iterdir():
        file.write_text(file.read_text().replace(there.uuid, here.uuid))
    return here.import_samples(path)


def refused(there: Run, here: Run, tmp_path: Path, match: str) -> None:
    before = f.snapshot(here)
    with pytest.raises(ImportConflict, match=match) as error:
        brought(there, here, tmp_path)
    assert error.value.portable_id == f"{here.uuid}/0" and "samplestore import FILE --run OTHER" in str(error.value)
    assert f.snapshot(here) == before


def test_two_copies_of_a_backup_that_both_went_on(store: Store, tmp_path: Path) -> None:
    """The other's tokens must not be left out in silence, as if they were here."""
    there, here = (answered(*begun(store, name), n=n) for name, n in (("a", 7), ("b", 2)))
    refused(there, here, tmp_path, "has less of it")
    there, worker = begun(store, "c")
    for claim in there.claim(worker, 9):
        there.append(claim, [99, 98], [-0.5, -0.5], 0, "stop")
    refused(there, here, tmp_path, "is another")


def test_the_same_history_is_the_same_group(store: Store, tmp_path: Path) -> None:
    there, here = (answered(*begun(store, name, stages=["reward"]), reward=1.0) for name in ("a", "b"))
    done = brought(there, here, tmp_path)
    assert (done.added, done.existing) == (0, 2)


def test_a_group_of_another_prompt_is_another(store: Store, tmp_path: Path) -> None:
    refused(begun(store, "a")[0], begun(store, "b", first=40)[0], tmp_path, "is another")


def test_equal_tokens_with_other_log_probs_were_drawn_elsewhere(store: Store, tmp_path: Path) -> None:
    there, here = (answered(*begun(store, name), probs=p) for name, p in (("a", -0.5), ("b", -0.75)))
    refused(there, here, tmp_path, "is another")


@pytest.mark.parametrize(("here_too", "said"), [(0.0, "is another"), (None, "has less of it")])
def test_rewards_that_are_not_here(store: Store, tmp_path: Path, here_too: float | None, said: str) -> None:
    there, here = (
        answered(*begun(store, name, stages=["reward"]), reward=r) for name, r in (("a", 1.0), ("b", here_too))
    )
    refused(there, here, tmp_path, said)


def test_a_new_life_that_the_run_does_not_know(store: Store, tmp_path: Path) -> None:
    there, here = (begun(store, name)[0] for name in ("a", "b"))
    there.requeue([f.value(there, "SELECT min(id) FROM sample WHERE run_id = :r", r=there.id)], "again")
    refused(there, here, tmp_path, "has less of it")


def test_a_former_life_that_was_another(store: Store, tmp_path: Path) -> None:
    there, (here, worker) = answered(*begun(store, "a"), probs=-0.75), begun(store, "b")
    answered(here, worker)
    here.requeue([r["id"] for r in f.rows(here, "SELECT id FROM sample WHERE run_id = :r", r=here.id)], "again")
    answered(here, worker, probs=-0.75)
    refused(there, here, tmp_path, "is another")


def finish(run: Run, worker: int) -> None:
    """What was under way at the export goes on."""
    for claim in run.claim(worker, 9):
        f.answer(run, claim, 4)


def score(run: Run, worker: int) -> None:
    for stage in run.claim_stages(worker, 9):
        run.score(stage, 0.5)


def consume(run: Run, worker: int) -> None:
    trainer = f.register(run, "trainer")
    for step in range(2):
        batch = f.lease(run, trainer, step, 1, max_staleness=3)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.publish_weights(step=step)


def prune(run: Run, worker: int) -> None:
    assert retention.prune(run, 0).groups


def requeue(run: Run, worker: int) -> None:
    run.requeue([r["id"] for r in f.rows(run, "SELECT id FROM sample")], "again")


def drop(run: Run, worker: int) -> None:
    run.drop([r["id"] for r in f.rows(run, "SELECT id FROM sample_group")], "no")


@pytest.mark.parametrize(
    "later",
    [
        (), (finish,), (finish, score), (finish, score, consume), (finish, score, consume, prune), (requeue,),
        (finish, requeue, finish), (finish, score, requeue, finish, score), (drop,), (finish, drop, requeue),
    ],
    ids=lambda later: "-".join(step.__name__ for step in later) or "at once",
)  # fmt: skip
def test_a_group_that_moved_on_is_still_the_same(
    store: Store, tmp_path: Path, later: tuple[Callable[[Run, int], None], ...]
) -> None:
    run, worker = begun(store, "a", stages=["reward"], max_staleness=3)
    one, _ = run.claim(worker, 9)
    f.add(run, one, 3, 0, "abort")
    run.release(one, "weights")
    run.export(tmp_path / "out.jsonl", format="jsonl")
    run.goodbye(worker)
    worker = f.register(run)
    for step in later:
        step(run, worker)
        done = run.import_samples(tmp_path / "out.jsonl")
        assert (done.added, done.existing) == (0, 2), step.__name__
    f.sound(run)


def test_a_life_that_moved_on_in_every_way(store: Store, tmp_path: Path) -> None:
    """Tools, forks, arrays, failures: what an export says of them is found again, also after they went."""
    run = lived(store)
    run.export(tmp_path / "out.jsonl", format="jsonl", arrays=["all"])
    run.export(tmp_path / "part.jsonl", format="jsonl", statuses=["completed"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {r["parent"] for r in rows} > {None}
    given = [s for part in exports.parts(run, Selection()) for s in exports.samples(run, run.uuid, part, Selection())]
    assert run.import_samples(given).existing == 8
    assert run.import_samples(tmp_path / "part.jsonl").added == 0
    retention.prune(run, 0)
    assert run.import_samples(tmp_path / "out.jsonl").existing == 8
    ready = "SELECT id FROM sample_group WHERE state = 'ready'"
    ids = f.rows(run, f"SELECT id FROM sample WHERE parent_id IS NULL AND group_id IN ({ready})")
    run.requeue([r["id"] for r in ids], "again")
    assert run.import_samples(tmp_path / "out.jsonl").existing == 8
    f.sound(run)


def test_a_fork_that_the_run_does_not_know(store: Store, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        run, worker = begun(store, name)
        run.publish_weights(step=0)
        claim, _ = run.claim(worker, 9)
        f.add(run, claim, 4, 0, "stop")
        runs.append((run, claim))
    forked(*runs[0])
    refused(runs[0][0], runs[1][0], tmp_path, "has less of it")


def test_a_fork_that_slime_has_masked_is_still_the_same(store: Store) -> None:
    """It comes back without its parent, so that nothing tells which of its tokens are its own."""
    run, worker = begun(store, "r", stages=["reward"])
    run.publish_weights(step=0)
    for claim in run.claim(worker, 9):
        f.add(run, claim, 4, 0, "stop")
        forked(run, claim)
    parts = exports.parts(run, Selection())
    samples = [s for part in parts for s in exports.samples(run, run.uuid, part, Selection())]
    told = [slime_samples.to_slime(s) for s in samples]
    for values, made in zip(told, samples, strict=True):
        if made.parent_upto:
            values["loss_mask"] = [0] * len(values["loss_mask"])
    assert any(made.parent_upto for made in samples)
    added = run.import_samples([slime_samples.from_slime(values) for values in told])
    assert (added.added, added.existing) == (0, len({s.group for s in samples}))
