"""The statements of an append: a fenced UPDATE of the sample and an INSERT of the segment, for many samples at once.

SQLite runs each once, over a list of rows. To PostgreSQL every statement is a round trip, so there both are one, over
arrays. They are made of the same expressions.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from samplestore.clock import db_now
from samplestore.models import Sample, Segment, WeightVersionRow
from samplestore.statements import staleness
from samplestore.statements.prepared import Over, given
from samplestore.statements.samples import held_by

sample, segment, version = Sample.__table__, Segment.__table__, WeightVersionRow.__table__

# What is given of an append.
TYPES: dict[str, Any] = {
    "run_id": sa.BigInteger, "sample_id": sa.BigInteger,
    "owner": sa.BigInteger, "attempt": sa.BigInteger, "incarnation": sa.BigInteger,
    "seq": sa.BigInteger, "n": sa.BigInteger, "n_loss": sa.BigInteger, "aborted": sa.BigInteger,
    "low": sa.BigInteger, "high": sa.BigInteger, "loss_version": sa.BigInteger, "unknown": sa.BigInteger,
    "loss": sa.BigInteger, "kind": sa.Text, "rid": sa.Text, "engine": sa.Text, "reason": sa.Text,
    "lp_loss": sa.Double, "lp_sum": sa.Double, "payload": sa.LargeBinary,
}  # fmt: skip


def known(run: Any, number: Any) -> sa.ColumnElement[bool]:
    """The run has this weight version, or none is given. Staleness of a number that means nothing would be a guess."""
    there = sa.exists().where(version.c.run_id == run, version.c.version == number)
    return sa.or_(number.is_(None), there.correlate_except(version))


def _stalest(run: Any, number: Any) -> Any:
    """The staler of the stored oldest version and the new one: by freshness, not by number, since after a rewind a
    lower number can be the fresher one."""
    new = staleness.freshness_of(run, number)
    old = staleness.freshness_of(run, sample.c.oldest_version)
    return sa.case(
        (number.is_(None), sample.c.oldest_version),
        (sample.c.oldest_version.is_(None), number),
        (sample.c.oldest_version == number, number),
        (new < old, number),
        else_=sample.c.oldest_version,
    )


def _move(rows: Any) -> Any:
    """n_segments = seq makes gaps and repeats visible: both change no row, and neither does an unknown version."""
    run, low, high = rows.c.run_id, rows.c.low, rows.c.high
    return (
        sa.update(sample)
        .where(
            *held_by(rows),
            sample.c.incarnation == rows.c.incarnation,
            sample.c.n_segments == rows.c.seq,
            known(run, low),
            known(run, high),
        )
        .values(
            n_segments=sample.c.n_segments + 1,
            n_tokens=sample.c.n_tokens + rows.c.n,
            n_loss_tokens=sample.c.n_loss_tokens + rows.c.n_loss,
            n_aborts=sample.c.n_aborts + rows.c.aborted,
            logprob_sum=sample.c.logprob_sum + rows.c.lp_loss,
            # NULL counts as not there
            version_min=sa.case(
                (sa.or_(sample.c.version_min.is_(None), low < sample.c.version_min), low),
                else_=sample.c.version_min,
            ),
            version_max=sa.case(
                (sa.or_(sample.c.version_max.is_(None), high > sample.c.version_max), high),
                else_=sample.c.version_max,
            ),
            oldest_version=_stalest(run, rows.c.loss_version),
            version_unknown=sa.case((rows.c.unknown == 1, 1), else_=sample.c.version_unknown),
            finish_reason=rows.c.reason,
            progress_at=db_now(),
        )
    )


def _store(rows: Any, source: sa.FromClause, n_tokens: Any) -> Any:
    """A segment for each of `source`, whose n_tokens counts the segment already."""
    row: dict[str, Any] = {
        "sample_id": rows.c.sample_id, "incarnation": rows.c.incarnation, "seq": rows.c.seq,
        "start": n_tokens - rows.c.n, "n_tokens": rows.c.n, "kind": rows.c.kind, "loss": rows.c.loss,
        "version_min": rows.c.low, "version_max": rows.c.high, "owner": rows.c.owner,
        "attempt": rows.c.attempt, "request_rid": rows.c.rid, "engine": rows.c.engine,
        "finish_reason": rows.c.reason, "logprob_sum": rows.c.lp_sum, "created_at": db_now(),
        "payload": rows.c.payload,
    }  # fmt: skip
    return sa.insert(segment).from_select(list(row), sa.select(*row.values()).select_from(source)).inline()


def _in_one_statement() -> Over:
    """For PostgreSQL; a sample may be in it once. Rows are locked in the order of their ids, as everywhere: an UPDATE
    takes them as its join finds them."""
    rows = given(TYPES)
    held = (
        sa.select(sample.c.id)
        .where(sample.c.id.in_(sa.select(rows.c.sample_id)))
        .order_by(sample.c.id)
        .with_for_update(key_share=True)
        .cte("held")
    )
    moved = _move(rows).where(held.c.id == rows.c.sample_id).returning(*rows.c, sample.c.n_tokens).cte("moved")
    return Over(rows, _store(moved, moved, moved.c.n_tokens))


def _one_after_the_other() -> tuple[Over, Over]:
    """For SQLite. It needs no lock: the transaction holds the whole database."""
    rows = given(TYPES)
    moved = rows.join(sample, sample.c.id == rows.c.sample_id)
    return (
        Over(rows, _move(rows)),
        Over(rows, _store(rows, moved, sample.c.n_tokens)),
    )


MOVE, STORE = _one_after_the_other()
MOVE_AND_STORE = _in_one_statement()
VERSION_EXISTS = sa.select(known(bindparam("b_run"), bindparam("number", type_=sa.BigInteger)))
