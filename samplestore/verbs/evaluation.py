"""Evaluations: groups of a data set that are generated and scored like others, and never trained on.

They are in no window, no batch and no staleness: admission does not count them, and when they are scored they end as
dropped with the reason "evaluation". Their samples go before those to train on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import plain_json, plain_text, whole
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting
from samplestore.models import DatasetRow, EvaluationRow, PromptRow
from samplestore.queries.evaluation import progress
from samplestore.states import EVALUATION_PRIORITY, Purpose
from samplestore.verbs.prompts import create_groups
from samplestore.verbs.serve import Served
from samplestore.verbs.tx import Tx

evaluation, dataset, prompt = EvaluationRow.__table__, DatasetRow.__table__, PromptRow.__table__

MAX_SAMPLES = 10_000  # of a prompt


def start(
    tx: Tx,
    name: str,
    n_samples: int = 1,
    sampling: dict[str, Any] | None = None,
    max_new_tokens: int | None = None,
    again: bool = False,
) -> int:
    """Begin to evaluate the run's current version on a data set that was added for it; the evaluation's id. The same
    question about the same version is the same evaluation: repeating the call is harmless.

    n_samples        of each prompt
    sampling         over the run's and the worker's, e.g. {"temperature": 0.0}
    max_new_tokens   response budget; None is the worker's
    again            where the last evaluation of this question is done: another one. Where it is under way, that one
    Raises InvalidSetting.
    """
    plain_text("dataset", name)
    n = whole("samples", n_samples, 1, MAX_SAMPLES)
    given = plain_json("sampling", {} if sampling is None else sampling)
    limit = None if max_new_tokens is None else whole("max_new_tokens", max_new_tokens, 1)
    row = tx.lock_run()
    known = {d.name: d for d in tx.rows(sa.select(dataset).where(dataset.c.run_id == tx.run_id))}
    if name not in known or known[name].purpose != Purpose.EVAL or not known[name].n_prompts:
        there = ", ".join(sorted(d.name for d in known.values() if d.purpose == Purpose.EVAL)) or "there is none"
        cure = "samplestore add-prompts FILE --dataset NAME --eval"
        training = f"{name!r} is for training; " if name in known and known[name].purpose != Purpose.EVAL else ""
        raise InvalidSetting("dataset", name, f"a data set for evaluation ({training}{there}; add one with: {cure})")
    asked = [known[name].n_prompts, n, given, limit]
    values = {"run_id": tx.run_id, "dataset": name, "version": row.current_version}
    found, key = _last(tx, values, asked)
    if found is not None and not (again and progress(tx.connection, found)[0] == 0):
        return found
    ids = tx.rows(
        sa.select(prompt.c.id)
        .where(prompt.c.run_id == tx.run_id, prompt.c.dataset == name)
        .order_by(prompt.c.dataset_position)
    )
    made = tx.execute(
        sa.insert(evaluation)
        .values(
            **values, settings_key=key, n_samples=n, n_groups=len(ids), sampling=given, max_new_tokens=limit,
            created_at=db_now(),
        )
        .returning(evaluation.c.id)
    ).scalar_one()  # fmt: skip
    create_groups(tx, row, [Served(r.id, 0, EVALUATION_PRIORITY) for r in ids], n, made)
    tx.event("evaluate", name, version=row.current_version, details={"evaluation": made, "groups": len(ids)})
    return int(made)


def _last(tx: Tx, values: dict[str, Any], asked: list[Any]) -> tuple[int | None, str]:
    """(the last evaluation of this question, the key of the next one). The first has the key of the question alone."""
    last: int | None = None
    for number in itertools.count():
        text = json.dumps([*asked, number] if number else asked, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        found = tx.execute(sa.select(evaluation.c.id).filter_by(**values, settings_key=key)).scalar()
        if found is None:
            break
        last = int(found)
    return last, key
