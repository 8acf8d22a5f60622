"""Tables and views as pandas DataFrames, and tokens, a row each."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import arguments, codec, states, views
from samplestore.arguments import choice, whole
from samplestore.errors import InvalidSetting, MissingExtra, TokensPruned
from samplestore.models import Base, BatchGroup, BatchRow, Sample, SampleGroup, Segment
from samplestore.statements import staleness
from samplestore.statements.lists import among

TABLES = {
    "runs": "run", "prompts": "prompt", "datasets": "dataset", "groups": "sample_group", "samples": "sample",
    "segments": "segment", "stages": "stage", "requests": "request", "batches": "batch", "batch_groups": "batch_group",
    "versions": "weight_version", "timelines": "timeline", "workers": "worker", "engines": "engine",
    "evaluations": "evaluation", "events": "event", "ledger": "ledger_total",
}  # fmt: skip
TOKENS = "tokens"
NAMES = (*TABLES, TOKENS, *views.BY_NAME)
STATUSES: dict[str, type[StrEnum]] = {
    "runs": states.RunState, "groups": states.GroupState, "samples": states.SampleStatus, TOKENS: states.SampleStatus,
    "stages": states.StageStatus, "batches": states.BatchState, "batch_groups": states.BatchState,
    "workers": states.WorkerState, "batch_steps": states.BatchState,
}  # fmt: skip
LIMIT, TOKEN_LIMIT = 100_000, 1_000_000
MAX_ID = 2**63 - 1
TIMES = ("at", "heartbeat", "not_before")  # and what ends in _at; durations end in _s

sample, group, segment, batch, batch_group = (t.__table__ for t in (Sample, SampleGroup, Segment, BatchRow, BatchGroup))


class CutOff(UserWarning):
    """A frame has more rows than its limit: the rest was left out."""


def frame(
    store: Any,
    name: str,
    run: str | None = None,
    limit: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    step: int | None = None,
    status: str | None = None,
    sample_ids: Iterable[int] | None = None,
    group_ids: Iterable[int] | None = None,
    versions: Iterable[int] | None = None,
) -> Any:
    """A pandas DataFrame; `store.frame` says of what."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise MissingExtra("store.frame()", "frames") from None
    if name not in NAMES:
        raise InvalidSetting("table", name, " | ".join(NAMES))
    limit = whole("limit", (TOKEN_LIMIT if name == TOKENS else LIMIT) if limit is None else limit, 1)
    run_id = None if run is None else store.existing_run(run).id
    table = _table(name)
    lists = {"sample_ids": sample_ids, "group_ids": group_ids, "versions": versions}
    given = {key: _whole_numbers(key, values) for key, values in lists.items() if values is not None}
    where = [_of_run(table, run_id)] if run_id is not None else []
    where += [_among(name, table, key, values) for key, values in given.items()]
    if status is not None:
        where.append(_status(name, table, status))
    if step is not None:
        where.append(_of_step(name, table, whole("step", step, -1), run_id))
    read = _tokens if name == TOKENS else _rows
    return read(store.database, name, columns, where, given, limit)


def _table(name: str) -> Any:
    if name in views.BY_NAME:
        return views.BY_NAME[name].table
    return segment if name == TOKENS else Base.metadata.tables[TABLES[name]]


# -- which rows


def _sample_id(table: Any) -> Any:
    """The column that tells which sample a row is of, or None."""
    return table.c.id if table is sample else table.c.get("sample_id")


def _of_groups(table: Any, ids: Any) -> Any:
    """Whether a row is of one of the groups; None where a row has no group."""
    column = table.c.id if table is group else table.c.get("group_id")
    if column is not None:
        return column.in_(ids) if isinstance(ids, sa.Select) else among(column, ids)
    of_sample = _sample_id(table)
    return None if of_sample is None else of_sample.in_(sa.select(sample.c.id).where(_of_groups(sample, ids)))


def _of_run(table: Any, run_id: int) -> Any:
    """Rows of one run; some belong to it through their sample or their batch."""
    if table.name == "run":
        return table.c.id == run_id
    if "run_id" in table.c:
        return table.c.run_id == run_id
    owner, column = (batch, table.c.batch_id) if table is batch_group else (sample, table.c.sample_id)
    return column.in_(sa.select(owner.c.id).where(owner.c.run_id == run_id))


def _among(name: str, table: Any, key: str, values: list[int]) -> Any:
    if key == "group_ids":
        found = _of_groups(table, key)
    else:
        of_version = table.c.version_min if table is segment else table.c.get("version")
        column = _sample_id(table) if key == "sample_ids" else of_version
        found = None if column is None else among(column, key)
    return _there(found, name, key, values)


def _status(name: str, table: Any, status: str) -> Any:
    if name not in STATUSES:
        _there(None, name, "status", status)
    value = choice("status", status, STATUSES[name]).value
    if name == TOKENS:
        return table.c.sample_id.in_(sa.select(sample.c.id).where(sample.c.status == value))
    return table.c.get("status", table.c.get("state")) == value


def _of_step(name: str, table: Any, step: int, run_id: int | None) -> Any:
    """Rows that name the step, or those of the groups that its batch took. A rewind leaves one such batch of a step."""
    if "step" in table.c:
        return table.c.step == step
    live = batch.c.state.in_([s.value for s in states.LIVE_BATCH])
    taken = (
        sa.select(batch_group.c.group_id)
        .join(batch, batch.c.id == batch_group.c.batch_id)
        .where(batch.c.step == step, live, *([] if run_id is None else [batch.c.run_id == run_id]))
    )
    return _there(_of_groups(table, taken), name, "step", step)


def _there(condition: Any, name: str, key: str, value: Any) -> Any:
    if condition is None:
        raise InvalidSetting(key, value, f"left out: rows of {name!r} have no such thing")
    return condition


def _whole_numbers(key: str, values: Any) -> list[int]:
    if not isinstance(values, Iterable):
        raise InvalidSetting(key, values, "a list of whole numbers")
    return [whole(key, v, -1, MAX_ID) for v in values]


def _chosen(columns: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    known = list(known)
    if columns is not None and not columns:
        raise InvalidSetting("columns", columns, f"left out, or some of: {' | '.join(known)}")
    columns = arguments.optional(arguments.texts, "columns", columns)
    for column in columns or ():
        if column not in known:
            raise InvalidSetting("columns", column, " | ".join(known))
    return list(columns) if columns is not None else known


# -- rows


def _rows(
    database: Any, name: str, columns: Sequence[str] | None, where: list[Any], given: Mapping[str, Any], limit: int
) -> Any:
    import pandas as pd

    table = _table(name)
    readable = {c.name: c for c in table.c if not isinstance(c.type, sa.LargeBinary)}
    chosen = [readable[c] for c in _chosen(columns, readable)]
    key = views.BY_NAME[name].key if name in views.BY_NAME else [c.name for c in table.primary_key]
    query = sa.select(*chosen).where(*where).order_by(*(table.c[c].desc() for c in key)).limit(limit + 1)
    with database.reading() as connection:
        rows = connection.execute(query, given).fetchall()
    told = list(zip(*rows[:limit], strict=True)) if rows else [()] * len(chosen)
    made = pd.DataFrame({c.name: _series(c, values) for c, values in zip(chosen, told, strict=True)})
    return _marked(made, name, limit, len(rows) > limit)


def is_time(column: Any) -> bool:
    """Whether a column holds seconds since the epoch."""
    return column.name in TIMES or column.name.endswith("_at")


def _series(column: Any, values: Sequence[Any]) -> Any:
    import pandas as pd

    if isinstance(column.type, sa.Integer):
        return pd.Series(values, dtype="Int64" if getattr(column, "nullable", True) else "int64")
    if isinstance(column.type, sa.Double):
        numbers = pd.Series(values, dtype="float64")
        if not is_time(column):
            return numbers
        # in microseconds, which is what the clocks give; without, an empty column has another type than a full one
        return pd.to_datetime(numbers, unit="s", utc=True).astype("datetime64[us, UTC]")
    return pd.Series(values, dtype="string" if isinstance(column.type, sa.Text | sa.String) else "object")


def _marked(made: Any, name: str, limit: int, cut: bool) -> Any:
    made.attrs["cut_off"] = cut
    if cut:
        warnings.warn(
            f"store.frame({name!r}) is cut off at limit={limit}. Raise it, or ask for less: run, step, sample_ids, ...",
            CutOff,
            stacklevel=5,
        )
    return made


# -- tokens

TOKEN_COLUMNS = (
    "run_id", "group", "index", "sample_id", "seq", "position", "token", "logprob", "loss", "kind", "version",
    "staleness",
)  # fmt: skip


def _tokens(
    database: Any, name: str, columns: Sequence[str] | None, where: list[Any], given: Mapping[str, Any], limit: int
) -> Any:
    """Segments of present lives, read one after the other until there are `limit` tokens."""
    chosen = _chosen(columns, TOKEN_COLUMNS)
    unknown = (segment.c.kind == states.SegmentKind.GENERATED.value) & segment.c.version_min.is_(None)
    behind = staleness.behind(sample.c.run_id, segment.c.version_min)
    lag = sa.case((staleness.IMPORTED & ~unknown, 0), else_=behind)
    query = (
        sa.select(
            sample.c.run_id, group.c.number, sample.c.index, segment.c.sample_id, segment.c.seq, segment.c.start,
            segment.c.loss, segment.c.kind, segment.c.version_min, lag.label("lag"), segment.c.payload,
        )
        .select_from(
            segment.join(
                sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation)
            ).join(group, group.c.id == sample.c.group_id)
        )
        .where(*where)
        .order_by(segment.c.sample_id, segment.c.incarnation, segment.c.seq)
        .execution_options(yield_per=200)
    )  # fmt: skip
    rows, ids, probs, n, pruned, cut = [], [], [], 0, 0, False
    with database.reading() as connection, connection.execute(query, given) as found:
        for row in found:
            if n == limit:
                cut = True
                break
            try:
                tokens, logprobs = codec.decode(row.payload)
            except TokensPruned:
                pruned += 1
                continue
            here = min(tokens.size, limit - n)
            cut = here < tokens.size
            rows.append(tuple(row)[:-1])
            ids.append(tokens[:here])
            probs.append(np.full(here, np.nan, np.float32) if logprobs is None else logprobs[:here])
            n += here
    made = _exploded(rows, ids, probs, chosen)
    made.attrs["pruned_segments"] = pruned
    return _marked(made, name, limit, cut)


def _exploded(rows: list[tuple[Any, ...]], ids: list[Any], probs: list[Any], chosen: list[str]) -> Any:
    import pandas as pd

    sizes = [part.size for part in ids]
    of = np.repeat(np.arange(len(rows)), sizes)  # which segment a token is of
    starts = np.repeat([0, *np.cumsum(sizes)[:-1]][: len(sizes)], sizes).astype(np.int64)
    names = ("run_id", "group", "index", "sample_id", "seq", "start", "loss", "kind", "version", "staleness")
    dtypes = ("int64", "int64", "int32", "int64", "int32", "int32", "int8", "category", "Int64", "Int64")
    each = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
    made: dict[str, Any] = {}
    for name, dtype in zip(names, dtypes, strict=True):
        if name in chosen or name == "start":
            values = pd.Categorical(each[name], list(states.SegmentKind)) if name == "kind" else each[name]
            made[name] = pd.Series(values, dtype=None if name == "kind" else dtype).take(of).reset_index(drop=True)
    made["position"] = made["start"].to_numpy() + (np.arange(of.size) - starts).astype(np.int32)
    made["token"] = np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32)
    made["logprob"] = np.concatenate([np.empty(0, np.float32), *probs]).astype(np.float32)
    return pd.DataFrame({name: made[name] for name in chosen})
