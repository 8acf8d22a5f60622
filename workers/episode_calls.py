"""The calls of an episode, one after the other: each has its place in the record, or makes one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from samplestore.errors import EpisodeDiverged, EpisodeLimit, EpisodeTruncated, InvalidSetting, StepFailed
from samplestore.queries.episodes import DONE, RecordedCall
from samplestore.verbs import episodes as verbs
from samplestore.words import amount

if TYPE_CHECKING:
    from samplestore.workers.episode_runs import Turns


class Calls:
    """Where an episode stands.

    number   of the next call
    at       response position that it begins at
    over     what ended the episode; a function that swallows it gets it again
    running  kind of the call that runs, "" between two
    task     that makes it
    over_in  kind of the call that it came in
    closed   the function has ended: tasks that it left behind may not call any more
    """

    def __init__(self, turns: Turns, recorded: list[RecordedCall], limit: int, uuid: str, at: int = 0) -> None:
        self.turns, self.claim, self.recorded, self.limit, self.uuid = turns, turns.claim, recorded, limit, uuid
        self.number, self.at = 0, at
        self.over: BaseException | None = None
        self.running = ""
        self.task: asyncio.Task[Any] | None = None
        self.over_in, self.closed = "", False

    @property
    def replaying(self) -> bool:
        """Whether the next call is answered from the record."""
        return self.number < len(self.recorded)

    @contextlib.asynccontextmanager
    async def one(self, kind: str) -> AsyncIterator[Call]:
        """The next call. What ends the episode ends every later call too, whatever the function catches."""
        if self.over is not None:
            raise self.over
        if self.closed:
            raise InvalidSetting("ctx", f"{kind} after the end", "calls while the episode's function runs")
        if self.running:
            raise InvalidSetting("ctx", f"{kind} during {self.running}", "one call after the other: await the first")
        self.running, self.task = kind, asyncio.current_task()
        call = Call(self, kind)
        try:
            self.turns.check()
            if self.number >= self.limit:
                what = f"its episode makes more than {self.number:,} calls"
                raise EpisodeLimit(self.claim.sample_id, what, self.limit, "episode-max-calls")
            try:
                yield call
            except (EpisodeTruncated, InvalidSetting) as error:
                await call.refuse(error)
                raise
            finally:
                self.number += 1
        except (StepFailed, EpisodeTruncated, InvalidSetting):
            raise  # it is recorded, and the function may do something else
        except BaseException as error:  # a cancellation and a lost lease too: no later call may go on after any of them
            self.over, self.over_in = error, kind
            raise
        finally:
            self.running, self.task = "", None


class Call:
    """One call: its number, its row of the record, and the writes that make one."""

    def __init__(self, calls: Calls, kind: str) -> None:
        self.calls, self.kind, self.number, claim = calls, kind, calls.number, calls.claim
        self.row: RecordedCall | None = None
        self.name, self.asked = "", None
        self.key = f"{calls.uuid}/{claim.group_number}/{claim.index}/{claim.incarnation}/{self.number}"

    def recorded(self, name: str, asked: Any) -> RecordedCall | None:
        """The row of this call. Raises EpisodeDiverged where something else was asked for, and what it was refused
        with."""
        calls, claim = self.calls, self.calls.claim
        self.name, self.asked = name, asked
        if not calls.replaying:
            if calls.at != claim.n_tokens:  # begun by a worker without --episode, or by another function
                recorded, now = f"{amount(claim.n_tokens, 'response token')}", f"{self.kind} after {calls.at}"
                raise EpisodeDiverged(claim.sample_id, self.number, recorded, now)
            return None
        row = calls.recorded[self.number]
        if (row.kind, row.name, row.asked, row.start) != (self.kind, name, asked, calls.at):
            then, now = _told(row.kind, row.name, row.asked, row.start), _told(self.kind, name, asked, calls.at)
            raise EpisodeDiverged(claim.sample_id, self.number, then, now)
        self.row = row
        if row.state == DONE and isinstance(row.result, dict) and "refused" in row.result:
            raise refusal(claim.sample_id, row.result["refused"])
        return row

    async def refuse(self, error: EpisodeTruncated | InvalidSetting) -> None:
        """Record that this call was refused. A function that goes on would otherwise find its next call in this one's
        place when it runs again."""
        if self.row is None:
            await self.calls.turns.host.write(*self.noted(self.asked, {"refused": as_json(error)}, self.calls.at))

    async def begin(self, name: str, asked: Any) -> None:
        calls = self.calls
        await calls.turns.host.write(verbs.begin, calls.claim, self.number, self.kind, name, self.key, asked, calls.at)

    async def settle(self, result: Any = None, error: str | None = None) -> None:
        await self.calls.turns.host.write(verbs.settle, self.calls.claim, self.number, result, error, self.calls.at)

    async def note(self, result: Any) -> None:
        await self.calls.turns.host.write(*self.noted(None, result, self.calls.at))

    def noted(self, asked: Any, result: Any, stop: int) -> tuple[Any, ...]:
        """The write that records it as done, for one transaction with others."""
        calls = self.calls
        return verbs.note, calls.claim, self.number, self.kind, self.name, self.key, asked, result, calls.at, stop


def as_json(error: EpisodeTruncated | InvalidSetting) -> dict[str, Any]:
    """A refusal as JSON, for the record."""
    if isinstance(error, EpisodeTruncated):
        return {"n_tokens": error.n_tokens}
    return {"name": error.name, "value": f"{error.value!r:.200}", "allowed": error.allowed}


def refusal(sample_id: int, recorded: dict[str, Any]) -> EpisodeTruncated | InvalidSetting:
    if "n_tokens" in recorded:
        return EpisodeTruncated(sample_id, recorded["n_tokens"])
    return InvalidSetting(recorded["name"], recorded["value"], recorded["allowed"])


def shown(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else text[:300] + "..."


def _told(kind: str, name: str, asked: Any, start: int | None) -> str:
    return f"{kind} {name + ' ' if name else ''}{shown(asked)} at token {start}"
