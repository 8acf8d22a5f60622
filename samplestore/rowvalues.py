"""The values of a prompt row: a checked, plain copy that both databases keep as it is, and what each field may hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from samplestore import codec
from samplestore.promptfiles import SHOWN, printable, show
from samplestore.types import Ids
from samplestore.words import amount

MAX_ROW_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_INT_BITS = 1024
WITHOUT_POINT = 1e16  # floats from here on are written with an exponent, which PostgreSQL resolves to a whole number
MAX_DATASET_NAME = 200


class BadValue(Exception):
    """Why a row is refused: the field (a path such as metadata.scores[2]), the reason, the value (bounded)."""

    def __init__(self, reason: str, value: Any = None, field: str = "") -> None:
        self.reason, self.field = reason, field
        self.shown = "" if value is None else show(value)
        super().__init__(reason)

    def inside(self, outer: str | int) -> BadValue:
        """The same, seen from the object or list around it."""
        step = f"[{outer}]" if isinstance(outer, int) else printable(outer, SHOWN)
        dot = "." if self.field and not self.field.startswith("[") else ""
        self.field = f"{step}{dot}{self.field}"
        return self


def plain(value: Any, max_bytes: int) -> Any:
    """A copy of only dict, list, str, int, float, bool and None; tuples and numpy values become those. Numbers come
    as both databases give them back: -0.0 as 0.0, a float from 1e16 on as the whole number that it is.

    Raises BadValue: NaN and infinities (not JSON), NUL characters (PostgreSQL stores none), lone surrogates (not
    UTF-8), integers beyond 1024 bits, more than 64 levels, other types, keys that are not text, more than max_bytes.
    """
    return _Walk(max_bytes).copy(value, 0)


class _Walk:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes

    def copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        if isinstance(value, str):
            return self._text(value)
        self._spend(1)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise BadValue(f"is an integer of more than {MAX_INT_BITS} bits")
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise BadValue("is not a finite number, and JSON has no other", value)
            return _kept(float(value))
        if depth >= MAX_DEPTH:
            raise BadValue(f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            return self._object(value, depth)
        if isinstance(value, list | tuple):
            return self._list(value, depth)
        raise BadValue(f"is of type {type(value).__name__}, which JSON does not have", value)

    def _object(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        made = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadValue("has a key that is not text", key)
            try:
                made[self._text(key)] = self.copy(item, depth + 1)
            except BadValue as error:
                raise error.inside(key) from None
        return made

    def _list(self, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        made = []
        for i, item in enumerate(value):
            try:
                made.append(self.copy(item, depth + 1))
            except BadValue as error:
                raise error.inside(i) from None
        return made

    def _text(self, text: str) -> str:
        try:
            self._spend(len(text.encode("utf-8")))
        except UnicodeEncodeError as error:
            at = error.start
            raise BadValue(f"has a lone surrogate at character {at}", text[max(0, at - 10) : at + 10]) from None
        if (at := text.find("\0")) >= 0:
            near = text[max(0, at - 10) : at + 10]
            raise BadValue(f"has a NUL character at character {at}, which PostgreSQL can't store", near)
        return str(text)

    def _spend(self, n_bytes: int) -> None:
        self.left -= n_bytes
        if self.left < 0:
            raise BadValue(f"makes the row larger than {self.max_bytes:,} bytes")


def _kept(value: float) -> int | float:
    return int(value) if abs(value) >= WITHOUT_POINT else value or 0.0


def whole_label(value: Any, key: str) -> Any:
    """A row's label, of `plain`. SQLite makes a number of a column that holds nothing else, so that 18.0 comes back as
    18; it does so here already. Raises BadValue for a whole number that SQLite would round."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if not -(2**63) <= value < 2**63:
        raise BadValue("is a whole number of more than 64 bits; write it as text", value, key)
    return value


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number that may stand in a row, and no bool: one that could be a reward."""
    return isinstance(value, int | float) and codec.reward(value) is not None


def token_ids(value: Any) -> Ids:
    """int32 [n] from a row's prompt_ids. Nothing is rounded or wrapped on the way."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise BadValue("must be a list of token ids", value, "prompt_ids")
    for i, item in enumerate(value):
        if type(item) is not int and not isinstance(item, np.integer):  # bool is an int to isinstance
            raise BadValue(f"token {i} is not a whole number", item, "prompt_ids")
        if not 0 <= item < 2**31:
            raise BadValue(f"token {i} is outside 0 to 2**31 - 1", item, "prompt_ids")
    return np.array(value, dtype=np.int32)


IMAGE_PARTS = ("image", "image_url", "input_image")  # also as the APIs of others have them, with a URL
IMAGE_PLACE = (
    'is an image: write {"type": "image"} there, which is its place, and the image itself into the row\'s list images, '
    "as bytes, base64 or the path of a file; URLs are not fetched"
)


def check_messages(key: str, messages: list[Any], images: int = 0) -> None:
    """Raises BadValue unless these are chat messages that a template can take, with a place for each of the row's
    images, or for none: then their tokens stand in the text."""
    places = 0
    if not messages:
        raise BadValue("is an empty list", field=key)
    for i, message in enumerate(messages):
        at = f"{key}[{i}]"
        if not isinstance(message, dict):
            raise BadValue("must be a message: an object with role and content", message, at)
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise BadValue("must be text such as system, user, assistant or tool", message.get("role"), f"{at}.role")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise BadValue("is missing", field=f"{at}.content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if images and isinstance(part, dict) and part == {"type": "image"}:
                places += 1
                continue
            # A template would write a placeholder for an image, and the image itself would be lost.
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                raise BadValue(IMAGE_PLACE, part, f"{at}.content[{j}]")
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BadValue('must be {"type": "text", "text": ...}', part, f"{at}.content[{j}]")
        if not isinstance(content, str | list | None):
            raise BadValue("must be text or a list of text parts", content, f"{at}.content")
    if places not in (0, images):
        raise BadValue(
            f"has {amount(places, 'place')} for images, and the row has {amount(images, 'image')}", field=key
        )


def parsed(said: dict[str, Any], key: str, kind: type) -> Any:
    """said[key] as a list or dict; also from a string of JSON: Parquet files keep objects of mixed shape so."""
    value = said.get(key)
    if isinstance(value, str):
        try:
            value = plain(json.loads(value), MAX_ROW_BYTES)
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is a string that is not JSON: {error}", value, key) from error
        except BadValue as error:
            raise error.inside(key) from error
    if value is not None and not isinstance(value, kind):
        raise BadValue("must be a list" if kind is list else "must be an object", value, key)
    return value


def dataset_name(name: Any) -> str:
    """The name, checked. Raises BadValue."""
    if not isinstance(name, str) or not name.strip():
        raise BadValue("must be text, and not empty", name, "dataset")
    if len(name) > MAX_DATASET_NAME or not name.isprintable():
        raise BadValue(f"must be at most {MAX_DATASET_NAME} printable characters", name, "dataset")
    return name
