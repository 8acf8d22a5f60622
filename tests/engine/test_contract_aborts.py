"""Aborts and clients that go away: what comes back, and that nothing goes on.

That a request has stopped, and did not just end, is shown by a twin of the same length that started before it and still
runs when the engine says that one request is left.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.contract import LONG, PATIENCE_S, SLOTS, Call, Talk, TooLate, in_time, job, refused


async def twins(talk: Talk, name: str, stream: bool = True) -> tuple[Call, Call]:
    """Two requests that run; the second one, which is a little ahead, stays."""
    twin = talk.start(job(f"{name}-two", LONG, stream=True))
    await twin.seen(1)
    one = talk.start(job(f"{name}-one", LONG, stream=stream))
    if stream:
        await one.seen(2)
    await talk.until(lambda running, waiting: running == 2, "both run", twin)
    await twin.goes_on(3)  # so that the other one, which may be unary, has made tokens too
    return one, twin


async def only_the_twin_runs(talk: Talk, twin: Call) -> None:
    """The engine runs for a moment at a time: SGLang aborts the request of a client that has gone two seconds later,
    and a fast one would have ended it, and the twin, by then."""
    async with asyncio.timeout(PATIENCE_S):
        while await talk.load() != (1, 0):
            async with talk.paused("in_place"):
                await talk.still(twin)
    await talk.check_running(twin)


# -- abort


@pytest.mark.parametrize("stream", [True, False])
@in_time
async def test_an_abort_gives_back_what_was_made(talk: Talk, stream: bool) -> None:
    one, twin = await twins(talk, "abort", stream)
    await talk.abort(one.rid)
    await one.aborted()
    assert 0 < len(one.ids) < LONG
    assert one.totals.prompt_tokens == 4
    if talk.engine.traits.spans:
        assert one.totals.spans is not None and one.totals.spans[-1]["end"] == len(one.ids)
    await only_the_twin_runs(talk, twin)


@in_time
async def test_an_abort_in_the_queue_gives_back_nothing(talk: Talk) -> None:
    running = await talk.fill()
    for stream in (True, False):
        queued = talk.start(job("queued", stream=stream))
        await talk.until(lambda running, waiting: waiting == 1, "one waits", *running)
        await talk.abort(queued.rid)
        await queued.end()
        await talk.check_running(*running)  # else it may have started
        assert queued.totals.finish_reason == "abort"
        assert (queued.ids, queued.logprobs, queued.totals.prompt_tokens) == ([], [], None)
    await talk.until(lambda running, waiting: (running, waiting) == (SLOTS, 0), "nobody waits", *running)


@in_time
async def test_an_abort_of_nobody_is_harmless(talk: Talk) -> None:
    running = talk.start(job("somebody", LONG, stream=True))
    await running.seen(1)
    await talk.abort("nobody-000000")
    await talk.abort("")
    body = job("finished", 4)
    done = await talk.ask(body)
    await talk.abort(body["rid"])
    again = await talk.ask(body)
    assert len(done.ids) == len(again.ids) == 4
    await running.goes_on()


@in_time
async def test_an_abort_at_the_moment_of_the_end(talk: Talk) -> None:
    """Whichever comes first: an answer comes, it is whole, and it says which of the two it was."""
    n, seen = 24 << talk.attempt, set()
    for place in range(24):
        call = talk.start(job("moment", n, stream=bool(place % 2)))
        if place % 2:
            await call.seen(place + 1)
        await talk.abort(call.rid)
        await call.end()
        assert call.totals.finish_reason in ("length", "abort")
        assert len(call.ids) == n or call.totals.finish_reason == "abort"  # which all n tokens may have
        seen.add(call.totals.finish_reason)
    await talk.idle()
    if "abort" not in seen:
        raise TooLate("no abort came before the end")


@in_time
async def test_aborts_go_by_prefix(talk: Talk) -> None:
    """So request ids have a fixed length: none is a prefix of another."""
    body, other = (job("prefix", LONG, stream=True) for _ in range(2))
    longer = talk.start({**other, "rid": body["rid"] + "0"})
    await longer.seen(2)
    one = talk.start(body)
    await one.seen(2)
    await talk.abort(one.rid)
    await one.aborted()
    if talk.engine.traits.prefix_aborts:
        await longer.aborted()
    else:
        await only_the_twin_runs(talk, longer)


@in_time
async def test_aborting_a_group_leaves_the_others(talk: Talk) -> None:
    other, *group = (talk.start(job(name, LONG, stream=True)) for name in ("other", "group", "group"))
    for call in (other, *group):
        await call.seen(2)
    await asyncio.gather(*(talk.abort(call.rid) for call in group))
    for call in group:
        await call.aborted()
    await only_the_twin_runs(talk, other)


@in_time
async def test_abort_all(talk: Talk) -> None:
    running = await talk.fill("all")
    queued = talk.start(job("all-queued", stream=True))
    await talk.until(lambda running, waiting: waiting == 1, "one waits", *running)
    await talk.post("/abort_request", abort_all=True)
    for call in (*running, queued):
        await call.aborted()
        assert len(call.ids) < LONG
    await talk.idle()


@pytest.mark.needs("refuses_duplicates")
@in_time
async def test_a_request_id_that_is_in_flight(talk: Talk) -> None:
    """Without that trait both requests are lost, and the first one is never answered."""
    body = job("twice", LONG, stream=True)
    running = talk.start(body)
    await running.seen(2)
    error = await refused(talk, job("twice", 4) | {"rid": running.rid}, running)
    assert (error.kind, error.status) == ("refused", 400) and running.rid in error.message
    await running.goes_on()


# -- clients that go away


@pytest.mark.parametrize("stream", [True, False])
@in_time
async def test_a_client_that_goes_away_stops_its_request(talk: Talk, stream: bool) -> None:
    """Within 4 seconds in a unary request, a long time for a tiny model: so only that it ends. Some releases do not
    even stop every stream: there the worker's abort has to."""
    one, twin = await twins(talk, "gone", stream)
    await one.cut()
    if stream and talk.engine.traits.hears_disconnects:
        await only_the_twin_runs(talk, twin)
    else:
        if stream:
            await talk.abort(one.rid)
        await talk.abort(twin.rid)
        await talk.idle()
