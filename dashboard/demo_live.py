"""The demo as a process of its own: it writes the run of demo_data.py, and goes on with it while the dashboard lives.

What a page says of the demo is so true: heartbeats are those of a living process, tokens come, batches are trained on,
weights are published. `start` begins it; it ends when its standard input is closed, whoever held it.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from pathlib import Path

import samplestore
from samplestore.dashboard import demo_data
from samplestore.dashboard.demo_builder import FLUSH, Builder, Call
from samplestore.errors import LeaseLost

READY = "ready"
SEED, TTL_S = 3, 30.0
TICK_S = 2.0
IN_FLIGHT = 6  # requests at a time: some 70 tokens a second
STEP_TICKS = 30  # between two steps of the trainer
TRAIN_TICKS = 3  # of a step, until its batch is committed and new weights are there
LATE_TICKS = 4  # after new weights, until the last engine has them


def start(url: str, folder: Path, steps: int, lasted_s: float) -> subprocess.Popen[str] | None:
    """Write the demo into the (migrated) database at `url`, its tokenizer into `folder`. Returns once it is written,
    with the process that goes on; None if it failed, which it said on standard error."""
    command = [sys.executable, "-m", __name__, url, str(folder), str(steps), str(lasted_s)]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert living.stdout is not None
    if living.stdout.readline().strip() == READY:
        return living
    living.wait()
    return None


class Living:
    """The run as it goes on. Nothing in here waits: `tick` is what happens in TICK_S seconds."""

    def __init__(self, builder: Builder) -> None:
        self.builder, self.ticks = builder, 0
        self.leased: int | None = None
        self.step = builder.version  # steps and versions are counted alike: each step publishes one
        asked = {call.claim.sample_id for call in builder.calls}
        builder.calls += [builder.call(claim) for claim in builder.held if claim.sample_id not in asked]

    def tick(self) -> None:
        b = self.builder
        self.ticks += 1
        for worker in (*b.workers, b.trainer):
            b.run.heartbeat(worker)
        self._train()
        if len(b.calls) < IN_FLIGHT:
            b.calls += [b.call(claim) for claim in b.claim(IN_FLIGHT - len(b.calls))]
        for call in list(b.calls):
            self._stream(call, FLUSH, None)
        b.score(8)
        b.engines(behind=int(self.ticks % STEP_TICKS < LATE_TICKS))

    def _train(self) -> None:
        try:
            if self.ticks % STEP_TICKS == STEP_TICKS - TRAIN_TICKS:
                self.leased = self.builder.lease(self.step, 4)
            if self.ticks % STEP_TICKS == 0 and self.leased is not None:
                leased, self.leased = self.leased, None
                self.builder.commit(leased)
                self._new_weights()
        except LeaseLost:  # an operator took the batch away, with a rewind
            return

    def _new_weights(self) -> None:
        """What is in flight is stopped, given back, and resumed under the weights that are published."""
        for call in list(self.builder.calls):
            self._stream(call, 5, "abort")
        self.builder.publish(self.step)
        self.step += 1

    def _stream(self, call: Call, tokens: int, stopped: str | None) -> None:
        b = self.builder
        try:
            reason = b.stream(call, tokens, stopped)
            if reason is None:
                return
            b.hang_up(call, reason)
            b.finish(call.claim) if reason != stopped else b.release(call.claim, "weight update")
        except LeaseLost:  # an operator took it away: dropped, requeued, aborted
            b.hang_up(call, "abort")
            b.held = [claim for claim in b.held if claim is not call.claim]
        b.calls.remove(call)


def main() -> None:
    url, folder, steps, lasted_s = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the dashboard; this process ends after it
    with samplestore.open(url) as store:
        living = Living(demo_data.begin(store, url, Path(folder), SEED, TTL_S, int(steps), float(lasted_s)))
        print(READY, flush=True)
        while not select.select([sys.stdin], [], [], TICK_S)[0]:
            living.tick()


if __name__ == "__main__":
    main()
