r"""Two agents: solvers write answers, a selector says which is best. Each is a training sample of its own.

    samplestore worker --db rollouts.db --router URL --tokenizer MODEL \
        --episode samplestore.examples.two_agents:episode

The prompt is a list of messages, the label the right answer. The solvers' text goes into the selector's prompt as plain
text: control tokens that a solver has written are left out, or they would end the selector's turn before it began.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

from samplestore.errors import EpisodeTruncated

SOLVERS, SOLVER_TOKENS, SELECTOR_TOKENS = 2, 48, 16
JUDGED = re.compile(r"judgment: *(\d{1,3})")
WRONG_CHOICE = 0.8  # what correct solvers' rewards are multiplied by when the selector chose a wrong one


async def episode(ctx: Any) -> float:
    """The reward of the first solver; the others' and the selector's are set on their own samples."""
    solvers = [ctx, *[await ctx.fork(upto=0) for _ in range(SOLVERS - 1)]]
    turns = await asyncio.gather(*(solver.generate(max_new_tokens=SOLVER_TOKENS) for solver in solvers))
    selector = await ctx.fork(prompt=selector_prompt(problem(ctx.prompt), [turn.text for turn in turns]))
    try:
        chosen = judgment((await selector.generate(max_new_tokens=SELECTOR_TOKENS)).text, SOLVERS)
    except EpisodeTruncated:  # the solvers' answers fill its context: there is no judgment
        chosen = None
    rewards = [float(str(ctx.label) in turn.text) for turn in turns]
    selector.reward, shaped = shape(rewards, chosen)
    for solver, reward in zip(solvers[1:], shaped[1:], strict=True):
        solver.reward = reward
    return shaped[0]


def problem(messages: Sequence[dict[str, Any]]) -> str:
    """The user's words: not the prompt as the chat template wrote it, whose control tokens would nest."""
    return "\n".join(m["content"] for m in messages if m["role"] == "user" and isinstance(m.get("content"), str))


def selector_prompt(question: str, answers: Sequence[str]) -> list[dict[str, str]]:
    listed = "\n".join(f"{number}: {answer}" for number, answer in enumerate(answers))
    return [{"role": "user", "content": f"{question}\n{listed}\nwhich is right? judgment:"}]


def judgment(text: str, n: int) -> int | None:
    """Which answer was chosen; None where the text does not say."""
    found = JUDGED.search(text)
    return int(found[1]) if found and int(found[1]) < n else None


def shape(rewards: Sequence[float], chosen: int | None) -> tuple[float, list[float]]:
    """(the selector's reward, the solvers'). A judgment that can't be read is no judgment: the selector gets no reward
    (NaN, not 0), and the solvers keep theirs as they are."""
    if chosen is None:
        return math.nan, list(rewards)
    right = rewards[chosen]
    return right, [reward if right else reward * WRONG_CHOICE for reward in rewards]
