"""A task that a random model can learn in a minute: answer with the digit that the prompt names.

    prompt   "give 7 now:"
    answer   "77 7q77777777b7777777777"     many of the named digit, in an answer that is neither short nor endless

A model that has learned nothing scores about 0.02. A model that ignores the prompt and writes digits scores 0.1 at
most, so whatever lies above comes from reading the prompt.
"""

from __future__ import annotations

import random
from typing import Any

SHORTEST, LONGEST = 24, 64  # characters of a good answer
DIGITS = "0123456789"
BEFORE = ("", "say ", "give ", "more ", "only ")
AFTER = ("", " now", " too")


def prompts(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows {"prompt", "label", "metadata"}; the same seed gives the same rows."""
    source = random.Random(seed)
    rows = []
    for _ in range(n):
        digit, before, after = source.choice(DIGITS), source.choice(BEFORE), source.choice(AFTER)
        rows.append({"prompt": f"{before}{digit}{after}:", "label": digit, "metadata": {"task": "digit"}})
    return rows


def reward(sample: Any) -> float:
    """Share of the answer that is the named digit, from 0 to 1.

    A short answer counts as if it were padded to SHORTEST characters (else one lucky character would be perfect), and
    one that goes on beyond LONGEST loses in proportion (else never ending would be free). `sample` has `response`
    (str) and `label` (str, the digit).
    """
    answer: str = sample.response
    length = max(len(answer), SHORTEST)
    return answer.count(sample.label) / length * min(1.0, LONGEST / length)
