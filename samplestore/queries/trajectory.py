"""One sample, to be read by a person: its segments, its events, and a window of its tokens.

Positions count prompt and response together: the prompt is [0, n_prompt), the response [n_prompt, n_prompt + n).
Nothing here costs with the length of the sample except its list of segments, which is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import Event, PromptRow, Sample, SampleGroup, Segment
from samplestore.statements import staleness
from samplestore.types import Floats, Ids

sample, group, prompt, segment, event = (t.__table__ for t in (Sample, SampleGroup, PromptRow, Segment, Event))

MAX_SEGMENTS = 5000
MAX_EVENTS = 200
MAX_WINDOW = 20_000  # tokens
CONTEXT = 8  # tokens on either side that a decoder needs: a character has up to four
OF_SAMPLE = ("abort", "release", "reap", "fail", "resume", "requeue")
OF_GROUP = ("dropped", "stale", "superseded", "straggler", "regenerate")
OF_RUN = ("publish", "abort_inflight", "rewind")


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring segments that differ in nothing but the flush that wrote them.

    start          position of its first token
    version_min, version_max   None where no weights made the tokens, or their version is not known
    logprob_sum    over its tokens; None where they have none
    """

    first_seq: int
    last_seq: int
    start: int
    n_tokens: int
    kind: str
    loss: int
    version_min: int | None
    version_max: int | None
    owner: int
    attempt: int
    engine: str | None
    request_rid: str | None
    finish_reason: str | None
    logprob_sum: float | None
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens at positions [start, start + n), and what a decoder needs around them.

    ids              int32 [n]
    logprobs         float32 [n], NaN where there is none
    before, after    int32 [<= CONTEXT], the ids on either side
    """

    start: int
    ids: Ids
    logprobs: Floats
    before: Ids
    after: Ids


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A sample as it was in one snapshot. `sample` and `group` are plain columns of their rows; the sample's
    `staleness` is that of now, of what a trainer holds or has consumed that at the lease.

    pruned   its response was pruned: spans and counters are there, of the tokens only those of the prompt
    """

    sample: dict[str, Any]
    group: dict[str, Any]
    incarnation: int
    n_prompt: int
    n_response: int
    spans: list[Span]
    spans_cut: bool
    events: list[dict[str, Any]]
    events_cut: bool
    tokens: Tokens
    as_of: float
    pruned: bool = False

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_response


def read(
    database: Database,
    run_id: int,
    group_number: int,
    index: int,
    *,
    incarnation: int | None = None,
    start: int | None = None,
    limit: int = 2000,
) -> Trajectory | None:
    """A sample of a run with the page of its tokens that holds position `start`; None where there is no such sample.

    incarnation   a former life of the sample; the present one if left out
    start         None is the beginning of the response; pages are [0, limit), [limit, 2 * limit), ...
    Raises ValueError where a stored payload is damaged.
    """
    size = max(1, min(limit, MAX_WINDOW))
    with database.reading() as connection:
        row = connection.execute(_HEAD, {"b_run": run_id, "number": group_number, "b_index": index}).one_or_none()
        if row is None:
            return None
        head = dict(row._mapping)
        life = head["incarnation"] if incarnation is None else incarnation
        found = connection.execute(_SEGMENTS, {"id": head["id"], "life": life, "most": MAX_SEGMENTS + 1}).fetchall()
        n_prompt = head["prompt_tokens"]
        n_response = sum(r.n_tokens for r in found[:MAX_SEGMENTS])
        pruned = any(bytes(r.format) == codec.PRUNED_PAYLOAD for r in found)  # of a life all are, or none is
        total = n_prompt if pruned else n_prompt + n_response
        at = n_prompt if start is None else start
        first = max(0, min(at, total - 1)) // size * size
        tokens = _tokens(connection, head, life, n_prompt, first, min(first + size, total), prompt_only=pruned)
        events = _events(connection, run_id, head)
        as_of = float(connection.execute(sa.select(db_now())).scalar_one())
    of_group = {name: head.pop(f"group_{name}") for name in _GROUP_COLUMNS}
    return Trajectory(
        head, of_group, life, n_prompt, n_response, merge(found[:MAX_SEGMENTS], n_prompt), len(found) > MAX_SEGMENTS,
        events[:MAX_EVENTS], len(events) > MAX_EVENTS, tokens, as_of, pruned,
    )  # fmt: skip


parent = sample.alias("parent")
# A fork that was not given its parent's prompt: its own one is its first segment.
OWN_PROMPT = sample.c.parent_id.is_not(None) & sample.c.parent_upto.is_(None)
_GROUP_COLUMNS = ("number", "state", "reason", "epoch", "n_samples", "created_at", "ready_at", "settled_at")
_HEAD = (
    sa.select(
        *sample.c,
        *[group.c[name].label(f"group_{name}") for name in _GROUP_COLUMNS],
        prompt.c.id.label("prompt_id"),
        prompt.c.dataset,
        sa.case((~OWN_PROMPT, prompt.c.images)).label("images"),
        sa.select(parent.c.index).where(parent.c.id == sample.c.parent_id).scalar_subquery().label("parent_index"),
        sa.case((OWN_PROMPT, 0), else_=prompt.c.n_tokens).label("prompt_tokens"),
        staleness.shown_sample_lag(group.c.run_id).label("staleness"),
    )
    .select_from(group.join(sample, sample.c.group_id == group.c.id).join(prompt, prompt.c.id == group.c.prompt_id))
    .where(
        group.c.run_id == sa.bindparam("b_run"),
        group.c.number == sa.bindparam("number"),
        sample.c.index == sa.bindparam("b_index"),
    )
)

_OF_LIFE = (segment.c.sample_id == sa.bindparam("id")) & (segment.c.incarnation == sa.bindparam("life"))
_SEGMENTS = (
    sa.select(
        *[c for c in segment.c if c.name != "payload"],
        (sa.func.substr(segment.c.payload, 1, 1, type_=sa.LargeBinary)).label("format"),
    )
    .where(_OF_LIFE)
    .order_by(segment.c.seq)
    .limit(sa.bindparam("most"))
)


def merge(rows: Any, n_prompt: int) -> list[Span]:
    """Segments (by seq) as spans: a flush is a row, but a reader wants to see where something changed."""
    spans: list[Span] = []
    for r in rows:
        has_logprobs = r.format is not None and bytes(r.format) == bytes([codec.WITH_LOGPROBS])
        new = Span(
            r.seq, r.seq, n_prompt + r.start, r.n_tokens, r.kind, r.loss, r.version_min, r.version_max, r.owner,
            r.attempt, r.engine, r.request_rid, r.finish_reason, r.logprob_sum if has_logprobs else None,
            r.created_at, r.created_at,
        )  # fmt: skip
        if spans and spans[-1].finish_reason is None and _same(spans[-1], new):
            old = spans[-1]
            total = None if old.logprob_sum is None or new.logprob_sum is None else old.logprob_sum + new.logprob_sum
            spans[-1] = replace(
                old, last_seq=new.last_seq, n_tokens=old.n_tokens + new.n_tokens, logprob_sum=total,
                finish_reason=new.finish_reason, last_at=new.last_at,
            )  # fmt: skip
        else:
            spans.append(new)
    return spans


def _same(a: Span, b: Span) -> bool:
    return (a.kind, a.loss, a.version_min, a.version_max, a.owner, a.attempt, a.engine, a.request_rid) == (
        b.kind, b.loss, b.version_min, b.version_max, b.owner, b.attempt, b.engine, b.request_rid
    )  # fmt: skip


def _slice(blob: Any, skip: sa.ColumnElement[int] | int, n: sa.ColumnElement[int] | int) -> Any:
    """Bytes [skip, skip + n) of a blob, cut in the database: a payload may have a hundred megabytes."""
    # PostgreSQL's substr(bytea) takes int4 only; no payload is longer than that.
    at, size = (sa.cast(sa.literal(v) if isinstance(v, int) else v, sa.Integer) for v in (skip, n))
    return sa.func.substr(blob, at + 1, size, type_=sa.LargeBinary)


def _tokens(
    connection: sa.Connection, head: dict[str, Any], life: int, n_prompt: int, start: int, stop: int, *,
    prompt_only: bool,
) -> Tokens:  # fmt: skip
    low, high = max(0, start - CONTEXT), stop if prompt_only else stop + CONTEXT
    parts: list[tuple[Ids, Floats]] = []
    if low < n_prompt:
        n = min(high, n_prompt) - low
        data = connection.execute(
            sa.select(_slice(prompt.c.prompt_ids, 4 * low, 4 * n)).where(prompt.c.id == head["prompt_id"])
        ).scalar_one()
        parts.append(_pair(bytes(data), None, n))
    begin, end = max(0, low - n_prompt), high - n_prompt  # within the response
    if end > 0:
        skip = sa.case((segment.c.start < begin, begin - segment.c.start), else_=0)
        until = sa.case((segment.c.start + segment.c.n_tokens > end, end - segment.c.start), else_=segment.c.n_tokens)
        n_here = (until - skip).label("n_here")
        rows = connection.execute(
            sa.select(
                n_here,
                _slice(segment.c.payload, 1 + 4 * skip, 4 * (until - skip)).label("ids"),
                _slice(segment.c.payload, 1 + 4 * (segment.c.n_tokens + skip), 4 * (until - skip)).label("logprobs"),
            )
            .where(_OF_LIFE, segment.c.start < end, segment.c.start + segment.c.n_tokens > begin)
            .order_by(segment.c.seq),
            {"id": head["id"], "life": life},
        )
        parts.extend(_pair(bytes(r.ids), bytes(r.logprobs), int(r.n_here)) for r in rows)
    ids = np.concatenate([p[0] for p in parts]) if parts else np.empty(0, np.int32)
    logprobs = np.concatenate([p[1] for p in parts]) if parts else np.empty(0, np.float32)
    a, b = start - low, stop - low
    return Tokens(start, ids[a:b], logprobs[a:b], ids[:a], ids[b : b + CONTEXT])


def _pair(ids: bytes, logprobs: bytes | None, n: int) -> tuple[Ids, npt.NDArray[np.float32]]:
    if len(ids) != 4 * n or (logprobs and len(logprobs) != 4 * n):
        raise ValueError("a stored segment is damaged: its payload is shorter than its row says (samplestore check)")
    told = np.frombuffer(logprobs, "<f4") if logprobs else np.full(n, np.nan, np.float32)
    return np.frombuffer(ids, "<i4"), told


def _events(connection: sa.Connection, run_id: int, head: dict[str, Any]) -> list[dict[str, Any]]:
    """What happened to the sample, and to its run while it was generated. No index leads from a sample to its
    events, so both ends of the time are bounded and (run_id, kind, at) is used."""
    settled = head["group_settled_at"]
    until = db_now() if settled is None else sa.literal(settled + 1.0)
    generated = head["finished_at"] if head["finished_at"] is not None else db_now()
    at = event.c.at
    rows = connection.execute(
        sa.select(
            event.c.at, event.c.kind, sa.func.substr(event.c.reason, 1, 300).label("reason"), event.c.worker_id,
            event.c.version, event.c.tokens,
        )
        .where(event.c.run_id == run_id, event.c.kind.in_([*OF_SAMPLE, *OF_GROUP, *OF_RUN]))
        .where(at >= head["created_at"] - 1.0)
        .where(
            sa.or_(
                event.c.kind.in_(OF_SAMPLE) & (event.c.sample_id == head["id"]) & (at <= until),
                event.c.kind.in_(OF_GROUP) & (event.c.group_id == head["group_id"]) & (at <= until),
                event.c.kind.in_(OF_RUN) & (at <= generated),
            )
        )
        .order_by(event.c.id)
        .limit(MAX_EVENTS + 1)
    )  # fmt: skip
    return [dict(r._mapping) for r in rows]
