"""Forked runs stand where a checkpoint stood, whatever their origin does meanwhile."""

from __future__ import annotations

import json

import pytest

from samplestore import Store
from samplestore.copies import runs as copies
from samplestore.copies.copying import SourceMoved
from samplestore.copies.hidden import CopyBusy
from samplestore.errors import InvalidSetting, RewindTooFar

from ..support import factory as f
from .copying import Killed, during, go_on, kill_after, lay_down
from .exporting import lived


def test_a_fork_stands_where_the_checkpoint_stood(store: Store) -> None:
    run = lived(store, "one")
    before = f.snapshot(run)
    done = copies.fork(store, "one", 0, "two")
    fork = store.existing_run("two")
    assert fork.uuid != run.uuid and done.groups == 8 and done.version == fork.current_version
    of_run = {t: [r for r in rows if r.get("run_id", run.id) == run.id] for t, rows in f.snapshot(run).items()}
    assert of_run["sample_group"] == before["sample_group"] and of_run["sample"] == before["sample"], "not changed"
    assert [g["state"] for g in f.rows(fork, "SELECT state FROM sample_group WHERE run_id = :r", r=fork.id)].count(
        "consumed"
    ) == 2
    run.rewind(step=0)  # what a rewind does to the run itself, the fork has seen already
    assert f.states(fork) == f.states(run)
    newest = ("step", "depth", "common_depth", "path", "timeline", "parent")
    versions = [
        f.rows(r, "SELECT * FROM weight_version WHERE run_id = :r ORDER BY version", r=r.id) for r in (run, fork)
    ]
    assert [[v[k] for k in newest] for v in versions[0]] == [[v[k] for k in newest] for v in versions[1]]
    (event,) = f.events(fork, "copy")
    told = json.loads(event["details"]) if store.database.is_sqlite else event["details"]
    assert told == {"forked_from": run.uuid, "forked_run": "one", "step": 0}
    f.sound(run)
    f.sound(fork)


def test_both_go_on_from_a_fork(store: Store) -> None:
    run = lived(store, "one")
    fork = store.existing_run(copies.fork(store, "one", 1, "two").run)
    worker = f.register(fork)
    assert len(fork.claim(worker, 100)) == 2
    trainer = f.register(fork, "trainer")
    assert f.lease(fork, trainer, 2, max_staleness=9) is not None
    assert f.lease(run, f.register(run, "trainer"), 2, max_staleness=9) is not None
    f.sound(run)
    f.sound(fork)


def test_a_killed_fork_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(store, "one")
    with monkeypatch.context() as killing:
        killing.setattr("samplestore.copies.copying.CHUNK", 3)
        kill_after(killing, 3)
        with pytest.raises(Killed):
            copies.fork(store, "one", 0, "two")
    done = copies.fork(store, "one", 0, "two")
    assert done.existing == 6 and sorted(store.run_names()) == ["one", "two"]
    f.sound(store.existing_run("two"))


def test_forks_that_are_refused(store: Store) -> None:
    run = lived(store, "one")
    with pytest.raises(InvalidSetting, match="a run that is not there yet"):
        copies.fork(store, "one", 0, "one")
    with pytest.raises(InvalidSetting, match="newest of this timeline"):
        copies.fork(store, "one", 9, "two")
    run.prune(keep_steps=1)
    with pytest.raises(RewindTooFar):
        copies.fork(store, "one", -1, "two")
    assert store.run_names() == ["one"]
    copies.fork(store, "one", 1, "two")
    f.sound(store.existing_run("two"))


def test_a_fork_of_a_run_at_work(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens while it is copied: new weights, answers with them, prompts, groups and a step."""
    run = lay_down(lived(store, "one", max_staleness=9))
    run.reap()
    with monkeypatch.context() as meanwhile:
        during(meanwhile, lambda: go_on(run, 2))
        done = copies.fork(store, "one", 1, "two")
    fork = store.existing_run("two")
    newest = f.value(fork, "SELECT max(version_max) FROM sample WHERE run_id = :r", r=fork.id)
    assert newest == run.current_version == 2, "an answer of meanwhile was copied"
    assert fork.current_version == done.version == 3
    restored = next(v for v in fork.weight_versions() if v.version == 3)
    assert (restored.step, restored.path) == (0, "/w/1")
    versions = [v.version for v in fork.weight_versions()]
    assert versions == [0, 1, 2, 3]
    number = "SELECT n_prompts, n_groups FROM run WHERE id = :r"
    assert f.rows(fork, number, r=fork.id) == [{"n_prompts": 8, "n_groups": 8}]
    held = f.rows(fork, "SELECT dataset, count(*) AS n FROM prompt WHERE run_id = :r GROUP BY dataset", r=fork.id)
    assert held == [{"dataset": "default", "n": 8}]
    f.sound(fork)
    run.rewind(step=1)
    of_group = "SELECT number, oldest_version, state FROM sample_group WHERE run_id = :r AND number < 8 ORDER BY number"
    assert f.rows(fork, of_group, r=fork.id) == f.rows(run, of_group, r=run.id)


def test_a_fork_of_a_run_that_is_rewound_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lived(store, "one")
    with monkeypatch.context() as meanwhile:
        during(meanwhile, lambda: run.rewind(step=0))
        with pytest.raises(SourceMoved, match="was rewound"):
            copies.fork(store, "one", 1, "two")
    copies.fork(store, "one", 0, "two")
    assert store.run_names() == ["one", "two"]
    f.sound(store.existing_run("two"))


def test_a_killed_fork_begins_anew_where_the_run_went_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lived(store, "one", max_staleness=9)
    with monkeypatch.context() as killing:
        killing.setattr("samplestore.copies.copying.CHUNK", 3)
        kill_after(killing, 3)
        with pytest.raises(Killed):
            copies.fork(store, "one", 0, "two")
    assert store.existing_run().name == "one", "half a run is not the newest"
    go_on(run, 2)
    done = copies.fork(store, "one", 0, "two")
    fork = store.existing_run("two")
    assert (done.existing, done.version, store.run_names()) == (0, 3, ["one", "two"])
    run.rewind(step=0)
    of_group = "SELECT number, oldest_version, state FROM sample_group WHERE run_id = :r ORDER BY number"
    assert f.rows(fork, of_group, r=fork.id) == f.rows(run, of_group, r=run.id)
    f.sound(fork)


def test_two_forks_of_one_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(store, "one")

    def again() -> None:
        for step in (0, 1):
            with pytest.raises(CopyBusy, match="'two' is being copied"):
                copies.fork(store, "one", step, "two")

    with monkeypatch.context() as meanwhile:
        during(meanwhile, again)
        copies.fork(store, "one", 0, "two")
    assert store.run_names() == ["one", "two"]
    f.sound(store.existing_run("two"))
