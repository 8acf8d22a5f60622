"""The steps of an episode: something outside is done once, and what came out is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any, Literal

from samplestore.errors import EpisodeDiverged, LeaseLost, OutcomeUnknown, StepFailed
from samplestore.queries.episodes import DONE, FAILED, RecordedCall
from samplestore.workers.episode_calls import Call, shown
from samplestore.workers.episode_values import Values
from samplestore.workers.step_threads import in_thread

SHOWN_BYTES = 2000  # of arguments that are kept as they are; longer ones are kept as their digest

Unknown = Literal["retry", "fail"]
Replay = Literal["recorded", "execute"]


class Steps:
    """Does them for one sample.

    environment   (save, restore) of what lives in this process, once ctx.snapshot has named it
    """

    def __init__(self, sample_id: int, values: Values, timeout_s: float) -> None:
        self.sample_id, self.values, self.timeout_s = sample_id, values, timeout_s
        self.environment: tuple[Callable[[], Any], Callable[[Any], Any]] | None = None

    async def done(
        self, call: Call, row: RecordedCall | None, called: str, asked: Any, function: Callable[..., Any], args: Any,
        on_unknown: Unknown, replay: Replay, timeout_s: float | None,
    ) -> Any:  # fmt: skip
        """The result of this step: of its record, or of doing it now. Raises StepFailed, OutcomeUnknown,
        EpisodeDiverged."""
        if row is not None and row.state == FAILED:
            if row.result is not None:
                raise OutcomeUnknown(self.sample_id, call.number, called, call.key)
            raise StepFailed(self.sample_id, call.number, called, row.error or "")
        if row is not None and row.state == DONE:
            return await self._done_before(call, row, function, args, replay, timeout_s)
        if row is not None and on_unknown == "fail" and replay == "recorded":
            unknown = OutcomeUnknown(self.sample_id, call.number, called, call.key)
            await call.settle({"outcome": "unknown"}, unknown.error)
            raise unknown
        await call.begin(called, asked)
        try:
            value = self.values.json("result", await self._run(function, args, call.key, timeout_s))
            result = {"value": value}
            if self.environment is not None:
                result["state"] = self.values.json("state", self.environment[0]())
        except (LeaseLost, asyncio.CancelledError):
            raise
        except Exception as error:  # the user's function: whatever it raises is recorded, for every replay
            said = f"{type(error).__name__}: {error}" if not isinstance(error, TimeoutError) else "it took too long"
            await call.settle(error=said[:1000])
            raise StepFailed(self.sample_id, call.number, called, said[:1000]) from error
        await call.settle(result)
        return value

    async def _done_before(
        self, call: Call, row: RecordedCall, function: Callable[..., Any], args: Any, replay: Replay,
        timeout_s: float | None,
    ) -> Any:  # fmt: skip
        recorded = row.result["value"]
        if replay == "execute":
            again = self.values.json("result", await self._run(function, args, call.key, timeout_s))
            if again != recorded:
                raise EpisodeDiverged(self.sample_id, call.number, shown(recorded), shown(again))
        elif self.environment is not None and "state" in row.result:
            self.environment[1](row.result["state"])
        return recorded

    async def _run(self, function: Callable[..., Any], args: Any, key: str, timeout_s: float | None) -> Any:
        more = {"idempotency_key": key} if _takes_key(function) else {}
        async with asyncio.timeout(self.timeout_s if timeout_s is None else timeout_s):
            if inspect.iscoroutinefunction(function):
                return await function(*args, **more)
            made = await in_thread(function, *args, **more)  # its clock and its thread start together
            return await made if inspect.isawaitable(made) else made


def _takes_key(function: Callable[..., Any]) -> bool:
    try:
        return "idempotency_key" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C code
        return False


def bounded(value: Any) -> Any:
    """Arguments as the record keeps them."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    if len(text) <= SHOWN_BYTES:
        return value
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text), "begins": text[:200]}
