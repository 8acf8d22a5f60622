"""The named places: what they do when armed, and that nothing happens where nobody asked."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store, faults
from samplestore.errors import InvalidSetting
from tests.support import factory as f
from tests.support.processes import Process, Processes

CODE = "from samplestore import faults\nfor n in range(4):\n    print(n, flush=True)\n    faults.reached('claimed')"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def started(processes: Processes, spec: str) -> Process:
    return processes.start([sys.executable, "-c", CODE], name="python", env={faults.VARIABLE: spec})


def test_without_the_variable_nothing_happens(processes: Processes) -> None:
    assert started(processes, "").wait() == 0


def test_a_process_kills_itself_at_the_arrival_that_was_named(processes: Processes) -> None:
    process = started(processes, "claimed=kill@3")
    assert process.wait() == -signal.SIGKILL
    assert process.log().split() == ["0", "1", "2"]


def test_a_process_stops_and_goes_on(processes: Processes) -> None:
    process = started(processes, "claimed=stop@2")
    stat = Path(f"/proc/{process.pid}/stat")
    process.wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="it is stopped")
    assert process.log().split() == ["0", "1"]
    process.signal(signal.SIGCONT)
    assert process.wait() == 0
    assert process.log().split() == ["0", "1", "2", "3"]


def test_other_points_are_passed(processes: Processes) -> None:
    assert started(processes, "committed=kill@1").wait() == 0


def test_a_lost_answer_is_repeated_without_harm(store: Store) -> None:
    """Each verb's commit breaks off before its answer: the store repeats it, and nobody sees a difference."""

    def lossy(verb: Callable[..., Any], *args: Any) -> Any:
        before = store.database.reconnects
        faults.arm("committed=lose@1")
        try:
            return verb(*args)
        finally:
            faults.arm("")
            assert store.database.reconnects == before + 1

    run = f.make_run(store, prompts=2)
    worker, trainer = f.register(run), f.register(run, "trainer")
    assert lossy(run.claim, worker, 9) == [], "the first claim took them all, and nobody heard"
    assert lossy(run.disown, worker, []) == 0, "so did the first disown"
    for claim in run.claim(worker, 9):
        assert lossy(f.add, run, claim, 3, 0, "stop") == 3
        lossy(run.finish, claim)
    batch = lossy(f.lease, run, trainer, 1)
    lossy(f.commit, run, batch, trainer)
    lossy(run.publish_weights, "/w/1", 1)
    assert f.states(run) == ["consumed"] * 2 and run.current_version == 1
    f.sound(run)


def test_a_connection_that_is_cut_after_its_commit_was_sent(postgres_url: str) -> None:
    """The real thing, on PostgreSQL: the server gets the COMMIT, and its answer finds nobody."""
    with samplestore.open(postgres_url) as store:
        run = f.make_run(store, prompts=1)
        worker = f.register(run)
        claim, other = run.claim(worker, 2)
        cut: list[int] = []

        def commit(connection: sa.Connection) -> None:
            if cut:
                return
            driver: Any = connection.connection.driver_connection
            cut.append(driver.pgconn.backend_pid)
            driver.pgconn.send_query(b"COMMIT")
            while driver.pgconn.flush():
                continue
            # in the place of its socket comes one whose other end is closed: no answer can be read any more
            dead, other_end = socket.socketpair()
            with dead:
                other_end.close()
                os.dup2(dead.fileno(), driver.pgconn.socket)
            driver.pgconn.get_result()

        sa.event.listen(store.database.writer, "commit", commit)
        before = store.database.reconnects
        assert f.add(run, claim, 3) == 3
        assert len(cut) == 1 and store.database.reconnects == before + 1
        f.add(run, claim, 2)
        f.answer(run, other)
        run.finish(claim)
        assert [row["n_tokens"] for row in f.segments(run, claim.sample_id)] == [3, 2]
        f.sound(run)


@pytest.mark.parametrize("spec", ["claimed", "nowhere=kill@1", "claimed=explode@1", "claimed=kill@0", "claimed=kill@x"])
def test_what_is_misspelt_is_refused(spec: str) -> None:
    with pytest.raises(InvalidSetting, match="SAMPLESTORE_FAULTS"):
        faults.arm(spec)
