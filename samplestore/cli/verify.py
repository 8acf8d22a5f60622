"""samplestore check, ledger: what must hold, recounted."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, opened_run
from samplestore.cli.output import counts, emit_json, note, pairs, say, table


def check(db: Db = None, run: RunName = None, as_json: AsJson = False) -> None:
    """Verify every promise that a query can verify. Exit code 5 if one is broken."""
    with opened_run(db, run) as found:
        findings = found.check()
        name = found.name
    if as_json:
        emit_json({"run": name, "ok": not findings, "findings": [finding.as_json() for finding in findings]})
    elif not findings:
        say(f"ok: run {name} keeps every promise that a query can verify")
    for finding in [] if as_json else findings:
        say(f"{finding.code}: {finding.message} ({finding.count:,} rows)")
        for example in finding.examples:
            say(f"    {json.dumps(example, default=str)}")
    if findings:
        note(
            f"error: {len(findings)} checks of run {name} failed. "
            f"Look at the tokens with: samplestore ledger --run {name}"
        )
        raise typer.Exit(exits.CHECK)


def ledger(
    db: Db = None,
    run: RunName = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Recount from the payloads, or show the kept totals only.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Where every generated token is. Exit code 5 if the recount differs from the kept totals."""
    with opened_run(db, run) as found:
        told = found.ledger(exact)
        name = found.name
    if as_json:
        emit_json({"run": name, **told})
    else:
        _print(told)
    if told["closed"] is False:
        note(
            f"error: the token ledger of run {name} does not close. Find the rows with: samplestore check --run {name}"
        )
        raise typer.Exit(exits.CHECK)


def _print(told: dict[str, Any]) -> None:
    table(("fate", "tokens"), [*told["by_fate"].items(), ("generated", told["generated"])])
    requests = told["requests"]
    lost = {**requests["lost_by_reason"], "unexplained": requests["unexplained_tokens"]}
    said = f"{requests['generated']:,} generated = {requests['stored']:,} stored + {sum(lost.values()):,} lost"
    say()
    pairs(
        [
            *([("dropped", counts(told["dropped_by_reason"]))] if told["dropped_by_reason"] else []),
            ("resumes", f"{told['resumes']:,}, which kept {told['kept_by_resuming']:,} tokens"),
            ("requests", f"{requests['finished']:,} finished: {said} ({counts(lost)})"),
            ("prompts", f"{requests['prompt_tokens']:,} tokens, {requests['cached_tokens']:,} of them cached"),
            *(
                [("unknown", f"{n:,} requests of workers that died")]
                if (n := requests["worker_died_before_it_knew"])
                else []
            ),
            *([("recounted", told["recounted"])] if "recounted" in told else []),
            ("closed", {True: "yes", False: "NO", None: "not recounted (--exact does)"}[told["closed"]]),
        ]
    )
    if told.get("differences"):
        say()
        table(
            ("fate", "reason", "version", "recounted - kept"),
            [(d["fate"], d["reason"], d["version"], d["recounted_minus_kept"]) for d in told["differences"]],
        )
