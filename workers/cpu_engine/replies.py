"""JSON replies and the error shapes that SGLang's clients know."""

from __future__ import annotations

import orjson
from aiohttp import web


def json_reply(body: object, status: int = 200) -> web.Response:
    """`body` as JSON; NaN and infinities become null, as SGLang's do."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def error_text(message: str) -> web.Response:
    """400 for a request that breaks the contract: {"error": "..."}."""
    return json_reply({"error": message}, 400)


def message_error(message: str) -> web.Response:
    """400 for a request that can't be served: {"error": {"message": ...}}."""
    return json_reply({"error": {"message": message}}, 400)


def exception_reply(status: int, message: str) -> web.Response:
    """The shape of HTTP exceptions: {"object": "error", "message", "type", "param", "code"}."""
    return json_reply(
        {"object": "error", "message": message, "type": str(status), "param": None, "code": status}, status
    )
