"""An engine that does what a test tells it, over real HTTP: SGLang's native protocol in every dialect, and every way
to break it.

Its tokens follow from their place alone (prompt included), so a response that lost, repeated or reordered one shows:
token at place p is `token_at(p)`, its log-prob `logprob_at(p)`, whoever generated it, in however many requests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from .processes import HOST, wait_until

Dialect = Literal["incremental", "cumulative", "delta_ids"]
CONTEXT = 4096


def token_at(place: int) -> int:
    return 10 + place * 7 % 50


def logprob_at(place: int) -> float:
    return -0.125 * (place % 16 + 1)  # exact in float32


def expert_at(row: int, layer: int, k: int) -> int:
    """Of 8 experts."""
    return (row + 3 * layer + k) % 8


@dataclass
class Script:
    """What becomes of one request. Counts are tokens of this request.

    tokens          the answer's length; None: max_new_tokens. Shorter than that ends with "stop", else "length"
    dialect         incremental | cumulative | delta_ids (0.5.9, 0.5.10: delta ids, cumulative log-probs)
    chunk           tokens of a stream chunk
    stall_after     wait there until `engine.release()` or an abort
    deaf            the abort of this request is not heard (lost in a paused engine), an abort of all is
    die_after       the connection is cut there
    done_after      [DONE] there, without a finish_reason
    error_after     an error chunk there, then [DONE], as a router sends when its engine dies
    repeat_last     after an abort the last chunk repeats the last token (a retracted request)
    queued          aborted before it started: no tokens, no counts; as soon as it comes
    status, body    this HTTP status and body (a str as it is, all else as JSON) instead of an answer
    raw             these chunks (or, unary, this one answer) instead
    logprobs        "yes", or "none": output_token_logprobs is left out
    wrong           place in the answer -> value of its log-prob
    widened         tokens that its prompt has beyond those that were sent, as images make them
    """

    tokens: int | None = None
    dialect: Dialect = "incremental"
    chunk: int = 4
    stall_after: int | None = None
    deaf: bool = False
    die_after: int | None = None
    done_after: int | None = None
    error_after: int | None = None
    repeat_last: bool = False
    queued: bool = False
    status: int | None = None
    body: Any = None
    raw: Sequence[Any] | None = None
    logprobs: str = "yes"
    wrong: dict[int, Any] = field(default_factory=dict)
    widened: int = 0


Plan = Callable[[dict[str, Any], int], Script]


class _Dead(Exception):
    """The connection is to be cut."""


@dataclass
class _Running:
    rid: str
    abort: asyncio.Event
    deaf: bool
    ids: list[int] = field(default_factory=list)
    probs: list[Any] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


class ScriptedEngine:
    """Runs in a thread of the test. `plan(body, n)` gives the script of the n-th request, from 0. `port`: 0 is a free
    one."""

    def __init__(self, plan: Plan | None = None, label: str = "default", spans: bool = True, port: int = 0) -> None:
        self.plan: Plan = plan or (lambda body, n: Script())
        self.label, self.spans = label, spans
        self.requests: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.calls: list[tuple[str, Any]] = []  # control calls, in order
        self.running: dict[str, _Running] = {}
        self.most_running = 0
        self.paused = False
        self.load_blocks = False  # update_weights_from_disk changes the weights and then does not answer
        self.load_fails = 0  # this many calls of it fail
        self.continue_fails = 0  # this many calls of continue_generation do nothing and answer 500
        self.cached = 0  # cached_tokens that it tells
        self.nan_paths: set[str] = set()  # weights from there make log-probs that are no numbers
        self.model_path = "scripted"
        self.architecture: str | None = None  # of its model, as /model_info tells it
        self.server: dict[str, Any] = {"context_length": CONTEXT}  # what /server_info tells
        self.queued: int | None = None  # what /v1/loads tells to wait; None: there is no such page
        self.looks = 0  # how often it was asked for its weights
        self.on_load: Callable[[], None] = lambda: None  # called when weights are changed
        self.experts: tuple[int, int] | None = None  # (layers, top_k): routed experts are told when asked for
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()
        self.port = port
        self._thread.start()
        assert self._ready.wait(30), "the scripted engine did not start"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def release(self) -> None:
        """Let everything that stalls go on, now and later."""
        self._loop.call_soon_threadsafe(self._go.set)

    def idle(self) -> bool:
        return not self.running

    def close(self) -> None:
        """Cut all connections and stop listening, as a killed process does. Twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    # -- server

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._go, self._stop, self._unpaused = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._unpaused.set()
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                *(
                    web.post(f"/{name}", self._control)
                    for name in (
                        "abort_request", "update_weights_from_disk", "pause_generation", "continue_generation",
                    )
                ),
            ]
        )  # fmt: skip
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, HOST, self.port).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _model_info(self, request: web.Request) -> web.Response:
        self.looks += 1
        kinds = {"architectures": [self.architecture]} if self.architecture else {}
        return web.json_response({"model_path": self.model_path, "weight_version": self.label, **kinds})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server)

    async def _loads(self, request: web.Request) -> web.Response:
        if self.queued is None:
            raise web.HTTPNotFound
        rank = {"num_running_reqs": len(self.running), "num_waiting_reqs": self.queued, "num_used_tokens": 0}
        return web.json_response({"loads": [rank]})

    async def _control(self, request: web.Request) -> web.Response:
        name = request.path.lstrip("/")
        body = await request.json() if request.can_read_body else {}
        self.calls.append((name, body))
        if name == "abort_request":
            self.aborts.append("all" if body.get("abort_all") else body["rid"])
            for rid, one in list(self.running.items()):
                if body.get("abort_all") or (rid == body["rid"] and not one.deaf):
                    one.abort.set()
            return web.Response()
        if name == "pause_generation":
            self.paused = True
            self._unpaused.clear()
            if body.get("mode") == "abort":  # answered when what ran has ended; what comes meanwhile waits
                ran = list(self.running.values())
                for one in ran:
                    one.abort.set()
                while any(self.running.get(one.rid) is one for one in ran):
                    self._ended.clear()
                    await self._ended.wait()
        elif name == "continue_generation":
            if self.continue_fails:
                self.continue_fails -= 1
                return web.Response(status=500, text="Internal Server Error")
            self.paused = False
            self._unpaused.set()
        else:
            if self.load_fails:
                self.load_fails -= 1
                return web.json_response({"success": False, "message": "no such checkpoint"}, status=400)
            if body["abort_all_requests"]:
                for one in list(self.running.values()):
                    one.abort.set()
            while self.running and not self.paused:  # the writer lock: partials leave with the old label
                self._ended.clear()
                await self._ended.wait()
            self.on_load()
            self.label, self.model_path = body["weight_version"], body["model_path"]
            if self.load_blocks:
                await self._stop.wait()
            return web.json_response({"success": True, "message": "loaded", "num_paused_requests": 0})
        return web.json_response({"status": "ok"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script = self.plan(body, len(self.requests))
        self.requests.append(body)
        if script.status is not None:
            if isinstance(script.body, str):
                return web.Response(text=script.body, status=script.status)
            return web.json_response(script.body, status=script.status)
        reply = _Reply(request, body, script)
        one = self.running[body["rid"]] = _Running(body["rid"], asyncio.Event(), script.deaf)
        self.most_running = max(self.most_running, len(self.running))
        try:
            return await self._answer(reply, one)
        except _Dead:
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPInternalServerError from None
        finally:
            self.running.pop(body["rid"], None)
            self._ended.set()

    async def _answer(self, reply: _Reply, one: _Running) -> web.StreamResponse:
        script, limit = reply.script, reply.body["sampling_params"]["max_new_tokens"]
        if script.raw is not None:
            for chunk in script.raw:
                await reply.send(chunk)
            return await reply.end()
        if script.queued:
            return await reply.finish({"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
        length = limit if script.tokens is None else min(script.tokens, limit)
        start, sent = len(reply.body["input_ids"]), 0
        while len(one.ids) < length:
            await self._wait(script, one)
            if one.abort.is_set():
                break
            n = len(one.ids)
            one.ids.append(token_at(start + n))
            number = None if self.model_path in self.nan_paths else logprob_at(start + n)
            one.probs.append(script.wrong.get(n, number))
            one.labels.append(self.label)
            n += 1
            if n in (script.die_after, script.done_after, script.error_after):
                await reply.send(self._chunk(reply, one, sent, None))
                return await _break_off(reply, script)
            if n - sent >= script.chunk and n < length:
                await reply.send(self._chunk(reply, one, sent, None))
                sent = n
        aborted = len(one.ids) < length
        kind = "abort" if aborted else "length" if len(one.ids) >= limit else "stop"
        if aborted and script.repeat_last and sent:
            await reply.send(self._chunk(reply, one, sent, None))
            sent = len(one.ids) - 1  # the next chunk's ids repeat the last one, its log-probs are all of them
            last = self._chunk(reply, one, sent, kind)
            last["meta_info"]["output_token_logprobs"] = reply.entries(one, 0)
            return await reply.finish(last)
        return await reply.finish(self._chunk(reply, one, sent, kind))

    async def _wait(self, script: Script, one: _Running) -> None:
        """Where a script stalls, or the engine is paused."""
        waits = []
        if script.stall_after == len(one.ids) and not self._go.is_set():
            waits.append(self._go)
        if not self._unpaused.is_set():
            waits.append(self._unpaused)
        for event in waits:
            tasks = [asyncio.ensure_future(event.wait())]
            tasks.append(asyncio.ensure_future(one.abort.wait()))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()

    def _experts_of(self, reply: _Reply, generated: int) -> str:
        """Row r of the sequence has expert_at(r, layer, k), as SGLang sends them."""
        assert self.experts is not None
        layers, top_k = self.experts
        rows = range(reply.body.get("routed_experts_start_len", 0), len(reply.body["input_ids"]) + generated - 1)
        values = [expert_at(r, layer, k) for r in rows for layer in range(layers) for k in range(top_k)]
        return base64.b64encode(array("i", values).tobytes()).decode()

    def _chunk(self, reply: _Reply, one: _Running, sent: int, kind: str | None) -> dict[str, Any]:
        dialect = reply.script.dialect if reply.streams else "cumulative"
        meta: dict[str, Any] = {
            "id": one.rid, "finish_reason": None if kind is None else {"type": kind},
            "prompt_tokens": len(reply.body["input_ids"]) + reply.script.widened, "cached_tokens": self.cached,
            "completion_tokens": len(one.ids),
            "weight_version": one.labels[-1] if one.labels else self.label,
        }  # fmt: skip
        if kind is not None and self.spans:
            meta["weight_versions"] = _spans(one.labels)
        if kind is not None and self.experts and reply.body.get("return_routed_experts"):
            meta["routed_experts"] = self._experts_of(reply, len(one.ids))
        if reply.script.logprobs == "yes":
            meta["output_token_logprobs"] = reply.entries(one, sent if dialect == "incremental" else 0)
        ids = one.ids if dialect == "cumulative" else one.ids[sent:]
        return {"text": "x" * len(ids), "output_ids": list(ids), "meta_info": meta}


class _Reply:
    """One answer on its way: unary or a stream."""

    def __init__(self, request: web.Request, body: dict[str, Any], script: Script) -> None:
        self.request, self.body, self.script = request, body, script
        self.streams = bool(body.get("stream"))
        self.response: web.StreamResponse | None = None
        self.whole: Any = None

    def entries(self, one: _Running, start: int) -> list[list[Any]]:
        return [[p, i, None] for p, i in zip(one.probs[start:], one.ids[start:], strict=True)]

    async def send(self, chunk: Any) -> None:
        if not self.streams:
            self.whole = chunk
            return
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self.response.prepare(self.request)
        text = chunk if isinstance(chunk, str) else json.dumps(chunk)
        await self.response.write(f"data: {text}\n\n".encode())

    async def finish(self, chunk: Any) -> web.StreamResponse:
        await self.send(chunk)
        return await self.end()

    async def end(self) -> web.StreamResponse:
        if not self.streams:
            text = self.whole if isinstance(self.whole, str) else json.dumps(self.whole)
            return web.Response(text=text, content_type="application/json")
        await self.send("[DONE]")
        assert self.response is not None
        await self.response.write_eof()
        return self.response


async def _break_off(reply: _Reply, script: Script) -> web.StreamResponse:
    if script.error_after is not None:
        await reply.send({"error": {"message": "Stream error: upstream closed", "type": "stream_error"}})
    elif script.die_after is not None:
        raise _Dead
    return await reply.end()


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": label, "start": place, "end": place + 1})
    return spans


def wait_running(engines: Sequence[ScriptedEngine], n: int, timeout: float = 30.0) -> None:
    wait_until(lambda: sum(len(e.running) for e in engines) >= n, what=f"{n} requests run", timeout=timeout)
