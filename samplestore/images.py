"""Images of prompts: read from what a row says, checked, and named by the hash of their bytes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samplestore.media import Image, media_type_of
from samplestore.rowvalues import BadValue
from samplestore.words import amount

MAX_IMAGES = 64  # of one prompt
MAX_IMAGE_BYTES = 20 * 1024 * 1024
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
HOW = 'must be bytes, a data URL, a path, or an object with "bytes", "base64" or "path"'


def read_all(values: Any) -> tuple[Image, ...]:
    """The images of a row. Raises BadValue, with the place of the one that is none."""
    if not isinstance(values, list | tuple):
        raise BadValue("must be a list of images", type(values).__name__, "images")
    if len(values) > MAX_IMAGES:
        raise BadValue(f"has {amount(len(values), 'image')}, the limit is {MAX_IMAGES}", field="images")
    return tuple(_read(value, f"images[{place}]") for place, value in enumerate(values))


def _read(value: Any, field: str) -> Image:
    data = _bytes(value, field)
    if not data:
        raise BadValue("is empty", field=field)
    if len(data) > MAX_IMAGE_BYTES:
        raise BadValue(f"has {amount(len(data), 'byte')}, the limit is {MAX_IMAGE_BYTES:,}", field=field)
    media_type = media_type_of(data)
    if media_type is None:
        raise BadValue("is no PNG, JPEG, GIF or WebP image", data[:12].hex(), field)
    return Image(media_type, data)


def _bytes(value: Any, field: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):  # as Parquet files of image data sets have them, too
        for key in ("bytes", "base64", "path"):
            if value.get(key) is not None:
                return _bytes(value[key], field) if key == "bytes" else _decoded(value[key], key, field)
    elif isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise BadValue("is a data URL that is not base64", head[:80], field)
        return _decoded(body, "base64", field)
    elif isinstance(value, str):
        return _decoded(value, "path", field)
    raise BadValue(HOW, type(value).__name__, field)


def _decoded(value: Any, kind: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise BadValue(HOW, type(value).__name__, field)
    if kind == "path" and _URL.match(value):
        what = "is a URL, and nothing is fetched: give the path of the downloaded file, or its bytes"
        raise BadValue(what, value[:80], field)
    try:
        if kind == "path":
            with Path(value).open("rb") as file:
                return file.read(MAX_IMAGE_BYTES + 1)
        if len(value) > MAX_IMAGE_BYTES * 3 // 2:
            raise BadValue(f"has more than {MAX_IMAGE_BYTES:,} bytes", field=field)
        return base64.b64decode(value, validate=True)
    except (OSError, ValueError, binascii.Error) as error:
        raise BadValue(f"can't be read: {error}", value[:80], field) from None
