"""A reward model behind HTTP that is away, slow, wrong, or answers nonsense: only a finite number is a reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from samplestore.workers import remote_rewards
from samplestore.workers.remote_rewards import RemoteJudge
from samplestore.workers.rewards import RewardPoolStopped, RewardSample

Answer = Callable[[Any], Awaitable[web.StreamResponse]]


class Model:
    """Answers each request by the next of `answers`, the last one again and again, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[Any] = [{"reward": 0.5}]
        self.came, self.go = asyncio.Event(), asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.came.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "wait":
            await self.go.wait()
            answer = {"reward": 0.5}
        if callable(answer):
            answer = answer(self.asked[-1])
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Model]:
    monkeypatch.setattr(remote_rewards, "FIRST_WAIT_S", 0.001)
    made = Model()
    app = web.Application()
    app.router.add_post("/rm", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/rm"  # type: ignore[attr-defined]
    yield made
    made.go.set()
    await runner.cleanup()


def sample(index: int = 0, response: str = "4") -> RewardSample:
    return RewardSample(7 + index, 3, index, "2 + 2?", response, 1, [1, 2, 3], label="4", metadata={"m": 1})


def judge(model: Any, **options: Any) -> RemoteJudge:
    return RemoteJudge(model.url, **{"timeout_s": 5.0, "tries": 4, **options})


async def test_a_sample_is_sent_as_slime_sends_it(model: Model) -> None:
    model.answers = [0.25, {"reward": 1, "why": "equal"}, {"accuracy": 0.75}]
    async with judge(model) as rm:
        first, second = await rm.score(sample()), await rm.score(sample())
    async with judge(model, reward_key="accuracy") as rm:
        third = await rm.score(sample())
    assert [(r.outcome, r.reward) for r in (first, second, third)] == [("ok", 0.25), ("ok", 1.0), ("ok", 0.75)]
    assert second.details == {"why": "equal"}
    asked = model.asked[0]
    assert (asked["prompt"], asked["response"], asked["label"], asked["metadata"]) == ("2 + 2?", "4", "4", {"m": 1})


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_model_in_trouble_is_asked_again(model: Model, status: int) -> None:
    model.answers = [*(web.Response(status=status, text="busy") for _ in range(2)), {"reward": 1.0}]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward, len(model.asked)) == ("ok", 1.0, 3)


async def test_tries_end(model: Model) -> None:
    model.answers = [lambda _: web.Response(status=500, text="out of memory\x00")]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward, len(model.asked)) == ("verifier_error", None, 4)
    assert made.error is not None and "HTTP 500: out of memory\\x00 (4 tries)" in made.error


async def test_a_request_that_is_refused_is_not_asked_again(model: Model) -> None:
    model.answers = [lambda _: web.Response(status=422, text="no such field")]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert made.outcome == "verifier_error" and len(model.asked) == 1
    assert made.error is not None and "HTTP 422" in made.error


async def test_silence_is_a_timeout(model: Model) -> None:
    model.answers = ["wait"]
    async with judge(model, timeout_s=0.2, tries=2) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward, len(model.asked)) == ("verifier_timeout", None, 2)


async def test_nobody_there() -> None:
    async with RemoteJudge("http://127.0.0.1:9/rm", tries=1) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward) == ("verifier_error", None)


@pytest.mark.parametrize(
    "answer",
    ["", "{", "NaN", "Infinity", '"1.0"', "null", "[]", "{}", "1e999", '{"reward": "high"}', "[" * 100_000],
)
async def test_nonsense_is_no_reward(model: Model, answer: str) -> None:
    model.answers = [lambda _: web.Response(text=answer)]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward, len(model.asked)) == ("verifier_error", None, 1)
    assert made.error


async def test_a_reply_is_bounded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rewards, "MAX_REPLY_BYTES", 1000)
    model.answers = [lambda _: web.Response(text='{"reward": 1.0, "text": "' + "x" * 5000 + '"}')]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert made.error is not None and "more than 1000 bytes" in made.error


async def test_a_redirect_is_not_followed(model: Model) -> None:
    model.answers = [lambda _: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert made.error is not None and "HTTP 307" in made.error


async def test_what_the_judge_could_not_read_is_unparsed(model: Model) -> None:
    model.answers = [{"reward": None, "said": "well"}]
    async with judge(model) as rm:
        made = await rm.score(sample())
    assert (made.outcome, made.reward, made.details, len(model.asked)) == ("unparsed", None, {"said": "well"}, 1)


async def test_samples_that_wait_go_in_one_request(model: Model) -> None:
    def rewards(body: Any) -> Any:
        return [{"reward": float(s["index"])} if s["index"] != 2 else None for s in body["samples"]]

    model.answers = ["wait", rewards]
    async with judge(model, batch=4, concurrency=1) as rm:
        first = asyncio.create_task(rm.score(sample(0)))
        await model.came.wait()
        others = [asyncio.create_task(rm.score(sample(i))) for i in range(1, 6)]
        await asyncio.sleep(0)
        model.go.set()
        await first
        results = await asyncio.gather(*others)
    assert [len(asked["samples"]) for asked in model.asked] == [1, 4, 1]
    assert [(r.outcome, r.reward) for r in results] == [
        ("ok", 1.0), ("unparsed", None), ("ok", 3.0), ("ok", 4.0), ("ok", 5.0),
    ]  # fmt: skip


async def test_a_group_is_one_request(model: Model) -> None:
    model.answers = [[1.0, {"reward": 0.5, "rank": 2}]]
    async with judge(model) as rm:
        made = await rm.score_group([sample(0), sample(1)])
    assert (made.outcome, made.rewards, made.details) == ("ok", [1.0, 0.5], {"samples": [{}, {"rank": 2}]})
    model.answers = [[1.0]]
    async with judge(model) as rm:
        short = await rm.score_group([sample(0), sample(1)])
    assert (short.outcome, short.rewards) == ("verifier_error", [])


async def test_a_stop_is_no_verifier_error(model: Model) -> None:
    model.answers = ["wait"]
    async with judge(model) as rm:
        waiting = asyncio.create_task(rm.score(sample()))
        await model.came.wait()
    with pytest.raises(RewardPoolStopped):
        await waiting


def _poisoned(status: int) -> Any:
    def answer(body: Any) -> Any:
        if any(s["response"] == "poison" for s in body["samples"]):
            return web.Response(status=status, text="too long")
        return [{"reward": float(s["index"]), "why": "x"} for s in body["samples"]]

    return answer


async def scores(rm: RemoteJudge, n: int, poison: int | None = None) -> list[Any]:
    asked = (rm.score(sample(i, "poison" if i == poison else "4")) for i in range(n))
    return await asyncio.gather(*asked)


@pytest.mark.parametrize(("status", "most"), [(400, 7), (500, 10)])
async def test_a_sample_that_is_refused_fails_alone(model: Model, status: int, most: int) -> None:
    """Its neighbours have their rewards. A server in trouble had its tries before it is asked in halves."""
    model.answers = [_poisoned(status)]
    async with judge(model, batch=8, concurrency=1) as rm:
        made = await scores(rm, 8, poison=3)
    assert [r.reward for r in made] == [0.0, 1.0, 2.0, None, 4.0, 5.0, 6.0, 7.0]
    assert [r.outcome for r in made].count("verifier_error") == 1 and f"HTTP {status}" in made[3].error
    assert len(model.asked) == most


async def test_nonsense_for_a_batch_is_asked_for_in_halves(model: Model) -> None:
    def answer(body: Any) -> Any:
        return [{"reward": "high" if s["index"] == 2 else 1.0} for s in body["samples"]]

    model.answers = [answer]
    async with judge(model, batch=4, concurrency=1) as rm:
        made = await scores(rm, 4)
    assert [(r.outcome, r.reward) for r in made] == [
        ("ok", 1.0), ("ok", 1.0), ("verifier_error", None), ("ok", 1.0),
    ]  # fmt: skip


async def test_a_server_that_is_away_is_not_asked_for_each_sample(model: Model) -> None:
    model.answers = ["wait"]
    async with judge(model, batch=4, concurrency=1, timeout_s=0.2, tries=1) as rm:
        made = await scores(rm, 4)
    assert {r.outcome for r in made} == {"verifier_timeout"} and len(model.asked) == 1


async def test_a_large_batch_keeps_the_details_of_each(model: Model) -> None:
    why = "because " * 100
    model.answers = [lambda body: [{"reward": 1.0, "why": why} for _ in body["samples"]]]
    async with judge(model, batch=256, concurrency=1) as rm:
        made = await scores(rm, 256)
    assert len(model.asked) == 1
    assert {(r.outcome, r.reward, r.details["why"]) for r in made} == {("ok", 1.0, why)}
    async with judge(model) as rm:
        group = await rm.score_group([sample(i) for i in range(256)])
    assert len(group.rewards) == 256 and len(json.dumps(group.details)) < 17_000, "what is stored is bounded"
