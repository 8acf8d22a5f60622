"""What over-sampling and partial rollouts save: the modes sync, partial and async on the same long-tailed lengths.

    python benchmarks/april.py                       the table of benchmarks/README.md, some ten minutes
    python benchmarks/april.py --quick               one distribution, few steps
    python benchmarks/april.py --lengths pareto --modes sync partial --steps 20

A paced engine (engine_tailed.py), a real worker process and a trainer that waits for its batch, "trains" for a fixed
time, and publishes. Engine, worker, slots and lengths are the same in every mode. The idea that is measured is that of
APRIL (Active Partial Rollouts in Reinforcement Learning, arXiv 2509.18521), which slime calls partial rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from engine_tailed import LENGTHS, LONGEST  # noqa: E402 - a file beside this one, not an installed package

PROMPT = 8  # tokens
BAR = 1.3  # wall time of sync over that of partial, on long-tailed lengths


@dataclass(frozen=True, slots=True)
class Setup:
    """groups: of a step; slots: samples that the engine runs at once, as many as a step has: what partial gains is not
    that it fills an engine that sync leaves half empty from the start. tick_ms: of `chunk` tokens of each."""

    groups: int = 8
    samples: int = 4
    slots: int = 32
    chunk: int = 32
    tick_ms: float = 50.0
    train_s: float = 0.5


MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "max_staleness": 0},
    "partial": {"mode": "partial", "over_sampling_batch_size": 16, "max_staleness": 16},
    "partial, no resume": {
        "mode": "partial", "over_sampling_batch_size": 16, "max_staleness": 16, "resume": False, "max_aborts": 3,
    },
    "async, window 1": {"mode": "async", "max_staleness": 1},
    "async, window 4": {"mode": "async", "max_staleness": 4},
}  # fmt: skip


@contextmanager
def engine(setup: Setup, lengths: str) -> Iterator[str]:
    command = [
        sys.executable, HERE / "engine_tailed.py", "--lengths", lengths, "--slots", setup.slots, "--chunk", setup.chunk,
        "--interval-ms", setup.tick_ms, "--prompt-tokens", PROMPT,
    ]  # fmt: skip
    with _process(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]


@contextmanager
def _process(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([str(part) for part in command], **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def measure(setup: Setup, lengths: str, mode: str, steps: int) -> dict[str, Any]:
    """Run `steps` steps; what they took and made."""
    import samplestore

    with tempfile.TemporaryDirectory() as folder, samplestore.open(f"{folder}/april.db") as store:
        run = store.run(
            "april", samples_per_prompt=setup.samples, groups_per_step=setup.groups, max_new_tokens=LONGEST,
            progress_deadline_s=600, **MODES[mode],
        )  # fmt: skip
        run.add_prompts([{"prompt_ids": [7] * (PROMPT - 1) + [number]} for number in range(steps * setup.groups * 8)])
        with engine(setup, lengths) as url:
            worker = [
                sys.executable, "-m", "samplestore.cli", "worker", "--db", f"{folder}/april.db", "--engine", url,
                "--concurrency", setup.slots, "--log-level", "error",
            ]  # fmt: skip
            with _process(worker, env=_environment()) as process:
                waited, wall = _train(run, setup, steps)
                process.terminate()
                process.wait(60)
            made, again = _generated(url)
        return {"wall_s": wall, "waited_s": waited, "made": made, "again": again, **_told(run)}


def _generated(url: str) -> tuple[int, int]:
    """Tokens that the engine made, and how many of them it had made before."""
    with urllib.request.urlopen(f"{url}/generated", timeout=10) as answer:  # noqa: S310 - our own engine
        told = json.loads(answer.read())
    return int(told["tokens"]), int(told["again"])


def _environment() -> dict[str, str]:
    return {**os.environ, "SAMPLESTORE_WORKER_POLL_SECONDS": "0.05"}


def _train(run: Any, setup: Setup, steps: int) -> tuple[float, float]:
    """Seconds that the trainer waited for batches, and seconds in all: from the first batch, so that the start of
    processes does not count."""
    began, waited = 0.0, 0.0
    for step in range(steps + 1):  # the first is not counted: it finds nothing that was left
        asked = time.monotonic()
        with run.batch(step=step, timeout=300):
            waited += time.monotonic() - asked if step else 0.0
            time.sleep(setup.train_s)
        run.publish_weights(f"/weights/{step}", step=step)
        if step == 0:
            began = time.monotonic()
    return waited, time.monotonic() - began


def _told(run: Any) -> dict[str, Any]:
    import sqlalchemy as sa

    ledger = run.ledger(exact=True)
    if not ledger["closed"]:
        raise SystemExit(f"the ledger does not close: {ledger['differences']}")
    fates = ledger["by_fate"]
    with run.database.reading() as connection:
        one = connection.execute(
            sa.text("SELECT avg(staleness) AS mean, max(staleness) AS most FROM batch_group WHERE state = 'committed'")
        ).one()
        resumed = connection.execute(
            sa.text("SELECT count(*), coalesce(sum(n_resumes), 0) FROM sample WHERE n_resumes > 0")
        ).one()
    return {
        "consumed": fates.get("consumed", 0), "superseded": fates.get("superseded", 0),
        "stored": sum(fates.values()), "stale": fates.get("stale", 0), "mean": float(one.mean), "most": one.most,
        "resumed": resumed[0],
    }  # fmt: skip


HEAD = (
    "lengths | mode | wall s | sync / this | waiting s | sync / this | tokens consumed | consumed tokens/s | "
    "generated twice | expired or lost | staleness mean (max) | samples resumed"
)


def rows(setup: Setup, shapes: list[str], modes: list[str], steps: int, missed: list[str]) -> Iterator[list[str]]:
    """A row for each shape and mode; what misses the bar is put into `missed`."""
    for shape in shapes:
        base: dict[str, Any] | None = None
        for mode in modes:
            found = measure(setup, shape, mode, steps)
            base = base or found
            twice = found["again"] + found["superseded"]  # the engine takes a sample that starts afresh for another
            lost = found["stale"] + found["made"] - found["stored"]
            if mode == "partial" and twice:
                missed.append(f"{shape}: {twice} tokens were generated twice")
            if (modes[0], mode) == ("sync", "partial") and shape != "constant":
                ratio = base["wall_s"] / found["wall_s"]
                missed.extend([f"{shape}: {ratio:.2f} is below {BAR}"] if ratio < BAR else [])
            yield [
                shape, mode, f"{found['wall_s']:.1f}", f"{base['wall_s'] / found['wall_s']:.2f}",
                f"{found['waited_s']:.1f}", f"{base['waited_s'] / max(found['waited_s'], 0.1):.2f}",
                f"{found['consumed']:,}", f"{found['consumed'] / found['wall_s']:,.0f}", f"{twice:,}",
                f"{lost:,}", f"{found['mean']:.2f} ({found['most']})", f"{found['resumed']:,}",
            ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="lognormal, sync and partial, 5 steps")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="the first is the one that others are held against")
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    shapes = given.lengths or (["lognormal"] if given.quick else list(LENGTHS))
    modes = given.modes or (["sync", "partial"] if given.quick else list(MODES))
    names = [name.strip() for name in HEAD.split("|")]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names), flush=True)
    missed: list[str] = []
    for row in rows(Setup(), shapes, modes, given.steps or (5 if given.quick else 15), missed):
        print("| " + " | ".join(row) + " |", flush=True)
    if missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
