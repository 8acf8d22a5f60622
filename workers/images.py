"""Images of prompts as engines take them, kept for the siblings that ask for the same.

An engine gives each image as many tokens as it needs, in the place that the prompt has for it. All other ids must stay
as they are sent: a response is continued from them. What would end otherwise is refused here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore.models import Request, Segment
from samplestore.queries import images
from samplestore.types import Claim
from samplestore.workers import engine_state
from samplestore.workers.fleet import Fleet
from samplestore.workers.limits import Limits
from samplestore.workers.replies import EngineError, PromptRefused

request, segment = Request.__table__, Segment.__table__

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


def require_kept(fleet: Fleet, claim: Claim, limits: Limits) -> None:
    """No engine may encode this sample's tokens anew, and rows must belong to tokens that are stored. Raises
    EngineError("setup")."""
    if limits.routed_experts is not None:
        raise EngineError(
            "setup",
            "an image has more tokens in the engine than in its prompt, so routed experts can't be told by row. Start "
            "the worker without --routed-experts",
        )
    if (rewriting := fleet.members.rewriting) is not None and (limits.resumes or claim.n_tokens):
        raise EngineError(
            "setup",
            f"{rewriting} is older than SGLang {'.'.join(map(str, engine_state.IDS_SINCE))}: it decodes prompts "
            "with images and encodes them again, so that a sample can't go on from its tokens. Start a newer one, or "
            "make the run with resume=False",
        )


def require_places(claim: Claim, place: int | None) -> None:
    """One place for each image, as chat templates write it: where there are more, SGLang fails, or never answers; of
    models whose template writes other tokens there is none. Raises PromptRefused, EngineError("refused")."""
    if place is None:
        return
    n, generated = (int(np.count_nonzero(ids == place)) for ids in (claim.prompt_ids, claim.response_ids))
    if generated:
        raise EngineError("refused", f"token {place} in the response is the place of an image: no engine can go on")
    if n and n != len(claim.images):
        raise PromptRefused(
            f"the prompt has places for images (token {place}): {n}, images: {len(claim.images)}. Write one place for "
            "each image, as the chat template does; the engine gives it the tokens that the image needs"
        )


def known_prompt(connection: sa.Connection, claim: Claim) -> int | None:
    """Tokens that the engine must find in the prompt of the next request, by what it found in the first of this
    incarnation whose end is known; None: no such."""
    first = connection.execute(
        sa.select(request.c.prompt_tokens - segment.c.start)
        .join(request, request.c.rid == segment.c.request_rid)
        .where(
            segment.c.sample_id == claim.sample_id, segment.c.incarnation == claim.incarnation,
            request.c.prompt_tokens.is_not(None),
        )
        .order_by(segment.c.seq)
        .limit(1)
    ).scalar()  # fmt: skip
    return None if first is None else int(first) + claim.n_tokens
