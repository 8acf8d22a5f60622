"""What the dashboard's pages cost at a million samples, and what it costs workers that write meanwhile.

    python benchmarks/dashboard_speed.py                      SQLite, 20 million segments of 32 tokens: 12 GB
    python benchmarks/dashboard_speed.py --segments 1         a million segments: a few minutes
    python benchmarks/dashboard_speed.py --postgres URL       an empty database on a server of yours
    python benchmarks/dashboard_speed.py --writers 16         and append from so many processes meanwhile

Each page is run by Streamlit's own runner in this process, with empty caches. "queries" is the time in the database,
all queries of the page together; "page" is that and everything else on the server, without the browser.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import sqlalchemy as sa  # noqa: E402 - after the path

import samplestore  # noqa: E402
from samplestore.verbs import liveness  # noqa: E402
from tests.plans.million import GROUPS, build  # noqa: E402 - the run that the plans are checked on
from tests.support import factory as f  # noqa: E402

APP = HERE.parent / "dashboard" / "app.py"
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "Overview": ("overview", {}),
    "Groups, newest": ("groups", {}),
    "Groups, dropped": ("groups", {"state": "dropped"}),
    "Groups by reward spread": ("groups", {"order": "widest spread first"}),
    "Groups, text search": ("groups", {"text": "nobody wrote this"}),
    "Group": ("group", {"group": str(GROUPS // 2)}),
    "Sample": ("trajectory", {"sample": f"{GROUPS // 2}/1"}),
    "Aborts": ("aborts", {}),
    "Workers and engines": ("fleet", {}),
    "Batches": ("batches", {}),
    "Data": ("data", {}),
}


EVERY_S = 2.0


class Meter:
    """Time that statements of this process take in the database."""

    def __init__(self) -> None:
        self.spent, self.n, self._began = 0.0, 0, threading.local()
        sa.event.listen(sa.Engine, "before_cursor_execute", self._before)
        sa.event.listen(sa.Engine, "after_cursor_execute", self._after)

    def _before(self, *_: Any) -> None:
        self._began.at = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self.spent += time.perf_counter() - self._began.at
        self.n += 1


def look(meter: Meter, page: str, query: dict[str, str]) -> tuple[float, int, float]:
    """One look at a page: (seconds of queries, how many, seconds of all)."""
    import streamlit as st
    from streamlit.testing.v1 import AppTest

    at = AppTest.from_file(str(APP), default_timeout=600)
    if page != "overview":
        at.run()  # the runner knows pages only after it has shown the first
        at.switch_page(f"page_{page}.py")
    for key, value in query.items():
        at.query_params[key] = value
    st.cache_data.clear()
    st.cache_resource.clear()
    meter.spent, meter.n = 0.0, 0
    began = time.perf_counter()
    at.run()
    took = time.perf_counter() - began
    if at.exception:
        raise SystemExit(f"{page}: {at.exception}")
    return meter.spent, meter.n, took


def pages(url: str, repeat: int) -> None:
    os.environ["SAMPLESTORE_DATABASE_URL"] = url
    meter = Meter()
    print("\n| page | queries | queries ms (worst) | page ms |\n| --- | --- | --- | --- |")
    for name, (page, query) in PAGES.items():
        looks = [look(meter, page, query) for _ in range(repeat)]
        spent, all_of_it = [1e3 * one[0] for one in looks], [1e3 * one[2] for one in looks]
        n = looks[-1][1]
        print(
            f"| {name} | {n} | {statistics.median(spent):.0f} ({max(spent):.0f}) | {statistics.median(all_of_it):.0f} |"
        )


def write(url: str, ready: Any, stop: Any, told: Any) -> None:
    """Append to two samples until told to stop; how many segments, and the slowest append, go to `told`."""
    with samplestore.open(url) as store:
        run = store.existing_run("million")
        claims = run.claim(f.register(run), 2)
        ready.wait()
        n, slowest = 0, 0.0
        while not stop.is_set():
            for claim in claims:
                began = time.perf_counter()
                run.append(claim, list(range(32)), [-0.5] * 32, run.current_version)
                slowest = max(slowest, time.perf_counter() - began)
                n += 1
    told.put((n, slowest))


@contextmanager
def watching(url: str, burn_s: float) -> Iterator[None]:
    """Somebody looks at the overview, whose queries are the most, every two seconds. burn_s > 0: and instead spends so
    many seconds of CPU on nothing, which 16 writers on few cores miss too."""

    def go_on() -> None:
        meter = Meter()
        while True:
            began = time.monotonic()
            if burn_s:
                until = time.process_time() + burn_s
                while time.process_time() < until:
                    pass
            else:
                look(meter, "overview", {})
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))

    os.environ["SAMPLESTORE_DATABASE_URL"] = url
    looker = multiprocessing.get_context("fork").Process(target=go_on)
    looker.start()
    try:
        yield
    finally:
        looker.terminate()
        looker.join()


def cost_of_a_look(url: str) -> float:
    """Seconds of CPU."""
    os.environ["SAMPLESTORE_DATABASE_URL"] = url
    script = "import sys, time; sys.path[:0] = sys.argv[1:3]; import dashboard_speed as d; m = d.Meter();"
    script += "d.look(m, 'overview', {}); t = time.process_time(); d.look(m, 'overview', {});"
    script += "print(time.process_time() - t)"
    told = subprocess.run(
        [sys.executable, "-c", script, str(HERE), str(HERE.parent)], capture_output=True, text=True, check=True
    )
    return float(told.stdout.split()[-1])


def writers(url: str, n: int, seconds: float) -> None:
    print(f"| {n} writers, {seconds:.0f} s | appends/s | slowest append ms |\n| --- | --- | --- |")
    burn_s = cost_of_a_look(url)
    watched = f"the overview is looked at every {EVERY_S:.0f} s"
    burnt = f"{burn_s:.1f} s of CPU, as much as such a look takes, are spent every {EVERY_S:.0f} s on nothing"
    for name in ("alone", watched, burnt, "alone again"):
        context = multiprocessing.get_context("spawn")
        ready, stop, told = context.Barrier(n + 1), context.Event(), context.Queue()
        started = [context.Process(target=write, args=(url, ready, stop, told)) for _ in range(n)]
        for process in started:
            process.start()
        ready.wait()
        if name.startswith("alone"):
            time.sleep(seconds)
        else:
            with watching(url, burn_s if name == burnt else 0.0):
                time.sleep(seconds)
        stop.set()
        found = [told.get() for _ in started]
        for process in started:
            process.join()
        print(f"| {name} | {sum(one[0] for one in found) / seconds:.0f} | {1e3 * max(one[1] for one in found):.0f} |")
        with samplestore.open(url) as store:
            run = store.existing_run("million")
            for worker in f.rows(run, "SELECT id FROM worker WHERE state = 'live' AND run_id = :r", r=run.id):
                run.transact(lambda tx, id=worker["id"]: liveness.goodbye(tx, id))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=20, help="of each sample")
    parser.add_argument("--tokens", type=int, default=32, help="of each segment")
    parser.add_argument(
        "--postgres", metavar="URL", help="of an empty database; SQLite in a temporary folder if left out"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--writers", type=int, default=0, metavar="N")
    parser.add_argument("--seconds", type=float, default=15.0, help="that writers are measured")
    parser.add_argument(
        "--folder", help="where the file is made, and left for another time; a temporary one if left out"
    )
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # that there is no server
    with tempfile.TemporaryDirectory() as folder:
        path = Path(given.folder or folder) / "million.db"
        url = given.postgres or f"sqlite:///{path}"
        began = time.monotonic()
        with samplestore.open(url) as store:
            if "million" not in store.run_names():
                build(store, given.segments, given.tokens)
                print(f"built in {time.monotonic() - began:.0f} s")
        if given.writers:
            writers(url, given.writers, given.seconds)
        pages(url, given.repeat)


if __name__ == "__main__":
    main()
