"""mask_offpolicy: which tokens of a sample are older than its resume under other weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplestore.states import SegmentKind


def resumed_at(pieces: Sequence[Any]) -> int:
    """The place, among a sample's segments in order, from which on its tokens are no older than its last resume under
    other weights; 0 where there was none. What comes before it is off-policy, as slime's option of that name has it.

    A resume is a request that goes on from tokens of an earlier one, or of an earlier owner. Whether the weights had
    changed is told by the versions on both sides of it; a version that is not known counts as another. Under
    weight_update="keep" a request goes on while the weights change: nothing was resumed, and nothing is masked.
    """
    at, before = 0, None
    for place, piece in enumerate(pieces):
        if piece.kind != SegmentKind.GENERATED:
            continue
        if before is not None:
            went_on = (piece.attempt, piece.request_rid) != (before.attempt, before.request_rid)
            same = piece.version_min is not None and piece.version_min == before.version_max
            if went_on and not same:
                at = place
        before = piece
    return at
