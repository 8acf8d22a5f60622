"""The contract between samplestore's worker and an engine: how it is asked.

Everything goes through the worker's own client and reply reader, so what the suite shows holds for the worker.

A test that acts upon a request has to find it running, and no test decides that: an engine may be fast, and any process
may stall between two lines. So such a test looks, by the methods that raise TooLate, and `in_time` begins it anew.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import Delta, EngineError, ReplyReader, Totals
from tests.engine.traits import TRAITS, Traits
from tests.support.processes import wait_until_async

CONTEXT = 2048
SLOTS = 4  # requests that run at once; others wait
PROMPT = [10, 20, 30, 40]
LONG = 1900  # tokens of a request whose end is not waited for: 3 s and more, or less than one on a fast machine
ATTEMPTS = 6
PATIENCE_S = 120.0  # for what comes in a second or two where nothing else runs

_serial = itertools.count(1)


class TooLate(Exception):
    """What was to be acted upon had ended by itself: the attempt shows nothing, neither good nor bad."""


def in_time(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Begin a test anew, with new requests, when an attempt was too late. `talk.attempt` counts them from 0, for
    requests whose end is waited for: they get longer each time. An attempt that was too late is a warning, so that a
    behaviour which needs many shows in the run's summary, and one that never comes fails."""

    @functools.wraps(test)
    async def attempts(**arguments: Any) -> None:
        [talk] = [value for value in arguments.values() if isinstance(value, Talk)]
        for number in range(ATTEMPTS):
            talk.attempt = number
            try:
                return await test(**arguments)
            except TooLate as error:
                warnings.warn(f"{talk.engine.name}, attempt {number + 1}: too late, {error}", stacklevel=1)
                await talk.close()
        raise AssertionError(f"each of {ATTEMPTS} attempts was too late")

    return attempts


@dataclass(frozen=True)
class Weights:
    """Folders of one architecture with different weights; `nan` gives logits that are all NaN."""

    a: Path
    b: Path
    nan: Path


@dataclass(frozen=True)
class Engine:
    """A running engine under contract."""

    name: str
    url: str
    weights: Weights

    @property
    def traits(self) -> Traits:
        return TRAITS[self.name]


def job(name: str, n: int = 8, *, stream: bool = False, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    """A request of n tokens that no end token cuts short; what is not a field of requests is a sampling parameter.
    Its id is new and no prefix of another: an abort that overtakes its request hits the next one of that id."""
    fields = {name: more.pop(name) for name in ("extra_key", "logprob_start_len") if name in more}
    sampling = {"max_new_tokens": n, "ignore_eos": True, **more}
    rid = f"{name}-{next(_serial):06d}"
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    return {**body, **fields}


@dataclass
class Call:
    """A request in flight, read as the worker reads it. `answers` are its parsed chunks, `deltas` what is new in each;
    one unary answer is one chunk."""

    rid: str
    task: asyncio.Task[Call] = field(init=False)
    answers: list[Any] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    reader: ReplyReader = field(default_factory=ReplyReader)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    @property
    def totals(self) -> Totals:
        return self.reader.totals

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.ids]

    @property
    def logprobs(self) -> list[Any]:
        return [value for delta in self.deltas for value in delta.logprobs or []]

    def check_running(self) -> None:
        """Raises TooLate when it has ended by itself, AssertionError when something else has ended it."""
        if self.over and self.totals.finish_reason == "length":
            raise TooLate(f"{self.rid} had made its {len(self.ids)} tokens")
        assert not self.over, f"{self.rid} was ended: {self.totals}"

    async def seen(self, n: int) -> None:
        """Wait until n tokens have come. Raises TooLate when it has ended with fewer."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.ids) < n:
                self.check_running()
                self.arrived.clear()
                await self.arrived.wait()

    async def goes_on(self, n: int = 20) -> None:
        """Wait for n tokens more. Raises TooLate when they were its last ones, or fewer."""
        await self.seen(self.totals.completion_tokens + n)
        self.check_running()

    async def end(self) -> Call:
        """Read it to its end: its tokens and log-probs agree with each other and with the engine's count."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        assert len(self.ids) == len(self.logprobs) == self.totals.completion_tokens
        return self

    async def aborted(self) -> Call:
        """The same for one that an abort has ended. Raises TooLate when it had made all its tokens by then."""
        had, since = len(self.ids), time.monotonic()
        if (await self.end()).totals.finish_reason == "length":
            waited = time.monotonic() - since
            raise TooLate(f"{self.rid} made {len(self.ids)} tokens; {had} had come, the last came {waited:.2f} s later")
        assert self.totals.finish_reason == "abort"
        return self

    async def cut(self) -> None:
        """Close the connection, as a worker that dies does."""
        self.task.cancel()
        await asyncio.wait([self.task])


class Talk:
    """One test's conversation with one engine."""

    def __init__(self, engine: Engine, client: EngineClient) -> None:
        self.engine, self.client, self.calls = engine, client, list[Call]()
        self.attempt = 0

    # -- requests

    def start(self, body: dict[str, Any]) -> Call:
        """Send a request; it is read in the background."""
        call = Call(body["rid"])
        call.task = asyncio.create_task(self._read(call, body))
        self.calls.append(call)
        return call

    async def ask(self, body: dict[str, Any]) -> Call:
        """Send a request and read it to its end. Raises EngineError."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.start(body).task

    async def _read(self, call: Call, body: dict[str, Any]) -> Call:
        reply = self.client.generate(self.engine.url, body, "key")
        try:
            while chunks := await reply.read():
                call.answers += chunks
                call.deltas += [call.reader.feed(chunk) for chunk in chunks]
                reply.got_on()
                call.arrived.set()
        finally:
            call.over = True
            call.arrived.set()
            await reply.aclose()
        return call

    # -- control

    async def post(self, path: str, **body: Any) -> Any:
        return await self.client.post(f"{self.engine.url}{path}", body, PATIENCE_S)

    async def get(self, path: str) -> Any:
        return await self.client.get(f"{self.engine.url}{path}", PATIENCE_S)

    async def abort(self, rid: str) -> None:
        await self.post("/abort_request", rid=rid)

    async def begin(self, folder: Path, label: str) -> None:
        """Change the weights of an idle engine. A request whose answer has come may still be ending: a flush that
        finds it is no harmless thing. An update that hangs for what came before is said, and asked for again: it is not
        what any test is about."""
        await self.idle()
        try:
            await self.serve(folder, label)
        except EngineError as error:
            if "TimeoutError" not in error.message:
                raise
            warnings.warn(f"{self.engine.name}: an update of an idle engine hung for {PATIENCE_S} s", stacklevel=2)
            await self.serve(folder, label)

    async def serve(self, folder: Path, label: str, **more: Any) -> Any:
        """Change the weights, everything said that has a default somewhere."""
        body = {"model_path": str(folder), "weight_version": label, "abort_all_requests": False, "flush_cache": True}
        return await self.post("/update_weights_from_disk", **{**body, **more})

    @asynccontextmanager
    async def paused(self, mode: str) -> AsyncIterator[None]:
        """Generation stands still inside; it goes on afterwards whatever happened."""
        await self.post("/pause_generation", mode=mode)
        try:
            yield
        finally:
            await self.post("/continue_generation")

    async def version(self) -> str:
        return str((await self.get("/model_info"))["weight_version"])

    # -- what the engine says of itself

    async def load(self) -> tuple[int, int]:
        """Requests that run and requests that wait."""
        if not self.engine.traits.loads:
            [load] = await self.get("/get_load")
            return load["num_reqs"] - load["num_waiting_reqs"], load["num_waiting_reqs"]
        loads = (await self.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)

    async def until(self, reached: Callable[[int, int], bool], what: str, *calls: Call) -> None:
        """Ask the engine until its (running, waiting) are as wanted. Raises TooLate when one of `calls`, which have to
        run meanwhile, has ended."""

        async def look() -> bool:
            if reached(*await self.load()):
                return True
            for call in calls:
                call.check_running()
            return False

        await wait_until_async(look, what=what, timeout=PATIENCE_S)

    async def idle(self) -> None:
        """The engine generates for nobody."""
        await self.until(lambda running, waiting: running + waiting == 0, "the engine is idle")

    async def check_running(self, *calls: Call) -> None:
        """Raises TooLate when one has ended, as far as the engine had told when it answers to another call."""
        await self.version()
        for call in calls:
            call.check_running()

    async def still(self, *calls: Call) -> None:
        """Inside a pause: wait until no more tokens come. Raises TooLate when one of the calls has ended.

        A pause is answered before the scheduler has heard of it, so it is asked something: /server_info comes from
        there. The tokens that it had made are on their way then, through another process."""
        async with asyncio.timeout(PATIENCE_S):
            before = None
            while before != (before := [call.totals.completion_tokens for call in calls]):
                for _ in range(20):
                    await self.get("/server_info")
        for call in calls:
            call.check_running()

    async def fill(self, name: str = "fill") -> list[Call]:
        """Requests that take all slots, each with its first token."""
        calls = [self.start(job(name, LONG, stream=True)) for _ in range(SLOTS)]
        for call in calls:
            await call.seen(1)
        return calls

    async def close(self) -> None:
        """Leave the engine as it was found: it is shared, so nothing may go on in it, and it must not be paused. Aborts
        come before disconnections: 0.5.9 can forget a request that is cut off while it is aborted, and then an update
        of weights waits for minutes."""
        await self.post("/continue_generation")
        await self.post("/abort_request", abort_all=True)
        if running := [call.task for call in self.calls if not call.task.done()]:
            await asyncio.wait(running, timeout=10)
        for call in self.calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self.calls), return_exceptions=True)
        await self.post("/abort_request", abort_all=True)
        await self.idle()


async def refused(talk: Talk, body: dict[str, Any], *calls: Call) -> EngineError:
    """The error that a request ends with. Raises TooLate when there is none because one of `calls` has ended."""
    try:
        call = await talk.ask(body)
    except EngineError as error:
        return error
    await talk.check_running(*calls)
    raise AssertionError(f"it was not refused: {call.answers}")
