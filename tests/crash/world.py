"""One run with its processes, which die and are started again until the trainer has trained on every prompt."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import samplestore
from samplestore import Store
from tests.crash import children
from tests.crash.actors import Actor, RouterActor, is_stopped, send
from tests.crash.children import Job
from tests.crash.proof import Proof, require
from tests.crash.schedule import IMMORTAL, Fate, fate
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes, free_port, wait_until

ROOT = Path(__file__).parent.parent.parent
TTL_S = 2.0
POLL_S = 0.02
OWN_BUSY_S = 5.0  # the harness waits for the gate itself: not long, since it wakes those that stopped with it
LEAVE_S = 60.0
EXTRA_EVERY = 5  # deaths of processes to one of a migration, a prune or the server
FULL_SLOWER = 4.0  # lives of whole stacks last as much longer: their engines need time to start
STALLED_S = 180.0  # without a death and without a step: something hangs


@dataclass
class Tally:
    """What was survived, over all worlds."""

    kills: Counter[str]
    stops: Counter[str]
    left: Counter[str]  # processes that ended because the database server was away

    @property
    def killed(self) -> int:
        return self.kills.total()


class World:
    """A database, its run, and its processes.

    limit    deaths after which everybody may live until the run is over
    server   the PostgreSQL server of `url`, to be killed as well; None on SQLite
    """

    def __init__(
        self, url: str, folder: Path, seed: int, limit: int, tally: Tally, tokenizer: Path, *, prompts: int = 120,
        server: PostgresServer | None = None, full: bool = False, say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.url, self.folder, self.seed, self.limit, self.tally = url, folder, seed, limit, tally
        self.server, self.say, self.tokenizer, self.prompts = server, say, tokenizer, prompts
        for name in ("journals", "checkpoints", "logs"):
            (folder / name).mkdir(parents=True)
        self.steps = prompts // 2
        self.killed = 0
        self.calm = False
        self.actors: list[Actor] = []
        self.slow = FULL_SLOWER if full else 1.0
        self.context = children.context(full)
        self.processes = Processes(folder / "logs")
        self.store: Store = samplestore.open(url, busy_s=OWN_BUSY_S)
        self.run = self.store.run(
            "r", samples_per_prompt=2, groups_per_step=2, max_staleness=1, stale="mask", epochs=1, seed=seed,
            stages=("reward",), heartbeat_ttl_s=TTL_S, max_new_tokens=48, max_attempts=10_000, max_deaths=10_000,
        )  # fmt: skip
        self.run.add_prompts([{"prompt_ids": [1, 2, i]} for i in range(prompts)])
        self.proof = Proof(self.store, self.run, folder / "journals", folder / "checkpoints", self.look)
        self.extras: list[Callable[[int], None]] = []  # what else is killed now and then, with the number of the time
        self.done_extras = 0
        self.server_died_at = float("-inf")

    def next_fate(self, kind: str, name: str, life: int) -> Fate:
        return IMMORTAL if self.calm else fate(self.seed, kind, name, life, TTL_S, self.slow)

    # -- who is there

    def job(self, what: str, name: str, fate: Fate | None = None, **values: Any) -> Job:
        env = {"SAMPLESTORE_WORKER_POLL_SECONDS": "0.05", "SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "2"}
        return Job(what, values, self.folder / "logs" / f"{name}.log", fate.faults if fate else "", env)

    def add_trainer(self, weights: str, exact: bool, every: int = 3) -> None:
        def job(fate: Fate) -> Job:
            return self.job(
                "trainer", "trainer", fate, url=self.url, folder=self.folder / "checkpoints",
                journal=self.folder / "journals" / "trainer.journal", steps=self.steps, groups=2, every=every,
                weights=weights, exact=exact,
            )  # fmt: skip

        actor = Actor(self, "trainer", "trainer", job)
        actor.meant_to_end = True
        self.actors.append(actor)

    def add_worker(self, name: str, targets: list[str], scores: bool, **flags: Any) -> None:
        def job(fate: Fate) -> Job:
            flagged = {
                "db": self.url, "run": "r", "concurrency": 4, "flush-tokens": 8, "flush-seconds": 0.2, **flags
            }  # fmt: skip
            if scores:
                flagged |= {"reward": "tests.crash.reward:score", "tokenizer": self.tokenizer}
            args = [part for flag, value in flagged.items() for part in (f"--{flag}", str(value))] + targets
            return self.job("worker", name, fate, args=args, journal=self.folder / "journals" / f"{name}.journal")

        self.actors.append(Actor(self, "scorer" if scores else "worker", name, job))

    def add_router(self, engines: list[str]) -> str:
        port = free_port()
        self.actors.append(RouterActor(self, port, engines))
        return f"http://127.0.0.1:{port}"

    def add_embedded_engine(self, name: str, model: Path) -> str:
        port = free_port()
        args = ["--model", str(model), "--port", str(port), "--decode-interval", "0.01"]
        self.actors.append(Actor(self, "engine", name, lambda fate: self.job("embedded_engine", name, fate, args=args)))
        return f"http://127.0.0.1:{port}"

    def add_scripted_engine(self, name: str, pace_s: float) -> str:
        port = free_port()
        self.actors.append(
            Actor(self, "engine", name, lambda fate: self.job("scripted_engine", name, fate, port=port, pace_s=pace_s))
        )
        return f"http://127.0.0.1:{port}"

    # -- the run

    def go(self) -> None:
        """Until the trainer is done. Raises Broken when a promise does not hold."""
        try:
            for actor in self.actors:
                actor.start()
            moved_at, seen = time.monotonic(), None
            while not self._round():
                now = (self.killed, len(self.proof.commits))
                if now != seen:
                    moved_at, seen = time.monotonic(), now
                require(time.monotonic() - moved_at < STALLED_S, f"nothing moves\n{self._logs()}")
                time.sleep(POLL_S)
            self._finish()
        finally:
            self.close()

    def look(self) -> None:
        """Stop, wake and kill whose time has come; the dead are seen to in the next round."""
        for actor in self.actors:
            actor.look()

    def _round(self) -> bool:
        for actor in self.actors:
            point = actor.look()
            if point is None:
                continue
            if point == "end":
                return True
            if point == "left":
                self.tally.left[actor.kind] += 1
            else:
                self.count(f"{actor.kind} {point}")
            self.proof.after_a_death()
            actor.start()
        if self.extras and self.killed >= EXTRA_EVERY * (self.done_extras + 1) and not self.calm:
            self.done_extras += 1
            self.extras[self.done_extras % len(self.extras)](self.done_extras)
        return False

    def count(self, what: str) -> None:
        self.killed += 1
        self.tally.kills[what] += 1
        self.calm = self.killed >= self.limit
        if self.killed % 25 == 0:
            self.say(f"  {self.killed} deaths, {len(self.proof.commits)} commits, {self.proof.rewinds} rewinds")

    def _finish(self) -> None:
        self.calm = True
        for actor in self.actors:
            if actor.kind in ("worker", "scorer"):
                self._end(actor)
        self.proof.at_the_end(self.steps)

    def _end(self, actor: Actor) -> None:
        """Tell a worker to leave. Its fault may come to it on the way."""
        if actor.process.is_alive():
            actor.process.terminate()
        end = time.monotonic() + LEAVE_S
        while actor.process.is_alive():
            require(time.monotonic() < end, f"{actor.name} does not leave\n{self.tail(actor.name)}")
            for other in self.actors:
                if other.process.is_alive() and is_stopped(other.pid):
                    send(other.pid, signal.SIGCONT)
            actor.process.join(POLL_S)
        if actor.process.exitcode == -signal.SIGKILL:
            self.count(f"{actor.kind} {actor.fate.point or 'random'}")
            wait_until(
                lambda: self.run.reap() and self._nobody_owns(), what="the last dead are reaped", timeout=LEAVE_S
            )
        else:
            require(actor.process.exitcode == 0, f"{actor.name}: {actor.process.exitcode}\n{self.tail(actor.name)}")

    def _nobody_owns(self) -> bool:
        with self.store.database.reading() as connection:
            return not connection.execute(sa.text("SELECT count(*) FROM sample WHERE owner IS NOT NULL")).scalar()

    def kill_server(self, number: int = 0) -> None:
        """kill -9 of the database server, and recovery."""
        assert self.server is not None
        self.server_died_at = time.monotonic()
        self.server.kill_and_restart()
        self.count("postgres random")
        self.proof.after_a_death()

    # -- looks

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self, name: str, size: int = 3000) -> str:
        return f"--- end of the log of {name} ---\n{self.log(name)[-size:]}"

    def _logs(self) -> str:
        return "\n".join(self.tail(actor.name, 1500) for actor in self.actors)

    def close(self) -> None:
        for actor in self.actors:
            if actor.process is not None and actor.process.is_alive():
                actor.process.kill()
                actor.process.join(10)
        self.processes.close()
        self.store.close()
