"""Sampling parameters that samples bring of their own: those of evaluations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from samplestore.models import EvaluationRow
from samplestore.verbs.tx import Tx

evaluation = EvaluationRow.__table__


def settings_of(tx: Tx, ids: Collection[int | None]) -> dict[int | None, dict[str, Any]]:
    """What the samples of these evaluations are generated with, as fields of a claim."""
    wanted = sorted(id for id in ids if id is not None)
    if not wanted:
        return {}
    found = tx.rows(sa.select(evaluation).where(evaluation.c.id.in_(wanted)))
    return {row.id: {"sampling": row.sampling, "max_new_tokens": row.max_new_tokens} for row in found}
