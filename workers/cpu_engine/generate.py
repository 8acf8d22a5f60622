"""POST /generate: unary and streaming answers."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from .answers import answer
from .intake import Intake
from .options import BadRequest, ContractError, EngineOptions
from .replies import error_text, exception_reply, json_reply, message_error
from .request import Request
from .scheduler import QueueFull, Scheduler


class GenerateHandler:
    """Serves /generate for one scheduler."""

    def __init__(self, scheduler: Scheduler, intake: Intake, options: EngineOptions) -> None:
        self.scheduler = scheduler
        self.intake = intake
        self.options = options
        self.closing = False

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        if self.closing:
            return exception_reply(503, "The engine is shutting down.")
        try:
            body = orjson.loads(await http.read())
        except orjson.JSONDecodeError as error:
            return exception_reply(400, f"the body is not JSON: {error}")
        streaming = isinstance(body, dict) and bool(body.get("stream"))
        try:
            requests, is_list, streaming = self.intake.build(body)
        except ContractError as error:
            return error_text(str(error))
        except BadRequest as error:
            return await _stream_error(http, str(error)) if streaming else message_error(str(error))
        try:
            self._submit(requests)
            if streaming:
                return await self._stream(http, requests, is_list)
            return await self._unary(requests, is_list)
        finally:
            # A client that went away, in either mode, must not leave its request generating.
            for request in requests:
                if request.finish is None:
                    self.scheduler.abort(request.rid)

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                self.scheduler.submit(request)
            except QueueFull as error:
                request.queued_abort = True
                request.close({"type": "abort", "message": str(error), "status_code": 503, "err_type": None})

    def _answer(self, request: Request, sent: tuple[int, int] | None = None) -> dict[str, Any]:
        return answer(request, self.scheduler.version, sent, text=self.intake.tokenizer is not None)

    async def _unary(self, requests: list[Request], is_list: bool) -> web.Response:
        for request in requests:
            while request.finish is None:
                request.changed.clear()
                await request.changed.wait()
        for request in requests:
            assert request.finish is not None
            status = request.finish.get("status_code")
            if status:
                return exception_reply(int(status), str(request.finish["message"]))
        answers = [self._answer(request) for request in requests]
        return json_reply(answers if is_list else answers[0])

    async def _stream(self, http: web.Request, requests: list[Request], is_list: bool) -> web.StreamResponse:
        response = await _open_stream(http)
        try:
            if not is_list:
                await self._stream_one(response, requests[0], None)
            else:
                async with asyncio.TaskGroup() as group:
                    for index, request in enumerate(requests):
                        group.create_task(self._stream_one(response, request, index))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except* ConnectionResetError:
            pass  # the client went away: nobody is there to answer, and nothing is wrong here
        return response

    async def _stream_one(self, response: web.StreamResponse, request: Request, index: int | None) -> None:
        interval = request.params.stream_interval or self.options.stream_interval
        incremental = self.options.incremental_streaming_output
        tokens = characters = 0
        while True:
            finished = request.finish is not None
            count = len(request.output)
            # SGLang sends the first token at once and then every `interval` tokens.
            due = count > tokens and (tokens == 0 or count - tokens >= interval)
            if finished or due:
                body = self._answer(request, (tokens, characters) if incremental else None)
                tokens, characters = count, len(request.visible_text())
                if index is not None:
                    body["index"] = index
                await response.write(b"data: " + orjson.dumps(body) + b"\n\n")
            if finished:
                return
            if request.finish is None and len(request.output) == count:
                request.changed.clear()
                await request.changed.wait()


async def _open_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(http)
    return response


async def _stream_error(http: web.Request, message: str) -> web.StreamResponse:
    response = await _open_stream(http)
    body = {"error": {"message": message, "type": "BadRequestError", "code": 400, "retryable": False}}
    await response.write(b"data: " + orjson.dumps(body) + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response
