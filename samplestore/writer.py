"""Group commit: many small writes of one worker become one transaction, each acknowledged after the commit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from samplestore.verbs import samples, stages
from samplestore.verbs.tx import Transactor, Tx

Verb = Callable[..., Any]
LAST = 2**63
LOCKS_GROUP: frozenset[Verb] = frozenset({samples.finish, samples.fail, stages.score, stages.fail_stage})
# Verbs on one claim may share a commit. All others (claim, admit, ...) lock workers or runs, which come before groups
# in the lock order, and so have a commit of their own.
SHARES: frozenset[Verb] = LOCKS_GROUP | {
    samples.append,
    samples.release,
    samples.note_abort,
    samples.begin_request,
    samples.end_request,
    stages.release_stage,
}


@dataclass(slots=True)
class _Write:
    verb: Verb
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group_id: int
    sample_id: int
    number: int
    done: Future[Any] = field(default_factory=Future)


class Writer:
    """One thread that owns the writes of a worker process. Verbs are those of samplestore.verbs, which take a claim
    as their first argument.

    The writes of a commit are sorted by the lock order (group, sample); writes of one sample keep their order.
    Unsorted, two workers' commits deadlock on PostgreSQL more often than they succeed. If one write is refused the
    transaction is taken back and each is done alone, so that only the refused one fails.
    """

    def __init__(self, run: Transactor, max_writes: int = 64) -> None:
        self.run, self.max_writes = run, max_writes
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._count = 0
        self.commits = 0
        self._thread = threading.Thread(target=self._loop, name="samplestore-writer", daemon=True)
        self._thread.start()

    def submit(self, verb: Verb, claim: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue `verb(tx, claim, ...)`. The future gives its result, or its error, after the commit."""
        group_id, sample_id = getattr(claim, "group_id", 0), getattr(claim, "sample_id", 0)
        self._count += 1
        # Running from the start, so that it cannot be cancelled: tokens of a task that was cancelled are kept, and the
        # thread never finds a future that takes no result.
        if verb is samples.end_request:
            group_id = LAST  # it has no claim, and counts the tokens that appends before it have stored
        write = _Write(verb, (claim, *args), kwargs, group_id, sample_id, self._count)
        write.done.set_running_or_notify_cancel()
        self._waiting.put(write)
        return write.done

    def _loop(self) -> None:
        while True:
            first = self._waiting.get()
            if first is None:
                return
            writes, stop = [first], False
            while len(writes) < self.max_writes and not self._waiting.empty():
                more = self._waiting.get()
                if more is None:
                    stop = True
                    break
                writes.append(more)
            self._commit(writes)
            if stop:
                return

    def _commit(self, writes: list[_Write]) -> None:
        alone = [w for w in writes if w.verb not in SHARES]
        writes = sorted((w for w in writes if w.verb in SHARES), key=lambda w: (w.group_id, w.sample_id, w.number))
        if len(writes) > 1:
            try:
                results = self.run.transact(lambda tx: _all(tx, writes))
            except Exception:  # one of them was refused, or the database is in trouble: see below
                results = None
            if results is not None:
                self.commits += 1
                for write, result in zip(writes, results, strict=True):
                    write.done.set_result(result)
                writes = []
        for write in [*writes, *alone]:
            try:
                write.done.set_result(self.run.transact(partial(_one, write)))
                self.commits += 1
            except BaseException as error:  # handed to whoever waits for this write
                write.done.set_exception(error)

    def close(self) -> None:
        """Write what was queued, then end the thread."""
        self._waiting.put(None)
        self._thread.join()


def _one(write: _Write, tx: Tx) -> Any:
    return _all(tx, [write])[0]


def _all(tx: Tx, writes: list[_Write]) -> list[Any]:
    needed = sorted({w.group_id for w in writes if w.verb in LOCKS_GROUP})
    if needed:
        tx.lock_groups(needed)  # before any sample: the lock order
    return [w.verb(tx, *w.args, **w.kwargs) for w in writes]
