"""Every error that samplestore raises on purpose. Each carries its fields and says what to do next."""

from __future__ import annotations

import os
from itertools import islice
from shlex import quote
from typing import Any

from samplestore.words import amount, amount_is, close_to, did_you_mean, which

SQLITE = b"SQLite format 3\0"  # how a file of SQLite's begins
MOST_FILES = 2000  # of a folder that are looked at


class SampleStoreError(Exception):
    """Base class of all errors that are raised on purpose.

    look   words of the samplestore command that tells more, for the end of a message that names no next step; none: the
           command that was typed was typed wrongly, and its help tells more
    """

    look: tuple[str, ...] = ()


class DatabaseMissing(SampleStoreError):
    """A reading command was pointed at a database that does not exist."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(f"no database at {url}.{_meant(url)} Create it with: samplestore db upgrade --db {quote(url)}")


def _meant(url: str) -> str:
    """Of a file that is not there: the database beside it whose name is close."""
    folder, wanted = os.path.split(url)
    try:
        with os.scandir(folder or ".") as entries:
            beside = [entry.name for entry in islice(entries, MOST_FILES)]
    except (OSError, ValueError):  # no folder there, or no path at all: the URL of a server
        return ""
    return did_you_mean(wanted, (name for name in close_to(wanted, beside) if _is_database(os.path.join(folder, name))))


def _is_database(path: str) -> bool:
    if not os.path.isfile(path):  # opening a pipe would wait
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


class SchemaMismatch(SampleStoreError):
    """The database has another schema revision than this version of samplestore."""

    def __init__(self, url: str, found: str | None, expected: str, known: bool) -> None:
        self.url, self.found, self.expected = url, found, expected
        if found is None:
            cure = f"It has no samplestore schema yet. Run: samplestore db upgrade --db {quote(url)}"
        elif known:
            cure = f"Run: samplestore db upgrade --db {quote(url)}"
        else:
            cure = "It was written by a newer samplestore. Run: pip install -U samplestore"
        super().__init__(f"{url} has schema revision {found}, this samplestore needs {expected}. {cure}")


class DowngradeRefused(SampleStoreError):
    """The older schema has no place for what is stored. Nothing was changed."""

    def __init__(self, revision: str, what: str) -> None:
        self.revision, self.what = revision, what
        super().__init__(
            f"schema revision {revision} has no place for {what}. Nothing was changed. "
            "Restore a backup from before: samplestore restore BACKUP --db FILE"
        )


class UnsupportedFileSystem(SampleStoreError):
    """SQLite's WAL needs shared memory on one machine; this mount does not give it."""

    def __init__(self, path: str, mount: str, fstype: str) -> None:
        self.path, self.mount, self.fstype = path, mount, fstype
        super().__init__(
            f"{path} lies on {mount} ({fstype}), where SQLite files get corrupted or lock up. "
            "Use PostgreSQL (--db postgresql://...) or a local disk."
        )


class StoreBusy(SampleStoreError):
    """The writer gate of a SQLite database, or a lock of a PostgreSQL one, was not free in time."""

    look = ("status",)

    def __init__(
        self, path: str, waited_s: float, holder_pid: int | None, since: float | None, *, sessions: str | None = None
    ) -> None:
        self.path, self.waited_s, self.holder_pid, self.since = path, waited_s, holder_pid, since
        if sessions is not None:  # what a PostgreSQL server says of its own
            look = f"psql -c 'TABLE pg_stat_activity' {quote(path)}"
            super().__init__(f"waited {waited_s:.1f} s for a lock in {path}; {sessions}. Look at it with: {look}")
            return
        who = f"process {holder_pid} holds it" if holder_pid else "its holder is unknown"
        held = f" since {since:.0f} (unix time)" if since else ""
        super().__init__(
            f"waited {waited_s:.1f} s for the writer gate {path}; {who}{held}. "
            f"Look at it with: ps -fp {holder_pid or '<pid>'}"
        )


class StoreUnavailable(StoreBusy):
    """The database takes nothing for now: its disk is full, or its server is away or out of connections. Nothing was
    changed and nothing is lost; the same call can be made again, which is what workers do until it is over."""

    exit_code = 3

    def __init__(self, url: str, problem: str, cure: str) -> None:
        self.url, self.problem, self.cure = url, problem, cure
        self.path, self.waited_s, self.holder_pid, self.since = url, 0.0, None, None
        SampleStoreError.__init__(self, f"{url} can't be used for now: {problem}. Nothing was changed. {cure}")


class DatabaseUnusable(SampleStoreError):
    """The database can't be used as it is, and waiting does not help: it is none, or damaged, or closed to us."""

    exit_code = 3

    def __init__(self, url: str, problem: str, cure: str) -> None:
        self.url, self.problem, self.cure = url, problem, cure
        super().__init__(f"{url} {problem}. {cure}")


class StoreClosed(SampleStoreError):
    """A store was used after its close()."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(f"the store of {url} is closed. Open it again: samplestore.open({url!r})")


class RunNotFound(SampleStoreError):
    """A run was named that the database does not have."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name, self.known = name, known
        have = f"The database has: {', '.join(known)}." if known else "The database has no runs yet."
        missing = f"no run named {name!r}.{did_you_mean(name, known)}" if name else "there is no run."
        create = f"samplestore add-prompts FILE --run {quote(name) if name else 'NAME'}"
        super().__init__(f"{missing} {have} Create one with: {create}")


class RunSettingsConflict(SampleStoreError):
    """store.run(name, ...) was given other settings than those stored."""

    def __init__(self, name: str, stored: dict[str, Any], given: dict[str, Any]) -> None:
        self.name, self.stored, self.given = name, stored, given
        pairs = "; ".join(f"{k}: stored {stored[k]!r}, given {given[k]!r}" for k in given)
        super().__init__(f"run {name!r} exists with other settings ({pairs}). Leave them out, or use another run name.")


class InvalidSetting(SampleStoreError):
    """A setting or argument has a value that is not allowed. Nothing was changed."""

    def __init__(self, name: str, value: Any, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name}={value!r} is not allowed; use {allowed}")


class ArrayNotStored(SampleStoreError):
    """A named array was asked for that no sample of the batch, or of the run, has."""

    def __init__(self, name: str, have: list[str], of: str = "batch") -> None:
        self.name, self.have = name, have
        stored = ", ".join(have) or "none"
        super().__init__(f"no sample of this {of} has an array {name!r}; stored: {stored}. See: samplestore status")


class ArrayFileError(SampleStoreError):
    """A side-car file of a named array can't be written, is not there, or is damaged."""

    def __init__(self, place: str, problem: str, command: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(f"array files in {place}: {problem}. Look further with: {command}")


class WorkerDead(SampleStoreError):
    """This worker's row was declared dead; its samples belong to others. Cancel everything and register anew."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        super().__init__(
            f"worker {worker_id} was declared dead. Cancel its work, and register again: run.register(kind, name)"
        )


class UnknownWorker(WorkerDead):
    """A worker was named that the run does not have: never registered, another run's, or of a database that was
    replaced. To who did register it is the same as being dead."""

    def __init__(self, worker_id: Any) -> None:
        self.worker_id = worker_id
        SampleStoreError.__init__(
            self,
            f"this run has no worker {worker_id!r}. A worker is known by the number that it gets when it registers on "
            "the run: worker = run.register(kind, name)",
        )


class LeaseLost(SampleStoreError):
    """The caller no longer owns what it wanted to write. Nothing was changed."""

    def __init__(self, what: str, id: int, attempt: int, now_owner: int | None = None, now_attempt: int | None = None):
        self.what, self.id, self.attempt = what, id, attempt
        self.look = ("show", str(id)) if what == "sample" else ("tail",)
        self.now_owner, self.now_attempt = now_owner, now_attempt
        if what == "batch":  # has no attempts, and no request
            told = f"batch {id} is no longer leased by this trainer: it was committed, given back or reaped"
            super().__init__(f"{told}. Nothing was changed. Ask for its step again with: run.batch(step)")
            return
        super().__init__(
            f"{what} {id} is no longer held at attempt {attempt} (now owner {now_owner}, attempt {now_attempt}): "
            "drop this work and cancel its request"
        )


class EngineInUse(SampleStoreError):
    """An engine belongs to another run. Nothing was changed.

    workers   (id, host, pid) of that run's live workers that use it, and would take it back at once
    """

    def __init__(self, url: str, run: str, workers: list[tuple[int, str, int]]) -> None:
        self.url, self.run, self.workers = url, run, workers
        told = f"engine {url} belongs to run {run!r}"
        cure = f"samplestore engines forget {quote(url)}"
        if workers:
            shown = ", ".join(f"{id} (pid {pid} on {host})" for id, host, pid in workers[:5])
            told += f", whose {amount(len(workers), 'live worker')} would take it back at once: {shown}"
            them, gone = which(len(workers), "it", "them"), which(len(workers), "it has", "they have")
            cure = f"Stop {them} with samplestore drain --run {quote(run)} (or SIGTERM), and when {gone} gone: {cure}"
        else:
            cure = f"Give it back with: {cure}"
        super().__init__(f"{told}; an engine serves one run's weights. {cure}")


class EngineUpdating(SampleStoreError):
    """Another process is bringing an engine to other weights. Nothing was changed, and no engine was told.

    worker   (id, name, host, pid) of that process
    """

    def __init__(self, url: str, worker: tuple[int, str, str, int], for_s: float) -> None:
        self.url, self.worker, self.for_s = url, worker, for_s
        id, name, host, pid = worker
        super().__init__(
            f"engine {url} is being updated by worker {id} ({name}, pid {pid} on {host}), for {max(0.0, for_s):.0f} s "
            "so far: two updates at once would leave it with weights of neither. See when it is done with: samplestore "
            "engines list; free what dead workers hold with: samplestore reap"
        )


class InvalidSegment(SampleStoreError):
    """A segment breaks a promise about its arrays. Nothing was stored."""

    def __init__(self, reason: str, *, field: str, position: int | None = None) -> None:
        self.reason, self.field, self.position = reason, field, position
        super().__init__(f"segment refused: {reason}")


class SequenceConflict(SampleStoreError):
    """An append names a seq that is not the next one and is not a repetition of a stored segment."""

    def __init__(self, sample_id: int, seq: int, expected: int, why: str) -> None:
        self.sample_id, self.seq, self.expected, self.why = sample_id, seq, expected, why
        self.look = ("show", str(sample_id))
        super().__init__(f"sample {sample_id}: segment seq {seq} refused, the next is {expected}: {why}")


class InvalidTransition(SampleStoreError):
    """The state machine has no such arrow."""

    look = ("groups",)

    def __init__(self, what: str, id: int, state: str, verb: str, allowed: str) -> None:
        self.what, self.id, self.state, self.verb, self.allowed = what, id, state, verb, allowed
        super().__init__(f"cannot {verb} {what} {id}: it is {state}; allowed from: {allowed}")


class NotInRun(SampleStoreError):
    """Ids that do not exist, or belong to another run."""

    def __init__(self, what: str, ids: list[int]) -> None:
        self.what, self.ids = what, ids
        shown = ", ".join(str(i) for i in ids[:10]) + (", ..." if len(ids) > 10 else "")
        super().__init__(f"this run has no {what} with id {shown}. List them with: samplestore groups")


class UnknownVersion(SampleStoreError):
    """A weight version was named that the run does not have."""

    def __init__(self, run: str, version: int) -> None:
        self.run, self.version = run, version
        super().__init__(f"run {run!r} has no weight version {version}. Announce it first: run.publish_weights(...)")


class BatchTimeout(SampleStoreError):
    """No batch became ready in time; `why` says what is missing."""

    look = ("why",)

    def __init__(self, waited_s: float, why: Any) -> None:
        self.waited_s, self.why = waited_s, why
        super().__init__(f"no batch after {waited_s:.0f} s. {why}")


class WaitStopped(SampleStoreError):
    """A wait was ended from another thread. Nothing was leased."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} was stopped; nothing was leased. Ask again with: run.batch(...)")


class AbortTimeout(SampleStoreError):
    """Samples were still held by their workers after an abort was asked for and waited for; it stays asked for.

    at   (where, samples): the engines that generate for them, as far as their workers know, or who holds them
    """

    def __init__(self, waited_s: float, samples: list[int], at: list[tuple[str, int]]) -> None:
        self.waited_s, self.samples, self.at = waited_s, samples, at
        shown = ", ".join(map(str, samples[:5])) + (", ..." if len(samples) > 5 else "")
        told = "; ".join(f"{where}: {n:,}" for where, n in at[:5]) + ("; ..." if len(at) > 5 else "")
        super().__init__(
            f"{amount_is(len(samples), 'sample')} still in flight after "
            f"{waited_s:.0f} s ({shown}); {told or 'nobody says where'}. See what still generates with: samplestore "
            "engines list --live; free what dead workers hold with: samplestore reap"
        )


class WorkerFailed(SampleStoreError):
    """A worker of this run reported a fatal error while the trainer was waiting."""

    look = ("tail",)

    def __init__(self, worker_id: int, name: str, error: str) -> None:
        self.worker_id, self.name, self.error = worker_id, name, error
        super().__init__(f"worker {worker_id} ({name}) failed: {error}")


class StepAlreadyCommitted(SampleStoreError):
    """A batch was asked for a step whose batch is committed on this timeline."""

    def __init__(self, step: int, batch_id: int) -> None:
        self.step, self.batch_id = step, batch_id
        super().__init__(
            f"step {step} was committed as batch {batch_id}. Read it again with run.replay({step}), "
            f"or go back with run.rewind({step - 1})"
        )


class StepHeld(SampleStoreError):
    """Another trainer that is alive holds the batch of this step."""

    look = ("status",)

    def __init__(self, step: int, batch_id: int, worker_id: int) -> None:
        self.step, self.batch_id, self.worker_id = step, batch_id, worker_id
        super().__init__(f"step {step} is leased as batch {batch_id} by live worker {worker_id}")


class WorldMismatch(SampleStoreError):
    """A rank asked for its part of a batch that is shared out over another number of ranks."""

    def __init__(self, step: int, batch_id: int, planned: int, asked: int) -> None:
        self.step, self.batch_id, self.planned, self.asked = step, batch_id, planned, asked
        super().__init__(
            f"step {step} is shared out over {amount(planned, 'rank')} (batch {batch_id}), and world={asked} was asked "
            f"for. Start all ranks with one world; rank 0 plans anew: run.batch({step}, rank=0, world={asked})"
        )


class OnlyRankZero(SampleStoreError):
    """A rank that reads its part of a batch tried to settle it. Nothing was changed."""

    def __init__(self, verb: str, step: int, rank: int) -> None:
        self.verb, self.step, self.rank = verb, step, rank
        super().__init__(
            f"rank {rank} can't {verb} step {step}: rank 0 does, after all ranks are done. Leave the `with` block, or "
            "ask whether the lease still stands: batch.require_held()"
        )


class BatchReleased(SampleStoreError):
    """Rank 0 gave a batch back while another rank waited for it or read it. Nobody trains on it."""

    def __init__(self, step: int, batch_id: int, reason: str | None) -> None:
        self.step, self.batch_id, self.reason = step, batch_id, reason
        why = f": {reason}" if reason else ""
        super().__init__(
            f"rank 0 no longer holds batch {batch_id} of step {step}{why}. Stop all ranks and start them again from "
            f"the last checkpoint: run.batch({step}, ...)"
        )


class MissingLogprobs(SampleStoreError):
    """A batch that needs log-probs has a sample without."""

    def __init__(self, sample_id: int) -> None:
        self.sample_id, self.look = sample_id, ("show", str(sample_id))
        super().__init__(f"sample {sample_id} has trained tokens without log-probs; pass need_logprobs=False to accept")


class RewindTooFar(SampleStoreError):
    """What a rewind would have to bring back was pruned."""

    def __init__(self, step: int, limit: int, why: str) -> None:
        self.step, self.limit, self.why = step, limit, why
        super().__init__(
            f"cannot rewind to step {step}: {why} {limit}. The oldest step that is left: samplestore rewind {limit}"
        )


class TokensPruned(SampleStoreError):
    """Tokens were asked for that `samplestore prune` has removed. Counters, versions and rewards are still there.

    limit   steps up to this one were pruned; None: not known where it was noticed
    """

    def __init__(self, what: str, limit: int | None = None) -> None:
        self.what, self.limit = what, limit
        up_to = "" if limit is None else f" (retention: steps up to {limit})"
        super().__init__(f"the tokens of {what} were pruned{up_to}. What is kept: samplestore groups --state consumed")


class RunInUse(SampleStoreError):
    """A whole run can't be removed, nor a database replaced, while workers or trainers are alive on it."""

    def __init__(self, what: str, workers: list[int]) -> None:
        self.what, self.workers = what, workers
        shown = ", ".join(map(str, workers[:5])) + (", ..." if len(workers) > 5 else "")
        super().__init__(
            f"{what} is in use by {amount(len(workers), 'live worker')} or "
            f"{which(len(workers), 'trainer', 'trainers')} ({shown}). Stop {which(len(workers), 'it', 'them')}, and "
            "free what dead ones hold with: samplestore reap"
        )


class ImportConflict(SampleStoreError):
    """A group of an export contradicts what is in the run already. Nothing was stored."""

    BEFORE = "was imported before with other samples, tokens or rewards"

    def __init__(self, portable_id: str, why: str = BEFORE) -> None:
        self.portable_id = portable_id
        super().__init__(
            f"group {portable_id} {why}. Nothing was stored. "
            "Look at what is there with: samplestore groups --run NAME; or store the others in a run of their own: "
            "samplestore import FILE --run OTHER"
        )


class ReadTooLong(SampleStoreError):
    """A read session was open for too long and was ended: its snapshot kept the database from using space again."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(
            f"this read session was ended after {limit_s:g} s: while it is open the database can't use space again. "
            "Fetch what you need and leave it; for the next look open another: with store.session() as session: ..."
        )


class BackupError(SampleStoreError):
    """A backup or a restore was refused or failed. Neither the database nor an older backup was changed."""


class EvaluationTimeout(SampleStoreError):
    """An evaluation was not done in time. It goes on."""

    def __init__(self, evaluation_id: int, waited: float, left: int, why: str) -> None:
        self.evaluation_id, self.waited, self.left, self.why = evaluation_id, waited, left, why
        super().__init__(
            f"evaluation {evaluation_id} is not done after {waited:.0f} s: {amount(left, 'prompt')} "
            f"{which(left, 'is', 'are')} left. The run: {why}. It goes on; see it with: samplestore eval --list"
        )


class HookFailed(SampleStoreError):
    """A hook of the trainer raised, or returned what it must not. Nothing is leased; what it raised is the cause."""

    def __init__(self, hook: str, why: str) -> None:
        self.hook, self.why = hook, why
        super().__init__(f"the {hook} can't be used: {why}. Nothing is leased; correct it and ask for the batch again")


class MissingExtra(SampleStoreError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        self.feature, self.extra = feature, extra
        super().__init__(f"{feature} needs more packages. Run: pip install 'samplestore[{extra}]'")


class EpisodeDiverged(SampleStoreError):
    """An episode that runs again asked for something else than what is recorded: its function was changed meanwhile,
    or depends on what is not recorded (time, random numbers, another file)."""

    def __init__(self, sample_id: int, number: int, recorded: str, asked: str) -> None:
        self.sample_id, self.number, self.recorded, self.asked = sample_id, number, recorded, asked
        super().__init__(
            f"sample {sample_id}, call {number} of its episode: recorded is {recorded}, asked for is {asked}. Take "
            f"what may differ through ctx.step, or start afresh: samplestore requeue {sample_id} --reason TEXT"
        )


class EpisodeTruncated(SampleStoreError):
    """An episode has no room left for another token. Where the function does not catch it, the sample ends as
    `truncated`."""

    def __init__(self, sample_id: int, n_tokens: int) -> None:
        self.sample_id, self.n_tokens = sample_id, n_tokens
        super().__init__(
            f"sample {sample_id} has no room after {amount(n_tokens, 'response token')}: ctx.room says beforehand what "
            "is left. More of it: samplestore worker --max-new-tokens N, as far as the model's context goes"
        )


class EpisodeLimit(SampleStoreError):
    """An episode went beyond a bound of the worker."""

    def __init__(self, sample_id: int, what: str, limit: int, setting: str | None = None) -> None:
        self.sample_id, self.what, self.limit, self.setting = sample_id, what, limit, setting
        cure = f"Allow more with: samplestore worker --{setting} N" if setting else "Keep it elsewhere, by name"
        super().__init__(f"sample {sample_id}: {what}; the limit is {limit:,}. {cure}")


class StepFailed(SampleStoreError):
    """The function of an episode's step raised, or took too long. That is recorded: a replay raises it again. Catch it
    to go on with the episode."""

    def __init__(self, sample_id: int, number: int, name: str, error: str) -> None:
        self.sample_id, self.number, self.name, self.error = sample_id, number, name, error
        super().__init__(
            f"sample {sample_id}, step {number} ({name}) failed: {error}. To try the sample afresh: "
            f"samplestore requeue {sample_id} --reason TEXT"
        )


class OutcomeUnknown(StepFailed):
    """A step was begun by a worker that died before it could say how it ended, and may not be done twice."""

    def __init__(self, sample_id: int, number: int, name: str, key: str) -> None:
        self.key = key
        super().__init__(
            sample_id, number, name,
            f"outcome unknown: a worker died after it had begun (idempotency key {key}), and on_unknown is 'fail'",
        )  # fmt: skip
