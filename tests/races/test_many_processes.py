"""Sixteen worker and four trainer processes on one database, all in hot loops."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore.run import Run
from tests.support import factory as f
from tests.support.processes import Processes

WORKERS, TRAINERS = 16, 4
ROOT = Path(__file__).parent.parent.parent


def herd(processes: Processes, url: str, run: Run, seconds: float, out: Path) -> list[dict[str, Any]]:
    """What each process says that it did."""
    out.mkdir()
    args = [url, run.name, str(seconds), str(WORKERS), str(TRAINERS), str(out)]
    process = processes.start([sys.executable, "-m", "tests.races.herd", *args], name="herd", cwd=ROOT)
    assert process.wait(120 + 4 * seconds) == 0, process.log()
    return [json.loads((out / f"{n}.json").read_text()) for n in range(WORKERS + TRAINERS)]


@pytest.mark.parametrize(
    "seconds", [pytest.param(6, marks=pytest.mark.short), pytest.param(30, marks=pytest.mark.slow)]
)
def test_twenty_processes_share_one_run(processes: Processes, db_url: str, tmp_path: Path, seconds: int) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(
            store, prompts=500, samples_per_prompt=4, groups_per_step=24, max_staleness=4, epochs=None,
            max_attempts=1000, heartbeat_ttl_s=300.0,
        )  # fmt: skip
        told = herd(processes, db_url, run, seconds, tmp_path / "out")
        errors = [error for one in told for error in one["errors"]]
        assert not errors, f"{len(errors)} errors reached a user, the first:\n{errors[0]}"

        claims = Counter(tuple(claim) for one in told for claim in one["claims"])
        assert max(claims.values()) == 1, "two processes had one sample at one attempt"
        consumed = Counter(group for one in told for group in one["committed"])
        assert consumed and max(consumed.values()) == 1, "a group was consumed twice"
        assert set(consumed) == {r["id"] for r in f.rows(run, "SELECT id FROM sample_group WHERE state = 'consumed'")}
        assert run.ledger()["generated"] == sum(one["tokens"] for one in told), "an acknowledged token is missing"
        assert f.value(run, "SELECT count(*) FROM sample WHERE owner IS NOT NULL") == 0
        f.sound(run)

    shares = [len(one["claims"]) for one in told if one["kind"] == "rollout"]
    waits = sorted(s for one in told for s in one["claim_s"])
    p99 = waits[int(0.99 * len(waits))]
    print(
        f"\n{db_url.partition(':')[0]}: {sum(shares)} samples claimed in {len(waits)} claims, {len(consumed)} groups "
        f"consumed, {sum(one['lost'] for one in told)} leases lost; a process claimed {min(shares)} to {max(shares)}, "
        f"mean {statistics.mean(shares):.0f}; a claim took {1e3 * statistics.median(waits):.1f} ms, p99 "
        f"{1e3 * p99:.1f} ms"
    )
    assert min(shares) >= statistics.mean(shares) / 2, f"claims are not shared fairly: {sorted(shares)}"
