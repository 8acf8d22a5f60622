"""`samplestore reward` beside a real rollout worker: late judges, groups, a teacher; killed in the middle."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.engine.conftest import start_engine
from tests.support import factory
from tests.support.models import build_model
from tests.support.processes import Process
from tests.support.scripted_engine import Script
from tests.worker.conftest import Bench
from tests.worker.gates import AT_THE_GATE, Gate

FUNCTIONS = (
    AT_THE_GATE
    + """
import os
from pathlib import Path

HERE = Path(__file__).parent

def length(sample):
    return float(sample.response_length)

def late(sample):
    (HERE / f"began-{sample.sample_id}-{os.getpid()}").touch()
    wait_at_the_gate()
    return {"verdict": 0.5, "by": "judge"}

async def ranks(args, samples):
    return [args.first if s.index == 0 else 0.0 for s in samples]
"""
)


def reward_worker(bench: Bench, *flags: str) -> Process:
    args = [sys.executable, "-m", "samplestore.cli", "reward", "--db", bench.url, "--run", "r", *flags]
    env = {"OMP_NUM_THREADS": "1", "SAMPLESTORE_WORKER_POLL_SECONDS": "0.05"}
    return bench.processes.start(args, name="reward", env=env, cwd=bench.folder)


def stages(bench: Bench, name: str) -> list[dict[str, Any]]:
    return factory.rows(bench.run, "SELECT * FROM stage WHERE name = :n ORDER BY id", n=name)


def test_generation_never_waits_for_a_judge(any_bench: Bench, tokenizer: Path, functions: Path, gate: Gate) -> None:
    """The rollout worker scores its own stage, finishes and leaves; a judge comes later, is killed, and another one
    ends what it began; then the group is ranked, by a function written for slime."""
    any_bench.make_run(
        samples_per_prompt=2, stages=["reward", "judge"], group_stages=["rank"], epochs=1,
        reward_weights={"judge": 10, "rank": 100}, heartbeat_ttl_s=2.0,
    )  # fmt: skip
    engine = any_bench.engine(Script(tokens=20))
    rollout = any_bench.worker(engine, tokenizer=tokenizer, reward=f"{functions}:length", exit_when_done=True)
    assert rollout.wait(60) == 0, rollout.log()
    assert [row["reward"] for row in any_bench.samples()] == [20.0, 20.0]
    assert factory.states(any_bench.run) == ["scoring"]
    flags = ["--tokenizer", str(tokenizer), "--reward", f"judge={functions}:late", "--reward-key", "verdict"]
    flags += ["--reward", f"rank={functions}:ranks", "--reward-args", '{"first": 1.0}', "--exit-when-done"]
    killed = reward_worker(any_bench, *flags)
    any_bench.wait(lambda: list(functions.parent.glob("began-*")), "the judge has begun")
    killed.kill()
    gate.open()
    judge = reward_worker(any_bench, *flags)
    assert judge.wait(60) == 0, judge.log()
    assert [row["reward"] for row in any_bench.samples()] == [20.0 + 5.0 + 100.0, 20.0 + 5.0]
    assert factory.states(any_bench.run) == ["ready"]
    assert [(s["outcome"], s["details"] is not None) for s in stages(any_bench, "judge")] == [("ok", True)] * 2
    any_bench.sound()


def test_a_stop_gives_back_what_is_begun(bench: Bench, tokenizer: Path, functions: Path, gate: Gate) -> None:
    bench.make_run(samples_per_prompt=1, stages=["judge"], epochs=1)
    worker = factory.register(bench.run)
    factory.answer(bench.run, bench.run.claim(worker, 1)[0])
    flags = ["--tokenizer", str(tokenizer), "--reward", f"judge={functions}:late", "--reward-key", "verdict"]
    judge = reward_worker(bench, *flags, "--drain-timeout-s", "0.1")
    bench.wait(lambda: list(functions.parent.glob("began-*")), "the judge has begun")
    judge.terminate()
    assert judge.wait(30) == 0, judge.log()
    (stage,) = stages(bench, "judge")
    assert (stage["status"], stage["owner"], stage["failures"]) == ("pending", None, 0)
    bench.sound()


def test_one_that_was_away_registers_anew(bench: Bench, tokenizer: Path, functions: Path, gate: Gate) -> None:
    """Suspended until others took it for dead: what it had begun is not stored, and it goes on as a new worker."""
    bench.make_run(samples_per_prompt=1, stages=["judge"], epochs=1, heartbeat_ttl_s=2.0)
    factory.answer(bench.run, bench.run.claim(factory.register(bench.run), 1)[0])
    flags = ["--tokenizer", str(tokenizer), "--reward", f"judge={functions}:late", "--reward-key", "verdict"]
    judge = reward_worker(bench, *flags, "--exit-when-done")
    bench.wait(lambda: list(functions.parent.glob("began-*")), "the judge has begun")
    judge.signal(signal.SIGSTOP)
    (first,) = factory.rows(bench.run, "SELECT id FROM worker WHERE kind = 'reward'")
    factory.kill(bench.run, first["id"])
    gate.open()
    judge.signal(signal.SIGCONT)
    assert judge.wait(60) == 0, judge.log()
    told = factory.rows(bench.run, "SELECT state FROM worker WHERE kind = 'reward' ORDER BY id")
    assert [row["state"] for row in told] == ["dead", "gone"]
    (stage,) = stages(bench, "judge")
    assert (stage["outcome"], stage["value"], stage["failures"]) == ("ok", 0.5, 0)
    bench.sound()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to serve. Say --reward [STAGE=]SPEC or --teacher URL; the stages of run 'r': judge"),
        (["--reward", "typo=math", "--tokenizer", "x"], "has no typo stage (it has: judge)"),
        (["--teacher", "http://127.0.0.1:9"], "samplestore add-prompts FILE --run NEW_NAME --set 'stages="),
        (["--reward", "judge=math"], "Say --tokenizer DIR"),
        (["--reward", "judge=math", "--reward", "judge=math", "--tokenizer", "x"], "names a stage twice"),
        (["--teacher", "nowhere"], "is no URL of an engine"),
    ],
)
def test_what_cannot_be_served_is_told(bench: Bench, flags: list[str], said: str) -> None:
    bench.make_run(stages=["judge"])
    refused = reward_worker(bench, *flags)
    assert refused.wait(30) in (1, 2)
    assert said in refused.log()


class Model(BaseHTTPRequestHandler):
    """A reward model: the reward of a sample is its place in the group; the last one's judge could not be read."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        rewards = [{"reward": float(s["index"]) if s["index"] < 2 else None} for s in body["samples"]]
        data = json.dumps(rewards).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def model_url() -> Iterator[str]:
    Model.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/rm"
    server.shutdown()
    server.server_close()


def test_a_rollout_worker_with_a_reward_model(bench: Bench, tokenizer: Path, model_url: str) -> None:
    """A group's model by its URL; the batch leaves out the sample that could not be judged."""
    bench.make_run(samples_per_prompt=3, group_stages=["rank"], epochs=1)
    engine = bench.engine(Script(tokens=8))
    worker = bench.worker(engine, tokenizer=tokenizer, reward=f"rank={model_url}", exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    (asked,) = Model.asked
    assert [s["response_length"] for s in asked["samples"]] == [8, 8, 8]
    assert [row["reward"] for row in bench.samples()] == [0.0, 1.0, None]
    with bench.run.batch(step=0, groups=1, max_staleness=0) as batch:
        arrays = batch.arrays(layout="padded")
    assert arrays["advantages"][:2] == pytest.approx([-1.0, 1.0], abs=1e-4)
    assert np.isnan(arrays["advantages"][2]) and arrays["loss_mask"].sum(axis=1).tolist() == [8, 8, 0]
    bench.sound()


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded engine, in a process of its own."""
    engine = start_engine(build_model(tmp_path_factory.mktemp("models") / "v0", seed=1))
    yield engine.url
    engine.stop()


def test_a_teacher_fills_in_its_log_probs(bench: Bench, engine_url: str) -> None:
    """The embedded engine is the teacher; what it says of the response is what it says when it generates it."""
    bench.make_run(samples_per_prompt=2, stages=["teacher"], epochs=1, max_new_tokens=12)
    rollout = bench.worker(engine_url, exit_when_done=True)
    assert rollout.wait(60) == 0, rollout.log()
    teacher = reward_worker(bench, "--teacher", engine_url, "--exit-when-done")
    assert teacher.wait(60) == 0, teacher.log()
    for row in bench.samples():
        probs, present = bench.run.array(row["id"], "teacher_log_probs")
        assert present.all() and probs.dtype == np.float32
        np.testing.assert_allclose(probs, bench.tokens(row["id"])[1], atol=1e-4)
    assert factory.states(bench.run) == ["ready"]
    with bench.run.batch(step=0, groups=1, max_staleness=0) as batch:
        arrays = batch.arrays(named=["teacher_log_probs"])
    assert arrays["loss_mask"].sum() == sum(row["n_tokens"] for row in bench.samples()), "no reward was ever wanted"
    trained = arrays["loss_mask"] == 1
    np.testing.assert_allclose(
        arrays["teacher_log_probs"][trained], arrays["rollout_log_probs"][trained], atol=1e-4
    )  # fmt: skip
    bench.sound()
