"""Views: common questions as tables, for psql and sqlite3, without Python.

Built here from the same expressions as everything else; alembic/versions holds the text that a database has, and
tests/schema compares the two: whoever changes a view here writes a migration that makes it anew. Tables have singular
names, views plural ones. A condition on `run_id` reaches the large tables below, and their indexes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from samplestore.statements import views as queries

DIALECTS: dict[str, sa.Dialect] = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect()}  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class View:
    """doc      what a row is
    columns  name -> what it tells
    key      columns that tell its rows apart
    """

    name: str
    doc: str
    select: sa.Select[Any]
    columns: dict[str, str]
    key: tuple[str, ...]

    @cached_property
    def table(self) -> sa.TableClause:
        """It as something to select from."""
        return sa.table(self.name, *(sa.column(c.name, c.type) for c in self.select.selected_columns))

    def sql(self, dialect: str) -> str:
        """CREATE VIEW, for "sqlite" or "postgresql"."""
        made = self.select.compile(dialect=DIALECTS[dialect], compile_kwargs={"literal_binds": True})
        lines = [line.rstrip() for line in str(made).splitlines()]
        return "\n".join([f"CREATE VIEW {self.name} AS", *lines])


_RUN = {"run_id": "run.id", "run": "its name"}

VIEWS = (
    View(
        "ready_groups",
        "A finished group that waits for a trainer, and its staleness at this moment.",
        queries.ready_groups(),
        {
            **_RUN,
            "group_id": "sample_group.id",
            "number": "serving order within the run",
            "prompt_id": "prompt.id",
            "dataset": "of its prompt",
            "epoch": "pass over the prompts",
            "n_samples": "",
            "n_failed": "of them given up",
            "n_tokens": "response tokens",
            "reward_mean": "",
            "reward_std": "population standard deviation; 0: it teaches nothing",
            "oldest_version": "stalest version of a trained token",
            "staleness_oldest": "of the stalest trained token, in versions along the timeline; NULL: unknown",
            "staleness_newest": "of the freshest, in the sample where that is the stalest",
            "staleness_mean": "weighted by tokens, in the sample where that is the highest",
            "max_staleness": "the run's setting",
            "staleness": "by the run's staleness_mode",
            "in_window": "1: a batch with the run's max_staleness takes it as it is; 0: too old, or unknown",
            "ready_at": "",
            "waited_s": "seconds since then",
        },
        ("run_id", "number"),
    ),
    View(
        "token_fate",
        "Where generated tokens are, by the weights that made them: the totals of `samplestore ledger`.",
        queries.token_fate(),
        {
            **_RUN,
            "version": "weights that made them; NULL: unknown",
            "fate": "",
            "reason": "why dropped; else empty",
            "tokens": "",
        },
        ("run_id", "version", "fate", "reason"),
    ),
    View(
        "abort_causes",
        "Why samples were stopped in the middle, by engine, worker and weights.",
        queries.abort_causes(),
        {
            **_RUN,
            "kind": "abort: engine or operator; reap: the worker died, or made no progress; fail: an error",
            "reason": "of a fail its message",
            "engine": "of the call that was under way; NULL: none was",
            "worker_id": "worker.id",
            "version": "newest weights that wrote in that call; NULL: it wrote nothing",
            "times": "",
            "tokens_kept": "response tokens that the samples had; where the run resumes they are not generated again",
            "tokens_lost": "generated in those calls and not stored, as far as the engine told",
            "prefilled_again": "tokens that resuming computed once more: prompt and response, what was cached left out",
        },
        ("run_id", "kind", "reason", "engine", "worker_id", "version"),
    ),
    View(
        "version_rewards",
        "What finished samples of each weight version are like. A sample that several versions wrote counts for the "
        "newest. Evaluations are left out.",
        queries.version_rewards(),
        {
            **_RUN,
            "version": "NULL: unknown, or imported",
            "step": "trainer step that made the weights",
            "samples": "completed or truncated",
            "scored": "those with a reward",
            "reward_mean": "one that is nearer to 0 than 1e-100 counts as 0, one beyond 1e50 as 1e50",
            "reward_std": "population standard deviation",
            "truncated_ratio": "part that ended by a length limit",
            "mean_tokens": "response tokens",
        },
        ("run_id", "version"),
    ),
    View(
        "batch_steps",
        "A batch, and what it trained on. After a rewind a step has several: one is committed, the others rewound.",
        queries.batch_steps(),
        {
            **_RUN,
            "batch_id": "batch.id",
            "timeline": "branch of training",
            "step": "",
            "state": "leased, committed, released or rewound",
            "current_version": "the run's current version at the lease",
            "n_groups": "",
            "n_samples": "",
            "n_tokens": "",
            "staleness_max": "of its groups, at the lease",
            "staleness_mean": "",
            "reward_mean": "of its samples that did not fail, as they are now",
            "truncated_ratio": "part of the samples that ended by a length limit",
            "created_at": "when it was leased",
            "settled_at": "",
        },
        ("run_id", "batch_id"),
    ),
)

BY_NAME = {view.name: view for view in VIEWS}


def create(dialect: str) -> Iterator[str]:
    """The statements that make all views in an empty schema."""
    for view in VIEWS:
        yield view.sql(dialect)
