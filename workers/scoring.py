"""Rewards: stages of finished samples, scored in the reward pool and stored."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from samplestore.errors import LeaseLost
from samplestore.types import StageClaim
from samplestore.verbs import stages
from samplestore.workers.rewards import RewardPool, RewardPoolStopped, RewardSample

log = logging.getLogger("samplestore.scoring")

Write = Callable[..., Awaitable[Any]]
STAGE = "reward"


class Scorer:
    """Scores reward stages. A verifier's error or timeout is recorded as such, never as a reward of 0."""

    def __init__(self, pool: RewardPool, tokenizer: Any, write: Write) -> None:
        self.pool, self.tokenizer, self.write = pool, tokenizer, write

    def sample(self, claim: StageClaim) -> RewardSample:
        """What a reward function sees. The text is decoded from all response ids at once, so that characters which
        were split over segments come out whole."""
        ids = claim.response_ids.tolist()
        return RewardSample(
            sample_id=claim.sample_id, group_index=claim.group_number, index=claim.index, prompt=claim.prompt,
            response=self.tokenizer.decode(claim.response_ids), response_length=len(ids),
            tokens=[*claim.prompt_ids.tolist(), *ids], label=claim.label, status=claim.status, metadata=claim.metadata,
        )  # fmt: skip

    async def score(self, claim: StageClaim) -> None:
        """Score one stage and store what came out. A lost lease means that somebody else does it."""
        try:
            result = await self.pool.score(self.sample(claim))
            if result.outcome == "ok":
                await self.write(stages.score, claim, result.reward, result.details or None, result.elapsed_s)
            else:
                await self.write(
                    stages.fail_stage, claim, result.error or result.outcome, result.outcome, result.elapsed_s
                )
        except RewardPoolStopped:
            await self.write(stages.release_stage, claim)
        except LeaseLost as error:
            log.warning("sample=%d stage=%d %s", claim.sample_id, claim.stage_id, error)
        except Exception as error:
            # Ids that the tokenizer does not know, a result that the store refuses: a stage has no deadline, so one
            # that nobody settles would stay with this worker for as long as it lives.
            log.exception("sample=%d stage=%d could not be scored", claim.sample_id, claim.stage_id)
            await self._failed(claim, f"{type(error).__name__}: {error}")

    async def _failed(self, claim: StageClaim, error: str) -> None:
        try:
            await self.write(stages.fail_stage, claim, error)
        except LeaseLost as lost:
            log.warning("sample=%d stage=%d %s", claim.sample_id, claim.stage_id, lost)
