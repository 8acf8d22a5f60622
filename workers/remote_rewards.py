"""A reward model behind HTTP: retries with back-off, a time limit for every try, several samples in one request.

    POST URL  {"prompt": ..., "response": ..., "label": ...}           -> 0.5 or {"reward": 0.5, ...}
    POST URL  {"samples": [{...}, ...]}   (a batch, or a group)        -> [0.5, {"reward": 0.5, ...}, ...]

The first is what slime sends to its --rm-url. A reply is foreign: it is bounded, and what is no finite number is never
taken for one. {"reward": null} is a judge's word that it could not read its model's answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp

from samplestore.errors import InvalidSetting
from samplestore.logs import mask
from samplestore.workers.reward_process import BadReturn, json_details, safe_text, to_reward, to_rewards
from samplestore.workers.rewards import (
    GroupResult,
    Outcome,
    R,
    RewardPoolStopped,
    RewardResult,
    RewardSample,
    failed_result,
    made_result,
)

log = logging.getLogger("samplestore.scoring")

CONNECT_S = 10.0
MAX_REPLY_BYTES = 4 * 2**20
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 30.0
AGAIN = (408, 425, 429)  # and 5xx: the server's trouble, not the sample's


class _Failed(NamedTuple):
    """Why a try gave nothing; `again`: another one may. wait_s: what the server asked for. answered: the server has
    looked at the request, so that a single one of its samples may be to blame."""

    outcome: Outcome
    error: str
    again: bool
    wait_s: float = 0.0
    answered: bool = False
    elapsed_s: float = 0.0


class _Waiting(NamedTuple):
    sample: RewardSample
    done: asyncio.Future[RewardResult]


class RemoteJudge:
    """Scores by a reward model at `url`.

    timeout_s    of one try, from the request to the end of the reply
    tries        before a sample counts as failed; the store then tries it again later, up to the run's max_attempts
    batch        samples in one request, of those that wait; 1 sends slime's single form
    concurrency  requests at once
    reward_key   of a returned object, which key is the reward; None: "reward", else "score"
    """

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, tries: int = 10, batch: int = 1, concurrency: int = 16,
        reward_key: str | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("tries", tries), ("batch", batch), ("concurrency", concurrency)):
            if value < 1:
                raise InvalidSetting(name, value, "a whole number above 0")
        self.url, self.timeout_s, self.tries, self.batch, self.key = url, timeout_s, tries, batch, reward_key
        self.room = 2 * concurrency * batch
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting: list[_Waiting] = []
        self._session: aiohttp.ClientSession | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RemoteJudge:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_S),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        """A `score` in flight raises RewardPoolStopped: a shutdown is not a verifier error."""
        session, self._session = self._session, None
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        if session is not None:
            await session.close()

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample; with others that wait, where batches are sent. Raises RewardPoolStopped."""
        done: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(sample, done))
        task = asyncio.create_task(self._send_waiting())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        try:
            return await done
        except asyncio.CancelledError:
            if self._session is None:
                raise RewardPoolStopped(sample.sample_id) from None
            raise

    async def score_group(self, samples: Sequence[RewardSample]) -> GroupResult:
        """Score the samples of a group in one request. Raises RewardPoolStopped."""
        async with self._slots:
            made = await self._ask(samples, GroupResult)
        if isinstance(made, _Failed):
            return failed_result(GroupResult, made.error, made.elapsed_s, made.outcome)
        return replace(made, details=json_details(made.details))

    async def _send_waiting(self) -> None:
        """One request for the samples that wait when a slot is free: while all are busy, a batch fills up."""
        async with self._slots:
            mine, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
            mine = [w for w in mine if not w.done.done()]
            if not mine:
                return  # another request took them
            try:
                results = await self._results([w.sample for w in mine])
            except asyncio.CancelledError:
                for waiting in mine:
                    waiting.done.cancel()
                raise
            except Exception as error:  # whatever it is: those who wait for this batch would wait for ever
                for waiting in mine:
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
                return
            for waiting, result in zip(mine, results, strict=True):
                if not waiting.done.done():
                    waiting.done.set_result(result)

    async def _results(self, samples: list[RewardSample], tries: int | None = None) -> list[RewardResult]:
        """Of a batch, or of one sample. A batch that a server has refused, or answered with nonsense, is asked for in
        halves, and a failure is counted for a sample that fails alone: its neighbours must not be given up with it."""
        made: RewardResult | GroupResult | _Failed
        if self.batch == 1:
            made = await self._ask(samples, RewardResult, tries)
        else:
            made = await self._ask(samples, GroupResult, tries)
        if isinstance(made, RewardResult):
            return [made]
        if isinstance(made, _Failed):
            if not made.answered or len(samples) == 1:
                return [failed_result(RewardResult, made.error, made.elapsed_s, made.outcome) for _ in samples]
            half = len(samples) // 2
            left = 1 if made.again else tries  # the pauses for a server in trouble have been made
            return [*await self._results(samples[:half], left), *await self._results(samples[half:], left)]
        details = made.details.get("samples", [{}] * len(samples))
        each = zip(made.rewards, details, strict=True)
        return [made_result(RewardResult, [reward], said, made.elapsed_s) for reward, said in each]

    async def _ask(self, samples: Sequence[RewardSample], kind: type[R], tries: int | None = None) -> R | _Failed:
        """The result of a request, tried until it is had or hopeless."""
        began, most = time.monotonic(), tries or self.tries
        body = _body(samples[0]) if kind is RewardResult else {"samples": list(map(_body, samples))}
        try:
            payload = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            return _Failed("verifier_error", f"the sample cannot be written as JSON: {error}", False, answered=True)
        for number in range(1, most + 1):
            answer = await self._try(samples[0].sample_id, payload, kind, len(samples), began)
            if not isinstance(answer, _Failed):
                return answer
            got: _Failed = answer
            if not got.again or number == most:
                break
            wait = max(got.wait_s, random.uniform(0.5, 1.0) * FIRST_WAIT_S * 2 ** (number - 1))
            log.warning("reward model %s, try %d of %d: %s", mask(self.url), number, most, got.error)
            await asyncio.sleep(min(MAX_WAIT_S, wait))
        told = f" ({number} tries)" if number > 1 else ""
        return got._replace(error=f"{mask(self.url)}: {got.error}{told}", elapsed_s=time.monotonic() - began)

    async def _try(self, sample_id: int, payload: bytes, kind: type[R], n: int, began: float) -> R | _Failed:
        if self._session is None:
            raise RewardPoolStopped(sample_id)
        try:
            # a redirect would carry prompts and responses to an address that nobody named
            async with self._session.post(
                self.url, data=payload, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as reply:
                data = await reply.content.read(MAX_REPLY_BYTES + 1)
                while len(data) <= MAX_REPLY_BYTES and not reply.content.at_eof():
                    data += await reply.content.read(MAX_REPLY_BYTES + 1 - len(data))
                status, wait = reply.status, _retry_after(reply.headers.get("Retry-After"))
        except TimeoutError:
            return _Failed("verifier_timeout", f"no reply within {self.timeout_s:g} s", True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _Failed("verifier_error", safe_text(f"{type(error).__name__}: {error}", 500), True)
        if status != 200:
            shown = safe_text(data[:300].decode("utf-8", "backslashreplace"), 300)
            return _Failed(
                "verifier_error", f"HTTP {status}: {shown}", status in AGAIN or status >= 500, wait, status not in AGAIN
            )
        if len(data) > MAX_REPLY_BYTES:
            return _Failed("verifier_error", f"a reply of more than {MAX_REPLY_BYTES} bytes", False, answered=True)
        return self._read(data, kind, n, time.monotonic() - began)

    def _read(self, data: bytes, kind: type[R], n: int, elapsed_s: float) -> R | _Failed:
        try:
            value = json.loads(data)
            if kind is GroupResult:
                rewards, details = to_rewards(value, n, self.key)
            else:
                reward, details = to_reward(value, self.key)
                rewards = [reward]
        except (ValueError, RecursionError) as error:
            return _Failed(
                "verifier_error", f"its reply is no JSON: {safe_text(str(error), 200)}", False, answered=True
            )
        except BadReturn as error:
            said = str(error).replace("the reward function returned", "the reward model sent")
            return _Failed("verifier_error", safe_text(said, 500), False, answered=True)
        return made_result(kind, rewards, details, elapsed_s)


def _body(sample: RewardSample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata,
        "sample_id": sample.sample_id, "group_index": sample.group_index, "index": sample.index,
        "response_length": sample.response_length, "status": sample.status,
    }  # fmt: skip


def _retry_after(value: str | None) -> float:
    """Seconds that a server asks to be left alone; 0 where it says nothing, or a date."""
    try:
        return min(MAX_WAIT_S, max(0.0, float(value or 0)))
    except ValueError:
        return 0.0
