"""The heartbeat: a small thread with its own connection, for every process that owns something."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from samplestore.errors import StoreBusy, StoreClosed, WorkerDead
from samplestore.types import Heartbeat
from samplestore.verbs import liveness
from samplestore.verbs.tx import Transactor

log = logging.getLogger("samplestore.heart")


class Heart:
    """Beats for one worker row and reaps now and then.

    ticked   monotonic time of the event loop's last sign of life; None: the process has no loop to watch. A heart
             that beats while the loop is stuck would keep a worker alive that does nothing.
    on_beat  called from the thread with what the heartbeat learnt
    on_dead  called once, from the thread, when the row was declared dead: cancel everything and register anew
    """

    def __init__(
        self,
        run: Transactor,
        worker_id: int,
        *,
        ticked: Callable[[], float] | None = None,
        on_beat: Callable[[Heartbeat], None] | None = None,
        on_dead: Callable[[], object] | None = None,
        interval_s: float | None = None,
    ) -> None:
        self.run, self.worker_id = run, worker_id
        self.interval_s = interval_s or min(5.0, run.settings.heartbeat_ttl_s / 5)
        self._pid = os.getpid()
        self._ticked, self._on_beat, self._on_dead = ticked, on_beat, on_dead
        self._stop = threading.Event()
        self._last_tick = float("-inf")
        self._reap_at = 0.0
        self.dead = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"samplestore-heart-{worker_id}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._beat()
            except WorkerDead:
                self.dead.set()
                log.error("worker=%d was declared dead", self.worker_id)
                if self._on_dead:
                    self._on_dead()
                return
            except StoreClosed as error:  # its owner forgot it
                log.warning("worker=%d beats no more: %s", self.worker_id, error)
                return
            except Exception as error:  # whatever it is: a heart that stops kills its worker
                log.warning("worker=%d heartbeat failed, trying again: %s", self.worker_id, error)

    def _beat(self) -> None:
        if self._ticked is not None:
            tick = self._ticked()
            if tick == self._last_tick:
                return
            self._last_tick = tick
        learnt = self.run.transact(lambda tx: liveness.heartbeat(tx, self.worker_id))
        if self._on_beat:
            self._on_beat(learnt)
        if learnt.late:
            # An outage or a suspended machine: everybody else's heartbeat has expired too. Let them beat first.
            self._reap_at = time.monotonic() + self.run.settings.heartbeat_ttl_s
        if self.may_reap:
            self._reap_at = time.monotonic() + max(1.0, self.run.settings.heartbeat_ttl_s / 4)
            self.run.transact(lambda tx: liveness.reap(tx, self.worker_id))

    @property
    def may_reap(self) -> bool:
        return time.monotonic() >= self._reap_at

    @property
    def beats_here(self) -> bool:
        """Not in a process that was forked: the worker, and all that it holds, is its parent's."""
        return self._pid == os.getpid() and not self.dead.is_set()

    def leave(self) -> None:
        """Stop, and say goodbye: what the worker still holds is free at once. Waiting for a reap does the same."""
        if self._pid != os.getpid():
            return
        self.stop()
        if not self.dead.is_set():
            try:
                self.run.transact(lambda tx: liveness.goodbye(tx, self.worker_id))
            except (SQLAlchemyError, StoreBusy, StoreClosed) as error:
                log.warning("worker=%d could not say goodbye; it will be reaped: %s", self.worker_id, error)

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
