"""The token ledger in SQL: the fate of generated tokens, the kept totals, and the recount from payloads."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from samplestore import codec
from samplestore.models import LedgerTotal, Sample, SampleGroup, Segment
from samplestore.statements.lists import among
from samplestore.statements.prepared import Prepared
from samplestore.states import FINISHED, GROUP_FATE, Fate, GroupState, SampleStatus, SegmentKind
from samplestore.types import UNKNOWN_VERSION

total, sample, group, segment = (t.__table__ for t in (LedgerTotal, Sample, SampleGroup, Segment))


def fate_case() -> sa.ColumnElement[str]:
    """states.fate as SQL, over the columns of sample_group, sample and segment."""
    superseded = segment.c.incarnation < sample.c.incarnation
    return sa.case(
        (superseded, Fate.SUPERSEDED.value),
        (sample.c.status == SampleStatus.FAILED.value, Fate.FAILED.value),
        *[(group.c.state == state.value, fate.value) for state, fate in GROUP_FATE.items()],
        (sa.or_(*(sample.c.status == s.value for s in FINISHED)), Fate.AWAITING_STAGE.value),
        (sample.c.owner.is_not(None), Fate.IN_FLIGHT.value),
        else_=Fate.RESUMABLE.value,
    )


def reason_case() -> sa.ColumnElement[str]:
    """Why dropped; the empty string for every other fate."""
    dropped = (group.c.state == GroupState.DROPPED.value) & (sample.c.status != SampleStatus.FAILED.value)
    own = segment.c.incarnation == sample.c.incarnation
    return sa.case((dropped & own, sa.func.coalesce(group.c.reason, "")), else_="")


def _joined() -> sa.FromClause:
    return segment.join(sample, sample.c.id == segment.c.sample_id).join(group, group.c.id == sample.c.group_id)


def _by_key(amount: sa.ColumnElement[Any]) -> Any:
    fate, reason = fate_case().label("fate"), reason_case().label("reason")
    version = sa.func.coalesce(segment.c.version_min, UNKNOWN_VERSION).label("version")
    return (
        sa.select(fate, reason, version, sa.func.sum(amount).label("amount"))
        .select_from(_joined())
        .where(segment.c.kind == SegmentKind.GENERATED.value)
        .group_by(fate, reason, version)
    )


# Tokens of some samples or groups by (fate, reason, version): taken before and after a change, the difference is
# what the change moves. Grouping by labels keeps the CASE in one place on both databases.
OF_SAMPLES = Prepared(_by_key(segment.c.n_tokens).where(among(sample.c.id, "ids")))
OF_GROUPS = Prepared(_by_key(segment.c.n_tokens).where(among(group.c.id, "ids")))


def counted_from_payload() -> sa.ColumnElement[int]:
    """Tokens that the bytes of a payload hold, whatever the row's n_tokens says; 0 if its length can't be right.

    A pruned payload holds none any more, so its row is believed. The kept totals never came from that number alone, so
    a row that was changed later still differs from them."""
    size = sa.func.length(segment.c.payload) - 1
    first = sa.func.substr(segment.c.payload, 1, 1, type_=sa.LargeBinary)
    with_logprobs = first == sa.literal(bytes([codec.WITH_LOGPROBS]), sa.LargeBinary)
    ids_only = first == sa.literal(bytes([codec.IDS_ONLY]), sa.LargeBinary)
    # `//` is whole division on both databases
    return sa.case(
        (with_logprobs & (size % 8 == 0), size // 8),
        (ids_only & (size % 4 == 0), size // 4),
        (pruned(), segment.c.n_tokens),
        else_=0,
    )


def pruned() -> sa.ColumnElement[bool]:
    """Whether a segment's tokens were pruned. By length first: comparing whole payloads would read them all."""
    first = sa.func.substr(segment.c.payload, 1, 1, type_=sa.LargeBinary)
    return (sa.func.length(segment.c.payload) == 1) & (first == sa.literal(codec.PRUNED_PAYLOAD, sa.LargeBinary))


def recount(run_id: int) -> Any:
    """The exact side of the ledger: tokens by (fate, reason, version), from the payloads of a whole run."""
    return _by_key(counted_from_payload()).where(sample.c.run_id == run_id)


def kept(run_id: int) -> Any:
    """The kept side: totals by (fate, reason, version), summed over workers."""
    return (
        sa.select(total.c.fate, total.c.reason, total.c.version, sa.func.sum(total.c.amount).label("amount"))
        .where(total.c.run_id == run_id)
        .group_by(total.c.fate, total.c.reason, total.c.version)
        .having(sa.func.sum(total.c.amount) != 0)
    )


def _upsert(insert: Any) -> Prepared:
    """Add to a total, or start it. One statement on both databases; the two constructs differ in name only."""
    statement = insert(total)
    added = statement.on_conflict_do_update(
        index_elements=["run_id", "worker_id", "fate", "reason", "version"],
        set_={"amount": total.c.amount + statement.excluded.amount},
    )
    return Prepared(added, ["run_id", "worker_id", "fate", "reason", "version", "amount"])


ADD = {"postgresql": _upsert(postgresql.insert), "sqlite": _upsert(sqlite.insert)}
