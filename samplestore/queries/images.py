"""Images of prompts, by the hash of their bytes."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from samplestore.errors import NotInRun
from samplestore.media import Image
from samplestore.models import PromptImage

image = PromptImage.__table__


def read(connection: sa.Connection, run_id: int, digests: Iterable[str]) -> dict[str, Image]:
    """One a query: each may have megabytes. Raises NotInRun for one that the run does not have."""
    found: dict[str, Image] = {}
    for digest in dict.fromkeys(digests):
        row = connection.execute(
            sa.select(image.c.media_type, image.c.data).where(image.c.run_id == run_id, image.c.digest == digest)
        ).one_or_none()
        if row is None:
            raise NotInRun(f"image {digest}", [])
        found[digest] = Image(row.media_type, bytes(row.data))
    return found
