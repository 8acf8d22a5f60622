"""An image of a prompt: its bytes, and what names them."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Image:
    """One image.

    media_type   image/png, image/jpeg, image/gif or image/webp, by its first bytes
    """

    media_type: str
    data: bytes

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def data_url(self) -> str:
        """As engines take it."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def media_type_of(data: bytes) -> str | None:
    """By the first bytes, whatever a name or a data URL says."""
    for start, kind in ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif")):
        if data.startswith(start):
            return f"image/{kind}"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None
