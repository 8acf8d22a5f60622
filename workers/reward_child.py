"""The worker's end of one reward process: pipes, deadline, how it died. `RewardPool` is its only user.

Pipes carry frames: a 4-byte big-endian length, then that many bytes of ASCII JSON. Never pickle: the child runs code
that has read model output. JSON with ASCII escapes keeps lone surrogates, which broken generations contain.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from typing import Any

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 256 * 2**10  # details and errors are cut far below it by the child
STDERR_TAIL = 4096
EXIT_GRACE_S = 5.0


class ChildFailed(Exception):
    """The child is gone or talks nonsense; the text says how it died."""


class Child:
    """One reward process. Used by one `score` at a time; after any failure it is killed and never used again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError("the reward process was started without pipes")
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self.stderr_tail = b""
        self.exited = asyncio.create_task(process.wait())
        self.drained = asyncio.create_task(self._drain(process.stderr))

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of what user code prints; an undrained pipe would block its print()."""
        while chunk := await stderr.read(STDERR_TAIL):
            self.stderr_tail = (self.stderr_tail + chunk)[-STDERR_TAIL:]
            logger.debug("reward process %d: %s", self.process.pid, chunk.decode("utf-8", "backslashreplace").rstrip())

    @property
    def alive(self) -> bool:
        return not self.exited.done() and not self.stdout.at_eof()

    async def exchange(self, payload: bytes | None) -> dict[str, Any]:
        """Send one frame (if any) and read one. Raises ChildFailed if the frame is not what our child writes."""
        if payload is not None:
            self.stdin.write(len(payload).to_bytes(4, "big") + payload)
            await self.stdin.drain()
        size = int.from_bytes(await self.stdout.readexactly(4), "big")
        if size > MAX_REPLY_BYTES:
            raise ChildFailed(f"the reward process announced a reply of {size} bytes; the limit is {MAX_REPLY_BYTES}")
        body = await self.stdout.readexactly(size)
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ChildFailed(f"the reward process wrote a reply that is not JSON: {error}") from error
        if not isinstance(reply, dict):
            raise ChildFailed("the reward process wrote a reply that is not an object")
        return reply

    async def ask(self, payload: bytes | None, timeout_s: float) -> dict[str, Any]:
        """`exchange` against the clock. Raises TimeoutError, or ChildFailed saying how the child died."""
        task = asyncio.create_task(self.exchange(payload))
        both: set[asyncio.Task[Any]] = {task, self.exited}
        try:
            # The exit counts too: a forked helper may keep the pipe open after the child itself is dead.
            done, _ = await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task not in done:
                # The reply may sit in the pipe: written just before the exit, or while our own event loop was stalled
                # or the machine suspended. Reading it costs nothing; calling it a timeout would be false.
                await asyncio.wait({task}, timeout=0.05)
            if task.done():
                return task.result()
            if self.exited.done():
                raise ChildFailed(await self.obituary())
            raise TimeoutError
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildFailed(await self.obituary()) from error
        finally:
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def obituary(self) -> str:
        """How the process ended, with the end of its standard error."""
        await asyncio.wait({self.exited}, timeout=1.0)
        code = self.process.returncode
        await asyncio.wait({self.drained}, timeout=0.2)
        self._kill_group()  # helpers outlive a child that died by itself
        if code is None:
            text = "the reward process closed its result pipe"
        elif code < 0:
            name = signal.Signals(-code).name if -code in {int(s) for s in signal.Signals} else f"signal {-code}"
            text = f"the reward process was killed by {name}"
            text += " (not by us: the system's out-of-memory killer?)" if name == "SIGKILL" else ""
        else:
            text = f"the reward process exited with code {code}"
        tail = self.stderr_tail.decode("utf-8", "backslashreplace").replace("\x00", "\\x00").strip()
        return f"{text}\n{tail[-2000:]}" if tail else text

    def kill(self) -> None:
        """SIGKILL the child and whatever it started. Once the child is known to be dead, its id may be another's."""
        if self.process.returncode is None:
            self._kill_group()
        self.stdin.close()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # the child leads its own process group
        except ProcessLookupError:
            logger.debug("reward process %d and its helpers were already gone", self.process.pid)

    async def reap(self) -> None:
        """After `kill`: wait until process and pipes are gone, so that no zombie and no transport stays behind."""
        ends: set[asyncio.Task[Any]] = {
            self.exited,
            self.drained,
            asyncio.create_task(self._read_to_end()),
            asyncio.create_task(self.stdin.wait_closed()),
        }
        # Bounded: a helper that left the process group may hold the pipes open for as long as it lives.
        await asyncio.wait(ends, timeout=EXIT_GRACE_S)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _read_to_end(self) -> None:
        while await self.stdout.read(2**16):
            pass
