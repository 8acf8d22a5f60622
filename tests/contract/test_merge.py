"""Merged runs: nothing lost, nothing doubled, nothing that still points at where it came from."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import samplestore
from samplestore import Store, faults, retention
from samplestore.backups import backup as backups
from samplestore.cli.app import run as cli_run
from samplestore.copies import hidden
from samplestore.copies import runs as copies
from samplestore.copies.copying import SourceMoved
from samplestore.copies.hidden import CopyBusy, CopyLost, Hidden
from samplestore.copies.runs import MergeRefused
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, InvalidSetting, RunInUse, RunNotFound, SchemaMismatch

from ..support import factory as f
from ..support.processes import Processes
from .copying import Killed, all_of, counts, during, go_on, kill_after, lay_down, lose_acknowledgements
from .exporting import lived


@pytest.fixture
def source(sqlite_template: Path, tmp_path: Path) -> Iterator[Store]:
    """Another database, in a SQLite file."""
    path = tmp_path / "source.db"
    shutil.copyfile(sqlite_template, path)
    with samplestore.open(str(path)) as opened:
        yield opened


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


def test_a_name_that_is_taken_with_the_uuid_behind_it(store: Store, source: Store) -> None:
    one = lay_down(f.make_run(source, "one"))
    taken = ["one", f"one-{one.uuid[:8]}", f"one-{one.uuid[:8]}-2"]
    for name in taken:
        f.make_run(store, name)
    assert [d.run for d in copies.merge(store, source.database.shown_url)] == [f"one-{one.uuid[:8]}-3"]


def test_what_came_by_way_of_another_database_is_there_already(
    store: Store, source: Store, sqlite_template: Path, tmp_path: Path
) -> None:
    one = lay_down(lived(source, "one"))
    shutil.copyfile(sqlite_template, tmp_path / "between.db")
    with samplestore.open(str(tmp_path / "between.db")) as between:
        copies.merge(between, source.database.shown_url)
        copies.merge(store, between.database.shown_url)
    (done,) = copies.merge(store, source.database.shown_url)
    assert (done.groups, done.existing) == (0, 8)
    f.sound(store.existing_run("one"))
    one.add_prompts([{"prompt_ids": [5]}])
    with pytest.raises(MergeRefused, match="went on after it was merged"):
        copies.merge(store, source.database.shown_url)


def test_of_a_source_comes_all_or_nothing(store: Store, source: Store) -> None:
    """What is refused is refused before the runs beside it are copied."""
    first, second = (lay_down(f.make_run(source, name)) for name in ("first", "second"))
    copies.merge(store, source.database.shown_url)
    retention.remove(store.existing_run(first.name))
    second.add_prompts([{"prompt_ids": [5]}])
    with pytest.raises(MergeRefused, match=r"'second' went on .* Nothing of it was merged"):
        copies.merge(store, source.database.shown_url)
    assert store.run_names() == ["second"]


def test_a_run_that_came_there_by_no_merge(store: Store, source: Store, db_url: str, tmp_path: Path) -> None:
    """The target itself, or a file that was copied."""
    lay_down(f.make_run(store, "one"))
    with pytest.raises(MergeRefused, match=r"is the target itself|came there by no merge"):
        copies.merge(store, db_url)
    lay_down(f.make_run(source, "other"))
    backups.backup(source.database, tmp_path / "copied.db")
    with samplestore.open(str(tmp_path / "copied.db")) as copied:
        with pytest.raises(MergeRefused, match="came there by no merge"):
            copies.merge(copied, source.database.shown_url)
        assert copied.run_names() == ["other"]
    if store.database.is_sqlite:
        os.link(store.database.path, tmp_path / "link.db")
        with pytest.raises(MergeRefused, match="is the target itself"):
            copies.merge(store, tmp_path / "link.db")


@pytest.mark.parametrize("n", [1, 3])
def test_a_merge_whose_process_is_killed(
    db_url: str, store: Store, source: Store, processes: Processes, n: int
) -> None:
    one = lay_down(lived(source, "one"))
    command = [sys.executable, "-m", "samplestore.cli", "merge", db_url, str(source.database.path)]
    killed = processes.start(command, name="merge", env={faults.VARIABLE: f"copying=kill@{n}"})
    assert killed.wait(60) == -signal.SIGKILL
    (name,) = store.run_names()
    assert Hidden.parse(name) is not None
    (done,) = copies.merge(store, source.database.shown_url)
    assert done.groups + done.existing == 8 and store.run_names() == ["one"]
    assert all_of(store.existing_run("one")) == all_of(one)
    f.sound(store.existing_run("one"))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_backup_that_is_taken_during_a_merge(
    source: Store, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """It is restored as it was, and the merge goes on in it: what is not finished keeps no promises yet."""
    one = lay_down(lived(source, "one"))
    with samplestore.open(sqlite_url) as store:
        during(monkeypatch, lambda: backups.backup(store.database, tmp_path / "backup.db"), n)
        copies.merge(store, source.database.shown_url)
    backups.restore(tmp_path / "backup.db", Database(f"sqlite:///{tmp_path}/restored.db"))
    with samplestore.open(f"sqlite:///{tmp_path}/restored.db") as restored:
        (name,) = restored.run_names()
        assert Hidden.parse(name) is not None
        monkeypatch.setattr(hidden, "_ended", lambda host, pid: False)  # this process
        copies.merge(restored, source.database.shown_url)
        assert restored.run_names() == ["one"] and all_of(restored.existing_run("one")) == all_of(one)
        f.sound(restored.existing_run("one"))


def test_what_is_not_merged(store: Store, source: Store, tmp_path: Path, db_url: str) -> None:
    one = f.make_run(source, "one")
    f.register(one)
    url = source.database.shown_url
    with pytest.raises(RunInUse, match="live worker"):
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


def test_side_car_files_are_the_copies_own_and_images_come_along(store: Store, source: Store, tmp_path: Path) -> None:
    run = f.make_run(source, "one", prompts=0, admit=False, array_url=str(tmp_path / "arrays"), array_file_bytes=1)
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    image = b"\x89PNG\r\n\x1a\npixels"
    run.add_prompts([{"messages": [{"role": "user", "content": content}], "prompt_ids": [9, 9], "images": [image]}])
    run.admit()
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.add(run, claim, 3, 0, "stop")
        run.attach(claim, "values", np.arange(3, dtype=np.float32))
        run.finish(claim)
    lay_down(run)
    before = all_of(run)
    assert any(row["images"] for row in before) and any(row["arrays"] for row in before)
    copies.merge(store, source.database.shown_url)
    merged = store.existing_run("one")
    shutil.rmtree(tmp_path / "arrays" / run.uuid)
    assert all_of(merged) == before
    sample = f.value(merged, "SELECT min(sample_id) FROM segment_array")
    assert merged.array(sample, "values")[0].tolist() == [0, 1, 2]
    f.sound(merged)


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
