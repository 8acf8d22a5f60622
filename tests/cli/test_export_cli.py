"""samplestore export, import, merge and fork, as a user types them."""

from __future__ import annotations

import os
import pty
import threading
from pathlib import Path
from typing import Any

import pytest

import samplestore
from tests.support.extras import library

from ..contract.exporting import lived


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a run "lived", which is only read."""
    path = tmp_path_factory.mktemp("exported") / "lived.db"
    with samplestore.open(str(path)) as store:
        lived(store)
    return path


def test_there_and_back(cli: Any, database: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other.db"
    first = cli("export", "lived", "--db", str(database), "--to", str(out))
    assert first.code == 0 and first.err == "", first.err
    assert first.out == f"{out}\n18 samples of 8 groups, 122 response tokens (run lived)\n"
    again = cli("export", "lived", "--db", str(database), "--to", str(out))
    assert again.code == 1 and again.err.endswith(f" --db {database} --to {out} --format parquet --force\n")
    told = cli("export", "lived", "--db", str(database), "--to", str(out), "--force", "--steps", "0:1", "--json").json
    assert (told["format"], told["groups"], told["steps"], told["pruned"]) == ("parquet", 4, [0, 1], 0)
    back = ("import", str(out), "--run", "again", "--db", str(other))
    assert cli(*back).out == f"{out}: 4 groups added, 0 already there (run again)\n"
    assert cli(*back, "--json").json == {"schema_version": 1, "run": "again", "added": 0, "existing": 4}
    assert cli("check", "--db", str(other)).code == 0


def test_slimes_files(cli: Any, database: Path, tmp_path: Path) -> None:
    library("torch")
    template = str(tmp_path / "dump" / "rollout_{rollout_id}.pt")
    made = cli("export", "lived", "--db", str(database), "--format", "slime", "--to", template, "--step", "1")
    assert made.code == 0 and made.out.startswith(str(tmp_path / "dump" / "rollout_1.pt")), made.err
    into = cli("import", template, "--run", "s", "--db", str(tmp_path / "s.db"))
    assert into.out == f"{template}: 2 groups added, 0 already there (run s)\n", into.err
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04")
    bad = cli("import", str(tmp_path / "bad.pt"), "--run", "s", "--db", str(tmp_path / "s.db"))
    assert bad.code == 1 and "bad.pt: is no whole file of torch.save" in bad.err
    assert bad.err.endswith("samplestore import FILE --run NAME\n")


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--step", "1", "--all"], 2, "exclude each other"),
        (["--steps", "3"], 2, "--steps is the first and the last step"),
        (["--steps", "3:1"], 2, "--steps is the first and the last step"),
        (["--step", "77"], 1, "no committed step from 77 to 77"),
        (["--format", "csv"], 1, "parquet | jsonl | slime"),
        (["--status", "nice"], 1, "status='nice'"),
        (["--format", "slime"], 1, "a path with {rollout_id} in it"),
    ],
)
def test_what_is_refused(cli: Any, database: Path, tmp_path: Path, more: list[str], code: int, said: str) -> None:
    done = cli("export", "lived", "--db", str(database), "--to", str(tmp_path / "x"), *more)
    assert done.code == code and said in done.err, done.err
    assert "samplestore " in done.err.rsplit(". ", 1)[-1] and not (tmp_path / "x").exists()


def test_missing_things_make_nothing(cli: Any, database: Path, tmp_path: Path) -> None:
    assert cli("export", "lived", "--db", str(tmp_path / "no.db"), "--to", str(tmp_path / "x")).code == 3
    assert cli("export", "other", "--db", str(database), "--to", str(tmp_path / "x")).code == 1
    assert cli("merge", str(tmp_path / "t.db"), str(tmp_path / "no.db")).code == 3
    assert cli("fork", "lived", "--db", str(tmp_path / "no.db"), "--at-step", "0", "--as", "b").code == 3
    assert list(tmp_path.glob("*.db")) == []


def test_fork_and_merge(cli: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "a.db", tmp_path / "all.db"
    with samplestore.open(str(source)) as store:
        run = lived(store)
    forked = cli("fork", "lived", "--db", str(source), "--at-step", "0", "--as", "branch")
    assert forked.out == "run branch: 8 groups of lived, as of step 0; current weights: version 2\n", forked.err
    taken = cli("fork", "lived", "--db", str(source), "--at-step", "0", "--as", "branch")
    assert taken.code == 1 and "samplestore runs" in taken.err
    busy = cli("merge", str(target), str(source))
    assert busy.code == 1 and busy.err.endswith("samplestore reap\n")
    with samplestore.open(str(source)) as store, store.database.writing() as connection:
        connection.exec_driver_sql("UPDATE worker SET heartbeat = heartbeat - 1000000")
    told = cli("merge", str(target), str(source), "--json").json
    assert [(r["run"], r["groups"], r["existing"]) for r in told["runs"]] == [("lived", 8, 0), ("branch", 8, 0)]
    assert told["runs"][0]["uuid"] == run.uuid
    again = cli("merge", str(target), str(source))
    assert again.out.splitlines()[0].startswith(f"{source}: run lived: 0 groups merged, 8 already there;")
    for name in ("lived", "branch"):
        assert cli("check", "--db", str(target), "--run", name).code == 0


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from samplestore.cli import progress

    with progress.bar("export") as draw:
        assert draw is None
    inside, terminal = pty.openpty()
    seen: list[bytes] = []
    read = threading.Thread(target=_read_all, args=(inside, seen))
    read.start()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", stderr)
        with progress.bar("export") as draw:
            assert draw is not None
            draw(1, 2)
    read.join(60)
    assert b"export" in b"".join(seen)
    assert capfd.readouterr().out == ""


def _read_all(terminal: int, seen: list[bytes]) -> None:
    try:
        while part := os.read(terminal, 65536):
            seen.append(part)
    except OSError:  # how a pseudo-terminal says that the other end is closed
        pass
