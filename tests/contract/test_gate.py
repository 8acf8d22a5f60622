"""The writer gate: one writer, bounded waits that name the holder, and a kernel that cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore import gate as gates
from samplestore.errors import StoreBusy
from samplestore.gate import Gate, _Lock

from ..support import factory as f
from ..support.processes import Process, Processes

HOLDER = """
import signal, sys
from samplestore.gate import Gate
with Gate(sys.argv[1], 5.0).hold():
    print("holding", flush=True)
    signal.pause()
"""
FORKER = """
import os, sys, time
from samplestore.gate import Gate
gate = Gate(sys.argv[1], 0.2)
with gate.hold():
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Gate(sys.argv[1], 0.2).hold().__enter__()
            answer = b"inside"
        except Exception as error:
            answer = type(error).__name__.encode()
        os.write(w, answer)
        os._exit(0)
    os.waitpid(pid, 0)
    print("child:", os.read(r, 100).decode(), flush=True)
# a child that lives on must not keep the lock of a parent that let go
with gate.hold():
    pid = os.fork()
    if pid == 0:
        import signal
        signal.pause()
other = Gate(sys.argv[1], 5.0)
with other.hold():
    print("free again", flush=True)
os.kill(pid, 9)
"""


def holder(processes: Processes, path: Path) -> Process:
    process = processes.start([sys.executable, "-c", HOLDER, str(path)], name="holder")
    process.wait_for_log("holding")
    return process


def test_a_stopped_holder_is_named(processes: Processes, sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.db.gate"
    process = holder(processes, path)
    process.signal(signal.SIGSTOP)
    with samplestore.open(sqlite_url, busy_s=0.2) as store:
        with pytest.raises(StoreBusy, match=f"process {process.pid} holds it") as caught:
            store.run("r")
        assert caught.value.holder_pid == process.pid
        assert caught.value.since is not None
        assert caught.value.waited_s == pytest.approx(0.2)
        assert store.run_names() == [], "readers need no gate"
        process.kill()
        assert store.run("r").id == 1, "the kernel opened the gate when its holder died"
        f.make_run(store, "s")


def test_who_gave_up_does_not_hold_the_gate_later(processes: Processes, tmp_path: Path) -> None:
    """The lock that a waiter queued for is let go when its turn comes after the waiter has left."""
    path = tmp_path / "gate"
    process = holder(processes, path)
    gate = Gate(str(path), 0.05)
    for _ in range(3):
        with pytest.raises(StoreBusy), gate.hold():
            raise AssertionError("inside")
    process.kill()
    for _ in range(3):
        with Gate(str(path), 30.0).hold():
            pass
        with gate.hold(30.0):
            pass
    gate.close()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    gate, inside, worst = Gate(str(tmp_path / "gate"), 30.0), [0], [0]

    def work() -> None:
        for _ in range(50):
            with gate.hold(), gate.hold():  # nested holds are one
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1]
    gate.close()


def test_descriptors_do_not_pile_up(tmp_path: Path) -> None:
    gate = Gate(str(tmp_path / "gate"), 30.0)

    def hold() -> None:
        with gate.hold():
            pass

    for _ in range(40):
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
    open_ = sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(tmp_path / "gate") for fd in os.listdir("/proc/self/fd"))
    assert open_ <= 2, "threads that ended left their descriptors behind"
    gate.close()


def test_a_thread_has_one_helper_which_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes write by turns every hold waits: a thread for each would cost more than the write."""
    path, asked = str(tmp_path / "gate"), threading.Semaphore(0)
    helpers: list[threading.Thread] = []
    queue = _Lock.queue

    def told(lock: _Lock, turn: Any) -> None:
        before = set(threading.enumerate())
        queue(lock, turn)
        if threading.current_thread() is thread:
            helpers.extend(t for t in threading.enumerate() if t.name == "samplestore-gate" and t not in before)
            asked.release()

    monkeypatch.setattr(_Lock, "queue", told)
    gate, other = Gate(path, 30.0), Gate(path, 30.0)

    def wait_twice(mine: threading.Barrier) -> None:
        for _ in range(2):
            mine.wait(30.0)
            with gate.hold():
                pass
            mine.wait(30.0)

    mine = threading.Barrier(2)
    thread = threading.Thread(target=wait_twice, args=(mine,))
    thread.start()
    for _ in range(2):
        with other.hold():
            mine.wait(30.0)
            assert asked.acquire(timeout=30.0), "it does not wait"
        mine.wait(30.0)
    thread.join(30.0)
    (helper,) = helpers
    helper.join(30.0)
    assert not helper.is_alive()
    gate.close()
    other.close()


@pytest.mark.parametrize("place", ["_Lock.queue", "_Turn.wait", "Gate._wait", "Gate._acquire", "os.pwrite"])
def test_a_ctrl_c_leaves_the_gate_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Wherever it comes: between a call and the next line is as likely as within the wait."""
    path = str(tmp_path / "gate")
    gate, other, waits, free = Gate(path, 30.0), Gate(path, 30.0), threading.Event(), threading.Event()
    at, name = place.split(".")
    owner = os if at == "os" else getattr(gates, at)
    call, queue = getattr(owner, name), _Lock.queue

    def queued(lock: _Lock, turn: Any) -> None:
        queue(lock, turn)
        free.set()

    def interrupted(*args: Any) -> None:
        (queued if name == "queue" else call)(*args)
        raise KeyboardInterrupt

    def hold() -> None:
        with other.hold():
            waits.set()
            assert free.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert waits.wait(30.0)
    with monkeypatch.context() as patch:
        patch.setattr(_Lock, "queue", queued)
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught, gate.hold():
            raise AssertionError("inside")
    thread.join(30.0)
    with Gate(path, 5.0).hold():
        assert caught.traceback, "where it is kept, as a notebook does, the gate is free all the same"
    with gate.hold(5.0):
        pass
    gate.close()
    other.close()


def test_a_wait_that_can_not_be_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel has no locks left, or no threads: the next wait is a new one."""
    path = str(tmp_path / "gate")
    gate, other, flock, queue = Gate(path, 30.0), Gate(path, 30.0), fcntl.flock, _Lock.queue

    def refused(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            raise OSError(errno.ENOLCK, "No locks available")
        flock(fd, how)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def queued(lock: _Lock, turn: Any) -> None:
        queue(lock, turn)
        inside.close()

    inside = ExitStack()
    inside.enter_context(other.hold())
    for patched, name, instead in ((threading.Thread, "start", no_thread), (fcntl, "flock", refused)):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, instead)
            with pytest.raises((OSError, RuntimeError), match=r"No locks available|new thread"), gate.hold():
                raise AssertionError("inside")
    with pytest.raises(StoreBusy), gate.hold(-0.5):
        raise AssertionError("inside")
    monkeypatch.setattr(_Lock, "queue", queued)
    with gate.hold(5.0):
        pass
    gate.close()
    other.close()


def test_closing_takes_the_gate_from_nobody(tmp_path: Path) -> None:
    path = str(tmp_path / "gate")
    gate = Gate(path, 30.0)
    with gate.hold():
        gate.close()
        with pytest.raises(StoreBusy), Gate(path, 0.0).hold():
            raise AssertionError("two are inside")
    with Gate(path, 5.0).hold():
        pass


def test_a_forked_child_inherits_neither_lock_nor_blame(processes: Processes, tmp_path: Path) -> None:
    process = processes.start([sys.executable, "-c", FORKER, str(tmp_path / "gate")], name="forker")
    log = process.wait_for_log("free again")
    assert "child: StoreBusy" in log
