"""Streams that are odd in a way that no protocol error shows: they never end, go on after their end, are somebody
else's, or come from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from samplestore.workers import control, engine_state
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError, ReplyReader
from tests.support.processes import HOST
from tests.support.scripted_engine import Script, token_at
from tests.worker.conftest import PROMPT_TOKENS, Bench
from tests.worker.test_replies import IDS, PROBS, chunk

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0)
    await site.start()
    try:
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def read_all(url: str, timeout_s: float, takes: bool = False) -> int:
    """Read a stream to its end; how many chunks came. takes: each is said to bring the answer on."""
    n = 0
    async with EngineClient(timeout_s) as client:
        reply = client.generate(url, {"stream": True}, "k")
        try:
            while chunks := await reply.read():
                n += len(chunks)
                if takes:
                    reply.got_on()
        finally:
            await reply.aclose()
    return n


def dripping(what: bytes, times: int | None) -> Handler:
    """Sends the same bytes again and again, much more often than the client's patience lasts."""

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        n = 0
        while times is None or n < times:
            await answer.write(what)
            await asyncio.sleep(0.02)
            n += 1
        await answer.write(b"data: [DONE]\n\n")
        return answer

    return handler


@pytest.mark.parametrize("what", [b": keep-alive\n\n", b"data: {}\n\n", b":"])
async def test_a_stream_that_sends_nothing_of_use_is_dead(what: bytes) -> None:
    """Silence is bounded by the socket's timeout, which each byte begins anew: without a bound of its own a proxy's
    keep-alives would hold the sample, and its slot, for ever."""
    async with serving(dripping(what, None)) as url, asyncio.timeout(30):
        with pytest.raises(EngineError, match="but no token for") as told:
            await read_all(url, 0.5)
    assert told.value.kind == "unreachable"


async def test_a_slow_stream_that_gets_on_is_alive() -> None:
    async with serving(dripping(b"data: {}\n\n", 60)) as url, asyncio.timeout(30):
        assert await read_all(url, 0.5, takes=True) == 60


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    """What another engine answers would be recorded, and aborted, at the wrong one."""
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        if request.path == "/elsewhere":
            return web.json_response({})
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with serving(handler) as url:
        with pytest.raises(EngineError, match="sends elsewhere, to '/elsewhere'"):
            await read_all(url, 5)
        async with EngineClient(5) as client:
            with pytest.raises(EngineError, match="sends elsewhere"):
                await control.abort(client, url, "rid")
            with pytest.raises(EngineError, match="sends elsewhere"):
                await engine_state.info(client, url)
    assert "/elsewhere" not in seen


def test_tokens_after_the_end_are_refused() -> None:
    reader = ReplyReader()
    reader.feed(chunk(IDS, PROBS, 0, 3, "incremental", "stop"))
    reader.feed(chunk(IDS, PROBS, 3, 3, "incremental", "stop"))  # said again, it is no harm
    with pytest.raises(EngineError, match="2 tokens after its finish_reason 'stop'"):
        reader.feed(chunk(IDS, PROBS, 3, 5, "incremental"))
    assert reader.totals.completion_tokens == 3


def raw(start: int, stop: int, reason: str | None, **meta: Any) -> dict[str, Any]:
    ids = [token_at(PROMPT_TOKENS + n) for n in range(32)]
    return chunk(ids, [-0.125 * ((PROMPT_TOKENS + n) % 16 + 1) for n in range(32)], start, stop, "incremental", reason,
                 weight_version="default", **meta)  # fmt: skip


def test_a_sample_ends_where_its_answer_said(bench: Bench) -> None:
    """What an engine sends after the end is not kept, and what came before it is complete."""
    bench.make_run(samples_per_prompt=1, max_attempts=3)
    engine = bench.engine(Script(raw=[raw(0, 8, None), raw(8, 12, "stop"), raw(12, 32, "length")]))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    [row] = bench.samples()
    assert (row["status"], row["n_tokens"], len(engine.requests)) == ("completed", 12, 1)
    bench.exact(12)
    bench.sound()


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_the_answer_to_another_call(bench: Bench, mode: str) -> None:
    """None of it is kept, and the sample is asked for again."""
    bench.make_run(samples_per_prompt=1, max_attempts=3)
    engine = bench.engine(lambda body, n: Script(raw=[raw(0, 32, "length", id="f" * 32)]) if n == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True, mode=mode)
    assert worker.wait(60) == 0, worker.log()
    [row] = bench.samples()
    assert (row["status"], row["n_tokens"], row["failures"], len(engine.requests)) == ("truncated", 32, 1, 2)
    assert "the answer is that of the call" in worker.log()
    bench.exact(32)
    bench.sound()


def test_several_answers_in_one_call(bench: Bench) -> None:
    """SGLang gives them ids of its own, by which none can be aborted: a setting that can't work ends the worker."""
    bench.make_run(samples_per_prompt=2, sampling={"n": 2})
    engine = bench.engine()
    worker = bench.worker(engine)
    assert worker.wait(60) != 0
    assert "samples_per_prompt says how many" in worker.log() and "Traceback" not in worker.log()
    assert engine.requests == [] and bench.unowned()
