"""Side-car files of databases that have a run in common, of damaged disks, and of sweeps while others write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import samplestore
from samplestore import Store, arrayfiles, retention
from samplestore.arrayfiles import LocalFiles
from samplestore.backups import arrays as backup_arrays
from samplestore.backups.backup import backup, restore
from samplestore.engine import Database
from samplestore.errors import BackupError, InvalidSetting
from samplestore.run import Run

from ..support import factory as f

Place = Callable[[], str]


@pytest.fixture
def filed(store: Store, tmp_path: Path) -> Run:
    return f.make_run(
        store, prompts=2, samples_per_prompt=1, groups_per_step=1, array_url=str(tmp_path / "arrays"),
        array_file_bytes=64,
    )  # fmt: skip


def attached(run: Run, fill: float) -> int:
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 32, finish_reason="stop")
    run.attach(claim, "values", np.full(32, fill, np.float32))
    run.finish(claim)
    run.goodbye(worker)
    return claim.sample_id


def files_of(run: Run) -> list[Path]:
    files = run.array_files()
    assert isinstance(files, LocalFiles)
    return sorted(files.folder.glob("??/*"))


@pytest.fixture
def elsewhere(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    sqlite = store.database.is_sqlite
    return f"sqlite:///{tmp_path / 'restored.db'}" if sqlite else str(request.getfixturevalue("postgres_empty_url"))


def restored(copy: Path, place: str) -> Store:
    target = Database(place)
    restore(copy, target, overwrite=not target.is_sqlite)
    target.close()
    return samplestore.open(place)


@pytest.mark.parametrize("whole", [False, True], ids=["steps", "run"])
def test_a_restored_copy_sweeps_its_own_files(
    filed: Run, store: Store, tmp_path: Path, elsewhere: str, whole: bool
) -> None:
    """The original goes on: what it stored after the backup is named by no row of the copy."""
    before = attached(filed, 1.0)
    backup(store.database, tmp_path / "copy")
    after = attached(filed, 2.0)
    with restored(tmp_path / "copy", elsewhere) as other:
        copy = other.existing_run("r")
        assert copy.array(before, "values")[0].tolist() == [1.0] * 32
        assert copy.uuid == filed.uuid and len(files_of(copy)) == 1
        if whole:
            retention.remove(copy)
            assert files_of(copy) == []
        else:
            assert retention.sweep_files(copy, grace_s=0.0).files == 0
            f.sound(copy)
            again = tmp_path / "again"
            assert backup(other.database, again).arrays == 1, "a copy is backed up as any other"
    f.sound(filed)
    assert [filed.array(i, "values")[0][0] for i in (before, after)] == [1.0, 2.0]
    assert retention.sweep_files(filed, grace_s=0.0).files == 0


def test_a_restore_takes_files_from_where_they_lay(filed: Run, store: Store, tmp_path: Path, elsewhere: str) -> None:
    sample_id = attached(filed, 1.0)
    backup(store.database, tmp_path / "copy")
    (tmp_path / "copy.arrays").rename(tmp_path / "away")
    with restored(tmp_path / "copy", elsewhere) as other:
        assert other.existing_run("r").array(sample_id, "values")[0].tolist() == [1.0] * 32


@pytest.mark.parametrize("damage", [lambda good: good[:10], lambda good: b"x" * len(good)], ids=["cut", "other"])
def test_damage_is_not_taken_for_the_file(
    filed: Run, store: Store, tmp_path: Path, elsewhere: str, damage: Callable[[bytes], bytes]
) -> None:
    sample_id = attached(filed, 1.0)
    backup(store.database, tmp_path / "copy")
    (kept,) = (tmp_path / "copy.arrays").glob("*/??/*")
    (path,) = files_of(filed)
    good = path.read_bytes()
    kept.write_bytes(damage(good))
    backup(store.database, tmp_path / "copy", overwrite=True)
    assert kept.read_bytes() == good, "a backup looks at what an earlier one left"
    path.write_bytes(damage(good))
    with restored(tmp_path / "copy", elsewhere) as other:
        assert other.existing_run("r").array(sample_id, "values")[0].tolist() == [1.0] * 32
    filed.array_files().put(good)
    assert path.read_bytes() == good, "equal bytes that come again mend it"
    f.sound(filed)


def test_a_restore_that_fails_leaves_no_files(sqlite_url: str, tmp_path: Path) -> None:
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=2, samples_per_prompt=1, array_url=str(tmp_path / "a"), array_file_bytes=64)
        attached(run, 1.0)
        attached(run, 2.0)
        backup(store.database, tmp_path / "copy")
        for path in [max(files_of(run)), max((tmp_path / "copy.arrays").glob("*/??/*"))]:
            path.unlink()
    target = Database(f"sqlite:///{tmp_path / 'restored.db'}")
    with pytest.raises(BackupError, match="A backup's files lie in"):
        restore(tmp_path / "copy", target)
    target.close()
    assert len(list((tmp_path / "a").glob("*/??/*"))) == 1, "the one that was there"


def test_one_file_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, stuck = LocalFiles(tmp_path), 1
    keys = [files.put(bytes([n]) * 9) for n in range(3)]
    remove = LocalFiles.remove

    def refusing(self: LocalFiles, key: str, grace_s: float = 0.0) -> bool:
        if key == keys[stuck]:
            raise PermissionError(13, "Permission denied")
        return remove(self, key, grace_s)

    monkeypatch.setattr(LocalFiles, "remove", refusing)
    with pytest.raises(BackupError, match="broken"), backup_arrays.copies() as put:
        put.extend((files, key) for key in keys)
        raise BackupError("broken")
    assert [key for key, _ in files.old(0.0)] == [keys[stuck]]


def test_a_sweep_while_files_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .partial that was listed has its own name, and is gone, when it is looked at."""
    files = LocalFiles(tmp_path)
    keys = [files.put(bytes([n]) * 9) for n in range(3)]
    (tmp_path / keys[0]).with_name(f"{keys[0][3:]}.1.1.partial").touch()
    stat = Path.stat

    def renamed(path: Path, **more: bool) -> os.stat_result:
        if path.name.endswith(".partial") or path.name == keys[1][3:]:
            path.unlink(missing_ok=True)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", renamed)
    assert sorted(key for key, _ in files.old(0.0)) == sorted([keys[0], keys[2]])


def test_a_relative_path_is_one_folder(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=1, samples_per_prompt=1, array_url="arrays", array_file_bytes=64)
        assert run.settings.array_url == str(tmp_path / "a" / "arrays")
        assert store.run("r", array_url="arrays").id == run.id, "typed again in the same folder"
        sample_id = attached(run, 1.0)
        monkeypatch.chdir(tmp_path / "b")
        f.sound(store.existing_run("r"))
        assert store.existing_run("r").array(sample_id, "values")[0][0] == 1.0
        assert store.run("file", array_url="file://x").settings.array_url == f"file://{tmp_path}/b/x"
        assert store.run("s3", array_url="s3://bucket/x").settings.array_url == "s3://bucket/x"
        for name in ("../up", "a/b", "", 7):
            with pytest.raises(InvalidSetting, match="array_folder"):
                store.run("bad", array_folder=name)
    assert arrayfiles.GRACE_S >= 3600
