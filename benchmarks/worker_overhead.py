"""What the worker costs over a bare client loop: CPU per token, tokens/s, memory. Needs no network and no model.

    python benchmarks/worker_overhead.py --quick            a minute: is anything much slower than it was?
    python benchmarks/worker_overhead.py                    the table of benchmarks/README.md
    python benchmarks/worker_overhead.py --shape sse8 --in-flight 64 512 --repeat 1
    python benchmarks/worker_overhead.py --flush            how much a segment should hold
    python benchmarks/worker_overhead.py --decoders         what JSON costs alone
    python benchmarks/worker_overhead.py --minutes 60       soak: memory over time at one setting

Engine and clients are processes of their own. Bare loop and worker take turns in the same run, over the same prompts:
read the ratios, not the absolute times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from clients import GROUP, Work  # noqa: E402 - a file beside this one, not an installed package
from engine_paced import chunk_bytes  # noqa: E402

BAR = 1.35  # CPU of the worker over that of the bare loop of the same shape


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine answers, and what is asked of it. tokens: length of a sample."""

    mode: str
    chunk: int
    interval_ms: float
    tokens: int


SHAPES = {
    "sse1": Shape("stream", 1, 20, 512),
    "sse8": Shape("stream", 8, 20, 4096),
    "sse64": Shape("stream", 64, 160, 4096),
    "sse8 full speed": Shape("stream", 8, 0, 4096),
    "sliced 1024": Shape("sliced", 64, 20, 4096),
    "unary": Shape("unary", 64, 20, 4096),
    "unary 1k": Shape("unary", 64, 20, 1024),
    # long enough for the worker to look at its streams only now and then
    "sse1 long": Shape("stream", 1, 20, 4096),
}
TABLE = ["sse1", "sse8", "sse64", "sliced 1024", "unary", "unary 1k"]
QUICK = ["sse8", "unary"]
IN_FLIGHT = [1, 8, 64, 512]
ROUNDS = {1: 1, 8: 4}  # samples one after another in each slot: what a process does once is spread over them


@contextmanager
def engine(shape: Shape) -> Iterator[str]:
    """A paced engine; its URL."""
    command = [sys.executable, HERE / "engine_paced.py", "--chunk", shape.chunk, "--interval-ms", shape.interval_ms]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait()


def run_client(work: Work, show: Callable[[str], Any] | None = None) -> dict[str, float]:
    """One client process, to its end; what it printed last. Its other lines go to `show`."""
    command = [sys.executable, str(HERE / "clients.py"), json.dumps(asdict(work))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            if last and show:
                show(last)
            last = line.strip()
    if process.returncode:
        raise SystemExit(f"{work.client} failed: {' '.join(command)}")
    told: dict[str, float] = json.loads(last)
    return told


def work_of(client: str, shape: Shape, url: str, in_flight: int, **more: Any) -> Work:
    return Work(
        client=client, url=url, mode=shape.mode, in_flight=in_flight,
        samples=ROUNDS.get(in_flight, 2) * max(in_flight, GROUP), tokens=shape.tokens, slice_tokens=1024, **more,
    )  # fmt: skip


def medians(clients: dict[str, Work], repeat: int) -> dict[str, dict[str, float]]:
    """Each client `repeat` times, taking turns; the median of each number, with us_token."""
    told: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for _ in range(repeat):
        for name, work in clients.items():
            told[name].append(run_client(work))
    found = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in told.items()}
    for numbers in found.values():
        numbers["us_token"] = 1e6 * numbers["cpu_s"] / numbers["tokens"]
        numbers["loop_us_token"] = 1e6 * numbers["loop_s"] / numbers["tokens"]
    return found


def table(head: str, rows: Iterable[list[str]]) -> None:
    names = head.split("|")
    print("| " + " | ".join(name.strip() for name in names) + " |")
    print("|" + " --- |" * len(names), flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def overhead(shapes: list[str], in_flight: list[int], repeat: int, flush_tokens: int) -> Iterator[list[str]]:
    """A row for each shape and number in flight."""
    for name in shapes:
        shape = SHAPES[name]
        with engine(shape) as url:
            for n in in_flight:
                bare = work_of("bare", shape, url, n)
                found = medians(
                    {
                        "bare": bare,
                        "unary": replace(bare, mode="unary"),
                        "worker": work_of("worker", shape, url, n, flush_tokens=flush_tokens),
                    },
                    repeat,
                )
                yield _row(name, shape, n, found)


def _row(name: str, shape: Shape, in_flight: int, found: dict[str, dict[str, float]]) -> list[str]:
    bare, unary, worker = found["bare"], found["unary"], found["worker"]
    allowed = 200 + 2 * 8 * shape.tokens * in_flight / 2**20  # ids and log-probs, twice
    return [
        name, f"{in_flight}", f"{bare['us_token']:.2f}", f"{unary['us_token']:.2f}", f"{worker['us_token']:.2f}",
        f"{worker['loop_us_token']:.2f}", f"{worker['us_token'] / bare['us_token']:.2f}",
        f"{worker['us_token'] / unary['us_token']:.1f}", f"{worker['tokens'] / worker['wall_s']:,.0f}",
        f"{1e6 / worker['us_token']:,.0f}", f"{worker['rss_peak']:.0f} of {allowed:.0f}",
    ]  # fmt: skip


HEAD = (
    "shape | in flight | bare us/token | bare unary us/token | worker us/token | of it event loop | worker / bare | "
    "worker / bare unary | worker tokens/s | worker tokens/s a core | RSS MB of allowed"
)


def flush_sizes(repeat: int) -> Iterator[list[str]]:
    """What the size of a segment costs: the worker at 64 in flight, 8 tokens a chunk."""
    shape = SHAPES["sse8"]
    with engine(shape) as url:
        for n in (64, 256, 1024, 4096):
            work = work_of("worker", shape, url, 64, flush_tokens=n, flush_seconds=3600.0)
            found = medians({"worker": work}, repeat)["worker"]
            yield [f"{n}", f"{found['us_token']:.2f}", f"{found['rss_peak']:.0f}", f"{n / 8 * 0.02:.1f} s"]


def decoders(repeat: int) -> Iterator[list[str]]:
    """JSON alone: the bytes of one 4,096-token answer, decoded chunk by chunk."""
    import orjson

    ways: dict[str, Callable[[bytes], Any]] = {"json": json.loads, "orjson": orjson.loads}
    try:
        import msgspec

        ways["msgspec"] = msgspec.json.Decoder().decode
    except ImportError:
        pass  # no dependency of ours: compared where it happens to be installed
    for size in (1, 8, 64, 4096):
        chunks = [chunk_bytes(at, at + size, 4096, 256) for at in range(0, 4096, size)]
        row = [f"{size}"]
        for decode in ways.values():
            times = []
            for _ in range(repeat):
                start = time.process_time()
                for chunk in chunks:
                    decode(chunk)
                times.append(time.process_time() - start)
            row.append(f"{1e6 * statistics.median(times) / 4096:.2f}")
        yield row + ["-"] * (3 - len(ways))


def soak(minutes: float, name: str, in_flight: int) -> None:
    """Memory of one worker over time."""
    shape = SHAPES[name]
    with engine(shape) as url:
        rate = in_flight * shape.chunk / (shape.interval_ms / 1000)
        samples = int(1.2 * rate * minutes * 60 / shape.tokens / GROUP + 1) * GROUP  # more than there is time for
        work = replace(work_of("worker", shape, url, in_flight, soak_s=minutes * 60), samples=samples)
        print(f"{name}, {in_flight} in flight, {rate:,.0f} tokens/s", flush=True)
        print(run_client(work, show=lambda line: print(line, flush=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} at 64 in flight, once")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help=f"default: {TABLE}")
    parser.add_argument("--in-flight", nargs="+", type=int, help=f"default: {IN_FLIGHT}")
    parser.add_argument("--repeat", type=int, default=3, help="the median is shown")
    parser.add_argument("--flush-tokens", type=int, default=1024)
    parser.add_argument("--flush", action="store_true", help="compare sizes of segments")
    parser.add_argument("--decoders", action="store_true", help="compare JSON decoders")
    parser.add_argument("--minutes", type=float, help="soak for that long")
    given = parser.parse_args()
    if given.minutes:
        soak(given.minutes, (given.shape or ["sse8"])[0], (given.in_flight or [64])[0])
    elif given.flush:
        table("flush tokens | worker us/token | RSS MB | tokens of so long are at risk", flush_sizes(given.repeat))
    elif given.decoders:
        table("tokens a chunk | json us/token | orjson us/token | msgspec us/token", decoders(given.repeat))
    else:
        shapes = given.shape or (QUICK if given.quick else TABLE)
        in_flight = given.in_flight or ([64] if given.quick else IN_FLIGHT)
        table(HEAD, overhead(shapes, in_flight, 1 if given.quick else given.repeat, given.flush_tokens))


if __name__ == "__main__":
    main()
