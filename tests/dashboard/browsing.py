"""A dashboard served for tests, and a browser's page that is watched for what must not happen on it."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

from tests.support.processes import Processes, free_port

RUN = "import typer; from samplestore.dashboard.command import dashboard; typer.run(dashboard)"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 60_000
# Streamlit looks for its server below the page's own path first, and at the root when that answers 404.
PROBES = ("/_stcore/health", "/_stcore/host-config")


def healthy(port: int) -> bool:
    """Whether a dashboard answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def serving(logs: Path, *args: str) -> Iterator[str]:
    """The address of `samplestore dashboard` with these arguments."""
    running, port = Processes(logs), free_port()
    server = running.start([sys.executable, "-c", RUN, *args, "--port", str(port)], name="dashboard")

    try:
        server.wait_for(lambda: healthy(port), what="it answers", timeout=90)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.close()


@dataclass
class Watched:
    """A page, and all that must not happen on it."""

    page: Page
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def check(self, address: str) -> None:
        assert self.dialogs == []
        assert self.errors == []
        assert self.hosts <= {urlsplit(address).netloc}
        assert self.page.evaluate("window.pwned === undefined")


def watch(browser: Browser, theme: Any = "light", height: int = 1000, width: int = 1360) -> Watched:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    page.set_default_timeout(WAIT_MS)
    watched = Watched(page)

    def dialog(opened: Any) -> None:
        watched.dialogs.append(opened.message)
        opened.dismiss()

    def console(message: Any) -> None:
        if message.type == "error" and not message.location.get("url", "").endswith(PROBES):
            watched.errors.append(f"{message.text} {message.location}")

    page.on("dialog", dialog)
    page.on("console", console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on(
        "request", lambda request: watched.hosts.add(urlsplit(request.url).netloc) if _remote(request.url) else None
    )
    page.on("websocket", lambda socket: watched.hosts.add(urlsplit(socket.url).netloc))
    return watched


def _remote(url: str) -> bool:
    return urlsplit(url).scheme not in ("data", "blob", "about")
