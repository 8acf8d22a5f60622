"""samplestore pause, resume, drain, abort, reap, requeue, drop, rewind: what operators do to a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import (
    Db,
    NeededReason,
    Reason,
    RunName,
    TheRun,
    chosen,
    chosen_run,
    listed,
    opened,
    opened_run,
)
from samplestore.cli.output import say
from samplestore.cli.show import find_sample
from samplestore.cli.typed import to_type
from samplestore.errors import InvalidTransition
from samplestore.words import amount, amount_is, which

if TYPE_CHECKING:
    from samplestore.run import Run


def pause(db: Db = None, run: RunName = None, reason: Reason = None) -> None:
    """Workers claim nothing more; what is in flight goes on."""
    with opened_run(db, run) as found:
        found.pause(reason)
        say(f"run {found.name} is paused; go on with: {to_type('resume', '--run', found.name)}")


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
            f"run {found.name} is draining; follow it with: {to_type('status', '--watch', '--run', found.name)}; "
            f"let it go on with: {to_type('resume', '--run', found.name)}"
        )


def abort(
    reason: NeededReason,
    db: Db = None,
    run: TheRun = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="Only this sample (GROUP/INDEX or its id); may be repeated.")
    ] = None,
    group: Annotated[list[int] | None, typer.Option(help="Only samples of this group (number); may repeat.")] = None,
    wait: Annotated[float | None, typer.Option(min=0, help="Wait as many seconds until workers have let go.")] = None,
) -> None:
    """Abort what is in flight at the engines. Workers store the partial samples, which stay resumable.

    They are resumed at once unless the run is paused before (samplestore pause).
    """
    from samplestore.queries.status import status

    with opened(db) as store:
        found = chosen(store, run)
        samples = [find_sample(store, named, found.name)["id"] for named in sample or ()]
        groups = [*existing_groups(found, group)] if group else []
        held = status(found.database, found.id)["in_flight"]
        found.abort_inflight(reason, samples=samples or None, groups=groups or None, wait_s=wait)
        what = "those samples" if samples or groups else f"what is in flight ({amount(held, 'sample')})"
        done = "have aborted" if wait is not None else "were asked to abort"
        say(f"run {found.name}: workers {done} {what}")


def reap(db: Db = None, run: RunName = None) -> None:
    """Free what workers hold whose heartbeat stopped, and samples that make no progress."""
    with opened_run(db, run) as found:
        done = found.reap()
        n, dead = len(done.workers), f" ({listed(done.workers)})" if done.workers else ""
        say(
            f"run {found.name}: {amount_is(n, 'worker')} dead{dead}; freed "
            f"{amount(done.samples, 'sample')}, {amount(done.stages, 'stage')}, {amount(done.batches, 'batch')}, "
            f"{amount(done.engines, 'engine')}; {amount(done.stragglers, 'straggler')}"
        )


def requeue(
    samples: Annotated[
        list[str], typer.Argument(metavar="SAMPLE...", help="GROUP/INDEX, RUN_UUID/GROUP/INDEX, or ids.")
    ],
    reason: NeededReason,
    db: Db = None,
    run: RunName = None,
) -> None:
    """Start samples afresh: a new incarnation, nothing is carried over; their tokens are superseded."""
    with opened(db) as store:
        found = {row["id"]: row for row in (find_sample(store, named, run) for named in samples)}
        owner = store.existing_run(one_run([*found.values()], "samples", "requeue"))
        places = {id: f"{row['number']}/{row['index']}" for id, row in sorted(found.items())}
        with naming({row["group_id"]: row["number"] for row in found.values()}):
            done = owner.requeue([*places], reason)
        told = listed([*places.values()])
        say(f"run {owner.name}: {amount(done, 'sample')} {which(done, 'starts', 'start')} afresh ({told})")


def drop(
    groups: Annotated[
        list[int],
        typer.Argument(metavar="GROUP...", min=0, help="Numbers of groups (`samplestore groups` shows them)."),
    ],
    reason: NeededReason,
    db: Db = None,
    run: TheRun = None,
) -> None:
    """Drop groups: they will not be trained on, and whoever generates for them is told to stop."""
    with chosen_run(db, run) as found:
        named = existing_groups(found, groups)
        with naming(named):
            done = found.drop([*named], reason)
        say(f"run {found.name}: {amount(done, 'group')} dropped ({listed([*named.values()])})")


@contextmanager
def naming(numbers: dict[int, int]) -> Iterator[None]:
    """What can't be done with a group is told of its number, not of its id."""
    try:
        yield
    except InvalidTransition as error:
        number = numbers.get(error.id, error.id)
        raise InvalidTransition(error.what, number, error.state, error.verb, error.allowed) from error


def existing_groups(run: Run, numbers: list[int]) -> dict[int, int]:
    """The ids of a run's groups that have these numbers, with the numbers. Raises CommandError."""
    from samplestore.queries.inspect import MAX_ROWS, groups_by_number

    wanted = sorted(set(numbers))
    listing = to_type("groups", "--run", run.name)
    if len(wanted) > MAX_ROWS:
        raise exits.CommandError(
            f"{len(wanted):,} groups at once; at most {MAX_ROWS:,} are taken. List them with: {listing}", exits.USAGE
        )
    rows = groups_by_number(run.database, run.id, [n for n in wanted if n < 2**63])
    if missing := sorted({*wanted} - {row["number"] for row in rows}):
        what = which(len(missing), "group", "groups")
        raise exits.CommandError(f"run {run.name} has no {what} {listed(missing)}. List them with: {listing}")
    return {row["id"]: row["number"] for row in rows}


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
                    "nobody is there to ask. Say it with: "
                    f"{to_type('rewind', str(step), '--run', found.name, '--yes')}",
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
