"""Stages of finished samples and groups: each is done by whoever serves its name, and what came out is stored."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from samplestore import faults
from samplestore.errors import LeaseLost
from samplestore.types import Member, StageClaim
from samplestore.verbs import stages
from samplestore.workers.rewards import Judge, RewardPoolStopped, RewardSample

log = logging.getLogger("samplestore.scoring")

Write = Callable[..., Awaitable[Any]]
STAGE = "reward"


class StageServer(Protocol):
    """Does the work of one stage. `room`: claims that it may hold at once."""

    @property
    def room(self) -> int: ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: Any) -> None: ...

    async def do(self, claim: StageClaim, write: Write) -> None:
        """Do it and store what came out. Raises RewardPoolStopped where it was stopped meanwhile."""
        ...


class Scorer:
    """The stages that a worker serves, by name."""

    def __init__(self, servers: Mapping[str, StageServer], write: Write) -> None:
        self.servers, self.write = servers, write
        self.busy: Counter[str] = Counter()
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Scorer:
        async with self._open:  # what was opened is closed if the next can't be
            for server in self.servers.values():
                await self._open.enter_async_context(server)
            self._open = self._open.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.aclose()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.servers)

    def rooms(self) -> list[tuple[str, int]]:
        """(stage, claims that may be taken now), of stages with room."""
        free = [(name, server.room - self.busy[name]) for name, server in self.servers.items()]
        return [(name, room) for name, room in free if room > 0]

    async def score(self, claim: StageClaim) -> None:
        """Do one stage and store what came out. A lost lease means that somebody else does it."""
        self.busy[claim.name] += 1
        try:
            await self.servers[claim.name].do(claim, self.write)
        except RewardPoolStopped:
            await self.write(stages.release_stage, claim)
        except LeaseLost as error:
            log.warning("%s %s", _named(claim), error)
        except Exception as error:
            # Ids that the tokenizer does not know, a result that the store refuses: a stage has no deadline, so one
            # that nobody settles would stay with this worker for as long as it lives.
            log.exception("%s could not be done", _named(claim))
            await self._failed(claim, f"{type(error).__name__}: {error}")
        finally:
            self.busy[claim.name] -= 1

    async def _failed(self, claim: StageClaim, error: str) -> None:
        try:
            await self.write(stages.fail_stage, claim, error)
        except LeaseLost as lost:
            log.warning("%s %s", _named(claim), lost)


def _named(claim: StageClaim) -> str:
    what = f"group={claim.group_id}" if claim.members else f"sample={claim.sample_id}"
    return f"{what} stage={claim.stage_id} {claim.name}"


class RewardStage:
    """Rewards of samples, and of groups. A verifier's error or timeout is recorded as such, never as a reward of 0."""

    def __init__(self, judge: Judge, tokenizer: Any) -> None:
        self.judge, self.tokenizer = judge, tokenizer

    @property
    def room(self) -> int:
        return self.judge.room

    async def __aenter__(self) -> RewardStage:
        await self.judge.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.judge.__aexit__(*error)

    def sample(self, claim: StageClaim, of: StageClaim | Member) -> RewardSample:
        """What a reward function sees. The text is decoded from all response ids at once, so that characters which
        were split over segments come out whole."""
        ids = of.response_ids.tolist()
        return RewardSample(
            sample_id=of.sample_id, group_index=claim.group_number, index=of.index, prompt=claim.prompt,
            response=self.tokenizer.decode(of.response_ids), response_length=len(ids),
            tokens=[*of.prompt_ids.tolist(), *ids], label=claim.label, status=of.status, metadata=claim.metadata,
        )  # fmt: skip

    async def do(self, claim: StageClaim, write: Write) -> None:
        if claim.members:
            group = await self.judge.score_group([self.sample(claim, member) for member in claim.members])
            faults.reached("rewarded")
            if group.outcome == "ok":
                await write(stages.score_group, claim, group.rewards, group.details or None, group.elapsed_s)
            else:
                await self._no_reward(claim, write, group)
            return
        result = await self.judge.score(self.sample(claim, claim))
        faults.reached("rewarded")
        if result.outcome == "ok":
            await write(stages.score, claim, result.reward, result.details or None, result.elapsed_s)
        elif result.outcome == "unparsed":
            await write(stages.unparsed, claim, result.error, result.details or None, result.elapsed_s)
        else:
            await self._no_reward(claim, write, result)

    async def _no_reward(self, claim: StageClaim, write: Write, result: Any) -> None:
        await write(stages.fail_stage, claim, result.error or result.outcome, result.outcome, result.elapsed_s)
