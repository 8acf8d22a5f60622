"""A run: the public verbs. Each is one transaction; what it does stands in samplestore.verbs."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import sqlalchemy as sa

from samplestore import arguments, arrays, newruns
from samplestore.arguments import id_of, id_of_worker, ids, plain_json, plain_text, seconds, whole
from samplestore.arrayfiles import ArrayFiles, keep, open_files
from samplestore.arrays import Prepared
from samplestore.asyncbatch import batch_async
from samplestore.batch import Batch
from samplestore.batches import mismatch, replay, require_options, take
from samplestore.engine import Database
from samplestore.errors import AbortTimeout, ArrayFileError, InvalidSetting
from samplestore.evaluations import evaluate
from samplestore.media import Image
from samplestore.mismatch import Mismatch
from samplestore.models import Run as RunRow
from samplestore.models import WeightVersionRow
from samplestore.portable import imports
from samplestore.portable.export_files import Exported, export
from samplestore.portable.exports import Selection
from samplestore.prompts import Prompt, prepare_all
from samplestore.queries import arrays as named
from samplestore.queries import check, determinism, experts, images, ledger, metrics, simulate, why
from samplestore.queries.evaluation import Evaluation, evaluations
from samplestore.retention import Pruned, prune
from samplestore.runsettings import RunSettings
from samplestore.states import Purpose
from samplestore.tokenizers import as_tokenizer
from samplestore.types import (
    Added,
    Claim,
    Finding,
    Heartbeat,
    Reaped,
    RequestInfo,
    StageClaim,
    WeightVersion,
    Why,
    expect,
)
from samplestore.verbs import (
    aborts,
    appends,
    evaluation,
    filters,
    groups,
    liveness,
    prompts,
    requests,
    rewind,
    samples,
    stages,
    stale,
    weights,
)
from samplestore.verbs import imports as import_verbs
from samplestore.verbs.tx import Tx

log = logging.getLogger("samplestore.run")

T = TypeVar("T")

POLL_S = 0.05  # between two looks whether workers have let go


class Run:
    """One training run in a store. Get it from `store.run(name)`.

    tokenizer   gives a trainer's hooks the response as text: a model's folder, or a tokenizer. That of add_prompts or
                import_samples in this process, if not set; it is not stored
    """

    def __init__(self, database: Database, id: int, uuid: str, name: str, settings: RunSettings) -> None:
        self.database, self.id, self.uuid, self.name, self.settings = database, id, uuid, name, settings
        self.tokenizer: Any = None
        self._files: ArrayFiles | None = None

    def transact(self, work: Callable[[Tx], T], *, durable: bool = False) -> T:
        """Run `work(tx)` in one transaction, with its ledger entries and events. It may be run again."""

        tx: Tx

        def once(connection: sa.Connection) -> T:
            nonlocal tx
            tx = Tx(connection, self.id, self.settings)
            return work(tx)

        return self.database.write(once, durable=durable, last=lambda: tx.flush())

    # -- prompts

    def add_prompts(
        self,
        rows: Iterable[Any],
        tokenizer: Any = None,
        max_prompt_tokens: int | None = None,
        dataset: str = "default",
        skip_invalid: bool = False,
        evaluation: bool = False,
    ) -> Added:
        """Store prompts: dict rows, or prepared samplestore.prompts.Prompt objects. Idempotent by content. With
        `evaluation` their data sets are for `evaluate`, and never served for training.
        Raises InvalidPrompts, InvalidSetting; then nothing is stored."""
        if isinstance(rows, str | Path | Mapping):
            allowed = f"a list of rows; a file is added by: samplestore add-prompts FILE --run {self.name}"
            raise InvalidSetting("rows", type(rows).__name__ if isinstance(rows, Mapping) else str(rows), allowed)
        listed = arguments.listed("rows", rows, 'a list of rows, e.g. [{"prompt": "..."}]')
        if max_prompt_tokens is not None:
            max_prompt_tokens = whole("max_prompt_tokens", max_prompt_tokens, 1)
        invalid = 0
        self.tokenizer = tokenizer if self.tokenizer is None else self.tokenizer
        if not all(isinstance(row, Prompt) for row in listed):
            listed, refused = prepare_all(
                listed, tokenizer, max_prompt_tokens=max_prompt_tokens, dataset=dataset, skip_invalid=skip_invalid
            )
            invalid = len(refused)
        purpose = Purpose.EVAL if evaluation else Purpose.TRAIN
        done = self.transact(lambda tx: prompts.add(tx, listed, purpose))
        return Added(done.added, done.existing, invalid)

    def import_samples(
        self,
        rows: Iterable[Any] | str | Path,
        *,
        tokenizer: Any = None,
        dataset: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Added:
        """Store samples that were generated elsewhere: what `export` wrote (a folder or file, by any format), slime's
        debug rollouts (a file, or a path with {rollout_id} in it), PortableSamples; or rows of prompts and responses
        (samplestore.portable.imports), or a file of them. All of it or nothing. Groups that are there already are left
        alone: those of an export by their portable id, others by their content. Rewards and filters run on them as on
        others.

        dataset    of rows that do not say one ("imported" if left out); of an export, of all its prompts
        progress   called with (groups stored, groups in all), now and then
        Raises InvalidImport with file, line and field, PromptFileError, SlimeFileError, ImportConflict, InvalidSetting,
        MissingExtra.
        """
        arguments.callback("progress", progress)
        loaded = None if tokenizer is None else as_tokenizer(tokenizer)
        self.tokenizer = loaded if self.tokenizer is None else self.tokenizer
        with imports.rereadable(rows) as source:

            def groups_of() -> Iterator[imports.Imported]:
                return imports.checked(source.groups(loaded, dataset), source.name)

            # Looked through before the database is held; read again to be stored, so that memory holds a few groups at
            # a time, and a row that is refused is refused before anything is written.
            seen = imports.look_through(groups_of())
            return self.transact(
                lambda tx: import_verbs.import_groups(
                    tx, imports.same(groups_of(), seen, source.name, progress), self._kept, source.manifest,
                    source.versions,
                ),
                durable=True,
            )  # fmt: skip

    def export(
        self,
        to: str | Path,
        *,
        format: str = "parquet",
        steps: tuple[int, int] | None = None,
        statuses: Sequence[str] = (),
        arrays: Sequence[str] = (),
        tokenizer: Any = None,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Exported:
        """Write samples with all that a trainer or an analyst wants, one row each, as `import_samples` takes them back.

        to         parquet: a folder, with files by step; jsonl: a file (.gz is compressed); slime: a path with
                   {rollout_id} in it, a file for each committed step
        steps      first and last committed step; None is all groups, those without a step too
        statuses   of samples, empty is any; the parents of chosen forks come along
        arrays     named arrays to write, or ["all"]
        tokenizer  to write the text of responses too
        force      replace an export that is there
        progress   called with (groups done, groups in all)
        Evaluations are left out, and groups whose tokens were pruned. Raises ExportExists, NothingToExport,
        InvalidSetting, MissingExtra, OSError.
        """
        arguments.callback("progress", progress)
        place, chosen = arguments.path("to", to), Selection.of(steps, statuses, arrays)
        loaded = None if tokenizer is None else as_tokenizer(tokenizer)
        return export(self, place, format=format, selection=chosen, tokenizer=loaded, force=force, progress=progress)

    def _kept(self, made: Prepared) -> Prepared:
        return keep(self.settings, self.array_files, made)

    def admit(self) -> int:
        """Create groups until the window is full: (max_staleness + 1) x groups_per_step. Returns how many."""
        return self.transact(prompts.admit)

    # -- samples

    def register(self, kind: str = "rollout", name: str | None = None, info: dict[str, Any] | None = None) -> int:
        """A worker row for this process; its id is needed for every claim. info: a JSON object. Raises
        InvalidSetting."""
        if name is not None:
            plain_text("name", name, 200)
        given = plain_json("info", info or {})
        return self.transact(lambda tx: liveness.register(tx, kind, name, given))

    def claim(self, worker: int, limit: int) -> list[Claim]:
        """Take up to `limit` samples, resumable first, siblings together. Raises WorkerDead, UnknownWorker."""
        owner, most = id_of_worker(worker), _most(limit)
        return self.transact(lambda tx: samples.claim(tx, owner, most))

    def append(
        self,
        claim: Claim,
        tokens: Any,
        logprobs: Any,
        version: appends.Version,
        finish_reason: str | None = None,
        kind: str = "generated",
        *,
        loss: int | None = None,
        rid: str | None = None,
        engine: str | None = None,
        seq: int | None = None,
    ) -> int:
        """Store the next segment; see verbs.appends.append. `seq` defaults to the claim's next."""
        number = expect(claim, Claim).seq if seq is None else seq
        given = (claim, number, tokens, logprobs, version, finish_reason, kind, loss, rid, engine)
        calls = appends.prepared([(given, {})])  # before the transaction, for which other processes wait
        (n,) = self.transact(lambda tx: appends.append_many(tx, calls))
        advance(claim, number, n, finish_reason)
        return n

    def finish(
        self,
        claim: Claim,
        status: str | None = None,
        *,
        finish_reason: str | None = None,
        keep_stages: bool | Collection[str] = False,
    ) -> list[StageClaim]:
        """End a sample: completed, or truncated if its last finish reason is "length". Raises LeaseLost."""
        return self.transact(lambda tx: samples.finish(tx, claim, status, finish_reason, keep_stages))

    def release(self, claim: Claim, reason: str) -> None:
        """Give a sample back, resumable from its stored tokens. No failure is counted. Raises LeaseLost."""
        self.transact(lambda tx: samples.release(tx, claim, reason))

    def fail(self, claim: Claim, error: str, backoff_s: float = 1.0, *, prompt_refused: bool = False) -> str:
        """Record a failed attempt; `failed` after max_attempts. Returns the new status. Raises LeaseLost.

        prompt_refused   no engine can ever take its prompt: `failed` at once, the group is dropped, and the prompt is
                         not served again unless the group's samples are requeued
        """
        return self.transact(lambda tx: samples.fail(tx, claim, error, backoff_s, prompt_refused))

    def attach(
        self, claim: Claim, name: str, array: Any, n_experts: int | None = None, first_row: int | None = None
    ) -> None:
        """Store a named array with a claimed sample, e.g. routed_experts [rows, layers, top_k]; see
        samplestore.arrays for names and shapes. Raises InvalidSegment, LeaseLost, ArrayFileError."""
        made = self.prepare_array(name, array, n_experts)
        self.transact(lambda tx: samples.attach(tx, claim, name, made, n_experts, first_row))

    def prepare_array(self, name: str, array: Any, n_experts: int | None = None) -> Prepared:
        """Check a named array; a large one is written into a side-car file, on the disk when this returns. What comes
        back may be given to `attach`. Raises InvalidSegment, ArrayFileError."""
        return self._kept(arrays.prepare(name, array, n_experts))

    def array_files(self) -> ArrayFiles:
        """The side-car files of this run. Raises ArrayFileError where it has no array_url."""
        if self._files is None:
            if self.settings.array_url is None:
                raise ArrayFileError(f"run {self.name!r}", "the run has no array_url", "samplestore status")
            self._files = open_files(self.settings, self.uuid)
        return self._files

    def begin_request(
        self, claim: Claim, rid: str, engine: str | None = None, temperature: float | None = None, resumes: bool = False
    ) -> None:
        """Record that an engine is asked to go on with a claimed sample. `resumes`: from tokens that it has. Raises
        LeaseLost, InvalidSetting."""
        named = (plain_text("rid", rid), arguments.optional(plain_text, "engine", engine))
        heat = arguments.optional(arguments.number, "temperature", temperature)
        self.transact(lambda tx: requests.begin_request(tx, claim, *named, heat, resumes))

    def end_request(self, info: RequestInfo) -> None:
        self.transact(lambda tx: requests.end_request(tx, info))

    def requeue(self, sample_ids: Sequence[int], reason: str) -> int:
        """Start samples afresh under a new incarnation; their old tokens are superseded. Raises NotInRun,
        InvalidTransition, InvalidSetting."""
        call, wanted = uuid.uuid4().hex, ids("sample_ids", sample_ids)
        return self.transact(lambda tx: groups.requeue(tx, wanted, reason, call))

    def drop(self, group_ids: Sequence[int], reason: str) -> int:
        """Drop groups; owners of their samples get LeaseLost. Raises NotInRun, InvalidTransition, InvalidSetting."""
        wanted = ids("group_ids", group_ids)
        return self.transact(lambda tx: groups.drop(tx, wanted, reason))

    def expire(
        self, group_ids: Sequence[int] | None = None, *, max_staleness: int | None = None, reason: str | None = None
    ) -> int:
        """Close groups as stale: those named, for a `reason`, or all that are more than `max_staleness` versions
        behind. Owners of their samples get LeaseLost. A rewind that makes them fresh again brings them back. Returns
        how many. Raises InvalidTransition, NotInRun, InvalidSetting."""
        if (group_ids is None) == (max_staleness is None):
            raise InvalidSetting("expire", None, "either group_ids or max_staleness")
        if group_ids is None:
            window = whole("max_staleness", max_staleness, 0)
            return self.transact(lambda tx: stale.expire_beyond(tx, window, reason))
        if not reason:
            raise InvalidSetting("reason", reason, "a few words: why")
        wanted = ids("group_ids", group_ids)
        return self.transact(lambda tx: groups.expire(tx, wanted, reason))

    # -- stages

    def claim_stages(self, worker: int, limit: int, names: Collection[str] | None = None) -> list[StageClaim]:
        """Take up to `limit` stages, oldest first: those called `names`, or any. Work on a whole group has its samples
        in `members`. Raises WorkerDead, UnknownWorker."""
        owner, most = id_of_worker(worker), _most(limit)
        only = arguments.optional(arguments.texts, "names", names)
        return self.transact(lambda tx: stages.claim_stages(tx, owner, most, only))

    def score(
        self, claim: StageClaim, value: float, details: dict[str, Any] | None = None, elapsed_s: float | None = None
    ) -> None:
        """Store a reward. Raises LeaseLost, InvalidSetting for what is not a finite number."""
        self.transact(lambda tx: stages.score(tx, claim, value, details, elapsed_s))

    def score_group(
        self, claim: StageClaim, values: Sequence[float | None], details: dict[str, Any] | None = None,
        elapsed_s: float | None = None,
    ) -> None:  # fmt: skip
        """Store a group stage's rewards, one for each of `claim.members`; None where a judge's answer could not be
        read. Raises LeaseLost, InvalidSetting."""
        self.transact(lambda tx: stages.score_group(tx, claim, values, details, elapsed_s))

    def unparsed(self, claim: StageClaim, said: str, details: dict[str, Any] | None = None) -> None:
        """A judge's answer could not be read: the sample is left out of reward shaping, never counted as 0. Raises
        LeaseLost."""
        self.transact(lambda tx: stages.unparsed(tx, claim, said, details))

    def complete_stage(
        self, claim: StageClaim, details: dict[str, Any] | None = None, array: tuple[str, Any] | None = None
    ) -> None:
        """Settle a stage that gives no number. `array`: what it gives instead, (name, rows [response tokens, ...]),
        such as a teacher's log-probs. Raises LeaseLost, InvalidSegment, ArrayFileError."""
        if array is not None and not (isinstance(array, tuple | list) and len(array) == 2):
            raise InvalidSetting("array", type(array).__name__, "(name, rows)")
        made = None if array is None else self.prepare_array(*array)
        self.transact(lambda tx: stages.complete_stage(tx, claim, details, array=made))

    def fail_stage(
        self, claim: StageClaim, error: str, outcome: str = stages.VERIFIER_ERROR, elapsed_s: float | None = None,
        backoff_s: float = 1.0,
    ) -> str:  # fmt: skip
        """Record a verifier's error or timeout: never a reward of 0."""
        return self.transact(lambda tx: stages.fail_stage(tx, claim, error, outcome, elapsed_s, backoff_s))

    def filter_group(
        self, claim: StageClaim, drop: str | None = None, removed: Mapping[int, str] | None = None
    ) -> None:
        """Settle the filter stage of a group: dropped for the reason `drop` or kept, samples (by id) taken out of the
        loss. See verbs.filters.filter_group."""
        self.transact(lambda tx: filters.filter_group(tx, claim, drop, removed))

    def release_stage(self, claim: StageClaim) -> None:
        self.transact(lambda tx: stages.release_stage(tx, claim))

    # -- liveness

    def heartbeat(self, worker: int) -> Heartbeat:
        """Raises WorkerDead: dead is final; UnknownWorker."""
        owner = id_of_worker(worker)
        return self.transact(lambda tx: liveness.heartbeat(tx, owner))

    def goodbye(self, worker: int, error: str | None = None) -> None:
        owner = id_of_worker(worker)
        self.transact(lambda tx: liveness.goodbye(tx, owner, error))

    def reap(self, reaper: int | None = None) -> Reaped:
        """Free what dead workers hold, and samples that make no progress."""
        by = None if reaper is None else id_of_worker(reaper)
        return self.transact(lambda tx: liveness.reap(tx, by))

    def disown(self, worker: int, held: Sequence[int], held_stages: Sequence[int] | None = None) -> int:
        """Free samples and stages that `worker` owns without knowing (the answer of a claim was lost)."""
        owner = id_of_worker(worker)
        known = (ids("held", held), None if held_stages is None else ids("held_stages", held_stages))
        return self.transact(lambda tx: liveness.disown(tx, owner, *known))

    # -- weights and control

    def publish_weights(
        self, path: str | None = None, step: int | None = None, label: str | None = None
    ) -> WeightVersion:
        """Announce new weights; workers and engines follow. The checkpoint must be complete on disk before. Repeating
        the call of one step and path on one timeline is harmless. Returns WeightVersion. Raises InvalidSetting.

        label   what engines report for them; made up if not given, unique within the run. The step and path of the
                current version with another label are the same weights, which get a version of that name and are no
                update: so a trainer names what a rewind has restored
        """
        call = uuid.uuid4().hex
        return self.transact(lambda tx: weights.publish(tx, path, step, label, call), durable=True)

    def describe_first_weights(self, path: str | None, label: str = weights.FIRST_LABEL) -> None:
        """Say where version 0, the weights that engines start with, comes from."""
        self.transact(lambda tx: weights.describe_first(tx, path, label))

    @property
    def current_version(self) -> int:
        query = sa.select(RunRow.current_version).where(RunRow.id == self.id)
        return self.database.read(lambda c: int(c.execute(query).scalar_one()))

    def weight_versions(self) -> list[WeightVersion]:
        """All versions, oldest first."""
        table = WeightVersionRow.__table__
        query = sa.select(table).where(table.c.run_id == self.id).order_by(table.c.version)
        return self.database.read(lambda c: [weights.as_version(row) for row in c.execute(query)])

    def abort_inflight(
        self,
        reason: str,
        *,
        samples: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        wait_s: float | None = None,
    ) -> int:
        """Ask workers to abort what is in flight (all of it, or the samples and groups named by id); partials are
        stored and stay resumable. Workers claim on unless the run is paused. Returns the number of the request.

        wait_s   wait as long until no worker holds what was in flight: then no engine generates for it
        Raises NotInRun, AbortTimeout (it stays asked for).
        """
        by = f"process {os.getpid()} on {socket.gethostname()}"
        named = (
            None if samples is None else ids("samples", samples),
            None if groups is None else ids("groups", groups),
        )
        wait_s = seconds("wait_s", wait_s)
        number, held = self.transact(lambda tx: aborts.abort_inflight(tx, reason, *named, by))
        if wait_s is not None:
            self._wait_let_go(held, wait_s)
        return number

    def _wait_let_go(self, held: set[tuple[int, int]], wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while held := held & self.database.read(lambda c: aborts.in_flight(c, self.id)):
            if time.monotonic() >= end:
                raise self._still_held(wait_s, sorted(id for id, _ in held))
            time.sleep(POLL_S)

    def _still_held(self, wait_s: float, ids: list[int]) -> AbortTimeout:
        return AbortTimeout(wait_s, ids, self.database.read(lambda c: aborts.held_at(c, ids)))

    def pause(self, reason: str | None = None) -> None:
        """Workers claim nothing more; what is in flight goes on."""
        self.transact(lambda tx: weights.set_state(tx, "paused", reason))

    def resume(self, reason: str | None = None) -> None:
        self.transact(lambda tx: weights.set_state(tx, "running", reason))

    def drain(self, reason: str | None = None) -> None:
        """Workers finish what they hold and leave."""
        self.transact(lambda tx: weights.set_state(tx, "draining", reason))

    # -- batches

    def batch(self, step: int, groups: int | None = None, **options: Any) -> Batch:
        """Wait for a batch and lease it; a context manager that commits on a clean exit and releases on an error. With
        `rank` and `world` the part of one rank. See samplestore.batches.take for the options."""
        require_options("run.batch", options)
        return take(self, step, groups, **options)

    def batch_async(self, step: int, groups: int | None = None, **options: Any) -> AbstractAsyncContextManager[Batch]:
        """The same for `async with`: waiting, reading, commit and release do not hold up the event loop. See
        samplestore.asyncbatch."""
        require_options("run.batch_async", options, without=("stop",))
        return batch_async(self, step, groups, **options)

    def replay(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The committed batch of a step again, or the part of a rank: same groups, same order, same settings. Raises
        SampleStoreError if there is none, TokensPruned."""
        return replay(self, whole("step", step), rank, world)

    def rewind(self, step: int) -> WeightVersion:
        """Go back to the checkpoint of `step`: groups that it has not seen are ready again, a new timeline starts,
        and the restored weights are published as a new version. Repeating it before anything was leased or published
        changes nothing. Raises RewindTooFar, InvalidSetting."""
        call = uuid.uuid4().hex
        return self.transact(lambda tx: rewind.rewind(tx, step, call), durable=True)

    def prune(self, keep_steps: int) -> Pruned:
        """Remove the tokens of what was trained on, or given up, before the last `keep_steps` committed steps, and give
        the space back, while others work. Counters, versions and rewards stay; a rewind further back is refused from
        then on. Raises InvalidSetting."""
        return prune(self, keep_steps)

    # -- evaluations

    def start_evaluation(self, dataset: str, samples: int = 1, **options: Any) -> int:
        """Begin to evaluate the current version on a data set of add_prompts(..., evaluation=True); its id. Workers
        serve its samples before others; they are in no batch and no window. Repeating it is harmless. See
        samplestore.verbs.evaluation.start for the options. Raises InvalidSetting."""
        self._tell_doubts(options.get("sampling"))
        return self.transact(lambda tx: evaluation.start(tx, dataset, samples, **options))

    def evaluate(self, dataset: str, samples: int = 1, **options: Any) -> Evaluation:
        """start_evaluation, wait until all of it is scored, and tell pass@k, mean reward and truncated ratio. See
        samplestore.evaluations.evaluate for the options. Raises EvaluationTimeout, WorkerFailed, InvalidSetting."""
        self._tell_doubts(options.get("sampling"))
        return evaluate(self, dataset, samples, **options)

    def _tell_doubts(self, sampling: Any) -> None:
        for doubt in newruns.doubts_of_sampling(sampling) if isinstance(sampling, Mapping) else ():
            log.warning("run %s: %s", self.name, doubt)

    def evaluations(self, pass_reward: float = 1.0) -> list[Evaluation]:
        """All evaluations of the run, by data set and weight version; those that are under way too."""
        return evaluations(self.database, self.id, pass_reward=pass_reward)

    # -- questions

    def why(
        self,
        groups: int | None = None,
        max_staleness: int | None = None,
        staleness_mode: str | None = None,
        stale: str | None = None,
    ) -> Why:
        """Why is no batch ready? Of a batch with these options, the run's settings where left out. Raises
        InvalidSetting."""
        groups = arguments.optional(whole, "groups", groups)
        max_staleness = arguments.optional(whole, "max_staleness", max_staleness)
        return why.why(self.database, self.id, self.settings, groups, max_staleness, staleness_mode, stale)

    def simulate(
        self, max_staleness: int, *, staleness_mode: str | None = None, stale: str | None = None
    ) -> dict[str, Any]:
        """What would a window of `max_staleness` have kept from the committed batches, or masked in them?
        See queries.simulate."""
        return simulate.simulate(self.database, self.id, self.settings, max_staleness, staleness_mode, stale)

    def mismatch(self, step: int | None = None) -> Mismatch:
        """How far the log-probs that batch.record_logprobs stored are from those of the engines, by token, sample and
        versions behind; of the newest step that has them where `step` is left out. Raises ArrayNotStored where the step
        has none, SampleStoreError where there is no such batch, TokensPruned."""
        return mismatch(self, None if step is None else whole("step", step))

    def ledger(self, exact: bool = False) -> dict[str, Any]:
        """The token ledger; `exact` recounts it from the payloads in one snapshot."""
        return ledger.read(self.database, self.id, exact)

    def metrics(self) -> dict[str, float]:
        """Numbers of the run now, by stable flat names like "samplestore/groups/ready", for wandb, trackio or
        TensorBoard. Cheap enough for every step; what is not known is left out. See samplestore.queries.metrics."""
        return metrics.read(self.database, self.id, self.settings)

    def routed_experts(self, sample_id: int) -> tuple[Any, Any]:
        """(experts [rows, layers, top_k], present [rows]); rows = prompt + response tokens - 1. Raises NotInRun."""
        return experts.routed_experts(self.database, self.id, id_of("sample_id", sample_id), self.array_files)

    def determinism(self, sample_id: int) -> determinism.Determinism:
        """Whether the same engine gives this sample's tokens again, and why not. Raises NotInRun."""
        return determinism.of_sample(self.database, self.id, id_of("sample_id", sample_id))

    def images(self, digests: Iterable[str]) -> dict[str, Image]:
        """Images of prompts by their digests (claim.images). Raises NotInRun."""
        named = arguments.texts("digests", digests, "digests")
        return self.database.read(lambda c: images.read(c, self.id, named))

    def array(self, sample_id: int, name: str) -> tuple[Any, Any]:
        """(rows [n, ...], present [n]) of a named array, n response tokens; see queries.arrays.one. Raises NotInRun,
        ArrayNotStored for a name that no sample of the run has, ArrayFileError."""
        return named.one(
            self.database, self.id, id_of("sample_id", sample_id), plain_text("name", name), self.array_files
        )

    def check(self) -> list[Finding]:
        """Every promise that a query can verify; an empty list is good."""
        return check.check(self.database, self.id, self.settings)


def _most(limit: Any) -> int:
    """Less than nothing is nothing: what is left of a bound may be below 0."""
    return 0 if isinstance(limit, int | np.integer) and limit < 0 else whole("limit", limit)


def advance(claim: Claim, seq: int, n: int, finish_reason: str | None) -> None:
    """Move a claim on after an acknowledged append (never before: a verb may be run again)."""
    if seq == claim.seq:
        claim.seq, claim.n_tokens, claim.finish_reason = seq + 1, claim.n_tokens + n, finish_reason
