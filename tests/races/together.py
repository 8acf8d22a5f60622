"""What the tests of races share: a transaction that is held open, threads from one barrier, waits for locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from samplestore.errors import SampleStoreError
from samplestore.run import Run
from samplestore.verbs.tx import Tx
from tests.support import factory as f
from tests.support.processes import wait_until

DEADLINE_S = 30.0


class Held:
    """`work(tx)` in a transaction of another thread, which stays open before its commit until `let_go`."""

    def __init__(self, run: Run, work: Callable[[Tx], Any]) -> None:
        self._release, self._done_work = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)

        def hold(tx: Tx) -> Any:
            result = work(tx)
            self._done_work.set()
            if not self._release.wait(DEADLINE_S):
                raise TimeoutError("nobody let go")
            return result

        self.future: Future[Any] = self._pool.submit(run.transact, hold)
        wait_until(lambda: self._done_work.is_set() or self.future.done(), what="the held transaction's work")

    def let_go(self) -> Any:
        self._release.set()
        try:
            return self.future.result(DEADLINE_S)
        finally:
            self._pool.shutdown()


@contextmanager
def threads(n: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """A function that runs `work(i)` in n threads from one barrier on; results or errors in order."""
    with ThreadPoolExecutor(n) as pool:

        def together(work: Callable[[int], Any]) -> list[Any]:
            barrier = threading.Barrier(n)

            def one(i: int) -> Any:
                barrier.wait(DEADLINE_S)
                try:
                    return work(i)
                except SampleStoreError as error:
                    return error

            return [future.result(2 * DEADLINE_S) for future in [pool.submit(one, i) for i in range(n)]]

        yield together


def waiting_for_locks(run: Run) -> int:
    return int(
        f.value(
            run, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    )
