"""What needs size or time: several processes, large tables, disk, a gigabyte in one go, memory."""

# ruff: noqa: S608 - only numbers are put into statements

from __future__ import annotations

import json
import multiprocessing
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import store_api
import store_floor
import store_reads
from clients import memory_mb
from store_data import Places, Plan, Spent, median, new_run, table
from store_rollouts import GROUP, pieces, rollouts

import samplestore
from samplestore.run import Run
from samplestore.urls import parse_url, sqlite_module

MIB = 2**20
WINDOW = 1024  # groups under way at once in the large tables
WARM_GROUPS = 16  # that each process lives through before it is measured: workers run for days


def versions() -> str:
    import psycopg

    return (
        f"Python {platform.python_version()}, SQLite {sqlite_module().sqlite_version}, SQLAlchemy {sa.__version__}, "
        f"psycopg {psycopg.__version__}, numpy {np.__version__}"
    )


def quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))


def lives(at: Places, backend: str, durability: str, processes: int, groups: int, k: int) -> Spent:
    """All samples of a run, by so many processes that start at once."""
    answers = dict(enumerate(rollouts(GROUP * groups)))
    with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
        new_run(store, groups)
        for n in range(processes):
            new_run(store, WARM_GROUPS, f"warm {n}")
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager:
            ready = manager.Barrier(processes)
            work = {
                "url": url, "durability": durability, "run": "bench", "answers": answers, "k": k, "ready": ready,
                "in_flight": 64 // processes,
            }  # fmt: skip
            with context.Pool(processes) as pool:
                told = pool.map(store_api.one_life, [{**work, "warm": n} for n in range(processes)], chunksize=1)
    start, stop = min(t[0] for t in told), max(t[1] for t in told)
    assert sum(t[2] for t in told) == GROUP * groups
    return Spent(GROUP * groups, stop - start, float("nan"))


def claims(at: Places, backend: str, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of each claim of 64: (store, floor)."""
    own, plain = [], []
    with at.fresh(backend) as url, samplestore.open(url) as store:
        run = new_run(store, 2 * (turns + 1) * 64 // GROUP)
        owner = run.register()
        floor = store_floor.FLOORS[backend](url, "normal")
        for turn in range(turns + 1):
            began = time.perf_counter()
            assert len(run.claim(owner, 64)) == 64
            between = time.perf_counter()
            assert len(floor.claim(run.id, owner, 64)) == 64
            if turn:  # the first connects and compiles
                own.append(between - began)
                plain.append(time.perf_counter() - between)
        floor.close()
    return own, plain


# -- disk and memory


def disk(at: Places, plan: Plan) -> None:
    """Bytes of the whole database for each generated token, the empty one taken off."""

    def rows() -> Iterator[list[str]]:
        for tokens in (64, 256, 1024, 8192):
            row = [f"{tokens:,}"]
            for backend in dict.fromkeys(name for name, _ in plan.backends):
                operations = max((8 if plan.quick else 48) * MIB // (8 * tokens), 64)
                with at.fresh(backend) as url:
                    before = size(at, url)
                    with samplestore.open(url) as store:
                        run = new_run(store, 8)
                        segments = pieces(tokens)
                        store_api.append(run, run.claim(run.register(), 64), segments, operations, 16)
                    row.append(f"{(size(at, url) - before) / (operations * tokens) / 8:.3f}")
            yield row

    table(
        "Bytes on disk, as a multiple of the 8 bytes of id and log-prob", "tokens a segment | sqlite | postgres", rows()
    )

    def resumed() -> Iterator[list[str]]:
        for resumes in (0, 4, 16, 64):
            row = [f"{resumes}"]
            for backend in dict.fromkeys(name for name, _ in plan.backends):
                with at.fresh(backend) as url:
                    before = size(at, url)
                    with samplestore.open(url) as store:
                        total = _resume(new_run(store, 2), resumes)
                    row.append(f"{(size(at, url) - before) / total / 8:.3f}")
            yield row

    table(
        "The same with resumes: 16 samples of 65,536 tokens, given back and claimed again so often",
        "resumes | sqlite | postgres", resumed(),
    )  # fmt: skip


def _resume(run: Run, resumes: int) -> int:
    """16 samples of 65,536 tokens each, in resumes + 1 pieces of equal length, each by a request of its own."""
    owner = run.register()
    length = 65_536 // (resumes + 1)
    ((ids, probs),) = pieces(length, 1)
    for turn in range(resumes + 1):
        for claim in run.claim(owner, 16):
            rid = f"{claim.sample_id}-{turn}"
            run.begin_request(claim, rid, "engine", 1.0, resumes=turn > 0)
            run.append(claim, ids, probs, 0, "abort" if turn < resumes else "stop", rid=rid)
            if turn < resumes:
                run.release(claim, "weights")
    return 16 * length * (resumes + 1)


def size(at: Places, url: str) -> int:
    """Bytes of a closed database."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return sum(
            file.stat().st_size
            for file in Path(str(parsed.database)).parent.glob(f"{Path(str(parsed.database)).name}*")
        )
    assert at.server is not None
    with at.server.connect(parsed.database) as connection:
        return int(connection.execute("SELECT pg_database_size(current_database())").fetchone()[0])


def sustained(at: Places, plan: Plan) -> None:
    """A gigabyte in one go on SQLite, 64 in flight and 16 in a commit: the WAL's size and the longest wait."""

    def rows() -> Iterator[list[str]]:
        operations = (128 if plan.quick else 1024) * MIB // (8 * 1024)
        with at.fresh("sqlite") as url, samplestore.open(url) as store:
            run = new_run(store, 8)
            wal = Path(f"{store.database.path}-wal")
            largest, done = [0], threading.Event()

            def watch() -> None:
                while not done.wait(0.02):
                    largest[0] = max(largest[0], wal.stat().st_size)

            thread = threading.Thread(target=watch)
            thread.start()
            spent = store_api.append(run, run.claim(run.register(), 64), pieces(1024), operations, 16)
            done.set()
            thread.join()
        yield [
            f"{operations * 8 / 1024:,.0f}", f"{spent.rate:,.0f}",
            *(f"{spent.wait_ms(share):.1f}" for share in (0.5, 0.99, 1.0)), f"{largest[0] / MIB:.0f}",
        ]  # fmt: skip

    table("Sustained append, SQLite", "MiB | ops/s | wait p50 ms | p99 | longest | largest WAL MiB", rows())


def memory(at: Places, plan: Plan) -> None:
    """512 samples of 32,768 tokens in flight, each segment of 1,024 tokens waiting for its acknowledgement. What the
    worker itself keeps beside is in README.md."""

    def rows() -> Iterator[list[str]]:
        for backend in dict.fromkeys(name for name, _ in plan.backends):
            with at.fresh(backend) as url:
                code = "import json, sys, store_scale; store_scale.remember(json.loads(sys.argv[1]))"
                told = subprocess.run(
                    [sys.executable, "-c", code, json.dumps({"url": url, "segments": 4 if plan.quick else 32})],
                    cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
                )  # fmt: skip
                before, peak = json.loads(told.stdout)
                yield [backend, f"{before:.0f}", f"{peak:.0f}", f"{512 * 32768 * 8 / MIB:.0f}"]

    table("Memory of a process, MiB", "database | before | peak | tokens in flight", rows())


def remember(given: dict[str, Any]) -> None:
    with samplestore.open(given["url"]) as store:
        run = new_run(store, 64)
        taken = run.claim(run.register(), 512)
        segments = pieces(1024)
        before = memory_mb()
        store_api.append(run, taken, segments, 512 * given["segments"], 64)
        print(json.dumps([before, memory_mb("VmHWM")]))


# -- large tables


def scale(at: Places, plan: Plan, samples: int, churn: int) -> None:
    """Claim and finish with 10,000 samples of history and with many more, after churn, by turns."""

    def rows() -> Iterator[list[str]]:
        for backend in dict.fromkeys(name for name, _ in plan.backends):
            with at.fresh(backend) as small, at.fresh(backend) as large:
                told: dict[int, list[tuple[float, float]]] = {}
                with samplestore.open(small) as a, samplestore.open(large) as b:
                    runs = {10_000: _history(a, 10_000), samples: _history(b, samples)}
                    _churn(runs[samples], churn)
                    told = {n: [] for n in runs}
                    for _ in range(20):
                        for n, run in runs.items():
                            told[n] += _turns(run, 20)
                    yield _row(backend, "", told)
                    if backend == "postgres":  # in both: what was claimed meanwhile stays in the way of each claim
                        told = {n: [] for n in runs}
                        with ExitStack() as stack:
                            readers = [stack.enter_context(run.database.reading()) for run in runs.values()]
                            end = time.monotonic() + 60
                            while time.monotonic() < end:
                                for reader in readers:  # the server ends a transaction that is idle for long
                                    reader.execute(sa.text("SELECT count(*) FROM run"))
                                for n, run in runs.items():
                                    told[n] += _turns(run, 20)
                        yield _row(backend, "a reader open for 60 s", told)

    table(
        f"Claim of 8 and finish of each, ms: 10,000 samples, and {samples:,}; {churn:,} claims and finishes before",
        "database | | claim p50 | claim p99 | finish p50 | finish p99 | ratios", rows(),
    )  # fmt: skip


def _row(backend: str, what: str, told: dict[int, list[tuple[float, float]]]) -> list[str]:
    cells, relative = [], []
    for column in (0, 1):
        for share in (0.5, 0.99):
            small, large = (1e3 * quantile([turn[column] for turn in turns], share) for turns in told.values())
            cells.append(f"{small:.2f}, {large:.2f}")
            relative.append(f"{large / small:.2f}")
    return [backend, what, *cells, " ".join(relative)]


def _history(store: samplestore.Store, samples: int) -> Run:
    """A run with so many consumed samples behind it, written by SQL."""
    run = new_run(store, WINDOW)
    groups = samples // GROUP
    statements = (
        f"""INSERT INTO sample_group (run_id, prompt_id, number, epoch, timeline, state, n_samples, n_open, n_unscored,
            n_failed, created_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {groups})
        SELECT g.run_id, g.prompt_id, 100000000 + i, 0, 0, 'consumed', 8, 0, 0, 0, 0
        FROM n, (SELECT * FROM sample_group LIMIT 1) g""",
        """INSERT INTO sample (group_id, "index", run_id, incarnation, status, closed, priority, not_before, attempt,
            let_go, failures, n_tokens, n_loss_tokens, n_segments, n_aborts, n_resumes, version_unknown, logprob_sum,
            created_at)
        SELECT g.id, i, g.run_id, 0, 'completed', 0, 0, 0, 1, 1, 0, 9, 9, 1, 0, 0, 0, -1, 0
        FROM sample_group g, (SELECT 0 AS i UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5
            UNION SELECT 6 UNION SELECT 7) j WHERE g.state = 'consumed'""",
        "ANALYZE",
    )  # fmt: skip
    for statement in statements:
        with run.database.writing() as connection:
            connection.execute(sa.text(statement))
    return run


def _churn(run: Run, lives: int) -> None:
    """So many samples claimed, answered and finished as a worker does it, and dropped when ready. The small table has
    none of this: what churn leaves behind shows in the large one only."""
    owner, answers = run.register(), {0: pieces(8, 1)}
    while lives > 0:
        spent = store_api.life(run, owner, answers, 64)
        lives -= spent.operations
        _renew(run)
    run.goodbye(owner)


def _renew(run: Run) -> None:
    """Drops what is ready and admits as much anew."""
    query = sa.text("SELECT id FROM sample_group WHERE run_id = :run AND state = 'ready'")
    run.drop(run.database.read(lambda c: c.execute(query, {"run": run.id}).scalars().all()), "churn")
    run.admit()


def _turns(run: Run, n: int) -> list[tuple[float, float]]:
    """n times: claim 8, answer them; drop what is ready and admit more. Seconds of (claim, finish)."""
    owner, told = run.register(), []
    ((ids, probs),) = pieces(8, 1)
    for _ in range(n):
        began = time.perf_counter()
        taken = run.claim(owner, 8)
        claimed = time.perf_counter() - began
        if not taken:
            _renew(run)
            continue
        for claim in taken:
            run.append(claim, ids, probs, 0, "stop")
        began = time.perf_counter()
        for claim in taken:
            run.finish(claim)
        told.append((claimed, (time.perf_counter() - began) / len(taken)))
    run.goodbye(owner)
    return told


# -- peers


def peers(at: Places, plan: Plan, python: str) -> None:
    """The same rollouts through the store at full durability and through other buffers; see store_peers.py."""
    n = 256 if plan.quick else 1024
    answers = dict(enumerate(rollouts(n)))

    def own(k: int) -> dict[str, float]:
        with at.fresh("sqlite") as url, samplestore.open(url, durability="full") as store:
            run = new_run(store, n // GROUP)
            segments = sum(len(answers[id % n]) for id in range(1, n + 1))
            spent = store_api.life(run, run.register(), answers, k)
            with run.batch(step=0, groups=64 if n >= 512 else n // GROUP, timeout=60) as batch:
                reads = [store_reads.api(run, batch).rate for _ in range(3)]
        return {"appends": segments / spent.wall_s, "lives": spent.rate, "reads": median(reads)}

    def other(name: str, k: int) -> dict[str, float]:
        told = subprocess.run(
            [python, "store_peers.py", name, str(n), str(k)], cwd=Path(__file__).parent, capture_output=True, text=True,
        )  # fmt: skip
        if told.returncode:
            raise RuntimeError(f"{name}: {told.stderr[-2000:]}")
        return json.loads(told.stdout.splitlines()[-1])

    def rows() -> Iterator[list[str]]:
        for k in (16,) if plan.quick else (1, 16, 64):
            found: dict[str, list[dict[str, float]]] = {
                "samplestore": [],
                "straw": [],
                "transferqueue": [],
                "torch": [],
            }
            for _ in range(plan.repeat):
                found["samplestore"].append(own(k))
                for name in ("straw", "transferqueue", "torch"):
                    found[name].append(other(name, k))
            for name, turns in found.items():
                cells = []
                for what in ("appends", "lives", "reads"):
                    values = [turn[what] for turn in turns if what in turn]
                    cells.append(f"{median(values):,.0f}" if values else "-")
                yield [name, f"{k}", *cells]

    table("Peers, SQLite at durability full", "buffer | k | appends/s | lives/s | samples read/s", rows())
