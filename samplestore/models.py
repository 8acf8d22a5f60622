"""The schema, as ORM classes. Hot statements are Core on the same tables.

Alembic is the only way to a database with this schema (alembic/versions); a test compares the two.
Times are seconds since the epoch by the database's clock. Ids never leave a database; the portable id of a
sample is run_uuid/group/sample/incarnation. Blobs stand last in their row, so that reading the columns before
them never touches the overflow pages.

Relationships and the properties that decode payloads are for readers in `store.session()`; nothing is written by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from samplestore import states

if TYPE_CHECKING:
    import numpy.typing as npt

    from samplestore.types import Floats, Ids

# BigInteger would not become SQLite's autoincrementing rowid, hence the variant.
Id = BigInteger().with_variant(Integer, "sqlite")
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

ID: Any = {"autoincrement": True, "primary_key": True}
AUTO = {"sqlite_autoincrement": True}  # ids are handed out, so they must never be used twice
# Room for in-page updates, and vacuums by a hundredth of the table: a claim walks over what was claimed since the last.
HOT = {
    **AUTO,
    "postgresql_with": {
        "fillfactor": 80, "autovacuum_vacuum_scale_factor": 0.01, "autovacuum_vacuum_threshold": 1000,
    },
}  # fmt: skip


def one_of(column: str, values: Iterable[str]) -> str:
    """SQL text `column IN ('a', 'b')`, for CHECKs and partial indexes. Values come from states.py only."""
    return f"{column} IN ({', '.join(repr(str(v)) for v in values)})"


def partial(where: str) -> dict[str, Any]:
    return {"sqlite_where": text(where), "postgresql_where": text(where)}


def related(doc: str, join: str | None = None, order: str | None = None) -> Any:
    """Rows of another table, loaded when they are first asked for. join: where no single foreign key says it."""
    return relationship(primaryjoin=join, order_by=order or False, viewonly=True, doc=doc)


class Base(DeclarativeBase):
    if TYPE_CHECKING:
        __table__: ClassVar[Table]  # SQLAlchemy promises less; every class here is mapped to a table

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: Id,
        float: Double(),
        str: Text(),
        bytes: LargeBinary(),
        dict[str, Any]: Json,
    }


class Run(Base):
    """One training run: settings, serving order, current weights, control flags."""

    __tablename__ = "run"
    __table_args__ = (CheckConstraint(one_of("state", states.RunState), name="state"), AUTO)

    id: Mapped[int] = mapped_column(Id, **ID)
    uuid: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(default="running")
    created_at: Mapped[float]
    settings: Mapped[dict[str, Any]]
    timeline: Mapped[int] = mapped_column(default=0)
    current_version: Mapped[int] = mapped_column(default=0)
    last_version: Mapped[int] = mapped_column(default=0, comment="highest version ever given out; never reused")
    n_prompts: Mapped[int] = mapped_column(default=0)
    n_groups: Mapped[int] = mapped_column(default=0, comment="groups ever created; the next group's number")
    # The serving order (statements/order.py): prompts [chunk_start, chunk_stop) are served in a seeded permutation.
    epoch: Mapped[int] = mapped_column(default=0)
    chunk_start: Mapped[int] = mapped_column(default=0)
    chunk_stop: Mapped[int] = mapped_column(default=0)
    chunk_next: Mapped[int] = mapped_column(default=0)
    abort_seq: Mapped[int] = mapped_column(default=0, comment="raised by abort_inflight; workers follow it")
    abort_reason: Mapped[str | None]
    retention_step: Mapped[int] = mapped_column(default=-1, comment="steps up to here were pruned; no rewind below")
    # Steps of the modes sync and partial (verbs/steps.py). The defaults stand in the database too: added later.
    step_filled: Mapped[int] = mapped_column(
        default=-1, server_default=text("-1"), comment="weight version for which a step was filled with groups"
    )
    step_over: Mapped[int] = mapped_column(
        default=-1, server_default=text("-1"), comment="weight version for which enough groups are ready or taken"
    )


class Timeline(Base):
    """A branch of training. A rewind starts one."""

    __tablename__ = "timeline"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int | None]
    forked_at_step: Mapped[int | None]
    created_at: Mapped[float]

    run: Mapped[Run] = related("")


class WeightVersionRow(Base):
    """A set of weights. depth and common_depth make staleness a subtraction (statements/staleness.py)."""

    __tablename__ = "weight_version"
    __table_args__ = (UniqueConstraint("run_id", "label"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    timeline: Mapped[int]
    parent: Mapped[int | None]
    step: Mapped[int | None]
    depth: Mapped[int] = mapped_column(comment="weight updates since the run's first weights")
    common_depth: Mapped[int] = mapped_column(comment="depth of the last ancestor shared with the current timeline")
    label: Mapped[str] = mapped_column(comment="what engines report as weight_version")
    path: Mapped[str | None]
    created_at: Mapped[float]
    abandoned_at: Mapped[float | None] = mapped_column(comment="when a rewind left it behind")

    run: Mapped[Run] = related("")


class PromptRow(Base):
    """One dataset row. position is dense within a run, so that the serving order needs no scan."""

    __tablename__ = "prompt"
    __table_args__ = (
        UniqueConstraint("run_id", "content_key"),
        UniqueConstraint("run_id", "position"),
        Index("uq_prompt_dataset_position", "run_id", "dataset", "dataset_position", unique=True),
        AUTO,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    position: Mapped[int]  # negative: of an evaluation's data set, never served for training
    content_key: Mapped[str]
    dataset: Mapped[str]
    n_tokens: Mapped[int]
    created_at: Mapped[float]
    prompt: Mapped[Any] = mapped_column(Json, nullable=False)
    label: Mapped[Any | None] = mapped_column(Json)
    meta: Mapped[dict[str, Any]] = mapped_column("metadata", Json)
    tools: Mapped[Any | None] = mapped_column(Json)
    template_args: Mapped[Any | None] = mapped_column(Json)
    prompt_ids: Mapped[bytes] = mapped_column(comment="int32 little-endian")
    dataset_position: Mapped[int | None] = mapped_column(comment="dense within its data set")
    images: Mapped[Any | None] = mapped_column(Json, comment="digests of its images, in order")

    run: Mapped[Run] = related("")
    groups: Mapped[list[SampleGroup]] = related("made of it, by number", order="SampleGroup.number")

    @property
    def tokens(self) -> Ids:
        """Token ids, int32 [n_tokens]."""
        from samplestore import codec  # it loads numpy, which commands can do without

        return codec.ids_from(self.prompt_ids)


class PromptImage(Base):
    """An image that prompts of a run show: its bytes once, however many prompts have it."""

    __tablename__ = "prompt_image"

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True, comment="hex sha256 of the bytes")
    media_type: Mapped[str]
    n_bytes: Mapped[int]
    data: Mapped[bytes]


class DatasetRow(Base):
    """A named set of a run's prompts, and how far its own serving order stands (where the run serves by data set)."""

    __tablename__ = "dataset"
    __table_args__ = (CheckConstraint(one_of("purpose", states.Purpose), name="purpose"),)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    purpose: Mapped[str] = mapped_column(default="train")
    n_prompts: Mapped[int] = mapped_column(default=0)
    n_served: Mapped[int] = mapped_column(default=0, comment="groups admitted from it")
    epoch: Mapped[int] = mapped_column(default=0)
    chunk_start: Mapped[int] = mapped_column(default=0)
    chunk_stop: Mapped[int] = mapped_column(default=0)
    chunk_next: Mapped[int] = mapped_column(default=0)


class EvaluationRow(Base):
    """One evaluation of a run's weights on a data set."""

    __tablename__ = "evaluation"
    __table_args__ = (UniqueConstraint("run_id", "dataset", "version", "settings_key"), AUTO)

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    dataset: Mapped[str]
    version: Mapped[int] = mapped_column(comment="the run's current version when it began")
    n_samples: Mapped[int] = mapped_column(comment="of each prompt")
    n_groups: Mapped[int]
    settings_key: Mapped[str] = mapped_column(comment="sha256 of what was asked")
    max_new_tokens: Mapped[int | None]
    created_at: Mapped[float]
    sampling: Mapped[dict[str, Any]] = mapped_column(Json, comment="over the run's")

    run: Mapped[Run] = related("")
    groups: Mapped[list[SampleGroup]] = related(
        "generated for it, by number", "EvaluationRow.id == foreign(SampleGroup.evaluation_id)", "SampleGroup.number"
    )


class SampleGroup(Base):
    """samples_per_prompt samples of one prompt: what is trained on, filtered, dropped as one."""

    __tablename__ = "sample_group"
    __table_args__ = (
        CheckConstraint(one_of("state", states.GroupState), name="state"),
        CheckConstraint("n_open >= 0 AND n_unscored >= 0", name="counters"),
        UniqueConstraint("run_id", "number"),
        Index("ix_sample_group_state", "run_id", "state", "number"),
        Index("ix_sample_group_window", "run_id", "number", **partial(one_of("state", states.IN_WINDOW))),
        Index("ix_sample_group_prompt_id", "prompt_id"),  # a prompt that is deleted looks for its groups
        Index("ix_sample_group_evaluation", "evaluation_id", **partial("evaluation_id IS NOT NULL")),
        Index("uq_sample_group_import", "run_id", "import_key", unique=True, **partial("import_key IS NOT NULL")),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    prompt_id: Mapped[int] = mapped_column(ForeignKey("prompt.id"))
    number: Mapped[int] = mapped_column(comment="serving order within the run")
    epoch: Mapped[int]
    timeline: Mapped[int]
    state: Mapped[str] = mapped_column(default="open")
    reason: Mapped[str | None] = mapped_column(comment="why dropped or stale")
    n_samples: Mapped[int]
    n_open: Mapped[int] = mapped_column(comment="samples not finished")
    n_unscored: Mapped[int] = mapped_column(default=0, comment="stages not settled")
    n_failed: Mapped[int] = mapped_column(default=0)
    n_tokens: Mapped[int | None] = mapped_column(comment="response tokens, set when ready")
    oldest_version: Mapped[int | None] = mapped_column(comment="stalest version of a trained token, set when ready")
    reward_mean: Mapped[float | None]
    reward_std: Mapped[float | None]
    created_at: Mapped[float]
    ready_at: Mapped[float | None]
    settled_at: Mapped[float | None]
    straggling_at: Mapped[float | None] = mapped_column(comment="when the group passed its deadline")
    superseded_by: Mapped[int | None]
    pruned_at: Mapped[float | None] = mapped_column(comment="when its tokens went")
    evaluation_id: Mapped[int | None] = mapped_column(comment="NULL: it is there to be trained on")
    import_key: Mapped[str | None] = mapped_column(comment="what an import came from")

    run: Mapped[Run] = related("")
    prompt: Mapped[PromptRow] = related("")
    samples: Mapped[list[Sample]] = related("by index", order="Sample.index")
    memberships: Mapped[list[BatchGroup]] = related("batches that hold or held it", order="BatchGroup.batch_id")


class Sample(Base):
    """One trajectory. Every later write is guarded by (id, owner, attempt)."""

    __tablename__ = "sample"
    __table_args__ = (
        CheckConstraint(one_of("status", states.SampleStatus), name="status"),
        CheckConstraint(f"owner IS NULL OR {one_of('status', states.CLAIMABLE)}", name="owned_is_unfinished"),
        UniqueConstraint("group_id", "index"),
        # 'aborted' sorts before 'pending': resumable samples come first.
        Index(
            "ix_sample_claim",
            "run_id",
            "priority",
            "status",
            "group_id",
            "index",
            **partial(f"owner IS NULL AND closed = 0 AND {one_of('status', states.CLAIMABLE)}"),
        ),
        Index("ix_sample_owned", "owner", **partial("owner IS NOT NULL")),
        Index("ix_sample_run_status", "run_id", "status"),
        Index("ix_sample_resumed", "run_id", **partial("n_resumes > 0")),
        Index("ix_sample_parent", "parent_id", **partial("parent_id IS NOT NULL")),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    group_id: Mapped[int] = mapped_column(ForeignKey("sample_group.id"))
    index: Mapped[int] = mapped_column(comment="place within the group")
    incarnation: Mapped[int] = mapped_column(default=0)
    status: Mapped[str] = mapped_column(default="pending")
    closed: Mapped[int] = mapped_column(default=0, comment="1: its group does not want it any more")
    priority: Mapped[int] = mapped_column(default=0, comment="lower goes first")
    not_before: Mapped[float] = mapped_column(default=0.0, comment="back-off after a failure")
    owner: Mapped[int | None] = mapped_column(comment="worker.id")
    attempt: Mapped[int] = mapped_column(default=0, comment="the fence: rises at every change of owner")
    let_go: Mapped[int] = mapped_column(
        default=-1, comment="attempt that its owner ended itself; makes repeats harmless"
    )
    failures: Mapped[int] = mapped_column(default=0)
    n_tokens: Mapped[int] = mapped_column(default=0, comment="response tokens of this incarnation")
    n_loss_tokens: Mapped[int] = mapped_column(default=0)
    n_segments: Mapped[int] = mapped_column(default=0, comment="the next seq")
    n_aborts: Mapped[int] = mapped_column(default=0)
    n_resumes: Mapped[int] = mapped_column(default=0)
    version_min: Mapped[int | None]
    version_max: Mapped[int | None]
    oldest_version: Mapped[int | None] = mapped_column(comment="stalest version of a token with loss=1")
    version_unknown: Mapped[int] = mapped_column(default=0, comment="1: some trained token has no known version")
    logprob_sum: Mapped[float] = mapped_column(default=0.0)
    reward: Mapped[float | None]
    finish_reason: Mapped[str | None]
    error: Mapped[str | None]
    parent_id: Mapped[int | None] = mapped_column(comment="fan-out: whose prefix this sample shares")
    parent_upto: Mapped[int | None] = mapped_column(comment="fan-out: tokens of the parent that it shares")
    created_at: Mapped[float]
    claimed_at: Mapped[float | None]
    progress_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    finished_by: Mapped[int | None] = mapped_column(comment="worker.id")
    removed: Mapped[str | None] = mapped_column(comment="why its tokens carry no loss")
    n_without_logprob: Mapped[int] = mapped_column(
        default=0, server_default=text("0"), comment="trained tokens that came without a log-prob (imports)"
    )

    run: Mapped[Run] = related("")
    group: Mapped[SampleGroup] = related("")
    segments: Mapped[list[Segment]] = related(
        "of its present life, in order",
        "and_(Sample.id == foreign(Segment.sample_id), Sample.incarnation == foreign(Segment.incarnation))",
        "Segment.seq",
    )
    all_segments: Mapped[list[Segment]] = related("of every life", order="(Segment.incarnation, Segment.seq)")
    requests: Mapped[list[Request]] = related("calls to engines, in order", order="Request.id")
    stages: Mapped[list[Stage]] = related("rewards and the like, of every life", order="Stage.id")
    episode_steps: Mapped[list[EpisodeStep]] = related(
        "of every life", order="(EpisodeStep.incarnation, EpisodeStep.number)"
    )
    parent: Mapped[Sample | None] = relationship(
        primaryjoin="foreign(Sample.parent_id) == remote(Sample.id)", viewonly=True, doc="whose prefix a fork shares"
    )
    forks: Mapped[list[Sample]] = related("", "Sample.id == foreign(Sample.parent_id)", "Sample.id")

    @property
    def tokens(self) -> Ids:
        """Response token ids of its present life, int32 [n_tokens]; of a fork without what it shares with its parent.
        Raises TokensPruned."""
        return _joined([segment.tokens for segment in self.segments], "int32")

    @property
    def logprobs(self) -> Floats:
        """Log-probs beside `tokens`, float32 [n_tokens]; NaN where a token has none. Raises TokensPruned."""
        parts = [(segment.logprobs, segment.n_tokens) for segment in self.segments]
        return _joined([_nan(n) if probs is None else probs for probs, n in parts], "float32")

    @property
    def loss_mask(self) -> Ids:
        """Which of `tokens` are trained on, int32 [n_tokens] of 0 and 1, before any policy of a batch."""
        return _joined([[segment.loss] * segment.n_tokens for segment in self.segments], "int32")


class Segment(Base):
    """An append-only run of tokens of one sample. A flush is a row."""

    __tablename__ = "segment"
    __table_args__ = (
        CheckConstraint(one_of("kind", states.SegmentKind), name="kind"),
        CheckConstraint("n_tokens > 0", name="n_tokens"),
        # payloads hardly compress: TOAST would spend time for nothing
    )

    sample_id: Mapped[int] = mapped_column(ForeignKey("sample.id"), primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(comment="response position of its first token")
    n_tokens: Mapped[int]
    kind: Mapped[str]
    loss: Mapped[int]
    version_min: Mapped[int | None]
    version_max: Mapped[int | None]
    owner: Mapped[int]
    attempt: Mapped[int]
    request_rid: Mapped[str | None]
    engine: Mapped[str | None]
    finish_reason: Mapped[str | None]
    logprob_sum: Mapped[float]
    created_at: Mapped[float]
    payload: Mapped[bytes] = mapped_column(comment="codec.py: format byte, ids int32, log-probs float32")

    sample: Mapped[Sample] = related("")
    arrays: Mapped[list[SegmentArray]] = related(
        "named arrays beside it",
        "and_(Segment.sample_id == foreign(SegmentArray.sample_id), Segment.seq == foreign(SegmentArray.seq), "
        "Segment.incarnation == foreign(SegmentArray.incarnation))",
        "SegmentArray.name",
    )

    @property
    def tokens(self) -> Ids:
        """Token ids, int32 [n_tokens]. Raises TokensPruned, ValueError where the payload is damaged."""
        from samplestore import codec

        return codec.decode(self.payload)[0]

    @property
    def logprobs(self) -> Floats | None:
        """Log-probs, float32 [n_tokens]; None where they came without. Raises as `tokens` does."""
        from samplestore import codec

        return codec.decode(self.payload)[1]


def _joined(parts: list[Any], dtype: str) -> npt.NDArray[Any]:
    import numpy as np

    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _nan(n: int) -> Any:
    import numpy as np

    return np.full(n, np.nan, np.float32)


class SegmentArray(Base):
    """A named array beside a segment: routed experts, teacher log-probs, ..."""

    __tablename__ = "segment_array"
    __table_args__ = (
        Index("ix_segment_array_size", "name", "n_bytes", "sample_id"),
        Index("ix_segment_array_sidecar", "sidecar", **partial("sidecar IS NOT NULL")),
    )

    sample_id: Mapped[int] = mapped_column(ForeignKey("sample.id"), primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    dtype: Mapped[str]
    shape: Mapped[Any] = mapped_column(Json, nullable=False)
    codec: Mapped[str]
    sidecar: Mapped[str | None]  # name of the file that holds it, under the run's array_url
    created_at: Mapped[float]
    n_bytes: Mapped[int | None] = mapped_column(comment="of the array, wherever it lies")
    data: Mapped[bytes | None]


class Stage(Base):
    """Work on a finished sample: a reward, a filter, a teacher. Claimed, fenced and reaped like a sample."""

    __tablename__ = "stage"
    __table_args__ = (
        CheckConstraint(one_of("status", states.StageStatus), name="status"),
        UniqueConstraint("sample_id", "incarnation", "name"),
        Index(
            "uq_stage_group", "group_id", "incarnation", "name", unique=True, **partial("sample_id IS NULL")
        ),  # NULL differs from NULL in the constraint above
        Index("ix_stage_claim", "run_id", "id", **partial("owner IS NULL AND status = 'pending'")),
        Index("ix_stage_owned", "owner", **partial("owner IS NOT NULL")),
        Index("ix_stage_group_id", "group_id"),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    group_id: Mapped[int] = mapped_column(ForeignKey("sample_group.id"))
    sample_id: Mapped[int | None] = mapped_column(ForeignKey("sample.id"), comment="NULL: work on the whole group")
    incarnation: Mapped[int] = mapped_column(default=0)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(default="pending")
    owner: Mapped[int | None]
    attempt: Mapped[int] = mapped_column(default=0)
    let_go: Mapped[int] = mapped_column(default=-1)
    failures: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[float] = mapped_column(default=0.0)
    outcome: Mapped[str | None] = mapped_column(comment="ok, verifier_error, verifier_timeout")
    value: Mapped[float | None]
    elapsed_s: Mapped[float | None]
    error: Mapped[str | None]
    created_at: Mapped[float]
    claimed_at: Mapped[float | None]
    settled_at: Mapped[float | None]
    details: Mapped[dict[str, Any] | None] = mapped_column(Json)

    sample: Mapped[Sample | None] = related("")
    group: Mapped[SampleGroup] = related("")


class EpisodeStep(Base):
    """A recorded call of a multi-turn episode: `started` before, `done` after (workers/episodes.py)."""

    __tablename__ = "episode_step"
    __table_args__ = (CheckConstraint("state IN ('started', 'done', 'failed')", name="state"),)

    sample_id: Mapped[int] = mapped_column(ForeignKey("sample.id"), primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    state: Mapped[str]
    idempotency_key: Mapped[str]
    attempt: Mapped[int]
    started_at: Mapped[float]
    settled_at: Mapped[float | None]
    error: Mapped[str | None]
    result: Mapped[Any | None] = mapped_column(Json)
    kind: Mapped[str] = mapped_column(default="step", server_default=text("'step'"), comment="which call of ctx")
    start: Mapped[int | None] = mapped_column(comment="response position where it began")
    stop: Mapped[int | None] = mapped_column(comment="response position where it ended")
    asked: Mapped[Any | None] = mapped_column(Json, comment="what the function asked for; a replay must ask the same")

    sample: Mapped[Sample] = related("")


class Worker(Base):
    """One process start; trainers too. Never reused, found by id and never by name.

    No index holds `heartbeat`: on PostgreSQL each beat would rewrite it.
    """

    __tablename__ = "worker"
    __table_args__ = (
        CheckConstraint(one_of("state", states.WorkerState), name="state"),
        CheckConstraint(one_of("kind", states.WorkerKind), name="kind"),
        Index("ix_worker_live", "id", **partial("state = 'live'")),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    kind: Mapped[str]
    name: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    state: Mapped[str] = mapped_column(default="live")
    started_at: Mapped[float]
    heartbeat: Mapped[float]
    ttl_s: Mapped[float]
    ended_at: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(comment="fatal error, shown to a waiting trainer")
    info: Mapped[dict[str, Any]]

    run: Mapped[Run] = related("")


class EngineRow(Base):
    """An engine of a run and the weights it serves. Driving its update is a claim: owner and attempt."""

    __tablename__ = "engine"
    __table_args__ = (
        CheckConstraint("state IN ('live', 'failed', 'gone')", name="state"),
        Index("uq_engine_live_url", "url", unique=True, **partial("state <> 'gone'")),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    url: Mapped[str]
    state: Mapped[str] = mapped_column(default="live")
    version: Mapped[int | None] = mapped_column(comment="what it serves; NULL: unknown")
    label: Mapped[str | None] = mapped_column(comment="what it reports")
    owner: Mapped[int | None] = mapped_column(comment="worker.id of who drives its update")
    attempt: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[float] = mapped_column(default=0.0)
    error: Mapped[str | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    # What the engine tells of itself; NULL: not told.
    counter: Mapped[int | None] = mapped_column(comment="tokens that it has generated, as it counted when last read")
    counter_at: Mapped[float | None] = mapped_column(comment="when that was; rises with every reading")
    # The default stands in the database too: the column was added to tables that have rows.
    generated_tokens: Mapped[int] = mapped_column(
        server_default=text("0"), comment="sum of the counter's steps since the run knows the engine"
    )
    context_length: Mapped[int | None]
    release: Mapped[str | None] = mapped_column(comment="the version of SGLang")
    running: Mapped[int | None] = mapped_column(comment="requests when last seen")
    queued: Mapped[int | None]

    run: Mapped[Run] = related("")


class Request(Base):
    """One call to an engine: generated = stored + lost(reason)."""

    __tablename__ = "request"
    __table_args__ = (
        UniqueConstraint("rid"),
        Index("ix_request_sample_id", "sample_id"),
        Index("ix_request_open", "worker_id", **partial("finished_at IS NULL")),
        HOT,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    rid: Mapped[str]
    sample_id: Mapped[int] = mapped_column(ForeignKey("sample.id"))
    incarnation: Mapped[int]
    attempt: Mapped[int]
    worker_id: Mapped[int]
    engine: Mapped[str | None]
    prompt_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    generated_tokens: Mapped[int | None] = mapped_column(comment="NULL: the worker died before it knew")
    stored_tokens: Mapped[int] = mapped_column(default=0)
    lost_tokens: Mapped[int | None]
    lost_reason: Mapped[str | None]
    resumed_tokens: Mapped[int] = mapped_column(default=0, comment="response tokens that a resume carried over")
    retractions: Mapped[int | None]
    temperature: Mapped[float | None] = mapped_column(comment="the temperature that the log-probs carry")
    queue_s: Mapped[float | None]
    e2e_s: Mapped[float | None]
    finish_reason: Mapped[str | None]
    started_at: Mapped[float]
    finished_at: Mapped[float | None]
    spec: Mapped[dict[str, Any] | None] = mapped_column(Json)
    sampling_seed: Mapped[int | None] = mapped_column(comment="the seed that was asked for")
    greedy: Mapped[int | None] = mapped_column(comment="1: temperature 0, no draw at all")

    sample: Mapped[Sample] = related("")
    worker: Mapped[Worker | None] = related("", "foreign(Request.worker_id) == Worker.id")


class BatchRow(Base):
    """Groups leased by a trainer for one step."""

    __tablename__ = "batch"
    __table_args__ = (
        CheckConstraint(one_of("state", states.BatchState), name="state"),
        Index(
            "uq_batch_step",
            "run_id",
            "timeline",
            "step",
            unique=True,
            **partial(one_of("state", states.LIVE_BATCH)),
        ),
        Index("ix_batch_owned", "owner", **partial("state = 'leased'")),
        Index("ix_batch_run", "run_id", "id"),  # a run's newest batches, however many other runs have
        AUTO,
    )

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    timeline: Mapped[int]
    step: Mapped[int]
    state: Mapped[str] = mapped_column(default="leased")
    owner: Mapped[int]
    attempt: Mapped[int] = mapped_column(default=0)
    current_version: Mapped[int] = mapped_column(comment="the run's current version when it was leased")
    n_groups: Mapped[int]
    n_samples: Mapped[int]
    n_tokens: Mapped[int]
    reason: Mapped[str | None]
    created_at: Mapped[float]
    settled_at: Mapped[float | None]
    policy: Mapped[dict[str, Any]]
    plan: Mapped[Any | None] = mapped_column(Json)

    run: Mapped[Run] = related("")
    members: Mapped[list[BatchGroup]] = related("its groups, in order", order="BatchGroup.position")


class BatchGroup(Base):
    """Which groups a batch holds. The partial unique index is the proof that a group is in one live batch."""

    __tablename__ = "batch_group"
    __table_args__ = (
        CheckConstraint(one_of("state", states.BatchState), name="state"),
        Index("uq_batch_group_live", "group_id", unique=True, **partial(one_of("state", states.LIVE_BATCH))),
        Index("ix_batch_group_group_id", "group_id"),  # a group that is deleted looks for its batches
    )

    batch_id: Mapped[int] = mapped_column(ForeignKey("batch.id"), primary_key=True)
    group_id: Mapped[int] = mapped_column(ForeignKey("sample_group.id"), primary_key=True)
    position: Mapped[int]
    state: Mapped[str] = mapped_column(default="leased")
    staleness: Mapped[int | None] = mapped_column(comment="at the lease")

    batch: Mapped[BatchRow] = related("")
    group: Mapped[SampleGroup] = related("")


class LedgerTotal(Base):
    """Generated tokens by fate: the ledger's kept side. worker_id 0 holds what belongs to no live worker."""

    __tablename__ = "ledger_total"
    __table_args__ = (CheckConstraint(one_of("fate", states.Fate), name="fate"), {**HOT, "sqlite_autoincrement": False})

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    worker_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fate: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, comment="-1: unknown")
    amount: Mapped[int]


class RequestTotal(Base):
    """What a run's requests come to, kept as they end (statements/totals.py). worker_id as in ledger_total."""

    __tablename__ = "request_total"
    __table_args__ = ({**HOT, "sqlite_autoincrement": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    worker_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reason: Mapped[str] = mapped_column(primary_key=True, comment="why tokens were lost; empty: none, or nobody said")
    ended: Mapped[int] = mapped_column(comment="requests of which it is known how much was generated")
    unknown: Mapped[int] = mapped_column(comment="requests that ended without")
    generated: Mapped[int] = mapped_column(comment="tokens, as all below but resumes")
    stored: Mapped[int]
    prompt: Mapped[int]
    cached: Mapped[int]
    lost: Mapped[int]
    resumes: Mapped[int] = mapped_column(comment="requests that went on from stored tokens")
    resumed: Mapped[int] = mapped_column(comment="tokens that they went on from")
    at: Mapped[float] = mapped_column(comment="when the last of them ended; 0: none did")


class EventTotal(Base):
    """How many events of a kind a run has, kept as they are written. worker_id as in ledger_total."""

    __tablename__ = "event_total"
    __table_args__ = ({**HOT, "sqlite_autoincrement": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    worker_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True, comment="of aborts, releases and reaps; empty for others")
    n: Mapped[int]
    tokens: Mapped[int] = mapped_column(comment="that the events tell of")


class Event(Base):
    """Append-only: aborts, resumes, lease losses, drops, weight updates, rewinds, operator actions."""

    __tablename__ = "event"
    __table_args__ = (Index("ix_event_run_id_kind_at", "run_id", "kind", "at"), AUTO)

    id: Mapped[int] = mapped_column(Id, **ID)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    at: Mapped[float]
    kind: Mapped[str]
    reason: Mapped[str | None]
    worker_id: Mapped[int | None]
    group_id: Mapped[int | None]
    sample_id: Mapped[int | None]
    step: Mapped[int | None]
    version: Mapped[int | None]
    tokens: Mapped[int | None]
    details: Mapped[dict[str, Any] | None] = mapped_column(Json)

    run: Mapped[Run] = related("")
    sample: Mapped[Sample | None] = related("", "foreign(Event.sample_id) == Sample.id")
    group: Mapped[SampleGroup | None] = related("", "foreign(Event.group_id) == SampleGroup.id")
    worker: Mapped[Worker | None] = related("", "foreign(Event.worker_id) == Worker.id")
