"""Real routers as subprocesses: sglang-router, and its successor smg, which takes the same flags. Retries are off
unless asked for: a retried request is generated twice with the same id."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote

from .processes import HOST, Process, Processes, free_port, wait_until

STARTUP_S = 60.0

Kind = Literal["sglang-router", "smg"]
COMMANDS = {
    "sglang-router": [sys.executable, "-m", "sglang_router.launch_router"],
    "smg": [sys.executable, "-m", "smg", "launch"],  # sglang-router installs a program of that name, too
}


class Router:
    """A running router. Control calls must go to the engines themselves; the router only passes /generate on."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url

    @classmethod
    def start(
        cls,
        processes: Processes,
        engine_urls: Sequence[str] = (),
        *,
        kind: Kind = "sglang-router",
        retries: bool = False,
        policy: str = "round_robin",
        health_interval_s: int = 1,
        port: int | None = None,
        extra_args: Sequence[str] = (),
    ) -> Router:
        """Start a router and wait until it answers and lists all of `engine_urls`.

        retries            its default: up to five attempts
        policy             random, round_robin, cache_aware, power_of_two or manual (sticky by X-SMG-Routing-Key)
        health_interval_s  seconds between two looks at an engine; two failed looks take it out
        """
        port, metrics_port = port or free_port(), free_port()
        flags = {
            "--host": HOST,
            "--port": port,
            "--prometheus-host": HOST,
            "--prometheus-port": metrics_port,  # the default is fixed: two routers on one machine would collide
            "--policy": policy,
            "--health-check-interval-secs": health_interval_s,
            "--health-check-timeout-secs": 5,
            "--health-failure-threshold": 2,
            "--health-success-threshold": 1,
            "--worker-startup-timeout-secs": 60,
            "--worker-startup-check-interval": 1,
            "--shutdown-grace-period-secs": 1,
            "--log-level": "info",
        }
        args = [str(part) for flag in flags.items() for part in flag]
        more = [] if retries else ["--disable-retries"]
        process = processes.start([*COMMANDS[kind], *args, *more, *extra_args], name=kind)
        router = cls(process, f"http://{HOST}:{port}")
        process.wait_for(router.healthy, what="GET /health answers", timeout=STARTUP_S)
        for url in engine_urls:
            router.add_worker(url)
        return router

    def healthy(self) -> bool:
        """True when GET /health answers 200; it does so without engines too."""
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def workers(self) -> list[dict[str, Any]]:
        """The engines it knows: dicts with at least id, url and is_healthy."""
        status, body = self.request("GET", "/workers")
        if status != 200:
            raise AssertionError(f"GET /workers answered {status}: {body}")
        return list(body["workers"])

    def add_worker(self, url: str, *, wait: bool = True, timeout: float = 30.0) -> None:
        """Register an engine. A dead address gets 202 too, so `wait` waits until it is listed as healthy."""
        status, body = self.request("POST", "/workers", {"url": url})
        if status != 202:
            raise AssertionError(f"POST /workers answered {status}: {body}")
        if wait:
            self.process.wait_for(lambda: url in self._healthy(), what=f"engine {url} is listed", timeout=timeout)

    def remove_worker(self, url: str, *, timeout: float = 30.0) -> None:
        """Take an engine out and wait until it is no longer listed."""
        for worker in self.workers():
            if worker["url"] == url:
                self.request("DELETE", f"/workers/{quote(worker['id'], safe='')}")
        wait_until(lambda: url not in {w["url"] for w in self.workers()}, what=f"engine {url} is gone", timeout=timeout)

    def _healthy(self) -> set[str]:
        return {worker["url"] for worker in self.workers() if worker.get("is_healthy", True)}

    def request(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> tuple[int, Any]:
        """(status, body) of a blocking call; JSON is decoded, anything else is text. OSError: no connection."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        # No proxy from the environment: the router is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def stop(self) -> None:
        """Kill it with its children."""
        self.process.kill_tree()
