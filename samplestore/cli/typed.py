"""What was typed, and what is to type next."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import dropwhile, pairwise
from shlex import join

TYPED: ContextVar[Sequence[str]] = ContextVar("typed", default=())  # the words of this command line


def to_type(*words: str) -> str:
    """A command to type next, on the database that this one was told with --db: one that is configured is found again
    without."""
    from samplestore.logs import mask

    named: list[str] = []
    for word, following in pairwise([*TYPED.get(), ""]):
        if word == "--db":
            named.append(following)
        elif word.startswith("--db="):
            named.append(word.removeprefix("--db="))
    return mask(join(["samplestore", *words, *(["--db", named[-1]] if named else [])]))


def again(option: str, value: str) -> str:
    """The command that was typed, with another value of one option: what to type for the next page."""
    from samplestore.logs import mask

    words = list(TYPED.get())
    for at in reversed(range(len(words))):
        if words[at] == option:
            del words[at : at + 2]
        elif words[at].startswith(f"{option}="):
            del words[at]
    return mask(join(["samplestore", *words, option, value]))


def help_to_type() -> str:
    """The help of the command that was typed."""
    command = next(dropwhile(lambda word: word.startswith("-"), TYPED.get()), None)
    return join(["samplestore", *([command] if command else []), "--help"])
