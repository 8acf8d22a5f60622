"""A worker with a reward in flight, to be killed by test_rewards.py: reward_parent.py SPEC PID_FILE ACTION."""

from __future__ import annotations

import asyncio
import sys

from samplestore.workers.rewards import RewardPool, RewardSample


async def main(spec: str, path: str, action: str) -> None:
    async with RewardPool(spec, timeout_s=600) as pool:
        await pool.score(RewardSample(1, 0, 0, "p", "r", 1, [1], metadata={"do": action, "path": path}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
