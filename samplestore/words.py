"""Words in sentences: numbers with their nouns, and names that are close to one that is none."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def amount(n: int, noun: str) -> str:
    """1 group, 2 groups, 1,000 batches: a number and its noun, whose last word is declined."""
    return f"{n:,} {noun if n == 1 else _plural(noun)}"


def amount_is(n: int, noun: str) -> str:
    """1 group is, 2 groups are."""
    return f"{amount(n, noun)} {which(n, 'is', 'are')}"


def which(n: int, one: str, many: str) -> str:
    """The word that goes with so many: which(n, "is", "are")."""
    return one if n == 1 else many


def _plural(noun: str) -> str:
    if noun.endswith(("ch", "sh", "s", "x")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Those of `known` that whoever wrote `name` may have meant, the closest first; upper and lower case are alike."""
    folded = {one.casefold(): one for one in known}
    return [folded[one] for one in get_close_matches(name.casefold(), folded, n=5)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with a blank before it, to stand behind one that names what there is none of; empty where nothing is
    close."""
    close = close_to(name, known)
    return f" Did you mean {close[0]!r}?" if close else ""
