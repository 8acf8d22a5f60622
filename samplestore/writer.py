"""Group commit: many small writes of one worker become one transaction, each acknowledged after the commit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from samplestore.verbs import episodes, requests, samples, stages
from samplestore.verbs.together import LOCKS_GROUP, Verb, Write, perform
from samplestore.verbs.tx import Transactor

End = tuple[Any, Any, BaseException | None]  # a future, and its result or error
Call = tuple[Any, ...]  # a verb and its arguments, all but the transaction; the first of them is a claim
# Verbs on one claim may share a commit. All others (claim, admit, ...) lock workers or runs, which come before groups
# in the lock order, and so have a commit of their own.
SHARES: frozenset[Verb] = LOCKS_GROUP | {
    samples.append,
    samples.release,
    samples.note_abort,
    requests.begin_request,
    requests.end_request,
    episodes.touch,
    episodes.begin,
    episodes.settle,
    episodes.note,
    stages.release_stage,
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """Writes that are made together, and the future of whoever waits for them."""

    writes: list[Write]
    single: bool  # the future gives the result of the only one, not a list
    done: Any

    @property
    def shares(self) -> bool:
        """Whether they may be in one commit with others."""
        return all(write.verb in SHARES for write in self.writes)

    def result(self, results: list[Any]) -> Any:
        return results[0] if self.single else results


class Writer:
    """One thread that owns the writes of a worker process. Verbs are those of samplestore.verbs, which take a claim
    as their first argument.

    The writes of a commit are sorted by the lock order (group, sample); writes of one sample keep their order.
    Unsorted, two workers' commits deadlock on PostgreSQL more often than they succeed. If one write is refused the
    transaction is taken back and each is done alone, so that only the refused one fails.

    loop  the event loop that submits and waits. It is woken once for a commit, not once for each write; without it,
          futures are those of threads
    """

    def __init__(self, run: Transactor, max_writes: int = 64, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.run, self.max_writes, self.loop = run, max_writes, loop
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._ends: deque[End] = deque()  # for the loop
        self._woken = False  # it will look at them
        self.commits = 0
        self._thread = threading.Thread(target=self._loop, name="samplestore-writer", daemon=True)
        self._thread.start()

    def submit(self, verb: Verb, claim: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue `verb(tx, claim, ...)`. The future gives its result, or its error, after the commit."""
        return self._queue([_write(verb, claim, (claim, *args), kwargs)], single=True)

    def submit_together(self, calls: Sequence[Call]) -> Any:
        """Queue writes of one claim: all of them are made, in order, or none. The future gives their results."""
        claim = next((call[1] for call in calls if hasattr(call[1], "sample_id")), None)
        return self._queue([_write(verb, claim, tuple(args), {}) for verb, *args in calls], single=False)

    @property
    def queued(self) -> int:
        """Writes that wait, about."""
        return self._waiting.qsize()

    def _queue(self, writes: list[Write], single: bool) -> Any:
        done: Any = self.loop.create_future() if self.loop else Future()
        if self.loop is None:
            done.set_running_or_notify_cancel()  # a write is made whether somebody waits for it or not
        self._waiting.put(_Asked(writes, single, done))
        return done

    def _loop(self) -> None:
        while True:
            first = self._waiting.get()
            if first is None:
                return
            asked, stop = [first], False
            while len(asked) < self.max_writes and not self._waiting.empty():
                more = self._waiting.get()
                if more is None:
                    stop = True
                    break
                asked.append(more)
            self._commit(asked)
            if stop:
                return

    def _commit(self, asked: list[_Asked]) -> None:
        sharing = [a for a in asked if a.shares]
        if len(sharing) > 1 and self._at_once(sharing):
            asked = [a for a in asked if not a.shares]
        for one in asked:
            self._alone(one)

    def _at_once(self, asked: list[_Asked]) -> bool:
        try:
            results = iter(self.run.transact(lambda tx: perform(tx, [write for a in asked for write in a.writes])))
        except Exception:  # one of them was refused, or the database is in trouble: each is tried alone
            return False
        self.commits += 1
        self._tell([(a.done, a.result([next(results) for _ in a.writes]), None) for a in asked])
        return True

    def _alone(self, asked: _Asked) -> None:
        try:
            results = self.run.transact(lambda tx: perform(tx, asked.writes))
        except BaseException as error:  # handed to whoever waits for this write
            self._tell([(asked.done, None, error)])
        else:
            self.commits += 1
            self._tell([(asked.done, asked.result(results), None)])

    def _tell(self, ends: list[End]) -> None:
        if self.loop is None:
            _settle(ends)
        else:
            self._ends.extend(ends)
            if not self._woken:  # to wake a busy loop once more costs as much as an append
                self._woken = True
                self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """In the loop. What comes after the flag has fallen wakes it again."""
        self._woken = False
        while self._ends:
            _settle([self._ends.popleft()])

    def close(self) -> None:
        """Write what was queued, then end the thread."""
        self._waiting.put(None)
        self._thread.join()


def _settle(ends: list[End]) -> None:
    for done, result, error in ends:
        if done.cancelled():
            continue  # of a task that was cancelled: the write is made all the same
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


def _write(verb: Verb, claim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write:
    return Write(verb, (args, kwargs), getattr(claim, "group_id", 0), getattr(claim, "sample_id", 0))
