"""resume=False: a sample that was aborted starts again from its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.models import EpisodeStep, Sample
from samplestore.statements import samples as st
from samplestore.states import Fate, SampleStatus
from samplestore.verbs import rollouts
from samplestore.verbs.tx import Tx

sample, step = Sample.__table__, EpisodeStep.__table__

UNFINISHED = (None, "abort", "length")  # what the last segment of a sample says that goes on; "length": of a slice


def from_the_prompt(tx: Tx, taken: Sequence[Any]) -> Sequence[Any]:
    """The rows of a claim, after those that have tokens, or calls of an episode, have begun a new incarnation. A sample
    that is complete, and whose worker died before it could say so, stays as it is; so does one with a finished fork,
    which begins with tokens of it. Open forks are begun afresh by the new life of their parent (fanout).

    No counter of its group changes: the sample was open and is. So no group is locked, which a claim, that holds
    samples, may not do. Aborts and resumes are counted on: they are what max_aborts limits.
    """
    called = _called(tx, [row.id for row in taken])
    begun = [row for row in taken if row.id in called or (row.n_tokens and not _complete(tx, row))]
    finished = sa.select(sample.c.parent_id).where(
        sample.c.parent_id.in_([row.id for row in begun]), sample.c.status.not_in(rollouts.OPEN)
    )
    kept = set(tx.execute(finished).scalars()) if begun else set()
    begun = [row for row in begun if row.id not in kept]
    if not begun:
        return taken
    ids = [row.id for row in begun]
    for version, amount in tx.rows(st.TOKENS_OF, {"ids": ids}):
        tx.add(Fate.RESUMABLE, version, -int(amount))
        tx.add(Fate.SUPERSEDED, version, int(amount))
    for row in begun:
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == row.id)
            .values(
                incarnation=sample.c.incarnation + 1, status=SampleStatus.PENDING.value, n_tokens=0, n_loss_tokens=0,
                n_segments=0, version_min=None, version_max=None, oldest_version=None, version_unknown=0,
                logprob_sum=0.0, finish_reason=None, removed=None, n_without_logprob=0,
            )
        )  # fmt: skip
        tx.event(
            "restart", "the run does not resume", worker_id=tx.worker_id, sample_id=row.id, group_id=row.group_id,
            tokens=row.n_tokens,
        )  # fmt: skip
    fresh = {"incarnation": 1, "status": SampleStatus.PENDING.value, "n_segments": 0, "n_tokens": 0}
    return [_renewed(row, fresh) if row.id in set(ids) else row for row in taken]


def _called(tx: Tx, ids: list[int]) -> set[int]:
    """Those whose present life an episode has begun. Its last turn may be complete, but the episode is not: that ends
    with its sample."""
    mine = (step.c.sample_id == sample.c.id) & (step.c.incarnation == sample.c.incarnation)
    return set(tx.execute(sa.select(sample.c.id).where(sample.c.id.in_(ids), sa.exists().where(mine))).scalars())


def _renewed(row: Any, fresh: dict[str, Any]) -> Any:
    return row._replace(**{**fresh, "incarnation": row.incarnation + 1, "finish_reason": None})


def _complete(tx: Tx, row: Any) -> bool:
    used_up = row.finish_reason == "length" and row.n_tokens >= tx.settings.max_new_tokens
    return used_up or row.finish_reason not in UNFINISHED
