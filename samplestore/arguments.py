"""Arguments as a person types them, looked at before anything is done. Each check raises InvalidSetting."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from operator import index
from typing import Any, TypeVar

import numpy as np

from samplestore.errors import InvalidSetting, UnknownWorker
from samplestore.words import did_you_mean

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)

MAX_WHOLE = 2**31 - 1  # larger counts are typing errors; both databases could hold them, arithmetic on them not
LONGEST_S = 1e9  # seconds; more is a typing error


def optional(check: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """None, or what `check` makes of it."""
    return None if value is None else check(name, value)


def duration(name: str, value: Any) -> float:
    """A number of seconds, 0 or more, that is to end."""
    if not real(value) or not 0 <= value < LONGEST_S:
        raise InvalidSetting(name, value, "seconds, 0 or more")
    return float(value)


def number(name: str, value: Any) -> float:
    if not real(value) or not abs(value) < LONGEST_S:
        raise InvalidSetting(name, value, "a number")
    return float(value)


def several(name: str, value: Any, what: str) -> list[Any]:
    """A list of `what`. One name alone would be taken for a list of its characters."""
    allowed = f"a list of {what}, also for one: [{value!r}]"
    if isinstance(value, str | bytes | Mapping):
        raise InvalidSetting(name, value, allowed)
    return listed(name, value, allowed)


def listed(name: str, value: Any, allowed: str) -> list[Any]:
    """What `value` holds, and be it a generator, whose own errors stay its own."""
    try:
        given = iter(value)
    except TypeError:
        raise InvalidSetting(name, value, allowed) from None
    return list(given)


def texts(name: str, value: Any, what: str = "names") -> list[str]:
    return [plain_text(name, one) for one in several(name, value, what)]


def location(name: str, value: Any) -> str:
    """A path or URL that is stored: what both databases hold."""
    return plain_text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


def path(name: str, value: Any) -> str:
    """The path of a file or folder on this machine, whose name need not be UTF-8."""
    try:
        given = os.fspath(value)
        if isinstance(given, str) and given and b"\0" not in os.fsencode(given):
            return given
    except (TypeError, UnicodeEncodeError):
        pass
    raise InvalidSetting(name, value, 'a path, e.g. "folder/name"')


def callback(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise InvalidSetting(name, value, "a function, or None")


def whole(name: str, value: Any, low: int = 0, high: int = MAX_WHOLE) -> int:
    """`value` if it is a whole number from `low` to `high`. Raises InvalidSetting."""
    if type(value) is int and low <= value <= high:
        return value
    number = _index(value)
    if number is None or not low <= number <= high:
        raise InvalidSetting(name, value, f"a whole number from {low} to {high}")
    return number


def ids(name: str, value: Any) -> list[int]:
    """`value` as a list, if it is a collection of ids: whole numbers, numpy's too. Raises InvalidSetting."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidSetting(name, value, "a list of ids, also for one: [ID]")
    found = []
    for one in value:
        number = _index(one)
        if number is None or abs(number) >= 2**63:
            raise InvalidSetting(name, one, "ids that are whole numbers, as claims and store.frame(...) tell them")
        found.append(number)
    return found


def id_of(name: str, value: Any) -> int:
    """`value` if it is an id. Raises InvalidSetting."""
    return ids(name, [value])[0]


def seconds(name: str, value: Any) -> float | None:
    """`value` if it is a number of seconds, or None. Raises InvalidSetting."""
    require(name, value, "seconds, or None to wait for ever", lambda v: v is None or real(v))
    return None if value is None else float(value)


def choice(name: str, value: Any, choices: type[Choice]) -> Choice:
    """The member of `choices` that `value` names. Raises InvalidSetting."""
    one_of(name, value, choices)
    return choices(value)


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """`value` if it is one of these names. Raises InvalidSetting."""
    known = [str(one) for one in known]  # of an enum, the values
    if not isinstance(value, str) or value not in known:
        meant = did_you_mean(value, known) if isinstance(value, str) else ""
        raise InvalidSetting(name, value, " | ".join(known) + (f".{meant}" if meant else ""))
    return str(value)


def id_of_worker(value: Any) -> int:
    """`value` if it can be the id of a worker. Raises UnknownWorker."""
    number = _index(value)
    if number is None or not 0 < number < 2**63:
        raise UnknownWorker(value)
    return number


def plain_text(name: str, value: Any, limit: int = 4000) -> str:
    """`value` if it is text that both databases hold. Raises InvalidSetting."""
    fits = f"text of 1 to {limit} characters without NUL or lone surrogates"
    require(name, value, fits, lambda v: isinstance(v, str) and 0 < len(v) <= limit and _storable(v))
    return str(value)


def _storable(value: str) -> bool:
    return "\x00" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _plain_json(value: Any) -> bool:
    """Whether `value` comes back from JSON as it went in."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def jsonable(name: str, value: Any) -> None:
    """That JSON, and so both databases, hold `value`. Raises InvalidSetting."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidSetting(name, value, f"what JSON can hold: {error}") from None


def plain_json(name: str, value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object. Raises InvalidSetting."""
    require(name, value, "a JSON object", lambda v: isinstance(v, dict) and _plain_json(v))
    return dict(value)


def _index(value: Any) -> int | None:
    """The whole number that `value` is, numpy's and torch's too; None for what is none."""
    try:
        return None if isinstance(value, bool | np.bool_) else index(value)
    except TypeError:
        return None


def real(value: Any) -> bool:
    """Whether it is a number, numpy's too, and not NaN."""
    return plain_number(value) or (isinstance(value, np.integer | np.floating) and bool(value == value))


def plain_number(value: Any) -> bool:
    """Whether it is a number that JSON can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def require(name: str, value: Any, allowed: str, ok: Any) -> None:
    if not ok(value):
        raise InvalidSetting(name, value, allowed)
