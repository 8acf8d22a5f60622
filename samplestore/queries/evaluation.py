"""What evaluations found: pass@k, mean reward, truncated ratio, for each weight version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import DatasetRow, EvaluationRow, Sample, SampleGroup
from samplestore.statements.rewards import countable
from samplestore.states import EVALUATED, FINISHED, UNFINISHED_GROUP, Purpose, SampleStatus

dataset, evaluation, group, sample = (t.__table__ for t in (DatasetRow, EvaluationRow, SampleGroup, Sample))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation, as far as it is.

    version          the run's current version when it began
    done             all its groups are generated and scored
    n_prompts        and those of them that are done; n_samples: of each prompt
    n_scored         samples of done prompts with a reward, all of whose tokens are of `version`
    n_failed         samples that were given up: they are in no other number; newest_error: of the one that failed last
    n_other_version  finished samples with tokens of other weights than `version` (published meanwhile), or of weights
                     that nobody knows: they are in no other number
    mean_reward      over the samples with a reward
    pass_at          {k: pass@k}: the unbiased estimator of Chen et al., arXiv:2107.03374, section 2.1, mean over the
                     prompts with at least k scored samples. A sample passes with a reward of pass_reward or more
    truncated        part of the finished samples of `version` that ended by a length limit
    mean_tokens      response tokens of the finished samples of `version`
    """

    id: int
    dataset: str
    version: int
    done: bool
    created_at: float
    n_prompts: int
    n_prompts_done: int
    n_samples: int
    n_scored: int
    n_failed: int
    n_other_version: int
    pass_reward: float
    mean_reward: float | None
    pass_at: dict[int, float]
    truncated: float | None
    mean_tokens: float | None
    sampling: dict[str, Any]
    max_new_tokens: int | None
    newest_error: str | None

    @property
    def all_failed(self) -> bool:
        """It is done, and all of its samples were given up."""
        return self.done and self.n_failed > 0 and self.mean_tokens is None and not self.n_other_version

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pass_at": {str(k): value for k, value in self.pass_at.items()}}


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that one of k of n samples passes, c of which do; as a product, since the
    binomials of large n are no floats. Chen et al., arXiv:2107.03374, section 2.1. 0 <= c <= n, 1 <= k <= n."""
    if n - c < k:
        return 1.0
    missed = 1.0
    for i in range(n - c + 1, n + 1):
        missed *= 1.0 - k / i
    return 1.0 - missed


def powers(n: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to n, and n."""
    return tuple(sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n}))


def evaluations(
    database: Database, run_id: int, ids: Sequence[int] | None = None, pass_reward: float = 1.0
) -> list[Evaluation]:
    """Evaluations of a run, by data set and version."""
    wanted = sa.select(evaluation).where(evaluation.c.run_id == run_id)
    if ids is not None:
        wanted = wanted.where(evaluation.c.id.in_(ids))
    with database.reading() as connection:
        rows = connection.execute(
            wanted.order_by(evaluation.c.dataset, evaluation.c.version, evaluation.c.id)
        ).fetchall()
        return [_read(connection, row, pass_reward) for row in rows]


def newest(database: Database, run_id: int, limit: int) -> list[Evaluation]:
    """The evaluations of a run that began last, the newest first."""
    last = sa.select(evaluation.c.id).where(evaluation.c.run_id == run_id).order_by(evaluation.c.id.desc()).limit(limit)
    with database.reading() as connection:
        ids = list(connection.execute(last).scalars())
    return sorted(evaluations(database, run_id, ids), key=lambda e: -e.id) if ids else []


def datasets(database: Database, run_id: int) -> list[str]:
    """Names of the data sets that are there for evaluation."""
    query = sa.select(dataset.c.name).where(dataset.c.run_id == run_id, dataset.c.purpose == Purpose.EVAL.value)
    with database.reading() as connection:
        return list(connection.execute(query.order_by(dataset.c.name)).scalars())


def progress(connection: sa.Connection, evaluation_id: int) -> tuple[int, int]:
    """(groups that are not done, samples that are not finished)."""
    open_ones = group.c.state.in_([s.value for s in UNFINISHED_GROUP])
    row = connection.execute(
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(group.c.n_open), 0)).where(
            group.c.evaluation_id == evaluation_id, open_ones
        )
    ).one()
    return int(row[0]), int(row[1])


def _read(connection: sa.Connection, row: Any, pass_reward: float) -> Evaluation:
    ended = sample.c.status.in_([s.value for s in FINISHED])
    of_version = sa.func.coalesce(
        (sample.c.version_min == row.version) & (sample.c.version_max == row.version) & (sample.c.version_unknown == 0),
        sa.false(),
    )
    finished = ended & of_version

    def total(condition: Any) -> Any:
        return sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0)

    scored = finished & sample.c.reward.is_not(None)
    prompts = connection.execute(
        sa.select(
            total(scored).label("n"),
            total(scored & (sample.c.reward >= pass_reward)).label("passed"),
            total(finished).label("finished"),
            total(sample.c.status == SampleStatus.FAILED.value).label("failed"),
            total(finished & (sample.c.status == SampleStatus.TRUNCATED.value)).label("truncated"),
            total(ended & ~of_version).label("other"),
            sa.func.sum(sa.case((scored, countable(sample.c.reward)))).label("rewards"),
            sa.func.sum(sa.case((finished, sample.c.n_tokens))).label("tokens"),
        )
        .join(group, group.c.id == sample.c.group_id)
        .where(group.c.evaluation_id == row.id, group.c.reason == EVALUATED)
        .where(sample.c.parent_id.is_(None))  # a fork is a part of one try, not another try
        .group_by(group.c.id)
    ).fetchall()
    last = (
        sa.select(sample.c.error)
        .join(group, group.c.id == sample.c.group_id)
        .where(group.c.evaluation_id == row.id, sample.c.status == SampleStatus.FAILED.value)
        .order_by(sa.func.coalesce(sample.c.finished_at, 0.0).desc(), sample.c.id.desc())
        .limit(1)
    )
    left, _ = progress(connection, row.id)
    n, done = sum(p.n for p in prompts), sum(p.finished for p in prompts)
    at: dict[int, float] = {}
    for k in powers(row.n_samples):
        values = [pass_at_k(int(p.n), int(p.passed), k) for p in prompts if p.n >= k]
        if values:
            at[k] = sum(values) / len(values)
    return Evaluation(
        id=row.id, dataset=row.dataset, version=row.version, done=left == 0, created_at=row.created_at,
        n_prompts=row.n_groups, n_prompts_done=len(prompts), n_samples=row.n_samples, n_scored=int(n),
        n_failed=int(sum(p.failed for p in prompts)), n_other_version=int(sum(p.other for p in prompts)),
        pass_reward=pass_reward, mean_reward=sum(p.rewards for p in prompts if p.n) / n if n else None, pass_at=at,
        truncated=int(sum(p.truncated for p in prompts)) / done if done else None,
        mean_tokens=float(sum(p.tokens for p in prompts if p.finished)) / done if done else None,
        sampling=dict(row.sampling), max_new_tokens=row.max_new_tokens,
        newest_error=connection.execute(last).scalar(),
    )  # fmt: skip
