"""Real SGLang servers, their scheduler processes and the real router are killed while samples are in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import factory
from tests.support.models import build_model
from tests.support.processes import Process, Processes
from tests.support.router import Router
from tests.support.sglang import SGLang, chosen_releases, start_sglang
from tests.worker import phases, recompute
from tests.worker.conftest import Bench

# So much that the last fault still comes amid it where engines are five times as fast, or the test stalls for a second:
# 20 s of two engines on two cores.
SAMPLES, NEW_TOKENS = 48, 800
WAIT_S = 400.0
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "v0", 1, "qwen2")


class Fleet:
    """Two servers behind a router, each of which can be killed and started again at its address."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.processes, self.model = Processes(folder), model
        self.engines = [self.start() for _ in range(2)]
        self.router = Router.start(self.processes, [engine.url for engine in self.engines])

    def start(self, url: str | None = None) -> SGLang:
        port = urlsplit(url).port if url else None
        return start_sglang(self.processes, self.model, release=chosen_releases()[0], port=port)

    def restart(self, number: int) -> None:
        self.engines[number].process.kill_tree()
        self.engines[number] = self.start(self.engines[number].url)


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), model)
    try:
        yield made
    finally:
        made.processes.close()


def child(process: Process, title: str) -> int:
    """The pid of a server's child by the title that it gave itself."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # it has ended meanwhile
    for pid, name in titles.items():
        above = parents.get(pid)
        while above and above != process.pid:
            above = parents.get(above)
        if above == process.pid and title in name:
            return pid
    raise AssertionError(f"{process.name} has no child {title}: {sorted(set(titles.values()))}")


def test_servers_schedulers_and_the_router_die(bench: Bench, fleet: Fleet, model: Path) -> None:
    """Nothing acknowledged is lost, every sample is finished from where it was, and every log-prob is right."""
    run = bench.make_run(
        prompts=SAMPLES // 4, samples_per_prompt=4, groups_per_step=SAMPLES // 4, max_new_tokens=NEW_TOKENS,
        sampling={"temperature": 1.0, "ignore_eos": True},
    )  # fmt: skip
    run.describe_first_weights(str(model), "v0")
    worker = bench.worker(router=fleet.router.url, concurrency=8, flush_tokens=24, flush_seconds=0.3)
    kept: dict[int, int] = {}

    def reached(tokens: int, what: str) -> None:
        """Progress goes on, it is not over, and no sample has fewer tokens than were acknowledged before."""
        stored = "SELECT coalesce(sum(n_tokens), 0) FROM sample"
        bench.wait(lambda: factory.value(run, stored) >= tokens, what, WAIT_S)
        assert factory.value(run, stored) < total, f"{what}: all was done before the next fault could come"
        for row in bench.samples():
            assert row["n_tokens"] >= kept.get(row["id"], 0)
            kept[row["id"]] = row["n_tokens"]

    total = SAMPLES * NEW_TOKENS
    reached(total // 10, "both engines work")
    os.kill(child(fleet.engines[0].process, "scheduler"), signal.SIGKILL)
    reached(3 * total // 10, "the other engine goes on after the scheduler of one was killed")
    fleet.engines[1].process.kill()  # the server: HTTP and tokenizer; nobody is left
    fleet.restart(0)
    reached(5 * total // 10, "the first one is back")
    fleet.restart(1)
    fleet.router.process.kill_tree()
    fleet.router = Router.start(fleet.processes, [e.url for e in fleet.engines], port=urlsplit(fleet.router.url).port)
    bench.wait_all("truncated", WAIT_S)
    assert worker.terminate(60) == 0, worker.log()
    assert {(row["n_tokens"], row["failures"]) for row in bench.samples()} == {(NEW_TOKENS, 0)}
    lost = {r["lost_reason"] for r in bench.requests() if r["lost_reason"]}
    assert lost == {"engine died"}
    _, compared = phases.worst(run, {0: recompute.load(model)})
    assert compared == total
    bench.sound()
