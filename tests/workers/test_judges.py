"""Dict rewards, groups, functions written for slime, and answers that cannot be read, in real reward processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from samplestore.workers.rewards import GroupResult, RewardPool, RewardResult, RewardSample

FUNCTIONS = str(Path(__file__).parent / "judge_functions.py")


def sample(response: str = "4", n: int = 2, index: int = 0, label: Any = "4") -> RewardSample:
    return RewardSample(7 + index, 3, index, "2 + 2?", response, n, [1, 2, *range(n)], label=label)


async def score(name: str, given: RewardSample, **options: Any) -> RewardResult:
    async with RewardPool(f"{FUNCTIONS}:{name}", **options) as pool:
        return await pool.score(given)


async def score_group(name: str, given: Sequence[RewardSample], **options: Any) -> GroupResult:
    async with RewardPool(f"{FUNCTIONS}:{name}", **options) as pool:
        return await pool.score_group(given)


THREE = [sample(n=n, index=i) for i, n in enumerate((2, 5, 1))]


async def test_a_function_of_slime_s_is_called_as_slime_does() -> None:
    made = await score("slime_one", sample(), reward_key="accuracy", args={"format_reward": 0.5})
    assert (made.outcome, made.reward, made.details) == ("ok", 1.0, {"format": 0.5, "n": 0})


async def test_a_dict_without_the_key_that_counts_names_the_flag() -> None:
    made = await score("slime_one", sample(), args={"format_reward": 0.5})
    assert made.outcome == "verifier_error" and made.error is not None
    assert "'accuracy'" in made.error and "--reward-key NAME" in made.error


async def test_what_slime_s_args_lack_is_named() -> None:
    made = await score("slime_missing", sample())
    assert made.error is not None and "args.nobody" in made.error and "--reward-args" in made.error
    assert (await score("slime_missing", sample(), args={"nobody": 7})).reward == 7.0


async def test_a_group_is_scored_in_one_call() -> None:
    ranked = await score_group("ranks", THREE)
    assert (ranked.outcome, ranked.rewards) == ("ok", [1.0, 2.0, 0.0])
    assert ranked.details == {"samples": [{"of": 3}] * 3}
    assert (await score_group("slime_group", THREE)).rewards == [0.0, 1.0, 0.0]


async def test_a_group_s_answer_must_have_a_reward_for_each() -> None:
    made = await score_group("short_list", THREE)
    assert (made.outcome, made.rewards) == ("verifier_error", [])
    assert made.error is not None and "list of 3 rewards" in made.error


async def test_an_answer_that_cannot_be_read_is_no_reward() -> None:
    made = await score("unreadable", sample())
    assert (made.outcome, made.reward, made.details) == ("unparsed", None, {"said": "well, perhaps"})
    group = await score_group("partly", THREE)
    assert (group.outcome, group.rewards) == ("ok", [1.0, None, None])


async def test_one_that_hangs_fails_its_group(tmp_path: Path) -> None:
    path = tmp_path / "hangs.py"
    path.write_text("def hangs(samples):\n    while True: pass\n")
    async with RewardPool(f"{path}:hangs", timeout_s=0.5) as pool:
        made = await pool.score_group(THREE)
    assert (made.outcome, made.rewards) == ("verifier_timeout", [])


@pytest.mark.parametrize("name", ["ranks", "slime_group"])
async def test_a_group_function_given_a_sample_says_what_is_wrong(name: str) -> None:
    made = await score(name, sample())
    assert made.outcome == "verifier_error" and made.error
