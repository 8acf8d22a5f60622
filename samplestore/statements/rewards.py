"""Stored rewards as numbers that can be averaged."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.codec import MIN_REWARD

# Older releases stored any finite number. SMALLEST is the least that is let in now; the most is far below LARGEST.
SMALLEST, LARGEST = MIN_REWARD, 1e50


def countable(reward: Any) -> sa.ColumnElement[float]:
    """A reward, or a mean of some, of whose squares both databases can make a mean: PostgreSQL ends the query where a
    product comes to 0 or anything to infinity, and squares once more within avg(). What is nearer to 0 than SMALLEST is
    0, what is beyond LARGEST is that."""

    def number(value: float) -> Any:
        return sa.cast(sa.literal_column(repr(value)), sa.Double)

    return sa.case(
        (sa.func.abs(reward) < number(SMALLEST), number(0.0)),
        (reward > number(LARGEST), number(LARGEST)),
        (reward < number(-LARGEST), number(-LARGEST)),
        else_=reward,
    )
