"""Speed of the store against the plain driver, on SQLite and PostgreSQL, and against other buffers.

    .venv/bin/python benchmarks/store_speed.py --quick                 # a few minutes
    .venv/bin/python benchmarks/store_speed.py append life claim read  # named parts, medians of five
    .venv/bin/python benchmarks/store_speed.py disk sustained memory
    .venv/bin/python benchmarks/store_speed.py scale --samples 1000000 --churn 1000000   # hours at 10,000,000
    .venv/bin/python benchmarks/store_speed.py peers --peers-python build/peers/bin/python

Both sides take turns in one run, and a ratio is that of two neighbouring turns: what else the machine does meets both.
"us" is CPU of the measuring process, all threads; PostgreSQL's own is not in it. See store.md for what was found.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import store_api
import store_floor
import store_reads
import store_scale
from store_data import Places, Plan, Spent, interleaved, median, new_run, places, ratio, ratios, spread, table
from store_rollouts import GROUP, pieces, rollouts

import samplestore

BACKENDS = (("sqlite", "normal"), ("sqlite", "full"), ("postgres", "normal"))
TOKENS, IN_FLIGHT = (64, 256, 1024, 8192), (64, 512)
MIB = 2**20


def _pair(floor: Callable[[], Spent], api: Callable[[], Spent], repeat: int) -> list[str]:
    told = interleaved({"floor": floor, "api": api}, repeat)
    own, plain = told["api"], told["floor"]
    return [
        spread([s.rate for s in plain]), spread([s.rate for s in own]), ratio(ratios(own, plain)),
        f"{median([s.cpu_us for s in plain]):.0f}", f"{median([s.cpu_us for s in own]):.0f}",
    ]  # fmt: skip


PAIR = "floor ops/s | store ops/s | store / floor | floor us | store us"


def append(at: Places, plan: Plan) -> None:
    """Durable appends through the event loop and the writer thread."""

    def rows() -> Iterator[list[str]]:
        shapes = [(1024, 64)] if plan.quick else list(itertools.product(plan.tokens, plan.in_flight))
        for (backend, durability), (tokens, in_flight) in itertools.product(plan.backends, shapes):
            for k in (1, 16, 64):
                volume = (8 if plan.quick else 48) * MIB
                operations = max(min(volume // (8 * tokens), 20_000), 8 * k) // (8 if k == 1 else 1)
                yield [
                    backend, durability, f"{tokens:,}", f"{in_flight}", f"{k}",
                    *_append_pair(at, backend, durability, tokens, in_flight, k, operations, plan.repeat),
                ]  # fmt: skip

    table("Durable append", f"database | durability | tokens | in flight | k | {PAIR}", rows())


def _append_pair(
    at: Places, backend: str, durability: str, tokens: int, in_flight: int, k: int, operations: int, repeat: int
) -> list[str]:
    segments = pieces(tokens)

    def floor() -> Spent:
        with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
            run = new_run(store, in_flight // GROUP)
            claims = run.claim(run.register(), in_flight)
            plain = store_floor.FLOORS[backend](url, durability)
            spent = store_floor.append(plain, claims, segments, operations, k)
            plain.close()
            return spent

    def api() -> Spent:
        with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
            run = new_run(store, in_flight // GROUP)
            claims = run.claim(run.register(), in_flight)
            return store_api.append(run, claims, segments, operations, k)

    return _pair(floor, api, repeat)


def wait(at: Places, plan: Plan) -> None:
    """How long a worker waits for the acknowledgement, with 16 appends in flight and 16 in a commit."""

    def rows() -> Iterator[list[str]]:
        for backend, durability in plan.backends:
            found = []
            for _ in range(plan.repeat):
                with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
                    run = new_run(store, 2)
                    claims = run.claim(run.register(), 16)
                    found.append(store_api.append(run, claims, pieces(1024), 2000 if plan.quick else 20_000, 16))
            yield [
                backend, durability,
                *(f"{median([s.wait_ms(share) for s in found]):.2f}" for share in (0.5, 0.99, 1.0)),
            ]  # fmt: skip

    table("Acknowledgement of an append, ms", "database | durability | median | p99 | longest", rows())


def life(at: Places, plan: Plan) -> None:
    """Claim, append, finish; lengths of the long profile. Then one process against four."""
    groups = 16 if plan.quick else 128

    def rows() -> Iterator[list[str]]:
        lengths = dict(enumerate(rollouts(GROUP * groups)))
        for backend, durability in plan.backends:
            for k in (16,) if plan.quick else (1, 16, 64):

                def floor(backend: str = backend, durability: str = durability, k: int = k) -> Spent:
                    with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
                        run = new_run(store, groups)
                        plain = store_floor.FLOORS[backend](url, durability)
                        spent = store_floor.life(plain, run, run.register(), lengths, k)
                        plain.close()
                        return spent

                def api(backend: str = backend, durability: str = durability, k: int = k) -> Spent:
                    with at.fresh(backend) as url, samplestore.open(url, durability=durability) as store:
                        run = new_run(store, groups)
                        return store_api.life(run, run.register(), lengths, k)

                yield [backend, durability, f"{k}", *_pair(floor, api, plan.repeat)]

    table("Whole life of a sample (samples/s)", f"database | durability | k | {PAIR}", rows())

    def processes() -> Iterator[list[str]]:
        for backend, durability in plan.backends:
            told = interleaved(
                {
                    n: lambda n=int(n): store_scale.lives(at, backend, durability, n, groups, 16)  # noqa: B023
                    for n in ("1", "4")
                },
                plan.repeat,
            )
            yield [
                backend, durability, *(spread([s.rate for s in told[n]]) for n in told),
                ratio(ratios(told["4"], told["1"])),
            ]  # fmt: skip

    table("Lives in several processes, 16 in a commit", "database | durability | 1 | 4 | 4 / 1", processes())


def claim(at: Places, plan: Plan) -> None:
    """Claims of 64 fresh samples, the store's and the floor's by turns."""

    def rows() -> Iterator[list[str]]:
        for backend in dict.fromkeys(name for name, _ in plan.backends):
            own, plain = store_scale.claims(at, backend, 10 * plan.repeat)
            yield [
                backend, f"{1e3 * median(plain):.2f}", f"{1e3 * median(own):.2f}",
                f"{1e3 * store_scale.quantile(own, 0.99):.2f}",
            ]  # fmt: skip

    table("Claim of 64, ms", "database | floor | store | store p99", rows())


def read(at: Places, plan: Plan) -> None:
    """A batch of 64 groups to packed arrays."""

    def rows() -> Iterator[list[str]]:
        for backend in dict.fromkeys(name for name, _ in plan.backends):
            with at.fresh(backend) as url:
                own, plain = store_reads.compare(url, backend, 2 * plan.repeat + 1)
            yield [
                backend, spread([s.rate for s in plain]), spread([s.rate for s in own]), ratio(ratios(own, plain)),
                f"{median([s.cpu_us for s in plain]):.0f}", f"{median([s.cpu_us for s in own]):.0f}",
            ]  # fmt: skip

    table("Batch of 64 groups to packed arrays (samples/s)", f"database | {PAIR}", rows())


PARTS: dict[str, Callable[[Places, Plan], None]] = {
    "append": append, "wait": wait, "life": life, "claim": claim, "read": read, "disk": store_scale.disk,
    "sustained": store_scale.sustained, "memory": store_scale.memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, "scale", "peers", []], help="default: all but scale, peers"
    )
    parser.add_argument("--quick", action="store_true", help="small and once: does it run, and roughly how fast")
    parser.add_argument("--repeat", type=int, help="turns of each side; the median is shown")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"append: lengths of segments; default {TOKENS}")
    parser.add_argument("--in-flight", type=int, nargs="+", help=f"append: samples; default {IN_FLIGHT}")
    parser.add_argument("--no-postgres", action="store_true")
    parser.add_argument("--folder", help="where databases are made; default: the system's temporary folder")
    parser.add_argument("--samples", type=int, default=1_000_000, help="scale: size of the large table")
    parser.add_argument("--churn", type=int, default=10_000, help="scale: claims and finishes before measuring")
    parser.add_argument(
        "--peers-python", type=os.path.abspath, help="peers: a Python that has straw-queue and TransferQueue"
    )
    given = parser.parse_args()
    plan = Plan(
        given.repeat or (3 if given.quick else 5),
        given.quick,
        BACKENDS[:2] if given.no_postgres else BACKENDS,
        given.tokens or TOKENS,
        given.in_flight or IN_FLIGHT,
    )
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {store_scale.versions()}")
    with places(not given.no_postgres, given.folder) as at:
        for name in given.parts or PARTS:
            if name == "scale":
                store_scale.scale(at, plan, given.samples, given.churn)
            elif name == "peers":
                store_scale.peers(at, plan, given.peers_python or sys.executable)
            else:
                PARTS[name](at, plan)


if __name__ == "__main__":
    main()
