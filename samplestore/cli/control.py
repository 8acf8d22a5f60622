"""samplestore pause, resume, drain, abort, reap, requeue, drop, rewind: what operators do to a run."""

from __future__ import annotations

import sys
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import Db, NeededReason, Reason, RunName, TheRun, chosen_run, listed, opened, opened_run
from samplestore.cli.output import say
from samplestore.cli.show import find_sample

if TYPE_CHECKING:
    from samplestore.store import Store


def pause(db: Db = None, run: RunName = None, reason: Reason = None) -> None:
    """Workers claim nothing more; what is in flight goes on."""
    with opened_run(db, run) as found:
        found.pause(reason)
        say(f"run {found.name} is paused; go on with: samplestore resume --run {quote(found.name)}")


def resume(db: Db = None, run: RunName = None, reason: Reason = None) -> None:
    """Workers claim again."""
    with opened_run(db, run) as found:
        found.resume(reason)
        say(f"run {found.name} is running")


def drain(db: Db = None, run: RunName = None, reason: Reason = None) -> None:
    """Workers claim nothing more, finish what they hold, and leave."""
    with opened_run(db, run) as found:
        found.drain(reason)
        say(
            f"run {found.name} is draining; follow it with: samplestore status --watch --run {quote(found.name)}; "
            f"let it go on with: samplestore resume --run {quote(found.name)}"
        )


def abort(
    reason: NeededReason,
    db: Db = None,
    run: TheRun = None,
    sample: Annotated[list[int] | None, typer.Option(help="Only this sample (id); may be repeated.")] = None,
    group: Annotated[list[int] | None, typer.Option(help="Only this group's samples (id); may be repeated.")] = None,
    wait: Annotated[float | None, typer.Option(min=0, help="Wait as many seconds until workers have let go.")] = None,
) -> None:
    """Abort what is in flight at the engines. Workers store the partial samples, which stay resumable.

    They are resumed at once unless the run is paused before (samplestore pause).
    """
    from samplestore.queries.status import status

    with chosen_run(db, run) as found:
        held = status(found.database, found.id)["in_flight"]
        found.abort_inflight(reason, samples=sample, groups=group, wait_s=wait)
        named = sample or group
        what = "those samples" if named else f"what is in flight ({held:,} samples)"
        done = "have aborted" if wait is not None else "were asked to abort"
        say(f"run {found.name}: workers {done} {what}")


def reap(db: Db = None, run: RunName = None) -> None:
    """Free what workers hold whose heartbeat stopped, and samples that make no progress."""
    with opened_run(db, run) as found:
        done = found.reap()
        dead = f" ({listed(done.workers)})" if done.workers else ""
        say(
            f"run {found.name}: {len(done.workers)} workers are dead{dead}; freed {done.samples:,} samples, "
            f"{done.stages:,} stages, {done.batches:,} batches, {done.engines:,} engines; "
            f"{done.stragglers:,} stragglers"
        )


def requeue(
    samples: Annotated[
        list[str], typer.Argument(metavar="SAMPLE...", help="Ids, GROUP/INDEX, or RUN_UUID/GROUP/INDEX.")
    ],
    reason: NeededReason,
    db: Db = None,
    run: RunName = None,
) -> None:
    """Start samples afresh: a new incarnation, nothing is carried over; their tokens are superseded."""
    with opened(db) as store:
        found = [find_sample(store, named, run) for named in samples]
        ids = sorted({row["id"] for row in found})
        owner = store.existing_run(one_run(found, "samples", "requeue"))
        done = owner.requeue(ids, reason)
        say(f"run {owner.name}: {done:,} samples start afresh ({listed(ids)})")


def drop(
    groups: Annotated[
        list[int], typer.Argument(metavar="GROUP...", help="Group ids (`samplestore groups` shows them).")
    ],
    reason: NeededReason,
    db: Db = None,
) -> None:
    """Drop groups: they will not be trained on, and whoever generates for them is told to stop."""
    with opened(db) as store:
        rows = existing_groups(store, groups)
        owner = store.existing_run(one_run(rows, "groups", "drop"))
        done = owner.drop([row["id"] for row in rows], reason)
        say(f"run {owner.name}: {done:,} groups dropped (numbers {listed([row['number'] for row in rows])})")


def existing_groups(store: Store, ids: list[int]) -> list[dict[str, Any]]:
    from samplestore.queries.inspect import MAX_ROWS, groups_by_id

    wanted = sorted(set(ids))
    if len(wanted) > MAX_ROWS:
        raise exits.CommandError(
            f"{len(wanted)} groups at once; at most {MAX_ROWS} are taken. List them with: samplestore groups",
            exits.USAGE,
        )
    rows = groups_by_id(store.database, [i for i in wanted if 0 < i < 2**63])
    if missing := sorted({*wanted} - {row["id"] for row in rows}):
        raise exits.CommandError(f"there is no group {listed(missing)}. List the groups with: samplestore groups")
    return rows


def one_run(rows: list[dict[str, Any]], what: str, verb: str) -> str:
    names = sorted({row["run"] for row in rows})
    if len(names) > 1:
        raise exits.CommandError(
            f"these {what} belong to several runs ({', '.join(names)}): {verb} those of one run at a time. "
            f"See: samplestore {verb} --help",
            exits.USAGE,
        )
    return str(names[0])


def rewind(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="The step of the checkpoint that was restored.")],
    db: Db = None,
    run: TheRun = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Go back to the checkpoint of STEP: groups that it has not seen are ready again, on a new timeline.

    The restored weights are published as a new version. Stop the trainer before.
    """
    with chosen_run(db, run) as found:
        if not yes:
            if not sys.stdin.isatty():
                raise exits.CommandError(
                    f"nobody is there to ask. Say it with: samplestore rewind {step} --run {quote(found.name)} --yes",
                    exits.USAGE,
                )
            typer.confirm(
                f"Rewind run {found.name} to step {step}? What was trained after it counts as unseen", abort=True
            )
        restored = found.rewind(step)
        say(
            f"run {found.name} is at step {step}: timeline {restored.timeline}, weights version {restored.version} "
            f"(label {restored.label}, path {restored.path or 'none'})"
        )
