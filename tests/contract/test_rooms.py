"""Folders beside a place: gone at the end, cleared after a kill, and never somebody else's."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from samplestore import Store, rooms
from samplestore.backups import backup

from ..support import factory as f
from ..support.processes import Process, Processes

HOLDS = """
import signal, sys
from pathlib import Path
from samplestore import rooms
target = Path(sys.argv[1])
with rooms.beside(target) as room:
    (room / "half").write_text("made")
    if target.exists():
        target.rename(room / rooms.ASIDE)
    print("at work", flush=True)
    signal.pause()  # until it is killed
"""


def at_work(processes: Processes, target: Path) -> Process:
    process = processes.start([sys.executable, "-c", HOLDS, str(target)])
    process.wait_for_log("at work")
    return process


def left(target: Path) -> list[Path]:
    return sorted(target.parent.glob(".*.partial"))


def test_a_room_is_gone_at_its_end_and_what_made_way_is_back(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), rooms.beside(target) as room:
        target.rename(room / rooms.ASIDE)
        raise ZeroDivisionError
    assert target.read_text() == "old" and not left(target)


def test_what_a_killed_process_left_is_cleared_and_what_a_live_one_has_is_not(
    tmp_path: Path, processes: Processes
) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    lives, dies = at_work(processes, tmp_path / "other"), at_work(processes, target)
    assert not target.exists()
    with rooms.beside(target) as room:
        assert len(left(target)) == 3 and room in left(target), "both of them are at work"
    assert not target.exists() and len(left(target)) == 2
    dies.signal(signal.SIGKILL)
    dies.wait(30)
    rooms.clear(target)
    assert target.read_text() == "old"
    (one,) = left(target)
    assert one.name.startswith(".other.") and lives.alive()


def test_what_only_looks_like_a_room_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kept").touch()
    (tmp_path / ".out.abcdefgh.partial").symlink_to(mine)
    (tmp_path / ".out.ijklmnop.partial").touch()
    for name in (".out.b.abcdefgh.partial", ".out.ABCDEFGH.partial", "out.abcdefgh.partial", ".out.abcdefgh.partial2"):
        (tmp_path / name / rooms.ASIDE).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    rooms.clear(tmp_path / "out")
    rooms.clear(tmp_path / "none" / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_backup_clears_what_a_killed_one_left(store: Store, tmp_path: Path, processes: Processes) -> None:
    f.make_run(store)
    target = tmp_path / "copy"
    dies = at_work(processes, target)
    dies.signal(signal.SIGKILL)
    dies.wait(30)
    assert len(left(target)) == 1
    backup.backup(store.database, target)
    assert target.stat().st_size and not left(target)
