"""A store, scripted engines, and real `samplestore worker` processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore import Store, codec
from samplestore.run import Run
from tests.support import demo_data, factory
from tests.support.processes import Process, Processes, wait_until
from tests.support.scripted_engine import Plan, Script, ScriptedEngine, logprob_at, token_at
from tests.worker.gates import Gate

PROMPT_TOKENS = 3  # of factory.make_run
QUICK = {"flush_tokens": 8, "flush_seconds": 0.1}


class Bench:
    """One database with one run, and the means to work on it. `run` is there after `make_run`."""

    def __init__(self, store: Store, url: str, processes: Processes, folder: Path) -> None:
        self.store, self.url, self.processes, self.folder = store, url, processes, folder
        self.engines: list[ScriptedEngine] = []
        self.run: Run
        self.prompt_of: dict[int, int] = {}  # group id -> position of its prompt

    def make_run(self, **settings: Any) -> Run:
        """Two samples in one group, 32 new tokens, unless said."""
        given = {"prompts": 1, "groups_per_step": 1, "max_staleness": 0, "max_new_tokens": 32, **settings}
        self.run = factory.make_run(self.store, **given)
        return self.run

    def engine(self, plan: Plan | Script | None = None, **options: Any) -> ScriptedEngine:
        made = plan if plan is None or callable(plan) else (lambda body, n, script=plan: script)
        self.engines.append(ScriptedEngine(made, **options))
        return self.engines[-1]

    def worker(
        self, *engines: Any, router: str | None = None, env: dict[str, str] | None = None, cwd: Path | None = None,
        **flags: Any,
    ) -> Process:  # fmt: skip
        """Start a worker that flushes early and polls often."""
        flags = {"run": "r", **QUICK, **flags}
        args = [sys.executable, "-m", "samplestore.cli", "worker", "--db", self.url]
        args += [] if router is None else ["--router", router]
        for engine in engines:
            args += ["--engine", getattr(engine, "url", engine)]
        for name, value in flags.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                args.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                args += [f"--{flag}", str(value)]
        given = {
            "OMP_NUM_THREADS": "1", "SAMPLESTORE_WORKER_POLL_SECONDS": "0.05",
            "SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "3", **(env or {}),
        }  # fmt: skip
        return self.processes.start(args, name="worker", env=given, cwd=cwd or self.folder)

    # -- questions

    def samples(self) -> list[dict[str, Any]]:
        return factory.rows(self.run, 'SELECT * FROM sample ORDER BY group_id, "index"')

    def statuses(self) -> list[str]:
        return [row["status"] for row in self.samples()]

    def wait(self, predicate: Callable[[], Any], what: str, timeout: float = 40.0) -> Any:
        return wait_until(predicate, what=what, timeout=timeout, interval=0.03)

    def wait_all(self, status: str = "truncated", timeout: float = 40.0) -> None:
        self.wait(lambda: set(self.statuses()) == {status}, f"all samples are {status}", timeout)

    def wait_stored(self, tokens: int, timeout: float = 40.0) -> None:
        self.wait(lambda: all(s["n_tokens"] >= tokens for s in self.samples()), f"{tokens} tokens are stored", timeout)

    def requests(self) -> list[dict[str, Any]]:
        return factory.rows(self.run, "SELECT * FROM request ORDER BY id")

    def tokens(self, sample_id: int) -> tuple[list[int], list[float]]:
        """All stored ids and log-probs of a sample, in order."""
        ids: list[int] = []
        probs: list[float] = []
        for row in factory.segments(self.run, sample_id):
            assert row["start"] == len(ids)
            part_ids, part_probs = codec.decode(row["payload"])
            assert part_probs is not None
            ids += part_ids.tolist()
            probs += part_probs.tolist()
        return ids, probs

    def exact(self, n: int | None = None) -> None:
        """Every sample holds exactly the tokens that the scripted engines generate at its places, `n` of them."""
        for row in self.samples():
            ids, probs = self.tokens(row["id"])
            places = range(PROMPT_TOKENS, PROMPT_TOKENS + len(ids))
            assert len(ids) == row["n_tokens"] and (n is None or len(ids) == n)
            assert ids == [token_at(p) for p in places]
            assert probs == [logprob_at(p) for p in places]

    def sound(self) -> None:
        factory.sound(self.run)

    def unowned(self) -> bool:
        return all(row["owner"] is None for row in self.samples())


@contextmanager
def made_bench(url: str, processes: Processes, folder: Path) -> Iterator[Bench]:
    """A bench on a migrated database; at the end its processes are killed, then its engines closed."""
    store = samplestore.open(url)
    made = Bench(store, url, processes, folder)
    try:
        yield made
    finally:
        for process in processes.started:
            process.kill_tree()
        for engine in made.engines:
            engine.close()
        store.close()


@pytest.fixture
def bench(sqlite_url: str, processes: Processes, tmp_path: Path) -> Iterator[Bench]:
    """On SQLite."""
    with made_bench(sqlite_url, processes, tmp_path) as made:
        yield made


@pytest.fixture
def any_bench(db_url: str, processes: Processes, tmp_path: Path) -> Iterator[Bench]:
    """On SQLite, and on PostgreSQL."""
    with made_bench(db_url, processes, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer."""
    return demo_data.build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """In the folder of `bench` and of `functions`."""
    made = Gate(tmp_path)
    yield made
    made.open()


@pytest.fixture
def functions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The FUNCTIONS of the test's module, rewards or filters of a user, as a file."""
    path = tmp_path / "functions.py"
    path.write_text(request.module.FUNCTIONS)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The worker's second round, on PostgreSQL, is for `make test-all`: the store's own suites run on both databases
    every time, and these take minutes."""
    for item in items:
        on_postgres = "postgres" in getattr(getattr(item, "callspec", None), "id", "")
        if on_postgres and "any_bench" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
