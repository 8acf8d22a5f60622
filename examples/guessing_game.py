r"""A game with state: find a number between 0 and 9 with few guesses.

    samplestore worker --db rollouts.db --router URL --tokenizer MODEL \
        --episode samplestore.examples.guessing_game:episode

The game lives in the worker's process. `ctx.snapshot` saves it with every move, so that an episode that runs again,
here or on another machine, finds it as it was without playing the moves again.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from samplestore.errors import EpisodeTruncated

TURNS, TURN_TOKENS = 5, 12
DIGIT = re.compile(r"\d")


class Game:
    def __init__(self, secret: int) -> None:
        self.secret, self.guesses, self.found = secret, 0, False

    def guess(self, number: int | None) -> str:
        self.guesses += 1
        if number is None:
            return "say a digit."
        self.found = number == self.secret
        return "yes!" if self.found else "more." if number < self.secret else "less."

    def save(self) -> dict[str, Any]:
        return {"guesses": self.guesses, "found": self.found}

    def restore(self, state: dict[str, Any]) -> None:
        self.guesses, self.found = state["guesses"], state["found"]


async def episode(ctx: Any) -> float:
    """1.0 for the first guess, less for each one more; 0.0 if it was not found."""
    game = Game(int(ctx.label))
    await ctx.snapshot(game.save, game.restore)
    with contextlib.suppress(EpisodeTruncated):  # out of room: it is not found
        while not game.found and game.guesses < TURNS:
            turn = await ctx.generate(max_new_tokens=TURN_TOKENS)
            digit = DIGIT.search(turn.text)
            seen = await ctx.step(game.guess, int(digit[0]) if digit else None)
            await ctx.append(f" {seen} ")
    return 1.0 - (game.guesses - 1) / TURNS if game.found else 0.0
