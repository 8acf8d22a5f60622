"""Merged and forked runs: nothing lost, nothing doubled, nothing that still points at where it came from."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store, faults
from samplestore.cli.app import run as cli_run
from samplestore.copies import hidden
from samplestore.copies import runs as copies
from samplestore.copies.copying import SourceMoved
from samplestore.copies.hidden import CopyBusy, CopyLost, Hidden
from samplestore.copies.runs import MergeRefused
from samplestore.errors import DatabaseMissing, InvalidSetting, RewindTooFar, RunInUse, RunNotFound, SchemaMismatch
from samplestore.run import Run

from ..support import factory as f
from .test_export import lived, told


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture
def source(sqlite_template: Path, tmp_path: Path) -> Iterator[Store]:
    """Another database, in a SQLite file."""
    path = tmp_path / "source.db"
    shutil.copyfile(sqlite_template, path)
    with samplestore.open(str(path)) as opened:
        yield opened


def lay_down(run: Run) -> Run:
    """Everybody goes: then it may be merged."""
    f.execute(run, "UPDATE worker SET heartbeat = heartbeat - 1000000")
    return run


def all_of(run: Run) -> list[dict[str, Any]]:
    """What an export says, with what a copy keeps; owners, of whom none is here."""
    rows = told(run)
    for row in rows:
        row["status"] = "pending or aborted" if row["status"] in ("pending", "aborted") else row["status"]
        del row["n_aborts"]
    return rows


def kill_after(monkeypatch: pytest.MonkeyPatch, n: int) -> list[int]:
    """Raise at the n-th transaction of a copy."""
    passed: list[int] = []

    def reached(where: str) -> None:
        if where == "copying":
            passed.append(1)
            if len(passed) == n:
                raise Killed

    monkeypatch.setattr(faults, "reached", reached)
    return passed


def during(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Any], n: int = 1) -> None:
    """Let something happen once, after the n-th transaction of a copy."""
    passed: list[int] = []

    def reached(where: str) -> None:
        if where == "copying":
            passed.append(1)
            if len(passed) == n:
                happens()

    monkeypatch.setattr(faults, "reached", reached)


def lose_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each transaction is committed, its caller hears that the connection broke, and repeats it."""
    lost: list[str] = []

    def reached(where: str) -> None:
        if where == "committed":
            lost.append(where)
            if len(lost) % 2:
                raise sa.exc.OperationalError("COMMIT", None, ConnectionError("broke"), connection_invalidated=True)

    monkeypatch.setattr(faults, "reached", reached)
    return lost


def go_on(run: Run, step: int) -> None:
    """Another step of training, and more answers with its weights."""
    worker, trainer = f.register(run), f.register(run, "trainer")
    batch = f.lease(run, trainer, step, max_staleness=9)
    assert batch is not None
    f.commit(run, batch, trainer)
    run.publish_weights(f"/w/{step + 1}", step=step)
    run.add_prompts([{"prompt_ids": [7, 7, i], "label": "more", "dataset": "more"} for i in range(2)])
    run.admit()
    f.finish_all(run, worker)


def counts(run: Run) -> dict[str, int]:
    of_sample = ("segment", "segment_array", "episode_step")
    tables = ("prompt", "sample_group", "sample", "stage", "request", "batch", "event", "weight_version", "timeline")
    found = {t: f.value(run, f"SELECT count(*) FROM {t} WHERE run_id = :r", r=run.id) for t in tables}
    for t in of_sample:
        of_run = f"SELECT count(*) FROM {t} x JOIN sample s ON s.id = x.sample_id WHERE run_id = :r"
        found[t] = f.value(run, of_run, r=run.id)
    return found


def test_a_merged_run_is_the_run(store: Store, source: Store, tmp_path: Path) -> None:
    one = lay_down(lived(source, "one"))
    (done,) = copies.merge(store, source.database.shown_url)
    assert (done.run, done.uuid, done.groups, done.existing, done.in_flight) == ("one", one.uuid, 8, 0, 2)
    merged = store.existing_run("one")
    assert all_of(merged) == all_of(one)
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    assert merged.weight_versions() == one.weight_versions() and merged.current_version == one.current_version
    a, b = one.replay(step=1), merged.replay(step=1)
    leave_out = ("group_ids", "sample_ids", "rollout_ids")
    f.same_arrays(*({k: v for k, v in x.arrays(named=["entropy"]).items() if k not in leave_out} for x in (a, b)))
    fates = f.fates(merged)
    assert fates["resumable"] == f.fates(one)["in_flight"] and "in_flight" not in fates
    f.sound(merged)


def test_merging_again_changes_nothing(store: Store, source: Store) -> None:
    lay_down(lived(source, "one"))
    copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    before = f.snapshot(merged, leave_out=())
    (done,) = copies.merge(store, source.database.shown_url)
    assert (done.groups, done.existing) == (0, 8)
    assert f.snapshot(merged, leave_out=()) == before


def test_a_merged_run_goes_on(store: Store, source: Store) -> None:
    """Prompts in their order, partials from where they were, training from the next step, back to an earlier one."""
    lay_down(lived(source, "one"))
    copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    worker, trainer = f.register(merged), f.register(merged, "trainer")
    claims = merged.claim(worker, 10)
    assert [c.response_ids.size for c in claims] == [3, 8]
    for claim in claims:
        f.answer(merged, claim, 2, 1)
    for stage in merged.claim_stages(worker, 10):
        merged.score(stage, 1.0)
    batch = f.lease(merged, trainer, 2, max_staleness=3)
    assert batch is not None
    f.commit(merged, batch, trainer)
    f.sound(merged)
    merged.rewind(step=0)
    assert "ready" in f.states(merged)
    f.sound(merged)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_killed_merge_goes_on_where_it_was(
    store: Store, source: Store, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    one = lay_down(lived(source, "one"))
    with monkeypatch.context() as killing:
        killing.setattr("samplestore.copies.copying.CHUNK", 3)
        passed = kill_after(killing, n)
        with pytest.raises(Killed):
            copies.merge(store, source.database.shown_url)
    assert len(passed) == n
    (hidden,) = store.run_names()
    half = store.existing_run(hidden)
    visitor = f.register(half)
    assert Hidden.parse(hidden) is not None and half.claim(visitor, 10) == [], "nobody works on half a run"
    f.execute(half, "DELETE FROM worker WHERE id = :w", w=visitor)
    copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    assert all_of(merged) == all_of(one)
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    f.sound(merged)


def test_a_killed_merge_begins_anew_where_the_source_went_on(
    store: Store, source: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lay_down(lived(source, "one"))
    with monkeypatch.context() as killing:
        killing.setattr("samplestore.copies.copying.CHUNK", 3)
        kill_after(killing, 4)
        with pytest.raises(Killed):
            copies.merge(store, source.database.shown_url)
    go_on(one, 2)
    lay_down(one)
    (done,) = copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    assert (done.existing, store.run_names()) == (0, ["one"])
    assert all_of(merged) == all_of(one)
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    assert merged.weight_versions() == one.weight_versions() and merged.current_version == one.current_version == 2
    f.sound(merged)


def test_a_source_that_goes_on_during_its_merge(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lay_down(lived(source, "one"))
    with monkeypatch.context() as meanwhile:
        during(meanwhile, lambda: one.publish_weights(step=1))
        with pytest.raises(SourceMoved, match="went on while it was copied"):
            copies.merge(store, source.database.shown_url)
    with pytest.raises(RunNotFound):
        store.existing_run()
    copies.merge(store, source.database.shown_url)
    assert store.existing_run().current_version == one.current_version == 2
    assert store.run_names() == ["one"]


def test_a_merge_whose_acknowledgements_are_lost(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lay_down(lived(source, "one"))
    with monkeypatch.context() as losing:
        lost = lose_acknowledgements(losing)
        (done,) = copies.merge(store, source.database.shown_url)
    assert len(lost) >= 10 and len(lost) % 2 == 0
    merged = store.existing_run(done.run)
    assert all_of(merged) == all_of(one)
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    f.sound(merged)


@pytest.mark.parametrize("n", [1, 5])
def test_one_merge_at_a_time(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    one = lay_down(lived(source, "one"))
    url = source.database.shown_url

    def again() -> None:
        with pytest.raises(CopyBusy, match="'one' is being copied by process"):
            copies.merge(store, url)
        assert hidden.drop_unfinished(store) == 0, "somebody writes it"

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("samplestore.copies.copying.CHUNK", 3)
        during(meanwhile, again, n)
        copies.merge(store, url)
    merged = store.existing_run("one")
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    f.sound(merged)


@pytest.mark.parametrize("n", [1, 5])
def test_a_merge_that_was_taken_for_dead(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Whoever was silent for too long writes nothing any more, wherever it had got to."""
    one = lay_down(lived(source, "one"))
    url = source.database.shown_url

    def again() -> None:
        f.execute(store, "UPDATE worker SET heartbeat = heartbeat - 100000")
        (done,) = copies.merge(store, url)
        assert done.groups + done.existing == 8

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("samplestore.copies.copying.CHUNK", 3)
        during(meanwhile, again, n)
        with pytest.raises(CopyLost, match="was taken over"):
            copies.merge(store, url)
    merged = store.existing_run("one")
    assert all_of(merged) == all_of(one)
    assert counts(merged) == {**counts(one), "event": counts(one)["event"] + 1}
    f.sound(merged)


def test_the_owner_of_a_copy_that_was_killed_is_not_waited_for(
    store: Store, source: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down(lived(source, "one"))
    with monkeypatch.context() as killing:
        killing.setattr("samplestore.copies.hidden.Owner.let_go", lambda owner: None)
        kill_after(killing, 2)
        with pytest.raises(Killed):
            copies.merge(store, source.database.shown_url)
    with pytest.raises(CopyBusy):
        copies.merge(store, source.database.shown_url)
    f.execute(store, "UPDATE worker SET host = 'elsewhere', pid = :p WHERE state = 'live'", p=2**22 + 1)
    with pytest.raises(CopyBusy, match="elsewhere"):
        copies.merge(store, source.database.shown_url)
    f.execute(store, "UPDATE worker SET host = :h WHERE host = 'elsewhere'", h=socket.gethostname())
    copies.merge(store, source.database.shown_url)
    f.sound(store.existing_run("one"))


def test_several_sources_and_equal_names(store: Store, source: Store, sqlite_template: Path, tmp_path: Path) -> None:
    lay_down(f.make_run(source, "r"))
    mine = f.make_run(store, "r")
    shutil.copyfile(sqlite_template, tmp_path / "third.db")
    with samplestore.open(str(tmp_path / "third.db")) as third:
        other = lay_down(f.make_run(third, "s"))
        names = [d.run for url in (source, third) for d in copies.merge(store, url.database.shown_url)]
    assert names == [f"r-{source.existing_run('r').uuid[:8]}", "s"]
    assert store.existing_run("r").uuid == mine.uuid and store.existing_run("s").uuid == other.uuid
    for name in store.run_names():
        f.sound(store.existing_run(name))


def test_what_is_not_merged(store: Store, source: Store, tmp_path: Path, db_url: str) -> None:
    one = f.make_run(source, "one")
    f.register(one)
    url = source.database.shown_url
    with pytest.raises(RunInUse, match="live workers"):
        copies.merge(store, url)
    lay_down(one)
    worker = f.register(one)
    f.finish_all(one, worker, 2)
    lay_down(one)
    f.execute(one, "UPDATE sample SET n_tokens = n_tokens + 1 WHERE id = 1")
    with pytest.raises(MergeRefused, match="samplestore check --db"):
        copies.merge(store, url)
    f.execute(one, "UPDATE sample SET n_tokens = n_tokens - 1 WHERE id = 1")
    with pytest.raises(DatabaseMissing):
        copies.merge(store, tmp_path / "nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()
    if store.database.is_sqlite:
        with pytest.raises(MergeRefused, match="is the target itself"):
            copies.merge(store, db_url)
    assert store.run_names() == []
    copies.merge(store, url)
    one.requeue([1], "again")
    with pytest.raises(MergeRefused, match="went on after it was merged"):
        copies.merge(store, url)
    f.execute(one, "UPDATE alembic_version SET version_num = '0001'")
    with pytest.raises(SchemaMismatch, match="samplestore db upgrade"):
        copies.merge(store, url)


def test_side_car_files_are_the_copies_own(store: Store, source: Store, tmp_path: Path) -> None:
    run = f.make_run(source, "one", array_url=str(tmp_path / "arrays"), array_file_bytes=1)
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.add(run, claim, 3, 0, "stop")
        run.attach(claim, "values", np.arange(3, dtype=np.float32))
        run.finish(claim)
    lay_down(run)
    copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    shutil.rmtree(tmp_path / "arrays" / run.uuid)
    sample = f.value(merged, "SELECT min(sample_id) FROM segment_array")
    assert merged.array(sample, "values")[0].tolist() == [0, 1, 2]
    f.sound(merged)


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


def test_a_name_that_is_taken_meanwhile(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lived(store, "one")
    with monkeypatch.context() as meanwhile:
        during(meanwhile, lambda: store.run("two"))
        with pytest.raises(InvalidSetting, match="a run that is not there yet"):
            copies.fork(store, "one", 0, "two")
    assert len(store.run_names()) == 3 and store.existing_run().name == "two"
    uuid = lay_down(f.make_run(source, "three")).uuid
    with monkeypatch.context() as meanwhile:
        during(meanwhile, lambda: store.run("three"))
        (merged,) = copies.merge(store, source.database.shown_url)
    assert merged.run == f"three-{uuid[:8]}"
    copies.fork(store, "one", 0, "four")
    assert sorted(store.run_names()) == ["four", "one", "three", merged.run, "two"], "what nobody writes is gone"


def test_a_source_with_an_unfinished_copy(store: Store, source: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_down(lived(source, "one"))
    with monkeypatch.context() as killing:
        kill_after(killing, 2)
        with pytest.raises(Killed):
            copies.fork(source, "one", 0, "two")
    with pytest.raises(MergeRefused, match=r"samplestore prune --all --run '\(copying .* two' --db") as refused:
        copies.merge(store, source.database.shown_url)
    command = shlex.split(str(refused.value).partition("remove it with: ")[2])
    assert cli_run([*command[1:], "--yes"]) == 0
    copies.merge(store, source.database.shown_url)
    assert store.run_names() == ["one"]
