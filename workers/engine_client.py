"""HTTP to engines and routers: SGLang's native protocol."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from samplestore.workers.replies import MAX_EVENT_BYTES, EngineError, EventSplitter, error_of, parse_json

CONNECT_S = 10.0
MAX_BODY_BYTES = 256 * 1024 * 1024  # of an answer to a generate call: routed experts
MAX_PAGE_BYTES = 16 * 1024 * 1024  # of all others
MAX_IDLE_BYTES = 2 * MAX_EVENT_BYTES  # of a stream, between two tokens
READ_BUFFER_BYTES = 2**16  # each stream that waits for the store may hold twice that; 2**20 took 350 MB for 512 streams

Reading = Callable[[aiohttp.ClientResponse], Awaitable[Any]]
ROUTED_TO = "x-smg-routed-worker-id"  # some routers say which engine they chose
_URL = re.compile(r"https?://[!#-&(-;=?-\[\]-~]{1,500}")  # printable ASCII without quotes, brackets, backslash

# A wake-up for each server-sent event is what streaming costs, not its JSON. A stream that has run for long is left
# alone for a while after each look, and the kernel gathers what comes: for no more than three hundredths of the time
# that it has run, so that its end is noticed late by half of that on average, and for no more than half a second, so
# that little more is lost with this process than flush_seconds allows anyway. Shorter pauses, and those in which less
# than three chunks would come, cost more than they save.
PAUSE_SHARE, MIN_PAUSE_S, MAX_PAUSE_S, MIN_PAUSE_CHUNKS = 0.03, 0.05, 0.5, 3


class EngineClient:
    """One HTTP session for a worker's calls. `timeout_s` bounds the silence of a generate call, not its length."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.timeout_s),
            read_bufsize=READ_BUFFER_BYTES,
            headers={"Accept-Encoding": "identity"},  # a proxy that compresses a stream holds it back
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session:
            await self._session.close()

    def generate(self, base: str, body: dict[str, Any], routing_key: str) -> Reply:
        """POST /generate, from the first `read` of the reply on. Siblings share a routing key, so that they go to one
        engine, for its prefix cache. Close the reply: the engine stops when its client goes."""
        assert self._session is not None
        return Reply(self._session, base, body, {"X-SMG-Routing-Key": routing_key})

    async def get(self, url: str, timeout_s: float = 10.0) -> Any:
        return await self._call("GET", url, None, timeout_s)

    async def post(self, url: str, body: dict[str, Any], timeout_s: float = 30.0) -> Any:
        return await self._call("POST", url, body, timeout_s)

    async def delete(self, url: str, timeout_s: float = 10.0) -> Any:
        return await self._call("DELETE", url, None, timeout_s)

    async def text(self, url: str, timeout_s: float = 10.0) -> str:
        """A page that is not JSON, such as /metrics. Raises EngineError."""
        return str(await self._call("GET", url, None, timeout_s, _text))

    async def _call(
        self, method: str, url: str, body: dict[str, Any] | None, timeout_s: float, read: Reading | None = None
    ) -> Any:
        """The answer's body, as `read` gives it: parsed, None where it is empty. Raises EngineError."""
        assert self._session is not None
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                    answer = await (read or _page)(response)
                    _require_no_redirect(response)
                    if response.status >= 400:
                        raise error_of(answer, response.status)
                    return answer
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            raise _unreachable(url, error) from error


class Reply:
    """The answer to one generate call, read in batches of chunks: one wake-up for all that has come.

    engine  URL of the engine that answers, where a router tells; known after the first read
    """

    def __init__(
        self, session: aiohttp.ClientSession, base: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        self.engine: str | None = None
        self._session, self._base, self._body, self._headers = session, base, body, headers
        self._response: aiohttp.ClientResponse | None = None
        self._splitter = EventSplitter()
        self._ended, self._chunks = False, 0
        self._started = self._look_at = time.monotonic()
        self._idle = 0  # bytes
        self._waited, self._patience = 0.0, session.timeout.sock_read or float("inf")

    def got_on(self) -> None:
        """What was read brought the answer on. A stream that is waited for without that, for as long as it may be
        silent, is taken for dead as a silent one is: keep-alives of a proxy would hold its sample for ever. So is one
        that sends so much that nothing is ever waited for."""
        self._waited, self._idle = 0.0, 0

    async def read(self) -> list[Any]:
        """The next chunks, parsed, at least one; none when the reply is over. A stream that ends before its [DONE] just
        ends: only a finish_reason tells that a reply is complete. A later read may be cancelled and called again, the
        first may not: it waits for the whole of a unary answer. Raises EngineError."""
        try:
            chunks = await self._open() if self._response is None else []
            while not chunks and not self._ended:
                if self._look_at:
                    await self._let_gather()
                chunks = self._events(await self._next_bytes())
            return chunks
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            raise _unreachable(self._base, error) from error

    async def _next_bytes(self) -> bytes:
        if self._waited > self._patience:
            raise TimeoutError(f"it sends, but no token for {self._patience:g} s")
        assert self._response is not None
        began = time.monotonic()
        try:
            return await self._response.content.readany()
        finally:
            self._waited += time.monotonic() - began

    async def aclose(self) -> None:
        """Let go of the connection: reused where the answer was read to its end, closed where not."""
        if self._response is not None:
            self._response.release()
            await self._response.wait_for_close()

    async def _open(self) -> list[Any]:
        """Send the request. A unary answer is one chunk. The silence before it may be long; once it has begun it comes
        whole, and each byte of one that drips would begin the socket's timeout anew."""
        async with asyncio.timeout(_in_all(self._patience)):
            response = self._response = await self._session.post(
                f"{self._base}/generate", json=self._body, headers=self._headers, allow_redirects=False
            )
        told = response.headers.get(ROUTED_TO, "")
        self.engine = told.rstrip("/") if _URL.fullmatch(told) else None
        _require_no_redirect(response)
        async with asyncio.timeout(_in_all(self._patience)):
            if response.status != 200:
                raise error_of(await _page(response), response.status)
            if response.content_type == "text/html":
                raise EngineError("unreachable", f"{response.url} answers with a web page, as proxies do")
            if self._body.get("stream"):
                return []
            self._ended = True
            return [await _body(response)]

    def _events(self, data: bytes) -> list[Any]:
        """The chunks that are complete with these bytes; no bytes are the end."""
        self._idle += len(data)
        if self._idle > MAX_IDLE_BYTES:
            raise EngineError("unreachable", f"{self._base} sends, but no token in {self._idle:,} bytes")
        now = time.monotonic()
        age = now - self._started
        pause = min(MAX_PAUSE_S, PAUSE_SHARE * age)
        gathers = pause >= MIN_PAUSE_S and pause * self._chunks >= MIN_PAUSE_CHUNKS * age
        self._look_at = now + pause if gathers else 0.0
        self._ended = not data
        if self._ended and not self._chunks:
            raise EngineError("unreachable", f"{self._base} ended its answer without an event in it")
        chunks = []
        for event in self._splitter.feed(data):
            if event == b"[DONE]":
                self._ended = True
                break
            chunks.append(parse_json(event))
        self._chunks += len(chunks)
        return chunks

    async def _let_gather(self) -> None:
        """Don't look before `_look_at`. A cancelled pause is not begun again: its end stays."""
        rest = self._look_at - time.monotonic()
        connection = self._response.connection if self._response else None
        if rest <= 0 or connection is None or connection.transport is None:
            return
        transport = connection.transport
        transport.pause_reading()
        try:
            await asyncio.sleep(rest)
        finally:
            transport.resume_reading()


def _in_all(patience_s: float) -> float | None:
    """What bounds a wait in which bytes may come one by one: the socket's own timeout, and time to connect."""
    return None if math.isinf(patience_s) else patience_s + CONNECT_S


def _require_no_redirect(response: aiohttp.ClientResponse) -> None:
    """An engine is where its URL says: what another one answers would be recorded, and aborted, at the wrong one."""
    if 300 <= response.status < 400:
        where = response.headers.get("Location", "")[:500]
        raise EngineError("refused", f"{response.url} sends elsewhere, to {where!r}: give that URL", response.status)


def _unreachable(url: str, error: Exception) -> EngineError:
    told = EngineError("unreachable", f"{url}: {type(error).__name__}: {error}".rstrip(": "))
    told.unconnected = isinstance(error, aiohttp.ClientConnectorError)
    return told


async def _bytes(response: aiohttp.ClientResponse, most: int) -> bytes:
    parts, size = [], 0  # joined once: hundreds of answers that come together are most of this process's memory
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            raise EngineError("broken", f"{response.url}: an answer of more than {most:,} bytes")
    return b"".join(parts)


async def _text(response: aiohttp.ClientResponse) -> str:
    return (await _bytes(response, MAX_PAGE_BYTES)).decode("utf-8", "replace")


async def _body(response: aiohttp.ClientResponse) -> Any:
    """Of a generate call's answer. Raises EngineError where it is no JSON."""
    data = await _bytes(response, MAX_BODY_BYTES)
    return parse_json(data) if data.strip() else None


async def _page(response: aiohttp.ClientResponse) -> Any:
    """Any other body, as JSON where it is that."""
    if response.status == 200 and response.url.path.endswith("/generate"):
        return await _body(response)
    data = await _bytes(response, MAX_PAGE_BYTES)
    try:
        return parse_json(data) if data.strip() else None
    except EngineError:
        return data[:2000].decode("utf-8", "replace")
