"""samplestore eval: evaluate the current weights on a data set, and compare versions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, opened_run
from samplestore.cli.output import emit_json, say, table, when
from samplestore.cli.typed import to_type
from samplestore.words import which

if TYPE_CHECKING:
    from samplestore.queries.evaluation import Evaluation
    from samplestore.run import Run


def evaluate(
    dataset: Annotated[
        str | None,
        typer.Argument(metavar="DATASET", help="Added with add-prompts --eval.", show_default="the only one"),
    ] = None,
    db: Db = None,
    run: RunName = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of each prompt.")] = 1,
    sampling: Annotated[
        str | None,
        typer.Option(
            "--sampling", metavar="JSON", help="SGLang sampling parameters over the run's.", show_default="{}"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Response budget.", show_default="the worker's")
    ] = None,
    pass_reward: Annotated[
        float, typer.Option("--pass-reward", help="A sample passes with this reward or more.")
    ] = 1.0,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate once more what was evaluated: another evaluation.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until all of it is scored.")] = True,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Seconds to wait.", show_default="without end")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Start nothing: all evaluations of the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the current weights: start it, wait for the workers, and tell what was found.

    pass@k is the unbiased estimator. The same question about the same version is the same evaluation: after Ctrl-C or a
    timeout the command goes on waiting for it. Exit 1 where all samples failed; --again tries once more.
    """
    from samplestore.queries.obstacles import shown

    with opened_run(db, run) as found:
        if list_:
            _tell(found, found.evaluations(pass_reward), as_json)
            return
        options = {"sampling": _sampling(sampling), "max_new_tokens": max_new_tokens, "again": again}
        name = dataset or _only(found)
        if wait:
            made = found.evaluate(name, samples, pass_reward=pass_reward, timeout=timeout, **options)
            _tell(found, [made], as_json)
            if made.all_failed:
                raise exits.CommandError(
                    f"{which(made.n_failed, 'the sample', f'all {made.n_failed:,} samples')} failed; the last one: "
                    f"{shown(made.newest_error)}. When that is mended, give the command again with: --again"
                )
            return
        number = found.start_evaluation(name, samples, **options)
        (begun,) = [e for e in found.evaluations(pass_reward) if e.id == number]
        _tell(found, [begun], as_json)


def _sampling(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise exits.CommandError(
            f"--sampling is no JSON: {error}. Write it like: --sampling '{{\"temperature\": 0.0}}'", exits.USAGE
        ) from None
    if not isinstance(value, dict):
        raise exits.CommandError("--sampling must be an object, like: --sampling '{\"temperature\": 0.0}'", exits.USAGE)
    return value


def _only(run: Run) -> str:
    """The run's data set for evaluation, where it has one."""
    from samplestore.queries.evaluation import datasets

    names = datasets(run.database, run.id)
    if len(names) == 1:
        return names[0]
    if not names:
        raise exits.CommandError(
            f"run {run.name!r} has no data set to evaluate on. Add one with: "
            f"{to_type('add-prompts', 'FILE', '--run', run.name, '--dataset', 'NAME', '--eval')}"
        )
    raise exits.CommandError(
        f"run {run.name!r} has several data sets to evaluate on ({', '.join(names[:20])}): name one, like: "
        f"{to_type('eval', names[0], '--run', run.name)}",
        exits.USAGE,
    )


def _tell(run: Run, told: list[Evaluation], as_json: bool) -> None:
    if as_json:
        emit_json({"run": run.name, "evaluations": [e.as_json() for e in told]})
        return
    if not told:
        say(f"no evaluations yet. Start one with: {to_type('eval', 'DATASET', '--run', run.name)}")
        return
    ks = sorted({k for e in told for k in e.pass_at})
    table(
        ("data set", "version", "state", "prompts", "samples", "failed", *(f"pass@{k}" for k in ks), "mean reward",
         "truncated", "mean tokens", "other version", "sampling", "max new tokens", "began"),
        [
            (
                e.dataset, e.version, "done" if e.done else "under way", f"{e.n_prompts_done}/{e.n_prompts}",
                e.n_scored, e.n_failed, *(e.pass_at.get(k) for k in ks), e.mean_reward, e.truncated, e.mean_tokens,
                e.n_other_version, json.dumps(e.sampling), e.max_new_tokens, when(e.created_at),
            )
            for e in told
        ],
    )  # fmt: skip
