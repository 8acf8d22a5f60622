"""The store as a worker uses it: an event loop, the writer thread, the verbs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from store_data import Spent, timed
from store_rollouts import Piece

import samplestore
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import appends, samples
from samplestore.writer import Writer


def append(run: Run, claims: list[Claim], segments: list[Piece], operations: int, k: int) -> Spent:
    """`operations` appends, as many in flight as there are claims, at most k in a commit."""
    waits: list[float] = []
    told: list[Spent] = []

    async def lane(writer: Writer, claim: Claim, first: int) -> None:
        for seq, at in enumerate(range(first, operations, len(claims))):
            ids, probs = segments[at % len(segments)]
            began = time.perf_counter()
            await writer.submit(appends.append, claim, seq, ids, probs, 0)
            waits.append(time.perf_counter() - began)

    async def lanes() -> None:
        writer = Writer(run, k, asyncio.get_running_loop())
        await asyncio.gather(*(lane(writer, claim, i) for i, claim in enumerate(claims)))
        writer.close()

    with timed(operations, waits, told):
        asyncio.run(lanes())
    return told[0]


class _Claims:
    """Hands out claimed samples one by one, and claims k more when there are none."""

    def __init__(self, writer: Writer, owner: int, k: int) -> None:
        self.writer, self.owner, self.k = writer, owner, k
        self.waiting: deque[Claim] = deque()
        self.dry, self.lock = False, asyncio.Lock()

    async def next(self) -> Claim | None:
        async with self.lock:
            if not self.waiting and not self.dry:
                self.waiting.extend(await self.writer.submit(samples.claim, self.owner, self.k))
                self.dry = not self.waiting
            return self.waiting.popleft() if self.waiting else None


def life(run: Run, owner: int, answers: dict[int, list[Piece]], k: int, in_flight: int = 64) -> Spent:
    """Every sample of the run: claimed, appended segment by segment, finished. Operations are samples."""
    told: list[Spent] = []

    async def lane(writer: Writer, claims: _Claims) -> int:
        finished = 0
        while (claim := await claims.next()) is not None:
            for seq, (ids, probs) in enumerate(answers[claim.sample_id % len(answers)]):
                await writer.submit(appends.append, claim, seq, ids, probs, 0)
            await writer.submit(samples.finish, claim)
            finished += 1
        return finished

    async def lanes() -> int:
        writer = Writer(run, k, asyncio.get_running_loop())
        claims = _Claims(writer, owner, k)
        done = sum(await asyncio.gather(*(lane(writer, claims) for _ in range(in_flight))))
        writer.close()
        return done

    with timed(1, [], told):
        done = asyncio.run(lanes())
    return Spent(done, told[0].wall_s, told[0].cpu_s)


def one_life(given: dict[str, Any]) -> tuple[float, float, int]:
    """One of several processes on the same run. Returns (start, end, samples); clocks are the machine's."""
    with samplestore.open(given["url"], durability=given["durability"]) as store:
        warm = store.existing_run(f"warm {given['warm']}")  # connections and compiled statements
        life(warm, warm.register(), given["answers"], given["k"], given["in_flight"])
        run = store.existing_run(given["run"])
        owner = run.register()
        given["ready"].wait()
        start = time.monotonic()
        spent = life(run, owner, given["answers"], given["k"], given["in_flight"])
        return start, time.monotonic(), spent.operations
