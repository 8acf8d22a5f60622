"""The time limit of a sample: an attempt that takes too long is a failed one, whoever holds it and however alive."""

from __future__ import annotations

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.models import Sample
from samplestore.types import Claim
from samplestore.verbs import deaths, samples
from samplestore.verbs.tx import Tx

sample = Sample.__table__


def settle(tx: Tx) -> int:
    """Count a failure for every claimed sample past the run's sample_deadline_s: it is tried again from its stored
    tokens, and given up after max_attempts. Its owner learns it from its next write. Returns how many."""
    limit = tx.settings.sample_deadline_s
    if limit is None:
        return 0
    late = tx.rows(
        sa.select(sample)
        .where(deaths.owned(tx.run_id), sample.c.claimed_at < db_now() - limit)
        .order_by(sample.c.group_id, sample.c.id)
    )
    tx.lock_groups([row.group_id for row in late])  # all of them before any sample: the lock order
    done = 0
    for row in late:
        claim = Claim(
            run_id=tx.run_id, sample_id=row.id, group_id=row.group_id, group_number=0, index=0, owner=row.owner,
            attempt=row.attempt, incarnation=row.incarnation, seq=row.n_segments, n_tokens=row.n_tokens,
            status=row.status, failures=row.failures, prompt_ids=codec.ids_from(b""), response_ids=codec.ids_from(b""),
            prompt=None, label=None, metadata={},
        )  # fmt: skip
        # not where it was finished or given back between the look and the lock
        done += samples.fail_overdue(tx, claim, f"passed the sample deadline of {limit:g} s")
    return done
