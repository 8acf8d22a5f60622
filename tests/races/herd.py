"""Many real processes on one run, all in hot loops: python -m tests.races.herd URL RUN SECONDS WORKERS TRAINERS OUT

One process imports everything and forks the others before any of them has opened the database, so that twenty start
in the time of one. They begin together, and each writes what it did to OUT/N.json."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import samplestore
from samplestore.errors import LeaseLost
from samplestore.run import Run
from tests.support import factory as f

GROUPS = 4  # of a batch
TIDY_EVERY = 5  # turns between two heartbeats and reaps


class Contender:
    """One process: its loop and what it has seen."""

    def __init__(self, run: Run, number: int, kind: str) -> None:
        self.run, self.number, self.kind = run, number, kind
        self.me = f.register(run, kind)
        self.random = random.Random(number)
        self.told: dict[str, Any] = {
            "kind": kind, "claims": [], "claim_s": [], "committed": [], "tokens": 0, "lost": 0, "turns": 0,
            "errors": [],
        }  # fmt: skip

    def loop(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.told["turns"] += 1
            try:
                if self.kind == "trainer":
                    self.train(self.told["turns"])
                else:
                    self.roll_out()
                if self.told["turns"] % TIDY_EVERY == 0:
                    self.run.heartbeat(self.me)
                    self.run.reap(self.me)
            except Exception:  # nothing may reach a user: the test shows it
                self.told["errors"].append(traceback.format_exc())

    def roll_out(self) -> None:
        began = time.perf_counter()
        claims = self.run.claim(self.me, 2)
        self.told["claim_s"].append(time.perf_counter() - began)
        self.told["claims"] += [(c.sample_id, c.attempt) for c in claims]
        if len(claims) < 2:
            self.run.admit()
        version = self.run.current_version
        for claim in claims:
            try:
                self.told["tokens"] += f.add(self.run, claim, 3, version)
                what = self.random.random()
                if what < 0.1:
                    self.run.release(claim, "weights")
                elif what < 0.15:
                    self.run.fail(claim, "broken", backoff_s=0.0)
                else:
                    self.run.finish(claim)
            except LeaseLost:  # its group became too old meanwhile
                self.told["lost"] += 1

    def train(self, turn: int) -> None:
        # a place of its own for each trainer: two that meet on one step get StepHeld, which is another test
        batch = f.lease(self.run, self.me, 1000 * turn + self.number, GROUPS)
        if batch is None:
            self.run.admit()
        elif self.random.random() < 0.2:
            f.release(self.run, batch, self.me)
        else:
            f.commit(self.run, batch, self.me)
            taken = f.rows(self.run, "SELECT group_id FROM batch_group WHERE batch_id = :b", b=batch)
            self.told["committed"] += [r["group_id"] for r in taken]
            if self.random.random() < 0.5:
                self.run.publish_weights(path=f"/w/{self.number}/{turn}", step=1000 * turn + self.number)


def contend(url: str, name: str, seconds: float, number: int, kind: str, ready: int, go: int, out: Path) -> None:
    with samplestore.open(url) as store:
        contender = Contender(store.existing_run(name), number, kind)
        os.write(ready, b".")
        os.read(go, 1)  # its other end is closed when all are ready
        contender.loop(seconds)
        contender.run.goodbye(contender.me)
    (out / f"{number}.json").write_text(json.dumps(contender.told))


def main() -> None:
    url, name, seconds, workers, trainers, out = sys.argv[1:]
    kinds = ["rollout"] * int(workers) + ["trainer"] * int(trainers)
    (ready, is_ready), (go, say_go) = os.pipe(), os.pipe()
    children = []
    for number, kind in enumerate(kinds):
        if (pid := os.fork()) == 0:
            os.close(say_go)
            status = 1
            try:
                contend(url, name, float(seconds), number, kind, is_ready, go, Path(out))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    for _ in kinds:
        os.read(ready, 1)
    os.close(say_go)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(f"ended: {statuses}", flush=True)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
