"""What a demo run proves, read back from its database."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa

from samplestore.examples.grpo import reward_rise
from samplestore.models import BatchGroup, BatchRow, Sample, SampleGroup
from samplestore.queries.status import status

RISE = 3.0  # standard errors that the reward must have risen


def consumed_rewards(run: Any, limit: int | None = None) -> list[float]:
    """Mean reward of each consumed group, in the order of consumption; the last `limit` only."""
    query = (
        sa.select(SampleGroup.reward_mean)
        .join(BatchGroup, BatchGroup.group_id == SampleGroup.id)
        .join(BatchRow, BatchRow.id == BatchGroup.batch_id)
        .where(BatchRow.run_id == run.id, BatchRow.state == "committed")
        .order_by(BatchRow.step.desc(), BatchGroup.position.desc())
    )
    with run.database.reading() as connection:
        rows = connection.execute(query if limit is None else query.limit(limit)).scalars().all()
    return [float(r) for r in reversed(rows) if r is not None]


def recent_reward(run: Any, limit: int) -> float:
    rewards = consumed_rewards(run, limit)
    return sum(rewards) / len(rewards) if rewards else float("nan")


def _versions(run: Any) -> tuple[dict[str, int], dict[str, int]]:
    """(samples by number of versions that wrote them, consumed groups by staleness at their lease)."""
    from samplestore.models import Segment

    spans = (
        sa.select(sa.func.count(sa.distinct(Segment.version_min)).label("n"))
        .join(Sample, (Sample.id == Segment.sample_id) & (Sample.incarnation == Segment.incarnation))
        .where(Sample.run_id == run.id, Sample.status.in_(["completed", "truncated"]))
        .group_by(Segment.sample_id)
    )
    lags = (
        sa.select(BatchGroup.staleness, sa.func.count())
        .join(BatchRow, BatchRow.id == BatchGroup.batch_id)
        .where(BatchRow.run_id == run.id, BatchRow.state == "committed")
        .group_by(BatchGroup.staleness)
        .order_by(BatchGroup.staleness)
    )
    with run.database.reading() as connection:
        per_sample = Counter(str(n) for n in connection.execute(spans).scalars())
        staleness = {str(lag): int(n) for lag, n in connection.execute(lags)}
    return dict(sorted(per_sample.items())), staleness


def report(store: Any, run: Any, plan: Any, killed: list[str], exits: dict[str, int], seconds: float) -> dict[str, Any]:
    """Read everything back, print it, and say whether each promise was kept."""
    now, ledger, findings = status(run.database, run.id), run.ledger(exact=True), run.check()
    rewards = consumed_rewards(run)
    first, last, error = reward_rise(rewards) if len(rewards) >= 10 else (0.0, 0.0, float("inf"))
    per_sample, staleness = _versions(run)
    asked = plan.steps * plan.groups
    mixed = sum(n for versions, n in per_sample.items() if int(versions) > 1)
    promises = {
        "samples were resumed": now["resumed_samples"] > 0,
        "samples span several versions": mixed > 0,
        "a worker was killed": len(killed) == 1,
        "groups consumed = asked": now["groups"]["consumed"] == asked,
        "ledger closed": bool(ledger["closed"]),
        "check clean": not findings,
        "workers drained": all(code == 0 for code in exits.values()),
    }
    if plan.must_rise:
        promises["reward rose by 3 standard errors"] = last - first > RISE * error
    summary = {
        "schema_version": 1,
        "ok": all(promises.values()),
        "promises": promises,
        "seconds": round(seconds, 1),
        "reward": {"first_fifth": first, "last_fifth": last, "standard_error": error},
        "groups_consumed": now["groups"]["consumed"],
        "groups_asked": asked,
        "samples_resumed": now["resumed_samples"],
        "tokens_kept_by_resuming": ledger["kept_by_resuming"],
        "samples_by_versions": per_sample,
        "staleness_of_consumed_groups": staleness,
        "ledger": ledger,
        "check": [finding.as_json() for finding in findings],
        "killed": killed,
        "worker_exit_codes": exits,
    }
    _print(summary)
    return summary


def _counts(counts: dict[str, int]) -> str:
    return "  ".join(f"{name}: {n}" for name, n in counts.items())


def _print(s: dict[str, Any]) -> None:
    reward, ledger = s["reward"], s["ledger"]
    first, last = reward["first_fifth"], reward["last_fifth"]
    rise = (last - first) / reward["standard_error"]
    fates = "  ".join(f"{name} {amount}" for name, amount in ledger["by_fate"].items() if amount)
    lines = [
        ("reward", f"{first:.3f} -> {last:.3f} (first and last fifth, {rise:+.1f} standard errors)"),
        ("groups consumed", f"{s['groups_consumed']} of {s['groups_asked']} asked"),
        ("samples resumed", f"{s['samples_resumed']}, {s['tokens_kept_by_resuming']} tokens kept by resuming"),
        ("versions per sample", _counts(s["samples_by_versions"])),
        ("staleness", _counts(s["staleness_of_consumed_groups"]) + " (groups, when leased)"),
        ("token ledger", f"{ledger['generated']} generated = {fates}"),
        ("", f"closed: {str(ledger['closed']).lower()} (recounted from the payloads: {ledger['recounted']})"),
        ("check", "no finding" if not s["check"] else f"{len(s['check'])} findings: {s['check']}"),
        ("killed", ", ".join(s["killed"]) or "nobody"),
        ("took", f"{s['seconds']:.0f} s"),
    ]
    print()
    for name, text in lines:
        print(f"{name:<20} {text}")
    for promise, kept in s["promises"].items():
        if not kept:
            print(f"NOT MET: {promise}")
    print("all promises kept" if s["ok"] else "the demo did not keep its promises")
