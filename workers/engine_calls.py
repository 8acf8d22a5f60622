"""Many engines at once, for the command line: which ones, what each said, what they look like now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samplestore.cli import exits
from samplestore.workers import engine_state, routers
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError

LOOK_S = 5.0
PATIENT_S = 30.0  # where an answer decides whether all are told at once: a busy engine is slow, not away
HEALTH_S = 2.0  # a health check that generates does not answer while the engine is paused

Call = Callable[[EngineClient, str], Awaitable[str]]
Unsure = Callable[[EngineClient, str], Awaitable[bool]]  # whether nobody can know beforehand that an engine bears it


@dataclass(frozen=True)
class Told:
    """What came of one engine: what it said, or the error. serves: the label that it has after it failed. held_back: it
    was not told, since another one did not bear it."""

    url: str
    said: str
    failed: bool = False
    serves: str | None = None
    held_back: bool = False


def named(engine: list[str] | None, router: str | None) -> list[str]:
    """The engines that were given, and those that the router lists. Raises CommandError, EngineError."""
    urls = {url.rstrip("/") for url in engine or []}
    for url in [*urls, *([router] if router else [])]:
        if not url.startswith(("http://", "https://")):
            raise exits.CommandError(
                f"{url!r} is no URL: http://HOST:PORT. See: samplestore engines --help", exits.USAGE
            )
    if router:
        base = router.rstrip("/")

        async def ask() -> set[str]:
            async with EngineClient(LOOK_S) as client:
                return await routers.listed(client, base)

        urls |= asyncio.run(ask())
    if not urls:
        raise exits.CommandError(f"router {router} lists no engines. Name some with: --engine URL")
    return sorted(urls)


async def at_once(urls: Sequence[str], call: Call, timeout_s: float) -> list[Told]:
    """At all at the same time, each with its own deadline: one that hangs does not hold the others."""

    async def one(client: EngineClient, url: str) -> Told:
        try:
            async with asyncio.timeout(timeout_s):
                return Told(url, await call(client, url))
        except EngineError as error:
            said = str(error)
        except TimeoutError:
            said = f"no answer within {timeout_s:g} s"
        return Told(url, said, failed=True, serves=await engine_state.served_label(client, url, LOOK_S))

    async with EngineClient(timeout_s) as client:
        return list(await asyncio.gather(*(one(client, url) for url in urls)))


async def one_first(urls: Sequence[str], call: Call, timeout_s: float, unsure: Unsure | None) -> list[Told]:
    """At all at the same time where each is sure to bear it. Else at one of those that are not, and at the others when
    it has: what kills an engine must not kill all. That one comes first in what is returned."""
    async with EngineClient(PATIENT_S) as client:
        doubts = [] if unsure is None else await asyncio.gather(*(unsure(client, url) for url in urls))
        first = next((url for url, doubt in zip(urls, doubts, strict=False) if doubt), None)
        if first is None:
            return await at_once(urls, call, timeout_s)
        others = [url for url in urls if url != first]
        [tried] = await at_once([first], call, timeout_s)
        if not tried.failed:
            return [tried, *await at_once(others, call, timeout_s)]
        labels = await asyncio.gather(*(engine_state.served_label(client, url, LOOK_S) for url in others))
    said = f"not told, since {first} did not take it"
    held = [
        Told(url, f"{said}; serves {label}" if label else said, failed=True, serves=label, held_back=True)
        for url, label in zip(others, labels, strict=True)
    ]
    return [tried, *held]


async def looks_alive(client: EngineClient, url: str) -> bool:
    try:
        await engine_state.health(client, url, HEALTH_S)
    except EngineError:
        return False
    return True


async def look(urls: list[str], router: str | None) -> tuple[dict[str, dict[str, Any]], routers.Router | None]:
    async with EngineClient(LOOK_S) as client:
        through = None if router is None else await routers.identify(client, router)
        seen = await asyncio.gather(*(see(client, url) for url in urls))
        return dict(zip(urls, seen, strict=True)), through


async def see(client: EngineClient, url: str) -> dict[str, Any]:
    """Each question by itself: an engine that is paused fails its health check and tells its load all the same."""

    async def ask(asked: Awaitable[Any]) -> Any:
        try:
            return await asked
        except EngineError as error:
            return error

    # Alone, as a router does: SGLang takes its answer to any other question as a sign of health too.
    well = await ask(engine_state.health(client, url, LOOK_S))
    info, server, load, generated = await asyncio.gather(
        *(
            ask(f(client, url, LOOK_S))
            for f in (engine_state.info, engine_state.server, engine_state.load, engine_state.generated_tokens)
        )
    )
    error = next((e for e in (info, well) if isinstance(e, EngineError)), None)
    load = load if isinstance(load, engine_state.Load) else engine_state.Load()
    return {
        "health": "ok" if error is None else "no answer" if isinstance(info, EngineError) else "fails",
        "label": info.label if isinstance(info, engine_state.Info) else None,
        "release": server.release if isinstance(server, engine_state.Server) else None,
        "running": load.running,
        "queued": load.queued,
        "tokens": load.tokens,
        "generated": generated if isinstance(generated, int) else None,
        "error": None if error is None else str(error),
    }
