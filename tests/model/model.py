"""A run as plain Python objects: what the store has to do, without a database and without speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from samplestore import states
from samplestore.types import Claim, StageClaim

IN_WINDOW = ("open", "scoring", "ready")
UNFINISHED = ("pending", "aborted")
ACTS = ("expire", "regenerate")


@dataclass
class Piece:
    """A segment. `low`, `high`: its weight versions; None: unknown."""

    ids: list[int]
    low: int | None
    high: int | None
    kind: str = "generated"
    loss: int = 1

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> bool:
        return self.kind == "generated" and self.loss == 1


@dataclass
class ModelStage:
    sample: ModelSample
    name: str
    incarnation: int
    status: str = "pending"  # pending, done, failed, cancelled, superseded
    owner: int | None = None
    claim: StageClaim | None = None  # what its owner knows; None also where a claim's answer was lost
    failures: int = 0
    value: float | None = None
    unparsed: bool = False  # its judge's answer could not be read

    def open(self) -> bool:
        return self.status == "pending"


@dataclass
class ModelSample:
    id: int
    group: ModelGroup
    index: int
    status: str = "pending"
    owner: int | None = None
    claim: Claim | None = None
    incarnation: int = 0
    failures: int = 0
    reason: str | None = None
    aborts: int = 0
    resumes: int = 0
    stuck: bool = False  # no progress for longer than its deadline
    lives: list[list[Piece]] = field(default_factory=lambda: [[]])  # of each incarnation
    stages: list[ModelStage] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return self.lives[-1]

    @property
    def tokens(self) -> int:
        return sum(p.n for p in self.pieces)

    @property
    def reward(self) -> float | None:
        mine = [s for s in self.stages if s.incarnation == self.incarnation]
        told = [s.value for s in mine if s.value is not None]
        return sum(told) if told and not any(s.unparsed for s in mine) else None

    def pending(self) -> list[ModelStage]:
        return [s for s in self.stages if s.open()]


@dataclass
class ModelGroup:
    id: int
    number: int
    state: str = "open"
    closed: bool = False
    straggling: bool = False  # past its deadline, and that was said
    pruned: bool = False  # its tokens are gone
    samples: list[ModelSample] = field(default_factory=list)

    def delivered(self) -> list[ModelSample]:
        return [s for s in self.samples if s.status != "failed"]


@dataclass
class ModelBatch:
    id: int
    step: int
    trainer: int
    groups: list[ModelGroup]
    lags: list[int]  # of the groups, when leased
    read: list[tuple[int, list[int], list[int], list[int]]]  # (sample, ids, loss mask, versions) as leased
    timeline: int
    asked: tuple[int, str, int, str]  # groups, staleness, window, policy
    state: str = "leased"


@dataclass
class ModelEngine:
    url: str
    label: str | None = None
    version: int | None = None
    owner: int | None = None
    held: dict[str, Any] | None = None
    failed: bool = False
    failures: int = 0
    backing_off: bool = False  # not_before lies ahead
    backed_off: bool = False  # it was set


@dataclass
class Rules:
    """The settings of a run that change what must happen."""

    on_failed: str
    stages: tuple[str, ...]
    stale: str
    staleness_mode: str
    on_straggler: str
    window: int = 4
    max_attempts: int = 2
    max_staleness: int = 1


class Model:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state, self.prompts = "running", 0
        self.groups: list[ModelGroup] = []
        self.batches: list[ModelBatch] = []
        self.engines: dict[str, ModelEngine] = {}
        self.stages: list[ModelStage] = []  # in the order in which they were made
        self.silent: set[int] = set()  # workers whose heartbeat has expired, not reaped yet
        self.zombies: list[Claim] = []
        self.stage_zombies: list[StageClaim] = []
        # version -> node of the tree of weights; node -> (parent, step). A restored version is its source's node.
        self.node: dict[int, int] = {0: 0}
        self.tree: dict[int, tuple[int | None, int | None]] = {0: (None, None)}
        self.labels: dict[int, str] = {0: "default"}
        self.paths: dict[int, str | None] = {0: None}
        self.current, self.timeline = 0, 0
        self.retention = -1  # no rewind goes below this step
        self.fork: tuple[int, int] | None = None  # (step, version) of a rewind after which nothing has happened

    # -- views

    @property
    def samples(self) -> list[ModelSample]:
        return [s for g in self.groups for s in g.samples]

    def held(self) -> list[ModelSample]:
        """Samples whose owner knows that it is."""
        return [s for s in self.samples if s.claim is not None]

    def in_window(self) -> list[ModelGroup]:
        return [g for g in self.groups if g.state in IN_WINDOW]

    def claimable(self) -> list[ModelSample]:
        """Samples that a claim takes, in its order: resumable first, siblings together."""
        if self.state != "running":
            return []
        free = [s for s in self.samples if s.owner is None and not s.group.closed and s.status in UNFINISHED]
        return sorted(free, key=lambda s: (s.status, s.group.id, s.index))

    def claimable_stages(self) -> list[ModelStage]:
        return [s for s in self.stages if s.open() and s.owner is None]

    def steps(self) -> list[int]:
        return [b.step for b in self.batches if b.state == "committed"]

    def leases(self) -> list[ModelBatch]:
        return [b for b in self.batches if b.state == "leased"]

    def fates(self) -> dict[str, int]:
        told: Counter[str] = Counter()
        for s in self.samples:
            for life, pieces in enumerate(s.lives):
                fate = states.fate(s.group.state, s.status, s.owner is not None, life < s.incarnation)
                told[fate.value] += sum(p.n for p in pieces if p.kind == "generated")
        return {k: v for k, v in told.items() if v}

    # -- staleness

    def lineage(self, node: int | None) -> list[int]:
        path = []
        while node is not None:
            path.append(node)
            node = self.tree[node][0]
        return path

    def lag(self, version: int) -> int:
        """Weight updates between a version and the current one: the path in the tree."""
        mine, there = self.lineage(self.node[self.current]), self.lineage(self.node[version])
        shared = len(set(mine) & set(there))
        return len(mine) + len(there) - 2 * shared

    def sample_staleness(self, s: ModelSample, mode: str) -> float | None:
        """None: nothing trained, or of a version that is not known."""
        trained = [p for p in s.pieces if p.trained]
        lags = [(p.n, self.lag(p.low)) for p in trained if p.low is not None]
        if not trained or len(lags) < len(trained):
            return None
        if mode == "mean":
            return sum(n * lag for n, lag in lags) / sum(n for n, _ in lags)
        return max(lag for _, lag in lags) if mode == "oldest" else min(lag for _, lag in lags)

    def staleness(self, g: ModelGroup, mode: str) -> float | None:
        """Of a finished group; None: not known."""
        trained = [s for s in g.delivered() if any(p.trained for p in s.pieces)]
        told = [self.sample_staleness(s, mode) for s in trained]
        return max((v for v in told if v is not None), default=None) if None not in told else None

    def beyond(self, g: ModelGroup, window: int, mode: str) -> bool:
        """Whether it is beyond the window for good. An unfinished one is by `oldest` as soon as one of its tokens is;
        by the others only its finished samples can be judged."""
        if g.state == "ready":
            return (self.staleness(g, mode) or 0) > window
        if mode == "oldest":
            known = [p.low for s in g.delivered() for p in s.pieces if p.trained and p.low is not None]
            return any(self.lag(version) > window for version in known)
        done = [s for s in g.samples if s.status in ("completed", "truncated")]
        return any((self.sample_staleness(s, mode) or 0) > window for s in done)

    def too_old(self, g: ModelGroup, policy: str) -> None:
        if policy == "regenerate":
            self.regenerate(g)
        else:
            self.close(g, "stale")

    def sweep(self) -> None:
        """What a publish, an admission and a rewind do with groups that no batch of this run can take."""
        rules = self.rules
        for g in self.groups:
            if g.state == "ready" and self.staleness(g, "oldest") is None:
                self.too_old(g, rules.stale)
        if rules.stale in ACTS:
            self.settle_beyond(rules.max_staleness, rules.staleness_mode, rules.stale, IN_WINDOW)

    def settle_beyond(self, window: int, mode: str, policy: str, of_states: tuple[str, ...]) -> None:
        for g in self.groups:
            if g.state in of_states and self.beyond(g, window, mode):
                self.too_old(g, policy)

    def occupied(self) -> int:
        """Groups that admission counts."""
        rules = self.rules
        lags = {g.id: self.staleness(g, rules.staleness_mode) for g in self.in_window() if g.state == "ready"}
        passed = [lag for lag in lags.values() if lag is not None and lag > rules.max_staleness]
        return len(self.in_window()) - (len(passed) if rules.stale == "skip" else 0)

    def deliverable(self, window: int, mode: str, policy: str) -> list[tuple[ModelGroup, float]]:
        """(group, staleness) that a batch may take, in order."""
        ready = [(g, self.staleness(g, mode)) for g in self.groups if g.state == "ready"]
        return [(g, lag) for g, lag in ready if lag is not None and (policy == "mask" or lag <= window)]

    def restored(self, step: int) -> int:
        """The node whose weights a rewind to the checkpoint of `step` restores."""
        for node in self.lineage(self.node[self.current]):
            at = self.tree[node][1]
            if node == 0 or (at is not None and at <= step):
                return node
        raise AssertionError("node 0 is every version's ancestor")

    # -- what happens to samples and groups

    def lose(self, s: ModelSample, *, stopped: bool = False) -> None:
        """The owner of `s` has lost it. `stopped`: that counts as an abort, unless one has just been counted."""
        if s.claim is not None:
            self.zombies.append(s.claim)
        if stopped and s.owner is not None and s.tokens and s.reason != "abort":
            s.aborts += 1
        s.claim = s.owner = None
        s.stuck = False
        if s.status in UNFINISHED:
            s.status = "aborted" if s.tokens else "pending"

    def lose_stage(self, stage: ModelStage) -> None:
        if stage.claim is not None:
            self.stage_zombies.append(stage.claim)
        stage.claim = stage.owner = None

    def finished(self, s: ModelSample, status: str) -> list[ModelStage]:
        s.status, s.claim, s.owner, s.stuck = status, None, None, False
        made = [ModelStage(s, name, s.incarnation) for name in self.rules.stages]
        s.stages += made
        self.stages += made
        self.settle(s.group)
        return made

    def close(self, g: ModelGroup, state: str) -> None:
        g.state, g.closed = state, True
        for s in g.samples:
            if s.owner is not None:
                self.lose(s)
            for stage in s.pending():
                self.lose_stage(stage)
                stage.status = "cancelled"

    def reopen(self, g: ModelGroup) -> None:
        g.closed = False
        for s in g.samples:
            for stage in s.stages:
                if stage.status == "cancelled" and stage.incarnation == s.incarnation:
                    stage.status = "pending"
        g.state = self.derived(g)

    def derived(self, g: ModelGroup) -> str:
        if any(s.status in UNFINISHED for s in g.samples):
            return "open"
        return "scoring" if any(s.pending() for s in g.samples) else "ready"

    def settle(self, g: ModelGroup) -> None:
        """What a finished, scored or failed sample does to its group."""
        if g.state not in ("open", "scoring"):
            return
        failed = sum(s.status == "failed" for s in g.samples)
        g.state = self.derived(g)
        short = self.rules.on_failed == "short" or (g.straggling and self.rules.on_straggler == "short")
        if g.state == "ready" and (failed == len(g.samples) or (failed and not short)):
            self.close(g, "dropped")

    def give_up(self, s: ModelSample) -> None:
        """A sample is failed for good."""
        s.status = "failed"
        for stage in s.pending():
            self.lose_stage(stage)
            stage.status = "failed"
        self.settle(s.group)
        if self.rules.on_failed == "drop" and s.group.state in IN_WINDOW:
            self.close(s.group, "dropped")

    def straggle(self, g: ModelGroup) -> None:
        """The group has passed its deadline: some of it is finished, some is not."""
        g.straggling = True
        if self.rules.on_straggler == "wait":
            return
        for s in g.samples:
            if s.status in UNFINISHED:
                self.lose(s)
                s.status = "failed"
        if self.rules.on_straggler == "drop":
            self.close(g, "dropped")
        else:
            self.settle(g)

    def restart(self, s: ModelSample) -> None:
        """A new incarnation."""
        for stage in s.stages:
            if stage.open():
                self.lose_stage(stage)
                stage.status = "superseded"
            elif stage.status == "cancelled":
                stage.status = "superseded"  # of an earlier incarnation now: it never comes back
        self.lose(s)
        s.status, s.failures, s.reason, s.aborts, s.resumes = "pending", 0, None, 0, 0
        s.incarnation += 1
        s.lives.append([])

    def requeue(self, s: ModelSample) -> None:
        self.restart(s)
        self.reopen(s.group)

    def regenerate(self, g: ModelGroup) -> None:
        for s in g.samples:
            if s.tokens or s.status == "failed":
                self.restart(s)
        g.straggling = False
        self.reopen(g)

    def gone(self, worker: int) -> None:
        """A worker or trainer left, or was found dead."""
        self.silent.discard(worker)
        for batch in self.leases():
            if batch.trainer == worker:
                self.give_back(batch, "released")
        for s in self.samples:
            if s.owner == worker:
                self.lose(s, stopped=True)
            for stage in s.pending():
                if stage.owner == worker:
                    self.lose_stage(stage)
        for engine in self.engines.values():
            if engine.owner == worker:
                engine.owner = None

    def give_back(self, batch: ModelBatch, state: str) -> None:
        batch.state = state
        for g in batch.groups:
            g.state = "ready"
