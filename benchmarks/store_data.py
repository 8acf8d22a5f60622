"""What the store's benchmarks share: rollouts, databases to write to, and how numbers are told."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from store_rollouts import GROUP, VOCABULARY

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # for tests.support, which starts PostgreSQL

import samplestore  # noqa: E402
from samplestore import migrations  # noqa: E402
from samplestore.run import Run  # noqa: E402
from tests.support.postgres import PostgresServer  # noqa: E402

PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Spent:
    """One measurement. `waits` are seconds, one for each operation or transaction."""

    operations: int
    wall_s: float
    cpu_s: float
    waits: Sequence[float] = ()

    @property
    def rate(self) -> float:
        return self.operations / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU of this process for an operation; PostgreSQL's own is not in it."""
        return 1e6 * self.cpu_s / self.operations

    def wait_ms(self, share: float) -> float:
        return 1e3 * float(np.quantile(self.waits, share)) if len(self.waits) else float("nan")


@contextlib.contextmanager
def timed(operations: int, waits: Sequence[float], into: list[Spent]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into.append(Spent(operations, time.perf_counter() - wall, time.process_time() - cpu, waits))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for. `backends`: (database, durability)."""

    repeat: int
    quick: bool
    backends: Sequence[tuple[str, str]]
    tokens: Sequence[int]
    in_flight: Sequence[int]


class Places:
    """Makes fresh migrated databases and removes them."""

    def __init__(self, folder: Path, server: PostgresServer | None) -> None:
        self.folder, self.server, self._count = folder, server, 0
        self._template = folder / "template.db"
        migrations.upgrade(f"sqlite:///{self._template}")
        self._postgres_template = None
        if server is not None:
            self._postgres_template = server.create(prefix="template")
            migrations.upgrade(server.url(self._postgres_template))

    @contextlib.contextmanager
    def fresh(self, backend: str) -> Iterator[str]:
        """The URL of a database without rows."""
        self._count += 1
        if backend == "sqlite":
            path = self.folder / f"store{self._count}.db"
            shutil.copyfile(self._template, path)
            yield f"sqlite:///{path}"
            for file in self.folder.glob(f"{path.name}*"):
                file.unlink()
        else:
            assert self.server is not None
            name = self.server.create(template=self._postgres_template)
            yield self.server.url(name)
            self.server.drop(name)


@contextlib.contextmanager
def places(postgres: bool = True, folder: str | None = None) -> Iterator[Places]:
    """`folder` decides the disk. PostgreSQL runs with fsync and full_page_writes on, as it comes."""
    path = Path(tempfile.mkdtemp(prefix="samplestore-bench-", dir=folder))
    settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    server = PostgresServer.launch(fsync=True, settings=settings) if postgres else None
    try:
        yield Places(path, server)
    finally:
        if server is not None:
            server.close()
        shutil.rmtree(path, ignore_errors=True)


def new_run(store: samplestore.Store, groups: int, name: str = "bench", **settings: Any) -> Run:
    """A run whose window is `groups` groups, all admitted."""
    given = {"samples_per_prompt": GROUP, "groups_per_step": groups, "max_staleness": 0, "epochs": None, **settings}
    run = store.run(name, **given)
    rng = np.random.default_rng(1)
    prompts = min(groups, 1024)
    run.add_prompts([{"prompt_ids": rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()} for _ in range(prompts)])
    run.admit()
    return run


def interleaved(ways: dict[str, Callable[[], Spent]], repeat: int) -> dict[str, list[Spent]]:
    """Each way `repeat` times, taking turns, so that what else the machine does meets all of them."""
    told: dict[str, list[Spent]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            told[name].append(way())
    return told


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median, and lowest to highest."""
    return f"{median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"


def ratios(own: Sequence[Spent], floor: Sequence[Spent]) -> list[float]:
    """Turn by turn: noise that lasts longer than a turn cancels out."""
    return [a.rate / b.rate for a, b in zip(own, floor, strict=True)]


def ratio(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(title: str, head: str, rows: Iterator[list[str]]) -> None:
    names = head.split("|")
    print(f"\n### {title}\n\n| " + " | ".join(name.strip() for name in names) + " |")
    print("|" + " --- |" * len(names), flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
