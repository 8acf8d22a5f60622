"""A full queue, the costly dialect, and the one request that must never be sent."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from tests.engine.contract import LONG, PATIENCE_S, Engine, Talk, Weights, in_time, job, refused
from tests.engine.recompute import TOLERANCE
from tests.support.processes import Processes
from tests.support.sglang import chosen_releases, start_sglang


@in_time
async def test_a_full_queue_is_told_as_busy(narrow: Talk) -> None:
    """HTTP 503 for a unary request, HTTP 200 and an abort for a stream: the reader makes one error of both."""
    running = narrow.start(job("running", LONG, stream=True))
    await running.seen(2)
    queued = narrow.start(job("queued", 4))
    await narrow.until(lambda running, waiting: (running, waiting) == (1, 1), "one runs and one waits", running)
    for stream in (False, True):
        error = await refused(narrow, job("third", 4, stream=stream), running)
        assert (error.kind, error.status) == ("busy", 503)
        assert "queue is full" in error.message
    await narrow.check_running(running)
    assert not queued.over
    await narrow.abort(running.rid)
    assert len((await queued.end()).ids) == 4


async def test_a_cumulative_stream_is_read_once(narrow: Talk) -> None:
    unary = await narrow.ask(job("unary", 120, temperature=0.0))
    streamed = await narrow.ask(job("streamed", 120, temperature=0.0, stream=True))
    assert streamed.ids == unary.ids and len(unary.ids) == 120
    assert streamed.logprobs == pytest.approx(unary.logprobs, abs=TOLERANCE)
    assert streamed.reader.cumulative
    for before, after in itertools.pairwise(streamed.answers):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


@in_time
async def test_an_abort_after_a_retraction_repeats_nothing_in_a_cumulative_stream(narrow: Talk) -> None:
    call = narrow.start(job("retract", LONG, temperature=0.0, stream=True))
    await call.seen(40)
    async with narrow.paused("retract"):
        await narrow.still(call)
        await narrow.abort(call.rid)
        await call.aborted()
    assert 40 <= len(call.ids) < LONG
    reference = await narrow.ask(job("plain", len(call.ids), temperature=0.0))
    assert call.ids == reference.ids


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", chosen_releases()[:1])
async def test_one_id_outside_the_vocabulary_ends_a_server(
    release: str, contract_weights: Weights, processes: Processes
) -> None:
    """Why the worker looks at every prompt before it sends it. A server of its own: it does not survive."""
    served = start_sglang(processes, contract_weights.a, release=release)
    async with EngineClient(PATIENCE_S) as client:
        talk = Talk(Engine(release, served.url, contract_weights), client)
        assert len((await talk.ask(job("good", 4))).ids) == 4
        with contextlib.suppress(EngineError):
            await talk.ask(job("poison", 4, prompt=[10, 20, 100_000]))
    served.process.wait(PATIENCE_S)
