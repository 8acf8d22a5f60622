"""An HTTP server that gives the answers it was made with, and remembers what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class Canned:
    """Answers: "METHOD /path" -> an object (200), (status, object or text), or a function of the request's body."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked, self.url = answers, [], ""

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((f"{request.method} {request.path_qs}", body))
        found = self.answers.get(f"{request.method} {request.path}", (404, {"detail": "Not Found"}))
        if isinstance(found, Callable):
            found = found(body)
        status, said = found if isinstance(found, tuple) else (200, found)
        if isinstance(said, str):
            return web.Response(text=said, status=status)
        return web.json_response(said, status=status)

    def bodies(self, call: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == call]


@asynccontextmanager
async def canned(answers: dict[str, Any]) -> AsyncIterator[Canned]:
    made = Canned(answers)
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", made.answer)
    async with TestServer(app) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made
