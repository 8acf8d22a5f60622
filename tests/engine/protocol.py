"""Speaking the engines' protocol in tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

PROMPT = [10, 20, 30, 40]


async def post(http: aiohttp.ClientSession, url: str, body: Any = None) -> tuple[int, Any]:
    async with http.post(url, json=body if body is not None else {}) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw.startswith((b"{", b"[")) else raw


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with http.get(url) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw.startswith((b"{", b"[")) else raw


def job(rid: str, max_new_tokens: int = 8, stream: bool = False, **params: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
    return {"input_ids": PROMPT, "rid": rid, "sampling_params": sampling, "return_logprob": True, "stream": stream}


async def chunks(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON chunks of a stream; fails unless it ends with [DONE]."""
    async with http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        done = False
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                done = True
            elif data:
                assert not done
                yield json.loads(data)
        assert done


async def internal(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    _, info = await get(http, f"{url}/server_info")
    state: dict[str, Any] = info["internal_states"][0]
    return state


async def until(http: aiohttp.ClientSession, url: str, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Ask the engine again (each answer lets it step) until its state is as wanted."""
    async with asyncio.timeout(60):
        while not reached(await internal(http, url)):
            pass
