"""How the scheduler waits for work, and how others wait for the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Wakes the scheduling loop and tells those who wait that its state has changed; for one event loop only."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._watchers: list[asyncio.Future[None]] = []

    def wake(self) -> None:
        """End the loop's sleep, the present one or the next."""
        self._wake.set()

    async def sleep(self, seconds: float | None) -> None:
        """Sleep until woken, at most `seconds` (None: no limit)."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()` is true; it is asked again at every change."""
        while not reached():
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    def changed(self) -> None:
        """Let everybody in `until` look again."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)
