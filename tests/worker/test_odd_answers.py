"""Answers of engines that are hostile or broken, read by one request without a worker around it: nothing false is
stored, it ends in time, and the log or the error names the engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from samplestore.errors import InvalidSegment
from samplestore.types import Claim
from samplestore.verbs import appends
from samplestore.workers import engine_client
from samplestore.workers.dispatch import Target
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.generation import Outcome, Request
from samplestore.workers.limits import Limits
from samplestore.workers.replies import EngineError, ReplyReader
from tests.support.scripted_engine import logprob_at, token_at
from tests.worker.test_odd_streams import Handler, serving
from tests.worker.test_replies import chunk

IDS = [token_at(n) for n in range(64)]
PROBS = [logprob_at(n) for n in range(64)]
N = 32  # tokens that are asked for
VERSIONS = {"v1": 1, "v2": 2, "v3": 3}


@dataclass
class Asked:
    """What came of one request. stored: (ids, log-probs, version) of each segment, in order."""

    url: str
    stored: list[tuple[list[int], list[float], Any]] = field(default_factory=list)
    outcome: str = ""
    error: Exception | None = None

    @property
    def n(self) -> int:
        return sum(len(ids) for ids, _, _ in self.stored)

    def exact(self) -> bool:
        ids = [id for part, _, _ in self.stored for id in part]
        probs = [p for _, part, _ in self.stored for p in part]
        return ids == IDS[: len(ids)] and probs == PROBS[: len(ids)]


async def ask(handler: Handler, mode: str = "stream", patience_s: float = 5.0) -> Asked:
    """One request of N tokens, direct, in weight update mode keep at label v1."""
    claim = Claim(
        run_id=1, sample_id=1, group_id=1, group_number=1, index=0, owner=1, attempt=1, incarnation=0, seq=0,
        n_tokens=0, status="pending", failures=0, prompt_ids=np.array([1, 2, 3], np.int32),
        response_ids=np.empty(0, np.int32), prompt=None, label=None, metadata={},
    )  # fmt: skip
    limits = Limits(mode, 16, 8, 0.05, N, {}, versions_may_change=True)

    async def write(verb: Any, *args: Any) -> None:
        pass

    async def together(calls: Any) -> list[Any]:
        for verb, *args in calls:
            if verb is appends.append:
                told.stored.append((np.asarray(args[2]).tolist(), np.asarray(args[3]).tolist(), args[4]))
        return [None] * len(calls)

    async def version(label: str | None) -> int | None:
        return VERSIONS.get(label or "")

    async with serving(handler) as url, EngineClient(patience_s) as client, asyncio.timeout(20):
        told = Asked(url)
        request = Request(
            claim, client, write, together, limits, lambda *_: None, version, {"v1"}, lambda _: "engine"
        )  # fmt: skip
        try:
            told.outcome = await request.run(Target(url, url), N, False)
        except Exception as error:
            told.error = error
    return told


def part(start: int, stop: int, reason: str | None = None, label: str = "v1", **meta: Any) -> dict[str, Any]:
    return chunk(IDS, PROBS, start, stop, "incremental", reason, weight_version=label, **meta)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


WHOLE = [part(0, 12), part(12, 20), part(20, N, "length")]


def sending(*data: bytes, headers: dict[str, str] | None = None, then: Awaitable[Any] | None = None) -> Handler:
    """Answers with these bytes, one write each; `hangs` after them: it stays open and silent."""

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        for one in data:
            await answer.write(one)
        if then is not None:
            await then
        return answer

    return handler


def events(*chunks: Any) -> bytes:
    return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


# -- bodies


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("mode", ["stream", "unary"])
async def test_a_body_that_is_compressed_unasked(mode: str, coding: str) -> None:
    body = events(*WHOLE) if mode == "stream" else json.dumps(part(0, N, "length")).encode()
    packed = gzip.compress(body) if coding == "gzip" else zlib.compress(body)
    cut = len(packed) // 2
    told = await ask(sending(packed[:cut], packed[cut:], headers={"Content-Encoding": coding}), mode)
    assert (told.outcome, told.n) == (Outcome.FINISHED, N) and told.exact()
    broken = await ask(sending(packed[:cut], b"junk" * 9, headers={"Content-Encoding": coding}), mode)
    assert broken.exact() and broken.n < N and (broken.outcome == Outcome.CUT or "broken" in str(broken.error))


@pytest.mark.parametrize("mode", ["stream", "unary"])
async def test_a_small_body_that_swells(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds count what comes out, not what came in."""
    monkeypatch.setattr(engine_client, "MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr("samplestore.workers.replies.MAX_EVENT_BYTES", 2**20)
    packed = gzip.compress(b'data: "' + b" " * 2**24)
    told = await ask(sending(packed, headers={"Content-Encoding": "gzip"}), mode)
    assert told.stored == [] and isinstance(told.error, EngineError) and told.error.kind == "broken"
    assert "1048576" in str(told.error) or "1,048,576" in str(told.error)


async def test_an_event_of_16_mb() -> None:
    fat = {**part(0, 12), "text": "x" * 2**24}
    told = await ask(sending(event(fat), events(*WHOLE[1:])))
    assert (told.outcome, told.n) == (Outcome.FINISHED, N) and told.exact()


@pytest.mark.parametrize("mode", ["stream", "unary", "sliced"])
async def test_a_web_page(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of a proxy that is in the way: no sample's fault, and told."""
    page = b"<html>\n\n<body>we are back soon</body></html>"
    told = await ask(sending(page, headers={"Content-Type": "text/html"}), mode)
    assert (told.outcome, told.stored, told.error) == (Outcome.CUT, [], None)
    assert f"engine={told.url}" in caplog.text and "web page" in caplog.text


@pytest.mark.parametrize("body", [b"", b"\n\n", b"upstream said no\n\n", b"data: [DONE]\n\n", events(part(0, 12))])
async def test_an_answer_that_just_ends_is_told(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    told = await ask(sending(body))
    assert told.outcome == Outcome.CUT and told.exact() and f"engine={told.url}" in caplog.text


# -- time


def dripping(head: bytes, slow: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(head)
        for byte in slow * 1000:
            request.transport.write(bytes([byte]))
            await asyncio.sleep(0.01)
        raise AssertionError("nobody ended it")

    return handler


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"


@pytest.mark.parametrize(
    ("mode", "head", "slow"),
    [
        ("stream", HEAD, b"data: {"),
        ("unary", HEAD, b" "),
        ("unary", HEAD.replace(b"200", b"500"), b" "),
        ("stream", HEAD[:-2], b"X-A: b\r\n"),
    ],
)
async def test_bytes_that_drip(
    mode: str, head: bytes, slow: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within an event, a body, or the headers: each byte begins the socket's timeout anew, and the sample would be held
    for ever."""
    monkeypatch.setattr(engine_client, "CONNECT_S", 0.05)
    told = await ask(dripping(head, slow), mode, patience_s=0.1)
    assert (told.outcome, told.stored) == (Outcome.CUT, []) and f"engine={told.url}" in caplog.text


async def test_some_tokens_and_then_silence(caplog: pytest.LogCaptureFixture) -> None:
    """While its /health may be fine: what came is stored at once, and the call ends."""
    told = await ask(sending(event(WHOLE[0]), then=asyncio.Event().wait()), patience_s=0.1)
    assert (told.outcome, told.n) == (Outcome.CUT, 12) and told.exact() and f"engine={told.url}" in caplog.text


async def test_a_flood_of_chunks_without_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So many that the worker never waits for one: no silence would end it."""
    monkeypatch.setattr(engine_client, "MAX_IDLE_BYTES", 10**6)

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(event(WHOLE[0]))
        while True:
            await answer.write(event(part(12, 12)) * 100)

    told = await ask(handler, patience_s=60)
    assert (told.outcome, told.n) == (Outcome.CUT, 12) and told.exact()
    assert f"{told.url} sends, but no token in 1," in caplog.text


# -- versions


@pytest.mark.parametrize(
    ("labels", "versions"),
    [
        (("v1", "v2", "v1"), (1, 2)),
        (("v1", "v3", "v2"), (1, 3)),
        (("v2", "v1", "v2"), (1, 2)),
        (("v1", "other", "v1"), None),
        (("v3", "v1", "v3"), (1, 3)),
    ],
)
async def test_labels_that_go_to_and_fro(labels: tuple[str, str, str], versions: Any) -> None:
    """As of an engine that came back with an old checkpoint, or two behind one address. Without spans each token of
    doubtful weights has the range of all that were told."""
    sent = [{**c, "meta_info": {**c["meta_info"], "weight_version": v}} for c, v in zip(WHOLE, labels, strict=True)]
    told = await ask(sending(events(*sent)))
    assert (told.outcome, told.n) == (Outcome.FINISHED, N) and told.exact()
    doubtful = [version for ids, _, version in told.stored if version != (1, 1)]
    assert set(doubtful) == {versions} and sum(len(i) for i, _, v in told.stored if v == versions) >= 20


# -- contents


@pytest.mark.parametrize("mode", ["stream", "unary"])
@pytest.mark.parametrize("wrong", [0.5, 1, 0.002, 3e38])
async def test_a_log_prob_above_0(mode: str, wrong: float) -> None:
    """It is none: a probability, or a logit. What came before it is kept."""
    probs = [*PROBS[:20], wrong, *PROBS[21:]]
    chunks = [chunk(IDS, probs, a, b, "incremental", r, weight_version="v1")
              for a, b, r in ((0, 12, None), (12, N, "length"))]  # fmt: skip
    whole = json.dumps(chunk(IDS, probs, 0, N, "cumulative", "length", weight_version="v1")).encode()
    told = await ask(sending(events(*chunks) if mode == "stream" else whole), mode)
    assert isinstance(told.error, InvalidSegment) and told.error.field == "logprobs" and told.exact()
    assert "above 0, no log-prob" in str(told.error) and told.n in (0, 12)
    assert told.error.position == 20 - told.n


async def test_a_log_prob_of_0_and_a_little_more_is_one() -> None:
    whole = chunk(IDS, [0.0, 5e-4] * 16, 0, N, "incremental", "length", weight_version="v1")
    assert (await ask(sending(events(whole)))).n == N


@pytest.mark.parametrize(
    ("probs", "unsound"), [([0.5, -1.0], True), ([-1.0, 0.5], True), ([-1.0, -2.0], False), ([None, None], True)]
)
def test_whether_an_engine_gives_log_probs(probs: list[Any], unsound: bool) -> None:
    """What a probe judges by."""
    reader = ReplyReader()
    reader.feed(chunk([1, 2], probs, 0, 2, "incremental", "length"))
    assert reader.unsound is unsound


@pytest.mark.parametrize("mode", ["stream", "unary", "sliced"])
async def test_more_tokens_than_were_asked_for(mode: str) -> None:
    """An engine that knows no end would fill the store."""
    chunks = [part(0, 12), part(12, 40), part(40, 64, "length")]
    whole = json.dumps(part(0, 64, "length")).encode()
    told = await ask(sending(events(*chunks) if mode == "stream" else whole), mode)
    assert isinstance(told.error, EngineError) and told.error.kind == "broken" and told.exact()
    assert "were asked for" in str(told.error) and told.n in (0, 12)


def nonsense() -> Iterator[Any]:
    """Values of wrong types for a field."""
    yield from (None, True, 7, 15, -1, 1.5, "x", [], {}, [[]], [None], {"a": 1}, 10**30, "9" * 100_000)


FIELDS = (
    "finish_reason", "completion_tokens", "output_token_logprobs", "output_token_logprobs_length", "weight_version",
    "weight_versions", "prompt_tokens", "cached_tokens", "num_retractions", "e2e_latency", "queue_time", "id",
    "routed_experts", "spec_accept_rate", "cached_tokens_details",
)  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_field_of_a_wrong_type(name: str, at: int) -> None:
    """In the first, a middle and the last chunk, with new tokens and without: exact tokens or an EngineError, and what
    an error says is short."""
    for value in nonsense():
        for stop in (12, 20):
            chunks = [part(0, 12), part(12, stop), part(stop, N, "length")]
            chunks[at]["meta_info"][name] = value
            reader, ids = ReplyReader(), []
            try:
                for one in chunks:
                    ids += reader.feed(one).ids
            except EngineError as error:
                assert len(str(error)) < 2100
            assert ids == IDS[: len(ids)]
            assert len(reader.totals.finish_reason or "") <= 40 and len(reader.totals.label or "") <= 200


async def test_a_finish_reason_of_100_kb() -> None:
    long = {"type": "x" * 100_000, "message": "y" * 100_000, "matched": "z" * 100_000}
    last = {**part(20, N)}
    last["meta_info"]["finish_reason"] = long
    told = await ask(sending(events(*WHOLE[:2], last)))
    assert (told.outcome, told.n) == (Outcome.FINISHED, N) and told.exact()
