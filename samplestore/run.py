"""A run: the public verbs. Each is one transaction; what it does stands in samplestore.verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from samplestore.batches import Batch, replay, take
from samplestore.engine import Database
from samplestore.models import Run as RunRow
from samplestore.models import WeightVersionRow
from samplestore.prompts import Prompt, prepare_all
from samplestore.queries import check, ledger, why
from samplestore.types import (
    Added,
    Claim,
    Finding,
    Heartbeat,
    Reaped,
    RequestInfo,
    RunSettings,
    StageClaim,
    WeightVersion,
    Why,
)
from samplestore.verbs import batches, groups, liveness, prompts, samples, stages, weights
from samplestore.verbs.tx import Tx

T = TypeVar("T")


class Run:
    """One training run in a store. Get it from `store.run(name)`."""

    def __init__(self, database: Database, id: int, uuid: str, name: str, settings: RunSettings) -> None:
        self.database, self.id, self.uuid, self.name, self.settings = database, id, uuid, name, settings

    def transact(self, work: Callable[[Tx], T], *, durable: bool = False) -> T:
        """Run `work(tx)` in one transaction, with its ledger entries and events. It may be run again."""

        def once(connection: sa.Connection) -> T:
            tx = Tx(connection, self.id, self.settings)
            result = work(tx)
            tx.flush()
            return result

        return self.database.write(once, durable=durable)

    # -- prompts

    def add_prompts(
        self,
        rows: Iterable[Any],
        tokenizer: Any = None,
        max_prompt_tokens: int | None = None,
        dataset: str = "default",
        skip_invalid: bool = False,
    ) -> Added:
        """Store prompts: dict rows, or prepared samplestore.prompts.Prompt objects. Idempotent by content.
        Raises InvalidPrompts; then nothing is stored."""
        listed = list(rows)
        invalid = 0
        if not all(isinstance(row, Prompt) for row in listed):
            listed, refused = prepare_all(
                listed, tokenizer, max_prompt_tokens=max_prompt_tokens, dataset=dataset, skip_invalid=skip_invalid
            )
            invalid = len(refused)
        done = self.transact(lambda tx: prompts.add(tx, listed))
        return Added(done.added, done.existing, invalid)

    def admit(self) -> int:
        """Create groups until the window is full: (max_staleness + 1) x groups_per_step. Returns how many."""
        return self.transact(prompts.admit)

    # -- samples

    def register(self, kind: str = "rollout", name: str | None = None, info: dict[str, Any] | None = None) -> int:
        """A worker row for this process; its id is needed for every claim."""
        return self.transact(lambda tx: liveness.register(tx, kind, name, info))

    def claim(self, worker: int, limit: int) -> list[Claim]:
        """Take up to `limit` samples, resumable first, siblings together. Raises WorkerDead."""
        return self.transact(lambda tx: samples.claim(tx, worker, limit))

    def append(
        self,
        claim: Claim,
        tokens: Any,
        logprobs: Any,
        version: samples.Version,
        finish_reason: str | None = None,
        kind: str = "generated",
        *,
        loss: int | None = None,
        rid: str | None = None,
        engine: str | None = None,
        seq: int | None = None,
    ) -> int:
        """Store the next segment; see verbs.samples.append. `seq` defaults to the claim's next."""
        number = claim.seq if seq is None else seq
        n = self.transact(
            lambda tx: samples.append(
                tx, claim, number, tokens, logprobs, version, finish_reason, kind, loss, rid, engine
            )
        )
        advance(claim, number, n, finish_reason)
        return n

    def finish(
        self, claim: Claim, status: str | None = None, *, finish_reason: str | None = None, keep_stages: bool = False
    ) -> list[StageClaim]:
        """End a sample: completed, or truncated if its last finish reason is "length". Raises LeaseLost."""
        return self.transact(lambda tx: samples.finish(tx, claim, status, finish_reason, keep_stages))

    def release(self, claim: Claim, reason: str) -> None:
        """Give a sample back, resumable from its stored tokens. No failure is counted. Raises LeaseLost."""
        self.transact(lambda tx: samples.release(tx, claim, reason))

    def fail(self, claim: Claim, error: str, backoff_s: float = 1.0) -> str:
        """Record a failed attempt; `failed` after max_attempts. Returns the new status. Raises LeaseLost."""
        return self.transact(lambda tx: samples.fail(tx, claim, error, backoff_s))

    def attach(self, claim: Claim, name: str, array: Any, n_experts: int | None = None) -> None:
        """Store a named array with a claimed sample, e.g. routed_experts [rows, layers, top_k]."""
        self.transact(lambda tx: samples.attach(tx, claim, name, array, n_experts))

    def begin_request(
        self, claim: Claim, rid: str, engine: str | None = None, temperature: float | None = None, resumes: bool = False
    ) -> None:
        self.transact(lambda tx: samples.begin_request(tx, claim, rid, engine, temperature, resumes))

    def end_request(self, info: RequestInfo) -> None:
        self.transact(lambda tx: samples.end_request(tx, info))

    def requeue(self, sample_ids: Sequence[int], reason: str) -> int:
        """Start samples afresh under a new incarnation; their old tokens are superseded."""
        return self.transact(lambda tx: groups.requeue(tx, sample_ids, reason))

    def drop(self, group_ids: Sequence[int], reason: str) -> int:
        """Drop groups; owners of their samples get LeaseLost."""
        return self.transact(lambda tx: groups.drop(tx, group_ids, reason))

    # -- stages

    def claim_stages(self, worker: int, limit: int) -> list[StageClaim]:
        return self.transact(lambda tx: stages.claim_stages(tx, worker, limit))

    def score(
        self, claim: StageClaim, value: float, details: dict[str, Any] | None = None, elapsed_s: float | None = None
    ) -> None:
        """Store a reward. Raises LeaseLost, InvalidSetting for what is not a finite number."""
        self.transact(lambda tx: stages.score(tx, claim, value, details, elapsed_s))

    def fail_stage(
        self, claim: StageClaim, error: str, outcome: str = stages.VERIFIER_ERROR, elapsed_s: float | None = None,
        backoff_s: float = 1.0,
    ) -> str:  # fmt: skip
        """Record a verifier's error or timeout: never a reward of 0."""
        return self.transact(lambda tx: stages.fail_stage(tx, claim, error, outcome, elapsed_s, backoff_s))

    def release_stage(self, claim: StageClaim) -> None:
        self.transact(lambda tx: stages.release_stage(tx, claim))

    # -- liveness

    def heartbeat(self, worker: int) -> Heartbeat:
        """Raises WorkerDead: dead is final."""
        return self.transact(lambda tx: liveness.heartbeat(tx, worker))

    def goodbye(self, worker: int, error: str | None = None) -> None:
        self.transact(lambda tx: liveness.goodbye(tx, worker, error))

    def reap(self, reaper: int | None = None) -> Reaped:
        """Free what dead workers hold, and samples that make no progress."""
        return self.transact(lambda tx: liveness.reap(tx, reaper))

    def disown(self, worker: int, held: Sequence[int], held_stages: Sequence[int] | None = None) -> int:
        """Free samples and stages that `worker` owns without knowing (the answer of a claim was lost)."""
        return self.transact(lambda tx: liveness.disown(tx, worker, held, held_stages))

    # -- weights and control

    def publish_weights(
        self, path: str | None = None, step: int | None = None, label: str | None = None
    ) -> WeightVersion:
        """Announce new weights; workers and engines follow. The checkpoint must be complete on disk before."""
        return self.transact(lambda tx: weights.publish(tx, path, step, label), durable=True)

    def describe_first_weights(self, path: str | None, label: str = weights.FIRST_LABEL) -> None:
        """Say where version 0, the weights that engines start with, comes from."""
        self.transact(lambda tx: weights.describe_first(tx, path, label))

    @property
    def current_version(self) -> int:
        with self.database.reading() as connection:
            return int(connection.execute(sa.select(RunRow.current_version).where(RunRow.id == self.id)).scalar_one())

    def weight_versions(self) -> list[WeightVersion]:
        """All versions, oldest first."""
        table = WeightVersionRow.__table__
        with self.database.reading() as connection:
            rows = connection.execute(sa.select(table).where(table.c.run_id == self.id).order_by(table.c.version))
            return [weights.as_version(row) for row in rows]

    def abort_inflight(self, reason: str) -> int:
        """Ask workers to abort what is in flight; partials are stored and stay resumable."""
        return self.transact(lambda tx: weights.abort_inflight(tx, reason))

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
        """Wait for a batch and lease it; a context manager that commits on a clean exit and releases on an error.
        See samplestore.batches.take for the options."""
        return take(self, step, groups, **options)

    def replay(self, step: int) -> Batch:
        """The committed batch of a step again: same groups, same order, same settings."""
        return replay(self, step)

    def rewind(self, step: int) -> WeightVersion:
        """Go back to the checkpoint of `step`: groups that it has not seen are ready again, a new timeline starts,
        and the restored weights are published as a new version. Raises RewindTooFar."""
        return self.transact(lambda tx: batches.rewind(tx, step), durable=True)

    # -- questions

    def why(self, groups: int | None = None, max_staleness: int | None = None) -> Why:
        """Why is no batch ready?"""
        return why.why(self.database, self.id, self.settings, groups, max_staleness)

    def ledger(self, exact: bool = False) -> dict[str, Any]:
        """The token ledger; `exact` recounts it from the payloads in one snapshot."""
        return ledger.read(self.database, self.id, exact)

    def check(self) -> list[Finding]:
        """Every promise that a query can verify; an empty list is good."""
        return check.check(self.database, self.id, self.settings)


def advance(claim: Claim, seq: int, n: int, finish_reason: str | None) -> None:
    """Move a claim on after an acknowledged append (never before: a verb may be run again)."""
    if seq == claim.seq:
        claim.seq, claim.n_tokens, claim.finish_reason = seq + 1, claim.n_tokens + n, finish_reason
