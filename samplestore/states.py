"""The state machines, once: statuses, terminal sets, transitions and the fate of a token.

SQL guards, CHECK constraints and partial indexes are derived from what stands here.
"""

from __future__ import annotations

from enum import StrEnum


class SampleStatus(StrEnum):
    """slime's statuses. Being owned by a worker is not a status."""

    PENDING = "pending"  # nothing decided yet: never started, or started and not yet let go
    ABORTED = "aborted"  # stopped with stored tokens; resumable
    COMPLETED = "completed"  # the model ended its answer
    TRUNCATED = "truncated"  # ended by a length limit
    FAILED = "failed"  # given up after max_attempts, or not scorable


CLAIMABLE = (SampleStatus.PENDING, SampleStatus.ABORTED)
FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
TERMINAL = (*FINISHED, SampleStatus.FAILED)

SAMPLE_TRANSITIONS: dict[SampleStatus, tuple[SampleStatus, ...]] = {
    SampleStatus.PENDING: (SampleStatus.ABORTED, *TERMINAL),
    SampleStatus.ABORTED: TERMINAL,
    # a finished sample fails when its reward can't be had; it is pending again after a requeue
    SampleStatus.COMPLETED: (SampleStatus.FAILED, SampleStatus.PENDING),
    SampleStatus.TRUNCATED: (SampleStatus.FAILED, SampleStatus.PENDING),
    SampleStatus.FAILED: (SampleStatus.PENDING,),
}


class GroupState(StrEnum):
    OPEN = "open"  # some samples are not finished
    SCORING = "scoring"  # all samples finished, some stage is not
    READY = "ready"  # a trainer may lease it
    LEASED = "leased"  # in a live batch
    CONSUMED = "consumed"  # in a committed batch
    DROPPED = "dropped"  # will not be trained on; reason says why
    STALE = "stale"  # fell out of the staleness window for good
    SUPERSEDED = "superseded"  # replaced by another group


UNFINISHED_GROUP = (GroupState.OPEN, GroupState.SCORING)
IN_WINDOW = (GroupState.OPEN, GroupState.SCORING, GroupState.READY)  # what admission counts
TAKEN = (GroupState.LEASED, GroupState.CONSUMED)  # by a trainer: the staleness to show is that of the lease

GROUP_TRANSITIONS: dict[GroupState, tuple[GroupState, ...]] = {
    GroupState.OPEN: (GroupState.SCORING, GroupState.READY, GroupState.DROPPED, GroupState.STALE),
    GroupState.SCORING: (GroupState.OPEN, GroupState.READY, GroupState.DROPPED, GroupState.STALE),
    GroupState.READY: (GroupState.OPEN, GroupState.LEASED, GroupState.DROPPED, GroupState.STALE),
    GroupState.LEASED: (GroupState.CONSUMED, GroupState.READY),
    GroupState.CONSUMED: (GroupState.READY,),  # by a rewind only
    GroupState.DROPPED: (GroupState.OPEN, GroupState.SUPERSEDED),
    GroupState.STALE: (GroupState.OPEN, GroupState.SCORING, GroupState.READY, GroupState.SUPERSEDED),  # rewind
    GroupState.SUPERSEDED: (),
}


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"  # workers claim nothing; what is in flight goes on
    DRAINING = "draining"  # workers claim nothing, finish what they hold, and leave


class WorkerState(StrEnum):
    LIVE = "live"
    DEAD = "dead"  # its heartbeat stopped; final
    GONE = "gone"  # said goodbye


COPIED_WORKER = "copied"  # key in the info of a worker that worked for the run of which this one is a copy


class WorkerKind(StrEnum):
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"
    TOOL = "tool"


class StageStatus(StrEnum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class BatchState(StrEnum):
    LEASED = "leased"
    COMMITTED = "committed"
    RELEASED = "released"  # given back before its commit
    # Committed, but the restored checkpoint has not seen it; or given back, and handed out before the checkpoint that
    # training began with anew: no checkpoint to come can have seen it (verbs/seen.py).
    REWOUND = "rewound"


LIVE_BATCH = (BatchState.LEASED, BatchState.COMMITTED)


class SegmentKind(StrEnum):
    GENERATED = "generated"
    ENVIRONMENT = "environment"


class Fate(StrEnum):
    """Where a generated token is. The ledger has one total for each."""

    IN_FLIGHT = "in_flight"
    RESUMABLE = "resumable"
    AWAITING_STAGE = "awaiting_stage"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    DROPPED = "dropped"
    STALE = "stale"
    FAILED = "failed"
    SUPERSEDED = "superseded"


# Tokens of a sample that did not fail share the fate of a group that has one.
GROUP_FATE: dict[GroupState, Fate] = {
    GroupState.READY: Fate.READY,
    GroupState.LEASED: Fate.LEASED,
    GroupState.CONSUMED: Fate.CONSUMED,
    GroupState.DROPPED: Fate.DROPPED,
    GroupState.STALE: Fate.STALE,
    GroupState.SUPERSEDED: Fate.SUPERSEDED,
}


def fate(group: str, status: str, owned: bool, superseded: bool) -> Fate:
    """The fate of a generated token, from the states of its group and sample.

    `superseded`: the token belongs to an earlier incarnation of its sample.
    statements/ledger.py holds the same rule as SQL; a test compares the two over all inputs.
    """
    if superseded:
        return Fate.SUPERSEDED
    if status == SampleStatus.FAILED:
        return Fate.FAILED
    if GroupState(group) in GROUP_FATE:
        return GROUP_FATE[GroupState(group)]
    if status in FINISHED:
        return Fate.AWAITING_STAGE
    return Fate.IN_FLIGHT if owned else Fate.RESUMABLE


class RolloutMode(StrEnum):
    """How generation and training take turns."""

    SYNC = "sync"  # a step's groups are generated for the step, all under one version of the weights
    PARTIAL = "partial"  # more groups are started than a step needs; the rest is aborted, and resumed in the next
    ASYNC = "async"  # generation never stops; the staleness window says how far it runs ahead


class WeightUpdateMode(StrEnum):
    ABORT = "abort"  # abort what is in flight, load, resume under the new weights
    KEEP = "keep"  # freeze, load, go on: nothing is aborted, a sample spans versions
    DRAIN = "drain"  # let what is in flight finish, then load


class StalenessMode(StrEnum):
    """How old a sample is, by its tokens with loss=1; statements/staleness.py defines it."""

    OLDEST = "oldest"
    NEWEST = "newest"
    MEAN = "mean"  # weighted by tokens


class StalePolicy(StrEnum):
    """What becomes of a ready group that is beyond the window when a batch is leased."""

    SKIP = "skip"  # it stays, for a batch that takes older ones
    MASK = "mask"  # it is delivered; its tokens beyond the window get loss mask 0, derived when read
    EXPIRE = "expire"  # it is closed, its tokens have fate stale
    REGENERATE = "regenerate"  # its samples begin a new incarnation, their old tokens are superseded


class FailedPolicy(StrEnum):
    DROP = "drop"  # one failed sample drops its group
    SHORT = "short"  # the group is delivered without it


EVALUATED = "evaluation"  # the reason of a group that was there to be evaluated, and was
PROMPT_REFUSED = "prompt refused: "  # how the reason of a dropped group begins whose prompt no engine can take
EVALUATION_PRIORITY = -(2**31)  # of its samples: below what a data set to train on can have (samplestore/serving.py)


class Purpose(StrEnum):
    """What a data set is for."""

    TRAIN = "train"
    EVAL = "eval"
    IMPORT = "import"  # prompts whose responses came with them: trained on, never served


class StragglerPolicy(StrEnum):
    WAIT = "wait"  # say so once in an event, and wait
    DROP = "drop"  # fail the straggler and drop the group
    SHORT = "short"  # fail the straggler and deliver the rest
