"""Pauses: what goes on afterwards, what does not, and what an abort does meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from samplestore.workers.replies import EngineError
from tests.engine.contract import LONG, PATIENCE_S, Call, Talk, in_time, job


async def check_that_it_goes_on(talk: Talk, mode: str, retractions: int) -> None:
    """As if nothing had been; new requests wait."""
    n = 400 << min(talk.attempt, 2)
    call = talk.start(job(mode, n, temperature=0.0, stream=True))
    await call.seen(20)
    async with talk.paused(mode):
        await talk.still(call)
        made = len(call.ids)
        late = talk.start(job("late", 4, stream=True))
        await talk.still(call, late)
        assert (len(call.ids), len(late.ids)) == (made, 0)
    await call.end()
    assert call.totals.finish_reason == "length" and len(call.ids) == n
    assert call.totals.retractions == retractions
    assert len((await late.end()).ids) == 4
    reference = await talk.ask(job("plain", n, temperature=0.0))
    assert call.ids == reference.ids


@pytest.mark.needs("survives_retraction")
@in_time
async def test_a_pause_that_retracts(talk: Talk) -> None:
    await check_that_it_goes_on(talk, "retract", 1)


@in_time
async def test_a_pause_that_freezes(talk: Talk) -> None:
    await check_that_it_goes_on(talk, "in_place", 0)


@in_time
async def test_a_pause_that_aborts(talk: Talk) -> None:
    call = talk.start(job("paused", LONG, stream=True))
    await call.seen(20)
    async with talk.paused("abort"):
        await call.aborted()
        assert len(call.ids) < LONG
        await talk.idle()
        late = talk.start(job("late", 4, stream=True))
        await talk.still(late)
        assert late.ids == []
    assert len((await late.end()).ids) == 4


@in_time
async def test_a_paused_engine_is_healthy(talk: Talk) -> None:
    """Else a router would take it for dead in the middle of a weight update. A check that generates hangs for 20 s."""
    call = talk.start(job("healthy", LONG, stream=True))
    await call.seen(2)
    async with talk.paused("in_place"):
        await talk.still(call)
        await talk.client.text(f"{talk.engine.url}/health", 15.0)
        assert await talk.version()
    await talk.post("/continue_generation")  # once more: harmless
    await call.goes_on()


@in_time
async def test_an_abort_of_a_retracted_request_keeps_its_tokens(talk: Talk) -> None:
    """Its last chunk repeats the last token in some releases: the reader takes none twice."""
    call = talk.start(job("retract", LONG, temperature=0.0, stream=True))
    await call.seen(60)
    async with talk.paused("retract"):
        await talk.still(call)
        await talk.abort(call.rid)
        await call.aborted()
    assert 60 <= len(call.ids) < LONG
    reference = await talk.ask(job("plain", len(call.ids), temperature=0.0))
    assert call.ids == reference.ids


@in_time
async def test_an_abort_of_a_frozen_request(talk: Talk) -> None:
    """Answered when the engine goes on, at the latest; with at most the token that was being made."""
    call = talk.start(job("frozen", LONG, stream=True))
    await call.seen(20)
    async with talk.paused("in_place"):
        await talk.still(call)
        before = len(call.ids)
        await talk.abort(call.rid)
    await call.aborted()
    assert len(call.ids) <= before + 2


@in_time
async def test_an_abort_during_a_pause_can_be_lost(talk: Talk) -> None:
    """Of a request that came during the pause: some releases then take no further abort of it, nor notice that its
    client goes. abort_all is heard even by one that hears nothing else. A twin that started before shows that it did
    not end by itself."""
    traits = talk.engine.traits
    twin = talk.start(job("lost-twin", LONG, stream=True))
    await twin.seen(1)
    async with talk.paused("in_place"):
        await talk.still(twin)
        call = await arrived(talk, job("lost", LONG, stream=True))
        await talk.abort(call.rid)
    if traits.hears_in_pause:
        await call.aborted()
        assert call.ids == []
        return
    await call.seen(20)
    await talk.abort(call.rid)
    if not traits.pause_loses_aborts:
        await call.aborted()
        assert len(call.ids) < LONG
        return
    await call.goes_on(100)
    await call.cut()
    for _ in range(20):
        load = await talk.load()
        await talk.check_running(twin)
        assert load == (2, 0), "it goes on even without a client"
    await talk.post("/abort_request", abort_all=True)
    await twin.aborted()
    await talk.idle()


async def arrived(talk: Talk, body: dict[str, Any]) -> Call:
    """A request that a paused engine knows, though it does not start it: sent twice, because the one that came later
    is refused. Where it is not, nothing is lost by not knowing."""
    call = talk.start(body)
    if not talk.engine.traits.refuses_duplicates:
        await talk.version()
        return call
    other = talk.start(body)
    done, _ = await asyncio.wait([call.task, other.task], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    [refused] = done
    assert isinstance(error := refused.exception(), EngineError) and "Duplicate" in error.message
    return other if refused is call.task else call
