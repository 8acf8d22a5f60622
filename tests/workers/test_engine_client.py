"""EngineClient over real sockets: replies are read whole however they are cut, and every end is told apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from samplestore.workers import engine_client
from samplestore.workers.engine_client import EngineClient, Reply
from samplestore.workers.replies import EngineError

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def part(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class Server:
    """Answers every request by `script(writer)`, on real sockets."""

    def __init__(self, script: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.script = script
        self.connections = 0
        self.gone = asyncio.Event()  # a client closed its connection
        self.requests: list[tuple[str, Any]] = []  # head, body
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split()[0])
                self.requests.append((head, json.loads(await reader.readexactly(length))))
                await self.script(writer)
        self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def asked(
    script: Callable[[asyncio.StreamWriter], Awaitable[None]], stream: bool = True, timeout_s: float = 30.0
) -> AsyncIterator[tuple[Reply, Server, EngineClient]]:
    """A reply that is about to be read, from a server that plays `script`."""
    server = Server(script)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with EngineClient(timeout_s) as client:
            async with contextlib.aclosing(client.generate(server.url, {"stream": stream}, "7-3")) as reply:
                yield reply, server, client


def sends(*data: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def script(writer: asyncio.StreamWriter) -> None:
        for one in data:
            writer.write(one)
            await writer.drain()
            await asyncio.sleep(0)

    return script


async def read_all(reply: Reply) -> list[Any]:
    found = []
    while chunks := await reply.read():
        found += chunks
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
async def test_a_stream_is_read_whole_however_it_is_cut(size: int) -> None:
    values = [{"n": n, "text": "\u00e9\r\n" * n} for n in range(12)]
    data = b"".join(map(event, values)) + b"data: [DONE]\n\n"
    cut = [part(data[at : at + size]) for at in range(0, len(data), size)]
    async with asked(sends(STREAM, *cut, END)) as (reply, server, _):
        assert await read_all(reply) == values
        assert await reply.read() == []
    assert server.requests[0][1] == {"stream": True}
    assert "x-smg-routing-key: 7-3\r\n" in server.requests[0][0]


async def test_what_came_together_is_read_together() -> None:
    """A wake-up for each chunk is what streaming costs."""
    async with asked(sends(STREAM + part(event(1) + event(2)) + part(event(3)))) as (reply, _, _):
        assert await reply.read() == [1, 2, 3]


async def test_done_ends_a_stream_also_where_the_connection_stays_open() -> None:
    async with asked(sends(STREAM + part(event(1)) + part(b"data: [DONE]\n\n" + event(2)))) as (reply, _, _):
        assert await read_all(reply) == [1]


async def test_a_stream_without_done_just_ends() -> None:
    async with asked(sends(STREAM, part(event(1)), END)) as (reply, _, _):
        assert await read_all(reply) == [1]


async def test_a_stream_that_is_cut_off_is_unreachable_after_what_came() -> None:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + part(event(1)))
        await writer.drain()
        writer.transport.abort()

    async with asked(script) as (reply, server, _):
        found: list[Any] = []
        with pytest.raises(EngineError, match="unreachable") as caught:
            while True:
                found += await reply.read()
        assert server.url in str(caught.value)
    assert found in ([1], [])  # a reset may overtake what was sent before it


async def test_a_unary_answer_is_one_chunk() -> None:
    async with asked(sends(whole(b'{"a": NaN, "b": 2}')), stream=False) as (reply, _, _):
        assert [chunk["b"] for chunk in await read_all(reply)] == [2]


@pytest.mark.parametrize(("body", "chunk"), [(b"null", None), (b"", None), (b"  ", None), (b"[]", [])])
async def test_an_empty_answer_is_a_chunk_too(body: bytes, chunk: Any) -> None:
    """Whoever reads it sees that it is none; taken for the end of a stream it would be asked for again for ever."""
    async with asked(sends(whole(body)), stream=False) as (reply, _, _):
        assert await reply.read() == [chunk]
        assert await reply.read() == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("400 Bad Request", b'{"error": {"message": "too long"}}', "refused"),
        ("404 Not Found", b'{"detail": "Not Found"}', "refused"),
        ("405 Method Not Allowed", b"", "refused"),
        ("429 Too Many Requests", b"slow down", "busy"),
        ("500 Internal Server Error", b'{"error": {"code": "call_upstream_request_error"}}', "unreachable"),
        ("500 Internal Server Error", b'{"object": "error", "message": "bad state", "code": 500}', "error"),
        ("501 Not Implemented", b"<html>no</html>", "unreachable"),
        ("503 Service Unavailable", b'{"object": "error", "message": "The request queue is full."}', "busy"),
    ],
)
async def test_statuses_keep_their_kinds(stream: bool, status: str, body: bytes, kind: str) -> None:
    async with asked(sends(whole(body, status)), stream) as (reply, _, _):
        with pytest.raises(EngineError) as caught:
            await reply.read()
    assert (caught.value.kind, caught.value.status) == (kind, int(status[:3]))


@pytest.mark.parametrize(
    ("told", "engine"),
    [
        ("http://10.0.0.7:30000", "http://10.0.0.7:30000"),
        ("https://engine-3.example/", "https://engine-3.example"),
        ("", None),
        ("engine-3", None),
        ("javascript:alert(1)", None),
        ("http://a b", None),
        ('http://"><script>', None),
        ("http://" + "x" * 600, None),
    ],
)
async def test_the_engine_that_a_router_names(told: str, engine: str | None) -> None:
    answer = whole(b"{}", headers=f"X-SMG-Routed-Worker-Id: {told}\r\n")
    async with asked(sends(answer), stream=False) as (reply, _, _):
        await reply.read()
        assert reply.engine == engine


async def test_a_cancelled_read_loses_nothing() -> None:
    go = asyncio.Event()

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + part(event(1)) + part(b'data: {"ha'))
        await writer.drain()
        await go.wait()
        writer.write(part(b'lf": 2}\n\n') + END)

    async with asked(script) as (reply, _, _):
        assert await reply.read() == [1]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await reply.read()
        go.set()
        assert await read_all(reply) == [{"half": 2}]


async def test_silence_beyond_the_timeout_is_unreachable() -> None:
    async with asked(sends(STREAM + part(event(1))), timeout_s=0.1) as (reply, _, _):
        assert await reply.read() == [1]
        with pytest.raises(EngineError, match="unreachable"):
            await reply.read()


async def test_a_reply_that_is_let_go_closes_its_connection() -> None:
    """The engine stops generating when its client goes."""
    async with asked(sends(STREAM + part(event(1)))) as (reply, server, _):
        assert await reply.read() == [1]
        await reply.aclose()
        await asyncio.wait_for(server.gone.wait(), 10)


async def test_a_reply_that_was_never_read_asks_nothing() -> None:
    async with asked(sends()) as (reply, server, _):
        await reply.aclose()
    assert server.requests == []


async def test_a_connection_is_used_again_after_a_whole_reply() -> None:
    async with asked(sends(STREAM + part(event(1) + b"data: [DONE]\n\n") + END)) as (reply, server, client):
        assert await read_all(reply) == [1]
        await reply.aclose()
        async with contextlib.aclosing(client.generate(server.url, {"stream": True}, "k")) as second:
            assert await read_all(second) == [1]
        assert server.connections == 1


# -- pauses of a long stream


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> float:
    """Every stream counts as long: a pause of this many seconds after each look."""
    monkeypatch.setattr(engine_client, "PAUSE_SHARE", 1e6)
    monkeypatch.setattr(engine_client, "MAX_PAUSE_S", 0.3)
    monkeypatch.setattr(engine_client, "MIN_PAUSE_CHUNKS", 0)
    return 0.3


async def test_the_kernel_gathers_while_a_long_stream_is_not_read(pausing: float) -> None:
    go = asyncio.Event()

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + part(event(0)))
        await go.wait()
        for n in range(1, 21):
            writer.write(part(event(n)))
            await writer.drain()
            await asyncio.sleep(0)  # a client that reads gets its turn between any two
        writer.write(part(b"data: [DONE]\n\n") + END)

    async with asked(script) as (reply, _, _):
        assert await reply.read() == [0]
        go.set()
        assert await reply.read() == list(range(1, 21))
        assert await reply.read() == []


async def test_a_pause_that_is_cancelled_again_and_again_ends_all_the_same(pausing: float) -> None:
    """A flush that is due more often than a pause lasts must not keep the stream from being read."""
    go = asyncio.Event()

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + part(event(0)))
        await go.wait()
        writer.write(part(event(1)))

    async with asked(script) as (reply, _, _):
        assert await reply.read() == [0]
        go.set()
        began, found = time.monotonic(), []
        while not found:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pausing / 5):
                    found = await reply.read()
        assert found == [1]
        assert time.monotonic() - began < 10 * pausing


async def test_a_young_stream_is_read_at_once() -> None:
    """Its end would be noticed late, by more than half a percent of its time."""
    go = asyncio.Event()

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + part(event(0)))
        await go.wait()
        writer.write(part(event(1)) + END)

    async with asked(script) as (reply, _, _):
        await reply.read()
        go.set()
        began = time.monotonic()
        assert await reply.read() == [1]
        assert time.monotonic() - began < engine_client.MAX_PAUSE_S
