"""A task that a random model can learn in a minute: go on with the letter that the prompt shows.

    prompt   "c c c:"
    answer   "cc cqcccccccc4ccccccccccc"     many of that letter, in an answer that is neither short nor endless

A model that has learned nothing scores about 0.02. A model that ignores the prompt scores 0.1 at most, since ten
letters are asked for equally often; whatever lies above comes from reading the prompt.
"""

from __future__ import annotations

import random
from typing import Any

SHORTEST, LONGEST = 24, 64  # characters of a good answer
LETTERS = "abcdefghij"


def prompts(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows {"prompt", "label", "metadata"}: a letter one to four times, with or without spaces.

    The same seed gives the same rows. Prompts repeat, as there are only 70 different ones.
    """
    source = random.Random(seed)
    rows = []
    for number in range(n):
        letter, times, gap = source.choice(LETTERS), source.randint(1, 4), source.choice(("", " "))
        prompt = gap.join([letter] * times) + ":"
        rows.append({"prompt": prompt, "label": letter, "metadata": {"task": "letter", "row": number}})
    return rows


def reward(sample: Any) -> float:
    """Share of the answer that is the letter, from 0 to 1.

    A short answer counts as if it were padded to SHORTEST characters (else one lucky character would be perfect), and
    one that goes on beyond LONGEST loses in proportion (else never ending would be free). `sample` has `response`
    (str) and `label` (str, the letter).
    """
    answer: str = sample.response
    length = max(len(answer), SHORTEST)
    return answer.count(sample.label) / length * min(1.0, LONGEST / length)
