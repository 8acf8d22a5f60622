"""The command line called as a user would, on a small run that was written through the real verbs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore.run import Run
from samplestore.types import Claim, RequestInfo
from samplestore.verbs import batches, weights

HOSTILE = "\x1b[31mred\x1b[0m\x07 \u202egnp.exe\u202c [bold]markup[/bold]\nsecond line\x9b2J"
ENGINE = "http://127.0.0.1:9"
POLICY = {"max_staleness": 1, "staleness": "oldest", "stale": "skip", "advantages": "grpo", "need_logprobs": True}


@dataclass
class Answer:
    """What a command ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        told = json.loads(self.out)
        assert told["schema_version"] == 1
        assert self.out.count("\n") == 1, "one object on one line"
        return dict(told)


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in this process, in an empty directory and without settings from the environment."""
    for name in list(os.environ):
        if name.startswith("SAMPLESTORE_") and name != "SAMPLESTORE_TEST_TAG":
            monkeypatch.delenv(name)
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    from samplestore.cli.app import run

    def call(*args: object) -> Answer:
        capfd.readouterr()
        code = run([str(arg) for arg in args])
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model's folder with one small tensor."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    from safetensors.numpy import save_file  # few of these tests need it

    save_file({"w": np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    return folder


@dataclass
class Small:
    """A run "small" of 4 groups of 2 samples: one trained on, one ready, one stopped in the middle, one not begun."""

    url: str
    name: str = "small"
    uuid: str = ""
    worker: int = 0
    claims: list[Claim] = field(default_factory=list)


def generate(run: Run, claim: Claim, n: int, finish_reason: str | None, lost: int = 0) -> None:
    """One request that stores `n` tokens."""
    rid, before = f"r{claim.sample_id}-{claim.attempt}", claim.n_tokens
    run.begin_request(claim, rid, ENGINE, 1.0, resumes=before > 0)
    run.append(claim, list(range(10, 10 + n)), np.full(n, -0.5), 0, finish_reason, rid=rid, engine=ENGINE)
    run.end_request(
        RequestInfo(
            rid, ENGINE, prompt_tokens=3 + before, cached_tokens=before, generated_tokens=n + lost,
            lost_reason="abort" if lost else None, finish_reason=finish_reason,
        )
    )  # fmt: skip


@pytest.fixture
def small(db_url: str) -> Small:
    made = Small(db_url)
    with samplestore.open(db_url) as store:
        run = store.run("small", samples_per_prompt=2, groups_per_step=2, max_staleness=1, max_attempts=2)
        run.add_prompts([{"prompt_ids": [1, 2, 3 + i]} for i in range(4)])
        assert run.admit() == 4
        made.uuid, made.worker = run.uuid, run.register("rollout", "worker-[red]x")
        made.claims = claims = run.claim(made.worker, 8)
        run.transact(lambda tx: weights.see_engine(tx, ENGINE, "default"))
        for claim in claims[:4]:
            generate(run, claim, 5, "stop")
            run.finish(claim)
        generate(run, claims[4], 3, "abort", lost=2)
        run.release(claims[4], HOSTILE)
        run.fail(claims[5], HOSTILE, backoff_s=3600.0)
        run.release(claims[6], "shutdown")
        trainer = run.register("trainer", "trainer-0")  # by hand: run.batch starts a heartbeat that outlives the test
        leased = run.transact(lambda tx: batches.lease(tx, trainer, 1, 1, POLICY))
        assert leased is not None
        run.transact(lambda tx: batches.commit(tx, leased, trainer))
    return made
