"""HTTP to engines and routers: SGLang's native protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from samplestore.workers.replies import EngineError, EventSplitter, error_of, parse_json

CONNECT_S = 10.0
MAX_BODY_BYTES = 256 * 1024 * 1024


class EngineClient:
    """One HTTP session for a worker's calls. `timeout_s` bounds the silence of a generate call, not its length."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.timeout_s),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session:
            await self._session.close()

    async def generate(self, base: str, body: dict[str, Any], routing_key: str) -> AsyncGenerator[Any, None]:
        """Chunks of POST /generate, parsed. A unary answer is one chunk. Raises EngineError; a stream that ends
        before its [DONE] just ends: only a finish_reason tells that a reply is complete."""
        assert self._session is not None
        headers = {"X-SMG-Routing-Key": routing_key}  # siblings go to one engine, for its prefix cache
        try:
            async with self._session.post(f"{base}/generate", json=body, headers=headers) as response:
                if response.status != 200:
                    raise error_of(await _body(response), response.status)
                if not body.get("stream"):
                    yield await _body(response)
                    return
                splitter = EventSplitter()
                async for data in response.content.iter_any():
                    for event in splitter.feed(data):
                        if event == b"[DONE]":
                            return
                        yield parse_json(event)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineError("unreachable", f"{base}: {type(error).__name__}: {error}") from error

    async def get(self, url: str, timeout_s: float = 10.0) -> Any:
        return await self._call("GET", url, None, timeout_s)

    async def post(self, url: str, body: dict[str, Any], timeout_s: float = 30.0) -> Any:
        return await self._call("POST", url, body, timeout_s)

    async def _call(self, method: str, url: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        """The answer's body, parsed; None where it is empty. Raises EngineError."""
        assert self._session is not None
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, url, json=body) as response:
                    answer = await _body(response)
                    if response.status >= 400:
                        raise error_of(answer, response.status)
                    return answer
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineError("unreachable", f"{url}: {type(error).__name__}: {error}") from error


async def _body(response: aiohttp.ClientResponse) -> Any:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise EngineError("broken", f"{response.url}: an answer of more than {MAX_BODY_BYTES} bytes")
    if not data.strip():
        return None
    try:
        return parse_json(bytes(data))
    except EngineError:
        if response.status == 200 and response.url.path.endswith("/generate"):
            raise
        return data[:2000].decode("utf-8", "replace")
