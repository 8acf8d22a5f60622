"""Kept totals made anew from the rows that they tell of."""

from __future__ import annotations

import sqlalchemy as sa

from samplestore.statements import totals
from samplestore.verbs.tx import Tx


def recount(tx: Tx) -> None:
    """Count the run's requests and events again, and keep that. Totals and rows can only differ where something else
    than this release wrote, such as a worker that went on while the schema was migrated. Of reasons that are too many
    to be told apart, those with the most keep their names."""
    tx.lock_run()
    if tx.connection.dialect.name == "postgresql":
        # Who has added to a total commits first, and is counted; who has not yet waits. SQLite has one writer anyhow.
        tx.execute(sa.text("LOCK TABLE request_total, event_total IN EXCLUSIVE MODE"))
    for table in (totals.of_requests, totals.of_events):
        tx.execute(sa.delete(table).where(table.c.run_id == tx.run_id))
    tx.recount(requests=totals.request.c.run_id == tx.run_id, events=totals.event.c.run_id == tx.run_id, anew=True)
