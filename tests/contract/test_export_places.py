"""Where an export goes: whole or not at all, and never in the place of what is none."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store, faults, retention
from samplestore.portable import export_files
from samplestore.portable.exports import NothingToExport
from samplestore.portable.files import MANIFEST
from samplestore.portable.replaced import ExportExists

from ..support import factory as f
from ..support.extras import library
from ..support.processes import Processes
from .exporting import FORMATS, export, lived, place

library("pyarrow")


def test_what_is_there_stays_there(store: Store, tmp_path: Path) -> None:
    run, path = lived(store), tmp_path / "out"
    run.export(path)
    with pytest.raises(ExportExists, match="--force"):
        run.export(path)
    run.export(path, force=True, steps=(0, 0))
    assert sorted(p.name for p in path.iterdir()) == [MANIFEST, "step=0"]
    mine = tmp_path / "mine"
    (mine / "kept").mkdir(parents=True)
    with pytest.raises(ExportExists, match="is no export"):
        run.export(mine, force=True)
    assert (mine / "kept").is_dir()
    (mine / "kept").rmdir()
    for name, text in ((MANIFEST, "{}"), ("kept", "mine")):
        shutil.rmtree(mine)
        shutil.copytree(path, mine)
        (mine / name).write_text(text)
        with pytest.raises(ExportExists):
            run.export(mine, force=True)
        assert (mine / name).read_text() == text


def test_a_file_that_no_export_made_stays_there(store: Store, tmp_path: Path) -> None:
    """With force too: rows, their manifest, and the database."""
    run, path = lived(store), tmp_path / "out.jsonl"
    beside = tmp_path / "out.jsonl.manifest.json"
    for one in (path, beside):
        for text in ("", "mine", '{"kind": "mine"}'):
            one.write_text(text)
            with pytest.raises(ExportExists, match="is no export"):
                run.export(path, format="jsonl", force=True)
            assert one.read_text() == text and len(list(tmp_path.glob("out*"))) == 1
        one.unlink()
    beside.mkdir()
    with pytest.raises(ExportExists, match="is no export"):
        run.export(path, format="jsonl")
    beside.rmdir()
    for compressed in ("", ".gz"):
        to = tmp_path / f"out.jsonl{compressed}"
        run.export(to, format="jsonl", statuses=["pending"])
        run.export(to, format="jsonl", force=True, steps=(0, 0))
        run.export(to, format="jsonl", force=True)
        to.unlink()
        with pytest.raises(ExportExists, match="--force"):
            run.export(to, format="jsonl")
    if not run.database.is_sqlite:
        return  # a server's files are none that a client could name
    database = run.database.path
    for where in (database, Path(f"{database}-wal"), Path(f"{database}.gate")):
        for kind in ("jsonl", "parquet"):
            with pytest.raises(ExportExists, match="is where the database is"):
                run.export(where, format=kind, force=True)
    f.sound(run)


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_a_replacement_that_is_stopped_at_the_last_moment_leaves_the_old_one(
    store: Store, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = lived(store), place(tmp_path, kind)
    export(run, path, kind, steps=(0, 0))
    before = {p: p.read_bytes() for p in path.parent.rglob("*out*") if p.is_file()}

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_files.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        export(run, path, kind, force=True)
    assert path.exists()
    assert {p: p.read_bytes() for p in path.parent.rglob("*out*") if p.is_file()} == before
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_breaks_off_leaves_nothing(store: Store, tmp_path: Path, kind: str) -> None:
    run, path = lived(store), place(tmp_path, kind)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("pulled the plug")

    export(run, path, kind, steps=(0, 0))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "rollouts.db" not in p.name}
    with pytest.raises(RuntimeError, match="plug"):
        export(run, path, kind, progress=stop, force=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "rollouts.db" not in p.name} == before


@pytest.mark.parametrize("kind", FORMATS[:2])
@pytest.mark.parametrize("force", [False, True])
def test_what_comes_there_during_the_export_stays(store: Store, tmp_path: Path, kind: str, force: bool) -> None:
    """An export takes hours: the place is looked at again before it is taken."""
    run, path = lived(store), place(tmp_path, kind)
    mine = path / "mine" if kind == "parquet" else path

    def comes(*_: int) -> None:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")

    with pytest.raises(ExportExists, match="is not replaced"):
        export(run, path, kind, progress=comes, force=force)
    assert mine.read_text() == "mine" and not list(tmp_path.glob("*.manifest.json"))
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_of_two_exports_to_one_place_the_first_stays(store: Store, tmp_path: Path, kind: str) -> None:
    run, path = lived(store), place(tmp_path, kind)
    first: list[Any] = []

    def other(*_: int) -> None:
        if not first:
            first.append(None)
            first.append(export(run, path, kind, steps=(0, 0)))

    with pytest.raises(ExportExists, match="--force"):
        export(run, path, kind, progress=other)
    assert store.run("again").import_samples(path).added == first[1].groups == 2


@pytest.mark.parametrize("point", ["exporting", "replacing"])
def test_an_export_that_is_killed_at_the_last_moment(
    db_url: str, store: Store, tmp_path: Path, processes: Processes, point: str
) -> None:
    """What it replaces is there again, and what it left is gone, when the next comes."""
    run, out, old = lived(store), tmp_path / "out", point == "replacing"
    if old:
        run.export(out, steps=(0, 0))
    to = ["export", "lived", "--to", str(out), "--db", db_url, "--force"]
    for _ in range(2):
        command = [sys.executable, "-m", "samplestore.cli", *to]
        killed = processes.start(command, env={faults.VARIABLE: f"{point}=kill@1"})
        assert killed.wait(60) == -signal.SIGKILL and not out.exists()
        assert len(list(tmp_path.glob(".out.*.partial"))) == 1, "the second has removed what the first left"
    if old:
        with pytest.raises(ExportExists, match="--force"):
            run.export(out)
        assert store.run("before").import_samples(out).added == 2
    assert run.export(out, force=old).groups == 8
    assert not list(tmp_path.glob(".out.*"))
    assert store.run("again").import_samples(out).added == 8


def test_a_run_that_is_removed_meanwhile(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    f.execute(run, "UPDATE worker SET heartbeat = heartbeat - 1000000")

    def removed(*_: int) -> None:
        if store.run_names():
            retention.remove(run)

    with pytest.raises(NothingToExport, match="has been removed meanwhile"):
        run.export(tmp_path / "out", progress=removed)
    assert not (tmp_path / "out").exists()
