"""Stages of whole groups: which comes next, and in which life of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.models import Sample, Stage
from samplestore.verbs.tx import Tx

sample, stage = Sample.__table__, Stage.__table__


def life(group_id: Any) -> sa.ScalarSelect[Any]:
    """Which life of a group it is: the number rises when any of its samples is started afresh."""
    return sa.select(sa.func.sum(sample.c.incarnation)).where(sample.c.group_id == group_id).scalar_subquery()


def create_next(tx: Tx, group_id: int, names: Sequence[str]) -> bool:
    """Make the next stage of a (locked) group whose samples are finished and whose stages are settled; False where
    there is none left. Each is made once in a life of the group, after the one before: it sees what that has found."""
    if not names:
        return False
    number = int(tx.execute(sa.select(life(group_id))).scalar_one())
    mine = (stage.c.group_id == group_id) & stage.c.sample_id.is_(None) & (stage.c.incarnation == number)
    there = {row.name for row in tx.rows(sa.select(stage.c.name).where(mine))}
    name = next((name for name in names if name not in there), None)
    if name is not None:
        made = {"run_id": tx.run_id, "group_id": group_id, "incarnation": number, "name": name}
        tx.execute(sa.insert(stage).values(created_at=db_now(), **made))
    return name is not None
