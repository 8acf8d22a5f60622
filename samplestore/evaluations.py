"""An evaluation from its start to its numbers."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import seconds
from samplestore.batches import raise_worker_failure
from samplestore.errors import EvaluationTimeout
from samplestore.models import EngineRow
from samplestore.models import Run as RunRow
from samplestore.queries.evaluation import Evaluation, evaluations, progress
from samplestore.queries.why import unfinished
from samplestore.verbs import evaluation
from samplestore.verbs.tx import Transactor

engine, run_table = EngineRow.__table__, RunRow.__table__

POLL_S = 0.2  # between two looks whether it is done


def evaluate(
    run: Transactor,
    dataset: str,
    samples: int = 1,
    sampling: dict[str, Any] | None = None,
    max_new_tokens: int | None = None,
    again: bool = False,
    *,
    pass_reward: float = 1.0,
    timeout: float | None = None,
) -> Evaluation:
    """Evaluate the current version on a data set, or go on waiting for the same evaluation; see
    verbs.evaluation.start for what is asked, queries.evaluation.Evaluation for what is told.

    pass_reward   a sample passes with this reward or more
    timeout       seconds; None waits for ever
    Raises EvaluationTimeout (it goes on), WorkerFailed, InvalidSetting.
    """
    timeout = seconds("timeout", timeout)
    number = run.transact(lambda tx: evaluation.start(tx, dataset, samples, sampling, max_new_tokens, again))
    since = time.monotonic()
    while left := run.database.read(lambda c: progress(c, number))[0]:
        waited = time.monotonic() - since
        if timeout is not None and waited >= timeout:
            raise EvaluationTimeout(number, waited, left, _why(run))
        raise_worker_failure(run)
        time.sleep(POLL_S if timeout is None else min(POLL_S, max(0.0, timeout - waited)))
    return evaluations(run.database, run.id, [number], pass_reward)[0]


def _why(run: Transactor) -> str:
    """What the run says, and which engines workers wait for before they claim samples of an evaluation."""
    with run.database.reading() as connection:
        at = connection.execute(sa.select(run_table.c.current_version).where(run_table.c.id == run.id)).scalar_one()
        rows = connection.execute(
            sa.select(engine.c.url, engine.c.version)
            .where(engine.c.run_id == run.id, engine.c.state == "live")
            .where(sa.func.coalesce(engine.c.version, -1) != at)
            .order_by(engine.c.url)
            .limit(3)
        ).fetchall()
    behind = [
        f"{row.url} serves {'weights of no version' if row.version is None else f'version {row.version}'}, the run is "
        f"at {at}: it is sent no samples of evaluations"
        for row in rows
    ]
    reasons = [text for _, text in unfinished(run.database, run.id, run.settings)]
    return "; ".join([*behind, *reasons]) or "nothing stands in the way"
