"""What the filters of a run decide about a scored group: kept, dropped with the reason, single samples out of the loss.

The filters are the last stage of a group: claimed, fenced, tried again, given back and reaped like any other."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from samplestore import codec, filters
from samplestore.errors import InvalidSetting
from samplestore.models import Sample
from samplestore.states import GroupState
from samplestore.types import StageClaim, expect
from samplestore.verbs import groups, stages
from samplestore.verbs.tx import Tx

sample = Sample.__table__

MAX_REASON = 200  # characters: it is a key of the ledger, and PostgreSQL's keys are short
DROPPED = "filter: "  # how the reason of a group that a filter dropped begins


def filter_group(
    tx: Tx,
    claim: StageClaim,
    drop: str | None = None,
    removed: Mapping[int, str] | None = None,
    elapsed_s: float | None = None,
) -> None:
    """Settle the filter stage of a group.

    drop      why the group is dropped; None keeps it
    removed   why samples (by id) are taken out of the loss: a batch gives their tokens loss mask 0; they still count in
              their group's baseline. Of a dropped group it is recorded too.
              Samples that are not named are in the loss, whatever an earlier filter said of them
    Raises LeaseLost, InvalidSetting for a claim that is none of filters, or samples that are none of the group's.
    """
    if expect(claim, StageClaim).name != filters.STAGE:
        raise InvalidSetting("claim", claim.name, f"the stage {filters.STAGE!r}")
    out = {id: _reason(why) for id, why in (removed or {}).items()}
    ours = {member.sample_id for member in claim.members}
    if not out.keys() <= ours:
        raise InvalidSetting("removed", sorted(out.keys() - ours), f"samples of group {claim.group_id}")
    reason = None if drop is None else _reason(drop)
    details = {"drop": reason, "removed": {str(id): why for id, why in sorted(out.items())}}
    if not stages.settle(tx, claim, stages.OK, None, details, elapsed_s):
        return
    tx.hold_samples(ours)
    for id in sorted(ours):  # all that were asked about: what an earlier life of the group was told is over
        tx.execute(sa.update(sample).where(sample.c.id == id).values(removed=out.get(id)))
    if reason is None:
        groups.count(tx, claim.group_id, n_unscored=-1)
    else:
        groups.refresh(tx, claim.group_id)  # its rewards are what somebody will ask for
        groups.close(tx, [claim.group_id], GroupState.DROPPED, DROPPED + reason)


def _reason(text: str) -> str:
    return codec.clean_text(str(text) or "no reason given", MAX_REASON)
