"""samplestore groups: the groups of a run, filtered and page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli.common import AsJson, Db, RunName, opened_run
from samplestore.cli.output import emit_json, note, shown, table, when
from samplestore.cli.typed import again
from samplestore.states import GroupState

if TYPE_CHECKING:
    from samplestore.queries.group_list import GroupFilter, GroupPage
    from samplestore.run import Run

MOST_LOOKS = 10  # stretches of group numbers that one command looks through for a page


def groups(
    db: Db = None,
    run: RunName = None,
    state: Annotated[
        list[GroupState] | None,
        typer.Option("--state", help="Only groups in this state; may be repeated.", show_default=False),
    ] = None,
    min_staleness: Annotated[
        int | None, typer.Option("--min-staleness", min=0, help="Only groups so many versions behind, or more.")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option("--max-staleness", min=0, help="Only groups so many versions behind, or fewer.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Only groups of this mean, or more.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Only groups of this mean, or less.")] = None,
    zero_std: Annotated[
        bool | None,
        typer.Option(
            "--zero-std/--some-std",
            help="Only groups whose rewards are all equal, and teach GRPO nothing; or only the others.",
            show_default=False,
        ),
    ] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Those whose rewards differ most come first, not the newest.")
    ] = False,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Only groups with tokens of this weight version.")
    ] = None,
    worker: Annotated[
        int | None, typer.Option("--worker", min=1, help="Only groups with a sample that this worker finished (id).")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Only groups of this data set.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only groups whose prompt contains this.")] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="PLACE", help="The next page: what the page before ended with.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Groups of a run, newest first, that fit all that is asked.

    Staleness is that of now; of a group that a trainer holds or has consumed that at the lease. A group of which
    something is not known yet is left out where that is asked for.
    """
    from samplestore.queries.group_list import NEWEST, SPREAD, GroupFilter

    where = GroupFilter(
        states=tuple(s.value for s in state or ()), staleness_min=min_staleness, staleness_max=max_staleness,
        reward_min=min_reward, reward_max=max_reward, zero_std=zero_std, version=version, worker=worker,
        dataset=dataset, text=text,
    )  # fmt: skip
    with opened_run(db, run) as found:
        rows, last = _look(found, where, after, SPREAD if spread else NEWEST, limit)
        name = found.name
    if as_json:
        emit_json({"run": name, "groups": rows, "more": last.after is not None, "after": last.after})
        return
    table(GROUPS, [_group(row) for row in rows])
    if last.after is not None:
        looked = "" if len(rows) == limit else f" (of what fits; looked through down to number {last.low})"
        note(f"there may be more{looked}; the next page: {again('--after', last.after)}")


def _look(
    run: Run, where: GroupFilter, after: str | None, order: str, limit: int
) -> tuple[list[dict[str, Any]], GroupPage]:
    """The rows of one page, and the last stretch of numbers that was looked through for them."""
    from samplestore.queries.group_list import page

    rows: list[dict[str, Any]] = []
    for _ in range(MOST_LOOKS):
        last = page(run.database, run.id, where, after=after, order=order, limit=limit - len(rows))
        rows += last.rows
        after = last.after
        if after is None or len(rows) == limit:
            break
    return rows, last


GROUPS = (
    *("group", "state", "finished", "unscored", "failed", "tokens", "staleness", "reward ± std", "created", "dataset"),
    "reason",
)


def _id(number: int | None) -> str | None:
    """Ids and versions are names, not amounts: no thousands separator."""
    return None if number is None else str(number)


def _group(r: dict[str, Any]) -> tuple[Any, ...]:
    return (
        _id(r["number"]), r["state"], f"{r['n_samples'] - r['n_open']}/{r['n_samples']}", r["n_unscored"] or None,
        r["n_failed"] or None, r["n_tokens"], r["staleness"], _reward(r), when(r["created_at"]), r["dataset"],
        r["reason"],
    )  # fmt: skip


def _reward(r: dict[str, Any]) -> str | None:
    """The mean, and how far apart the samples are."""
    if r["reward_mean"] is None:
        return None
    return f"{shown(r['reward_mean'])} ± {shown(r['reward_std'])}" if r["reward_std"] is not None else r["reward_mean"]
