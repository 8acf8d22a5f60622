"""What `samplestore doctor --router URL` finds out: which router, are its engines well, does it retry.

A router that retries sends a refused or broken request to the next engine under the same id. One that broke after an
engine had generated everything is generated again and again (five times by default), and nobody hears of it.

Whether it retries is seen by doing: for some seconds an engine of our own stands in the router's list. It refuses
everything with 503, as a full engine does, and remembers what came. Refused requests of others are retried by whoever
sent them (samplestore's worker waits a moment), and nothing is generated twice, because here nothing is generated.
It has a model name of its own, so that routers that choose by name send it nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from samplestore.cli import exits
from samplestore.cli.doctor import FAIL, OK, WARN, Result
from samplestore.words import amount
from samplestore.workers import routers
from samplestore.workers.engine_calls import LOOK_S, see
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError

NAME = "samplestore-probe"
REFUSED = "samplestore doctor refuses this, to see whether it comes again"
LISTED_S = 15.0  # that the router is given to look at the probe and list it
GONE_S = 6.0
LATE_S = 3.0
ANSWER_S = 5.0
BETWEEN_S = 0.1  # two tries: an engine that is busy may hold one for long
TRIES_PER_ENGINE, MOST_TRIES = 10, 200
CURE = "Start it with: --disable-retries"

_unheard = logging.getLogger(f"{__name__}.unheard")  # smg tries other protocols on the probe
_unheard.addHandler(logging.NullHandler())
_unheard.propagate = False


def check(url: str) -> list[Result]:
    """The checks of a router. Interrupted or not, it leaves the router's list as it found it."""
    try:
        return asyncio.run(_until_told(url))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _until_told(url: str) -> list[Result]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # SIGINT does so by itself
    async with EngineClient(LOOK_S) as client:
        try:
            router = await routers.identify(client, url)
            known = await routers.workers(client, router.url)
        except EngineError as error:
            return [Result("router", FAIL, str(error), exits.ENGINE)]
        named = Result("router", OK, str(router))
        if router.kind == "unknown":
            named = Result("router", WARN, f"{router}: what it drops from requests is not known")
        return [named, *await _engines(client, router, known), await _retries(client, router, known)]


async def _engines(client: EngineClient, router: routers.Router, known: list[routers.Listed]) -> list[Result]:
    known = [one for one in known if one.model_id != NAME]
    if not known:
        return [Result("router's engines", WARN, f"{router.url} lists none")]
    seen = await asyncio.gather(*(see(client, one.url) for one in known))
    away = [(one, told["error"]) for one, told in zip(known, seen, strict=True) if told["health"] != "ok"]
    out = [one.url for one in known if not one.healthy]
    found = []
    if away:
        said = f"{len(away)} of {len(known)} are not well; {away[0][0].url}: {away[0][1]}"
        cure = f"See: samplestore engines list --router {router.url}"
        found.append(Result("router's engines", FAIL, f"{said}. {cure}", exits.ENGINE))
    if out:
        said = f"{len(out)} of {len(known)} get no requests, because their health check failed ({out[0]})"
        found.append(Result("router's list", FAIL, f"{said}. {_HEALTH_CURE}", exits.CHECK))
    return found or [Result("router's engines", OK, f"{len(known)} answered, all get requests")]


_HEALTH_CURE = (
    "A paused engine looks dead unless it is started with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0. "
    "Go on with: samplestore engines continue"
)


# -- does it retry?


@dataclass
class Probe:
    """An engine that refuses. came: how often each request id arrived; hit: one of the doctor's own did."""

    own: set[str] = field(default_factory=set)
    came: Counter[str] = field(default_factory=Counter)
    hit: asyncio.Event = field(default_factory=asyncio.Event)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        """What smg tells SGLang by."""
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "sglang"}]})

    async def refuse(self, request: web.Request) -> web.Response:
        if request.path == "/generate":
            with contextlib.suppress(ValueError):
                body = await request.json()
                rid = body.get("rid") if isinstance(body, dict) else None
                if isinstance(rid, str) and rid in self.own:
                    self.came[rid] += 1
                    self.hit.set()
        return web.json_response({"error": {"message": REFUSED}}, status=503)


async def _retries(client: EngineClient, router: routers.Router, known: list[routers.Listed]) -> Result:
    try:
        for left in known:
            if left.model_id == NAME and not left.healthy:  # of a doctor that was killed
                await routers.unregister(client, router.url, left.url)
        async with _listed_probe(client, router) as probe:
            return await _ask(client, router, probe, len(known) + 1)
    except (EngineError, OSError) as error:
        return Result("router retries", WARN, f"unknown: {error}. {CURE}")


@asynccontextmanager
async def _listed_probe(client: EngineClient, router: routers.Router) -> AsyncIterator[Probe]:
    """A probe in the router's list. Raises EngineError where the router does not list it."""
    probe = Probe()
    app = web.Application()
    app.router.add_get("/health", probe.health)
    app.router.add_get("/v1/models", probe.models)
    app.router.add_route("*", "/{any:.*}", probe.refuse)
    runner = web.AppRunner(app, access_log=None, logger=_unheard, shutdown_timeout=0.5)
    await runner.setup()
    try:
        host = _own_address(router.url)
        await web.TCPSite(runner, host, 0).start()
        url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        known_as, was_listed = None, False
        try:
            known_as = await routers.register(client, router.url, url, NAME)
            await _until(client, router, url, listed=True, within_s=LISTED_S)
            was_listed = True
            yield probe
        finally:
            if not was_listed:
                await _come_late(client, router, url, runner)
            await routers.unregister(client, router.url, url, known_as)
            await _until(client, router, url, listed=False, within_s=GONE_S)
    finally:
        await runner.cleanup()


async def _come_late(client: EngineClient, router: routers.Router, url: str, runner: web.AppRunner) -> None:
    """Routers add engines in the background: one that is still about to list the probe would do so after it was taken
    out. With its server gone it can't be added any more; what was on its way by then is listed soon."""
    await runner.cleanup()
    with contextlib.suppress(EngineError):
        await _until(client, router, url, listed=True, within_s=LATE_S)


async def _until(client: EngineClient, router: routers.Router, url: str, *, listed: bool, within_s: float) -> None:
    """Wait until the probe gets requests, or is gone from the list. Raises EngineError."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                found = [one for one in await routers.workers(client, router.url) if one.url == url]
                if found and listed and found[0].healthy:
                    return
                if not found and not listed:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        what = "does not list, or not reach," if listed else "still lists"
        raise EngineError("unreachable", f"{router.url} {what} the doctor's probe at {url}") from None


async def _ask(client: EngineClient, router: routers.Router, probe: Probe, engines: int) -> Result:
    """Requests of one token until one arrives at the probe. Each has its own routing key and prompt, so that a policy
    that is sticky by either spreads them."""
    asked: dict[str, asyncio.Task[Any]] = {}
    try:
        for n in range(min(MOST_TRIES, TRIES_PER_ENGINE * engines)):
            rid = secrets.token_hex(16)
            probe.own.add(rid)
            asked[rid] = asyncio.create_task(_generate(client, router, rid, n))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BETWEEN_S):
                    await probe.hit.wait()
            if probe.hit.is_set():
                break
        if not probe.came:
            return Result(
                "router retries", WARN, f"unknown: none of {amount(len(asked), 'request')} came to the probe. {CURE}"
            )
        rid = next(iter(probe.came))
        return _judge(await asked[rid], probe.came[rid])
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def _generate(client: EngineClient, router: routers.Router, rid: str, n: int) -> str:
    """ "refused" as the probe did, "answered" by another engine, or what else came of it."""
    body = {
        "rid": rid, "model": NAME, "input_ids": [1 + n % 50], "stream": False,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }  # fmt: skip
    reply = client.generate(router.url, body, rid)
    try:
        async with asyncio.timeout(ANSWER_S):
            await reply.read()
        return "answered"
    except EngineError as error:
        return "refused" if REFUSED in error.message else str(error)
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    finally:
        await reply.aclose()


def _judge(outcome: str, arrivals: int) -> Result:
    if arrivals > 1 or outcome == "answered":
        said = f"a refused request was sent {arrivals} times" if arrivals > 1 else "a refused request was sent on"
        why = "what breaks after it was generated is generated again. samplestore's worker retries by itself"
        return Result("router retries", FAIL, f"yes: {said}; {why}. {CURE}", exits.CHECK)
    if outcome == "refused":
        return Result("router retries", OK, "no: a refused request came back at once")
    return Result("router retries", WARN, f"unknown: a refused request came back otherwise ({outcome}). {CURE}")


def _own_address(router: str) -> str:
    """This machine's address towards the router. Nothing is sent. Raises OSError."""
    parts = urlsplit(router)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as towards:
        towards.connect(found[4])
        return str(towards.getsockname()[0])
