"""samplestore export: samples of a run as files."""

from __future__ import annotations

from typing import Annotated

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, RunPlace, one_name, opened_run
from samplestore.cli.output import emit_json, say
from samplestore.cli.progress import bar
from samplestore.words import amount, which


def export(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PATH",
            help="parquet: a folder; jsonl: a file, .gz is compressed; slime: a path with {rollout_id} in it.",
            show_default=False,
        ),
    ],
    place: RunPlace = None,
    db: Db = None,
    run: RunName = None,
    format_: Annotated[str, typer.Option("--format", help="parquet | jsonl | slime")] = "parquet",
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Only what was trained on in step N.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only what was trained on in steps A to B.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All groups, whatever became of them: what is done without --step.")
    ] = False,
    status: Annotated[
        list[str] | None,
        typer.Option("--status", help=("Only samples of this status, and parents of forks; may be repeated.")),
    ] = None,
    arrays: Annotated[
        list[str] | None,
        typer.Option("--arrays", metavar="NAME", help='Named arrays to write too, or "all"; may be repeated.'),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="FOLDER", help="Write the text of responses too.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export samples: one row each, with tokens, log-probs, masks, versions, rewards and segments.

    What is written can be read by pyarrow, polars and duckdb (Parquet), line by line (JSON), or by slime with
    --load-debug-rollout-data; `samplestore import` takes all of it back as it was. Everything is there at the end, or
    nothing; the same rows give the same bytes. Evaluations are left out, and groups whose tokens were pruned.
    """
    chosen = _steps(step, steps, everything)
    named = one_name(place, run, "export")
    with opened_run(db, named) as found, bar(f"export {found.name}") as progress:
        name = found.name
        done = found.export(
            to, format=format_, steps=chosen, statuses=status or (), arrays=arrays or (), tokenizer=tokenizer,
            force=force, progress=progress,
        )  # fmt: skip
    if as_json:
        emit_json({"run": name, **done.as_json()})
        return
    for path in done.paths[:20]:
        say(path)
    if len(done.paths) > 20:
        say(f"and {len(done.paths) - 20:,} more")
    say(
        f"{amount(done.samples, 'sample')} of {amount(done.groups, 'group')}, "
        f"{amount(done.tokens, 'response token')} (run {name})"
    )
    if n := done.pruned:
        say(f"{amount(n, 'group')} {which(n, 'is left out: its', 'are left out: their')} tokens were pruned")


def _steps(step: int | None, steps: str | None, everything: bool) -> tuple[int, int] | None:
    """Raises CommandError."""
    if sum((step is not None, steps is not None, everything)) > 1:
        raise exits.CommandError(
            "--step, --steps and --all exclude each other. Try: samplestore export --to PATH --steps 10:20",
            exits.USAGE,
        )
    if step is not None:
        return step, step
    if steps is None:
        return None
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 2**31):
        raise exits.CommandError(
            f"--steps is the first and the last step, not {steps[:40]!r}. Try: samplestore export --to PATH "
            "--steps 10:20",
            exits.USAGE,
        )
    return int(first), int(last)
