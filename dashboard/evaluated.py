"""Evaluations of a run, as a piece of the page of batches: how good the weights were that training made."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from samplestore.dashboard import look, parts
from samplestore.queries.evaluation import Evaluation

ROWS = 10  # each is counted from its samples


def html(run: str, found: Sequence[Evaluation], as_of: float) -> str:
    """found: at least one."""
    columns = [
        ("data set", ""), ("weights", "n"), ("done", "n"), ("scored", "r"), ("mean reward", "r"), ("pass@1", "r"),
        ("pass@n", "r"), ("cut at the limit", "r"), ("mean tokens", "r"), ("began (UTC)", "n"),
    ]  # fmt: skip
    told = f"the newest first; a sample passes with a reward of {found[0].pass_reward:g}"
    if len(found) == ROWS:
        told += f"; all of them: samplestore eval --list --run {look.line(quote(run), 300)}"
    return parts.section("Evaluations", told, parts.table(columns, [_row(e, as_of) for e in found]))


def _row(e: Evaluation, as_of: float) -> list[str]:
    done = parts.mark("ok", "done") if e.done else parts.mark("warn", f"{e.n_prompts_done} of {e.n_prompts} prompts")
    failed = f' <span class="warn">{look.count(e.n_failed)} failed</span>' if e.n_failed else ""
    other = f' <span class="warn">{look.count(e.n_other_version)} of other weights</span>' if e.n_other_version else ""
    most = max(e.pass_at, default=1)
    return [
        look.line(e.dataset, 60), look.version_key(e.version), done, look.count(e.n_scored) + failed + other,
        "–" if e.mean_reward is None else f"{e.mean_reward:.3f}", _percent(e.pass_at.get(1)),
        "–" if most == 1 else f"{_percent(e.pass_at[most])} <small>n = {most}</small>", _percent(e.truncated),
        "–" if e.mean_tokens is None else look.count(e.mean_tokens), look.moment(e.created_at, as_of),
    ]  # fmt: skip


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f} %"
