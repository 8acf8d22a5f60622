"""The processes that are killed. They are forked from a server that has imported everything: a start costs a few
milliseconds instead of seconds, and a thousand deaths fit into minutes. What runs in them is the real thing."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PRELOAD = ["tests.crash.children", "tests.crash.trainer", "samplestore.cli.app", "samplestore.workers.rollout"]
PRELOAD_ENGINE = ["torch", "transformers", "samplestore.workers.cpu_engine"]


@dataclass(frozen=True)
class Job:
    """What a child does, and how it is to die by itself.

    what     name of a function of this module, `run_...`
    faults   for samplestore.faults.arm
    """

    what: str
    values: dict[str, Any]
    log: Path
    faults: str = ""
    env: dict[str, str] = field(default_factory=dict)


def context(full: bool) -> Any:
    """Where children come from; `full` preloads torch for embedded engines."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*PRELOAD, *(PRELOAD_ENGINE if full else [])])
    return made


def main(job: Job) -> None:
    from samplestore import faults

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the harness is killed, nothing stays behind
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job.env)
    faults.arm(job.faults)
    work: Callable[..., None] = globals()[f"run_{job.what}"]
    work(**job.values)


def run_worker(args: list[str], journal: Path) -> None:
    """`samplestore worker ARGS`, with a writer that keeps a journal."""
    from samplestore.cli import main as samplestore
    from samplestore.workers import rollout
    from tests.crash.journal import Journal, JournaledWriter

    JournaledWriter.journal = Journal(journal)
    vars(rollout)["Writer"] = JournaledWriter
    samplestore(["worker", *args])


def run_trainer(url: str, folder: Path, journal: Path, **how: Any) -> None:
    from tests.crash.journal import Journal
    from tests.crash.trainer import train

    train(url, folder, Journal(journal), **how)


def run_scripted_engine(port: int, pace_s: float) -> None:
    from tests.support.scripted_engine import Script, ScriptedEngine

    class Paced(ScriptedEngine):
        async def _wait(self, script: Any, one: Any) -> None:
            await super()._wait(script, one)
            if len(one.ids) % script.chunk == 0:
                await asyncio.sleep(pace_s)

    def plan(body: dict[str, Any], n: int) -> Script:
        """Half of the prompts are answered with 48 tokens or more and are cut off, half end by themselves."""
        prompt, there = body["input_ids"][2], len(body["input_ids"]) - 3
        return Script(tokens=max(1, 20 + prompt * 7 % 56 - there))

    Paced(plan, port=port)._thread.join()


def run_embedded_engine(args: list[str]) -> None:
    from samplestore.cli import main as samplestore

    samplestore(["engine", *args])


def run_upgrade(url: str) -> None:
    from samplestore import migrations

    migrations.upgrade(url)


def run_command(args: list[str]) -> None:
    """Any `samplestore` command."""
    from samplestore.cli import main as samplestore

    samplestore(args)
