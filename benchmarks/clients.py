"""What is compared: a bare aiohttp loop, and the real worker. Each runs in a process of its own.

    python benchmarks/clients.py '{"client": "worker", "url": "http://127.0.0.1:30000", ...}'

prints one JSON object: what the client cost from its first call to its last, imports not counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

GROUP = 8  # samples of a prompt


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement. Lengths in tokens.

    client         "bare" or "worker"
    url            of an engine; several with commas between them (worker only)
    router         `url` is a router's
    mode           "stream", "unary" or "sliced"
    vocabulary     token ids of prompts are below
    vary           answers end where the model says so, after `tokens` at the latest; not for mode sliced
    soak_s         above 0: stop then, whatever is left, and tell the memory every minute until then
    """

    client: str
    url: str
    mode: str
    in_flight: int
    samples: int
    tokens: int
    router: bool = False
    prompt: int = 256
    vocabulary: int = 100_000
    slice_tokens: int = 256
    flush_tokens: int = 1024
    flush_seconds: float = 2.0
    vary: bool = False
    soak_s: float = 0.0
    profile: str = ""  # a file for cProfile


def memory_mb(field: str = "VmRSS") -> float:
    """Of this process. VmHWM is its peak; getrusage would tell the parent's where that was larger."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def prompt_ids(work: Work, group: int) -> list[int]:
    """Prompts of different groups differ from the first token on: they share nothing in a prefix cache."""
    return [10 + (7 * group + place * (1 + group)) % (work.vocabulary - 10) for place in range(work.prompt)]


# -- the bare loop


async def bare(work: Work) -> int:
    """As many coroutines as samples are in flight; each posts, reads, decodes and keeps ids and log-probs of the sample
    that it is at. No store, no weight versions, no resume. Returns tokens."""
    left = iter(range(work.samples))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return sum(await asyncio.gather(*(_lane(session, work, left) for _ in range(work.in_flight))))


async def _lane(session: aiohttp.ClientSession, work: Work, left: Iterator[int]) -> int:
    total = 0
    for number in left:
        ids: list[int] = []
        probs: list[float] = []
        while len(ids) < work.tokens:
            room = work.tokens - len(ids)
            body = {
                "rid": f"{number:032x}", "input_ids": [*prompt_ids(work, number // GROUP), *ids],
                "return_logprob": True, "stream": work.mode == "stream",
                "sampling_params": {
                    "ignore_eos": not work.vary,
                    "max_new_tokens": min(room, work.slice_tokens) if work.mode == "sliced" else room,
                },
            }  # fmt: skip
            async with session.post(f"{work.url}/generate", json=body) as response:
                if work.mode != "stream":
                    _keep(orjson.loads(await response.read()), ids, probs)
                else:
                    buffer = b""
                    async for data in response.content.iter_any():
                        *events, buffer = (buffer + data).split(b"\n\n")
                        for event in events:
                            if event != b"data: [DONE]":
                                _keep(orjson.loads(event[6:]), ids, probs)
            if work.vary:
                break
        whole = len(ids) == work.tokens or work.vary
        assert whole and len(ids) == len(probs), f"{len(ids)} ids, {len(probs)} log-probs"
        total += len(ids)
    return total


def _keep(chunk: Any, ids: list[int], probs: list[float]) -> None:
    ids += chunk["output_ids"]
    probs += [entry[0] for entry in chunk["meta_info"]["output_token_logprobs"]]


# -- the worker


@contextmanager
def database(work: Work) -> Iterator[Any]:
    """A SQLite file with one run that has as many samples as asked for; all of its groups are admitted."""
    import samplestore

    groups = max(1, work.samples // GROUP)
    with tempfile.TemporaryDirectory() as folder, samplestore.open(f"{folder}/bench.db") as store:
        run = store.run(
            "bench", samples_per_prompt=min(GROUP, work.samples), groups_per_step=groups, max_staleness=0, epochs=1,
            max_new_tokens=work.tokens, sampling={"ignore_eos": not work.vary},
        )  # fmt: skip
        run.add_prompts([{"prompt_ids": prompt_ids(work, number)} for number in range(groups)])
        run.admit()
        yield run


def worker(work: Work) -> tuple[int, dict[str, float]]:
    """The worker as `samplestore worker` runs it, store included. Returns tokens, and what it cost."""
    import sqlalchemy as sa

    from samplestore.config import load_worker_config
    from samplestore.models import Request, Sample
    from samplestore.workers.collector import collect_seldom
    from samplestore.workers.rollout import RolloutWorker

    with database(work) as run:
        config = load_worker_config(
            None,
            {
                "db": "unused.db", "concurrency": work.in_flight, "mode": work.mode,
                **({"router": work.url} if work.router else {"engines": work.url.split(",")}),
                "slice_tokens": work.slice_tokens, "flush_tokens": work.flush_tokens,
                "flush_seconds": work.flush_seconds, "exit_when_done": True,
            },
        )  # fmt: skip
        rollout = RolloutWorker(run, config)
        collect_seldom()  # as the command does
        if work.soak_s:
            threading.Thread(target=_soak, args=(rollout, work.soak_s), daemon=True).start()
        cost = measured(lambda: asyncio.run(rollout.run_forever()), work.profile)
        table = Sample.__table__
        done = sa.select(sa.func.sum(table.c.n_tokens), sa.func.count()).where(
            table.c.n_tokens > 0 if work.soak_s else table.c.status.in_(["completed", "truncated"])
        )
        tokens, samples = run.database.read(lambda c: c.execute(done).one())
        asked = sa.select(
            sa.func.sum(Request.__table__.c.prompt_tokens), sa.func.sum(Request.__table__.c.cached_tokens)
        )
        cost["prompt_tokens"], cost["cached_tokens"] = run.database.read(lambda c: c.execute(asked).one())
    assert work.soak_s or samples == work.samples, f"{samples} samples of {work.samples} are done"
    return int(tokens), cost


def _soak(rollout: Any, seconds: float) -> None:
    """Tell the memory of this process every minute, then have the worker stop. In a thread of its own."""
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        print(f"minute {now / 60:5.1f}  RSS {memory_mb():6.1f} MB  peak {memory_mb('VmHWM'):6.1f} MB", flush=True)
        time.sleep(min(60.0, seconds - now))
    rollout.loop.call_soon_threadsafe(rollout.stop, "soak is over")


def measured(call: Any, profile: str = "") -> dict[str, float]:
    """Seconds of `call`: CPU of all threads, CPU of the event loop's thread, wall clock."""
    import cProfile

    profiler = cProfile.Profile(time.thread_time) if profile else None
    wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    if profiler:
        profiler.enable()
    call()
    if profiler:
        profiler.disable()
        profiler.dump_stats(profile)
    return {
        "cpu_s": time.process_time() - cpu, "loop_s": time.thread_time() - loop, "wall_s": time.perf_counter() - wall,
    }  # fmt: skip


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING)
    import samplestore.workers.rollout  # noqa: F401 - before the clock starts, and so that both clients' memory has it

    start = memory_mb()
    if work.client == "worker":
        tokens, cost = worker(work)
    else:
        told: list[int] = []
        cost = measured(lambda: told.append(asyncio.run(bare(work))), work.profile)
        tokens = told[0]
    print(json.dumps({"tokens": tokens, **cost, "rss_start": start, "rss_peak": memory_mb("VmHWM")}))


if __name__ == "__main__":
    main()
