"""Groups of a run that fit a filter, page by page: what the dashboard's page of groups asks.

Only the state is indexed. Any other condition is tested on a stretch of group numbers, LOOK of them at a time, so
that a filter that fits nothing costs the same in a long run as in a short one; the answer says how far it looked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.errors import InvalidSetting
from samplestore.models import PromptRow, Run, Sample, SampleGroup
from samplestore.statements import staleness
from samplestore.states import GroupState

run, group, sample, prompt = (t.__table__ for t in (Run, SampleGroup, Sample, PromptRow))

MAX_PAGE = 200
LOOK = 20_000  # group numbers that one page looks through
LOOK_TEXT = 4_000  # the same where the text of each prompt is read
LOOK_SPREAD = 50_000  # the newest groups among which the widest spread of rewards is sought
PROMPT_HEAD = 400  # characters of a prompt's JSON that a list carries
NEWEST, SPREAD = "newest", "spread"


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Conditions that all have to hold; what is None or empty asks nothing.

    states           group states
    staleness_min, staleness_max   as it is shown (statements.staleness.shown_lag): of now, and at the lease of what a
                     trainer holds or has consumed; a group whose staleness is unknown fits neither
    reward_min, reward_max         of the mean reward
    zero_std         True: only groups whose rewards are all equal; False: only those whose rewards differ
    version          some sample of the group has tokens of this weight version
    worker           some sample of the group was finished by this worker (its id)
    dataset          of the prompt
    text             the prompt contains it, as it stands in the data set; upper and lower case of ASCII are alike
    since, until     seconds since the epoch, of the group's creation
    """

    states: tuple[str, ...] = ()
    staleness_min: int | None = None
    staleness_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    zero_std: bool | None = None
    version: int | None = None
    worker: int | None = None
    dataset: str | None = None
    text: str | None = None
    since: float | None = None
    until: float | None = None

    @property
    def only_states(self) -> bool:
        return self == GroupFilter(states=self.states)


@dataclass(frozen=True, slots=True)
class GroupPage:
    """One page of groups.

    rows      plain columns of each, `staleness` as it is filtered by, `prompt_head`, `dataset`
    after     what `after` of the next page has to be; None: this is the last one
    low, high the group numbers [low, high) that were looked through
    matching  how many of those fit; None where it was not counted: only the state was asked for
    total     groups that the run ever created
    """

    rows: list[dict[str, Any]]
    after: str | None
    low: int
    high: int
    matching: int | None
    total: int


def page(
    database: Database,
    run_id: int,
    where: GroupFilter,
    *,
    after: str | None = None,
    order: str = NEWEST,
    limit: int = 50,
) -> GroupPage:
    """Groups that fit `where`, by falling number, or (order "spread") by falling standard deviation of their rewards.

    after   of the page before; None is the first one
    Raises InvalidSetting for a state, an order or an `after` that does not exist.
    """
    for state in where.states:
        if state not in list(GroupState):
            raise InvalidSetting("state", state, " | ".join(GroupState))
    if order not in (NEWEST, SPREAD):
        raise InvalidSetting("order", order, f"{NEWEST} | {SPREAD}")
    size = max(1, min(limit, MAX_PAGE))
    key = _key(after, order)
    with database.reading() as connection:
        total = int(connection.execute(sa.select(run.c.n_groups).where(run.c.id == run_id)).scalar_one())
        return (_by_spread if order == SPREAD else _by_number)(connection, run_id, where, key, total, size)


def _key(after: str | None, order: str) -> tuple[float, int] | None:
    """(standard deviation, number) below which the page begins; the former is 0 where groups go by number."""
    if after is None:
        return None
    spread, _, number = after.rpartition("~")
    try:
        key = (float(spread or 0.0), int(number))
    except ValueError:
        raise InvalidSetting("after", after[:60], "what the page before gave") from None
    if (order == SPREAD) != bool(spread) or not 0 <= key[1] < 2**62 or key[0] != key[0]:
        raise InvalidSetting("after", after[:60], "what the page before gave")
    return key


def _by_number(
    c: sa.Connection, run_id: int, where: GroupFilter, key: tuple[float, int] | None, total: int, size: int
) -> GroupPage:
    high = total if key is None else min(key[1], total)
    free = where.only_states  # an index finds the next ones, however far away they are
    low = 0 if free else max(0, high - (LOOK_TEXT if where.text else LOOK))
    found = c.execute(
        _rows(run_id, where)
        .where(group.c.number < high, group.c.number >= low)
        .order_by(group.c.number.desc())
        .limit(size + 1)
    ).fetchall()
    rows = [dict(r._mapping) for r in found[:size]]
    if len(found) > size:
        after: str | None = str(rows[-1]["number"])
    else:
        after = str(low) if low > 0 else None
    matching = None if free else _count(c, run_id, where, low, high)
    return GroupPage(rows, after, low, high, matching, total)


def _by_spread(
    c: sa.Connection, run_id: int, where: GroupFilter, key: tuple[float, int] | None, total: int, size: int
) -> GroupPage:
    low = max(0, total - (LOOK_TEXT if where.text else LOOK_SPREAD))
    query = _rows(run_id, where).where(group.c.number < total, group.c.number >= low, group.c.reward_std.is_not(None))
    if key is not None:
        query = query.where(
            sa.or_(group.c.reward_std < key[0], (group.c.reward_std == key[0]) & (group.c.number < key[1]))
        )
    found = c.execute(query.order_by(group.c.reward_std.desc(), group.c.number.desc()).limit(size + 1)).fetchall()
    rows = [dict(r._mapping) for r in found[:size]]
    after = f"{rows[-1]['reward_std']!r}~{rows[-1]['number']}" if len(found) > size else None
    counted = _count(c, run_id, where, low, total, group.c.reward_std.is_not(None))
    return GroupPage(rows, after, low, total, counted, total)


def _count(c: sa.Connection, run_id: int, where: GroupFilter, low: int, high: int, *more: Any) -> int:
    query = _fits(sa.select(sa.func.count()).select_from(_source(where)), run_id, where).where(
        group.c.number < high, group.c.number >= low, *more
    )
    return int(c.execute(query).scalar_one())


def _source(where: GroupFilter) -> Any:
    return group if where.text is None and where.dataset is None else _WITH_PROMPT


_WITH_PROMPT = group.join(prompt, prompt.c.id == group.c.prompt_id)


def _rows(run_id: int, where: GroupFilter) -> sa.Select[Any]:
    text = sa.cast(prompt.c.prompt, sa.Text)
    query = sa.select(
        group.c.id, group.c.number, group.c.state, group.c.reason, group.c.epoch, group.c.n_samples, group.c.n_open,
        group.c.n_unscored, group.c.n_failed, group.c.n_tokens, group.c.oldest_version,
        staleness.shown_lag(run_id).label("staleness"), group.c.reward_mean, group.c.reward_std, group.c.created_at,
        prompt.c.dataset, sa.func.substr(text, 1, PROMPT_HEAD).label("prompt_head"),
    ).select_from(_WITH_PROMPT)  # fmt: skip
    rows: sa.Select[Any] = _fits(query, run_id, where)
    return rows


def _fits(query: Any, run_id: int, w: GroupFilter) -> Any:
    query = query.where(group.c.run_id == run_id)
    if w.states:
        query = query.where(group.c.state.in_(w.states))
    lag = staleness.shown_lag(run_id)
    for low, column in ((w.staleness_min, lag), (w.reward_min, group.c.reward_mean), (w.since, group.c.created_at)):
        if low is not None:
            query = query.where(column >= low)
    for high, column in ((w.staleness_max, lag), (w.reward_max, group.c.reward_mean), (w.until, group.c.created_at)):
        if high is not None:
            query = query.where(column <= high)
    if w.zero_std is not None:
        query = query.where(group.c.reward_std == 0 if w.zero_std else group.c.reward_std > 0)
    of_group = sample.c.group_id == group.c.id
    if w.version is not None:
        query = query.where(_some(of_group, sample.c.version_min <= w.version, sample.c.version_max >= w.version))
    if w.worker is not None:
        query = query.where(_some(of_group, sample.c.finished_by == w.worker))
    if w.dataset is not None:
        query = query.where(prompt.c.dataset == w.dataset)
    if w.text:
        query = query.where(_contains(w.text))
    return query


def _some(*where: Any) -> sa.ColumnElement[bool]:
    """Of each group in turn. PostgreSQL would turn an EXISTS around: it looked through all samples ever written, for
    groups of which few lie in the stretch."""
    return sa.select(sa.func.count()).select_from(sample).where(*where).scalar_subquery() > 0


def _contains(text: str) -> sa.ColumnElement[bool]:
    """The prompt's JSON has the text. SQLite keeps it as it was written, with \\u for what is beyond ASCII; PostgreSQL
    keeps the characters. Both escape quotes and control characters, so the text is looked for in either writing."""
    stored = sa.cast(prompt.c.prompt, sa.Text)
    written = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return sa.or_(*[stored.ilike(f"%{_escaped(w)}%", escape="!") for w in sorted(written)])


def _escaped(text: str) -> str:
    return "".join(f"!{c}" if c in "!%_" else c for c in text)
