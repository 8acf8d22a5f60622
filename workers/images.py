"""Images of prompts as engines take them, kept for the siblings that ask for the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from samplestore.queries import images

MAX_CACHE_BYTES = 256 * 1024 * 1024

Read = Callable[[Callable[[Any], Any]], Awaitable[Any]]


class ImageData:
    """Data URLs by digest, the least recently asked for leave first."""

    def __init__(self, read: Read, run_id: int) -> None:
        self._read, self._run_id = read, run_id
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._size = 0

    async def urls(self, digests: Sequence[str]) -> list[str]:
        """In this order. Raises NotInRun."""
        missing = [digest for digest in digests if digest not in self._kept]
        found = await self._read(lambda c: images.read(c, self._run_id, missing)) if missing else {}
        told = {digest: self._kept.get(digest) or found[digest].data_url for digest in digests}
        for digest, url in told.items():
            if digest not in self._kept:
                self._size += len(url)
            self._kept[digest] = url
            self._kept.move_to_end(digest)
        while self._size > MAX_CACHE_BYTES and len(self._kept) > 1:
            self._size -= len(self._kept.popitem(last=False)[1])
        return [told[digest] for digest in digests]
