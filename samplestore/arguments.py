"""Arguments as a person types them, looked at before anything is done. Each check raises InvalidSetting."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from samplestore.errors import InvalidSetting
from samplestore.types import plain_text, real

T = TypeVar("T")

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
