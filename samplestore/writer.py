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

from samplestore.verbs import appends, episodes, requests, samples, stages
from samplestore.verbs.together import LOCKS_GROUP, Verb, Write, perform, prepared
from samplestore.verbs.tx import Transactor

End = tuple[Any, Any, BaseException | None]  # a future, and its result or error
Call = tuple[Any, ...]  # a verb and its arguments, all but the transaction; the first of them is a claim
# Verbs on one claim may share a commit. All others (claim, admit, ...) lock workers or runs, which come before groups
# in the lock order, and so have a commit of their own.
SHARES: frozenset[Verb] = LOCKS_GROUP | {
    appends.append,
    samples.release,
    appends.note_abort,
    requests.begin_request,
    requests.end_request,
    episodes.touch,
    episodes.begin,
    episodes.settle,
    episodes.note,
    stages.release_stage,
}


LANES = 2  # on PostgreSQL: a fifth to two fifths more appends a second than with one, for one more connection


@dataclass(slots=True)
class _Asked:
    """Writes that are made together, and the future of whoever waits for them."""

    writes: list[Write]
    single: bool  # the future gives the result of the only one, not a list
    done: Any
    after: Sequence[tuple[_Lane, threading.Event]] = ()  # what other lanes were asked for before

    @property
    def shares(self) -> bool:
        """Whether they may be in one commit with others."""
        return all([write.verb in SHARES for write in self.writes])

    def result(self, results: list[Any]) -> Any:
        return results[0] if self.single else results


class Writer:
    """Owns the writes of a worker process. Verbs are those of samplestore.verbs, which take a claim as their first
    argument.

    The writes of a commit are sorted by the lock order (group, sample); writes of one sample keep their order.
    Unsorted, two workers' commits deadlock on PostgreSQL more often than they succeed. If one write is refused the
    transaction is taken back and each is done alone, so that only the refused one fails.

    On SQLite one thread makes all of them: the file has one writer. On PostgreSQL there are LANES threads, each with
    the groups that fall to it: while the server writes one's commit, the other's is made. A write that names no group
    waits for all that was asked for before it, as it does with one thread; what is asked for after it may overtake it.

    loop  the event loop that submits and waits. It is woken once for a commit, not once for each write; without it,
          futures are those of threads
    """

    def __init__(self, run: Transactor, max_writes: int = 64, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.run, self.max_writes, self.loop = run, max_writes, loop
        self._ends: deque[End] = deque()  # for the loop
        self._woken = False  # it will look at them
        self._lanes = [_Lane(self, n) for n in range(1 if run.database.is_sqlite else LANES)]

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
        return sum(lane.waiting.qsize() for lane in self._lanes)

    @property
    def commits(self) -> int:
        """Transactions made so far."""
        return sum(lane.commits for lane in self._lanes)

    def _queue(self, writes: list[Write], single: bool) -> Any:
        done: Any = self.loop.create_future() if self.loop else Future()
        if self.loop is None:
            done.set_running_or_notify_cancel()  # a write is made whether somebody waits for it or not
        first, *others = self._lanes
        group = next((write.group_id for write in writes if write.group_id), 0)
        if group or not others:
            lane, after = self._lanes[group % len(self._lanes)], []
        else:
            lane, after = first, [(other, other.reached()) for other in others]
        lane.waiting.put(_Asked(writes, single, done, after))
        return done

    def tell(self, ends: list[End]) -> None:
        """Hand results to whoever waits. Called by the lanes."""
        if self.loop is None:
            for end in ends:
                _settle(*end)
        else:
            self._ends.extend(ends)
            if not self._woken:  # to wake a busy loop once more costs as much as an append
                self._woken = True
                self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """In the loop. What comes after the flag has fallen wakes it again."""
        self._woken = False
        while self._ends:
            _settle(*self._ends.popleft())

    def close(self) -> None:
        """Write what was queued, then end the threads."""
        for lane in self._lanes:
            lane.waiting.put(None)
        for lane in self._lanes:
            lane.thread.join()


class _Lane:
    """One thread of a writer, which makes what it is asked for in that order."""

    def __init__(self, writer: Writer, n: int) -> None:
        self._writer = writer
        self.waiting: queue.SimpleQueue[_Asked | threading.Event | None] = queue.SimpleQueue()
        self.commits = 0
        self.thread = threading.Thread(target=self._loop, name=f"samplestore-writer-{n}", daemon=True)
        self.thread.start()

    def reached(self) -> threading.Event:
        """Set when everything is made that was asked for until now."""
        mark = threading.Event()
        self.waiting.put(mark)
        return mark

    def _loop(self) -> None:
        while True:
            asked: list[_Asked] = []
            item = self.waiting.get()
            while isinstance(item, _Asked):
                asked.append(item)
                if len(asked) == self._writer.max_writes or self.waiting.empty():
                    break
                item = self.waiting.get()
            if asked:
                self._commit(asked)
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()

    def _commit(self, asked: list[_Asked]) -> None:
        for lane, mark in [before for a in asked for before in a.after]:
            while not mark.wait(1.0) and lane.thread.is_alive():
                pass  # a lane that died, as where the loop was closed under it, sets none
        sharing = [a for a in asked if a.shares]
        if len(sharing) > 1 and self._at_once(sharing):
            asked = [a for a in asked if not a.shares]
        for one in asked:
            self._alone(one)

    def _at_once(self, asked: list[_Asked]) -> bool:
        try:
            writes = prepared([write for a in asked for write in a.writes])
            results = iter(self._writer.run.transact(lambda tx: perform(tx, writes)))
        except Exception:  # one of them was refused, or the database is in trouble: each is tried alone
            return False
        self.commits += 1
        self._writer.tell([(a.done, a.result([next(results) for _ in a.writes]), None) for a in asked])
        return True

    def _alone(self, asked: _Asked) -> None:
        try:
            writes = prepared(asked.writes)
            results = self._writer.run.transact(lambda tx: perform(tx, writes))
        except BaseException as error:  # handed to whoever waits for this write
            self._writer.tell([(asked.done, None, error)])
        else:
            self.commits += 1
            self._writer.tell([(asked.done, asked.result(results), None)])


def _settle(done: Any, result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return  # of a task that was cancelled: the write is made all the same
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _write(verb: Verb, claim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write:
    return Write(verb, (args, kwargs), getattr(claim, "group_id", 0), getattr(claim, "sample_id", 0))
