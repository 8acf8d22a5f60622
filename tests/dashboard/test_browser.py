"""The pages in a real browser: what is drawn, what hostile texts can't do, and whom the page talks to.

Screenshots lie in SAMPLESTORE_TEST_ARTIFACTS, or in pytest's temporary folder.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.demo_data import Demo
from tests.support.processes import Processes, free_port

pytestmark = pytest.mark.browser

RUN = "import typer; from samplestore.dashboard.command import dashboard; typer.run(dashboard)"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 60_000
# Streamlit looks for its server below the page's own path first, and at the root when that answers 404.
PROBES = ("/_stcore/health", "/_stcore/host-config")


@pytest.fixture(scope="module")
def address(chromium: str, demo_sqlite: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `samplestore dashboard` on the demo."""
    running, port = Processes(tmp_path_factory.mktemp("dashboard_logs")), free_port()
    args = ["--db", demo_sqlite.url, "--port", str(port), "--tokenizer", str(demo_sqlite.tokenizer)]
    server = running.start([sys.executable, "-c", RUN, *args], name="dashboard")

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        server.wait_for(healthy, what="it answers", timeout=90)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.close()


@pytest.fixture
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("SAMPLESTORE_TEST_ARTIFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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


def watch(browser: Browser, theme: Any = "light", height: int = 1000) -> Watched:
    page = browser.new_page(viewport={"width": 1360, "height": height}, color_scheme=theme)
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


def generated(page: Page) -> Any:
    """The tokens of the response."""
    return page.locator(".ss-tokens .t:not(.p)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_overview_answers_on_the_first_screen(browser: Browser, address: str, artifacts: Path, theme: str) -> None:
    watched = watch(browser, theme, height=760)
    page = watched.page
    page.goto(address)
    expect(page.locator(".ss-verdict")).to_contain_text("1 of 3 engines do not serve v4 yet", timeout=WAIT_MS)
    expect(page.locator(".ss-card")).to_have_count(6)
    expect(page.locator('[data-testid="stVegaLiteChart"] svg, [data-testid="stVegaLiteChart"] canvas')).to_have_count(2)
    for seen in (".ss-verdict", ".ss-cards", ".ss-bar.tall"):
        box = page.locator(seen).bounding_box()
        assert box is not None and box["y"] >= 56 and box["y"] + box["height"] <= 760, seen
    expect(page.locator("td img, td script")).to_have_count(0)
    page.screenshot(path=artifacts / f"overview-{theme}.png")
    first = page.locator(".ss-head .meta").inner_text()
    expect(page.locator(".ss-head .meta")).not_to_have_text(first, timeout=WAIT_MS)  # it is read again by itself
    watched.check(address)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_trajectory_is_coloured_by_version(
    browser: Browser, address: str, demo_sqlite: Demo, artifacts: Path, theme: str
) -> None:
    watched, name = watch(browser, theme), demo_sqlite.spanning
    page = watched.page
    page.goto(f"{address}/trajectory?run={demo_sqlite.run}&sample={name[0]}/{name[1]}")
    expect(generated(page)).to_have_count(len(demo_sqlite.responses[name]), timeout=WAIT_MS)
    expect(page.locator(".ss-tokens .ss-badge")).to_have_text(["prompt ▸", "v2 ▸", "v3 ▸", "v4 ▸"])
    drawn = generated(page).evaluate_all(
        "ts => ts.map(t => { const s = getComputedStyle(t); return s.backgroundColor + s.borderBottomStyle })"
    )
    assert len(set(drawn)) == 3
    heights = page.locator(".ss-tokens .ss-badge").evaluate_all("bs => bs.map(b => b.getClientRects().length)")
    assert set(heights) == {1}, "a badge is broken across lines"
    assert re.search(r"id \d+ · response token 0 · v2 · log-prob -", generated(page).first.get_attribute("title") or "")
    page.screenshot(path=artifacts / f"trajectory-{theme}.png")
    watched.check(address)


def test_hostile_text_is_shown_and_does_nothing(
    browser: Browser, address: str, demo_sqlite: Demo, artifacts: Path
) -> None:
    watched, name = watch(browser), demo_sqlite.hostile
    page = watched.page
    page.goto(f"{address}/trajectory?sample={name[0]}/{name[1]}")
    expect(generated(page)).to_have_count(len(demo_sqlite.responses[name]), timeout=WAIT_MS)
    shown = page.locator(".ss-tokens").inner_text()
    for text in (
        "<script>alert('prompt')</script>",
        "<svg onload=alert(2)>",
        "window.pwned = true",
        "⟨U+202E⟩",
        "**markdown**",
    ):
        assert text in shown
    inside = page.locator(".ss-tokens").evaluate("e => [...new Set([...e.querySelectorAll('*')].map(x => x.tagName))]")
    assert inside == ["SPAN"]
    page.screenshot(path=artifacts / "hostile.png")
    watched.check(address)


def test_the_address_switches_the_sample(browser: Browser, address: str, demo_sqlite: Demo) -> None:
    watched = watch(browser)
    page = watched.page
    names = sorted(n for n in demo_sqlite.responses if n[0] == demo_sqlite.spanning[0])[:2]
    for group, index in names:
        page.goto(f"{address}/trajectory?run={demo_sqlite.run}&sample={group}/{index}")
        expect(page.locator(".ss-head .name")).to_have_text(f"Sample {group}/{index}", timeout=WAIT_MS)
        expect(generated(page)).to_have_count(len(demo_sqlite.responses[(group, index)]))
    # The other way round: a choice on the page changes the address.
    page.get_by_role("radio", name=re.compile(f"^{names[0][1]} ")).click()
    expect(page.locator(".ss-head .name")).to_have_text(f"Sample {names[0][0]}/{names[0][1]}", timeout=WAIT_MS)
    page.wait_for_url(re.compile(rf"sample={names[0][0]}(/|%2F){names[0][1]}"))
    # A click into a page that is still being drawn is lost.
    expect(generated(page)).to_have_count(len(demo_sqlite.responses[names[0]]), timeout=WAIT_MS)
    page.get_by_text("log-prob", exact=True).click()
    page.wait_for_url(re.compile(r"colour=log-prob"))
    watched.check(address)


def test_a_link_of_the_overview_opens_its_trajectory(browser: Browser, address: str) -> None:
    watched = watch(browser)
    page = watched.page
    page.goto(address)
    link = page.locator(".ss-table td a").first
    name = link.inner_text()
    link.click()
    expect(page.locator(".ss-head .name")).to_have_text(f"Sample {name}", timeout=WAIT_MS)
    watched.check(address)


PAGES = {
    "Groups": ".ss-table a", "Group": '[data-testid="stVegaLiteChart"]', "Sample": ".ss-tokens .t",
    "Aborts": ".ss-card", "Workers and engines": ".ss-table", "Batches": ".ss-table a", "Data": ".ss-card",
}  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_drawn(browser: Browser, address: str, artifacts: Path, theme: str) -> None:
    watched = watch(browser, theme)
    page = watched.page
    page.goto(address)
    expect(page.locator(".ss-verdict")).to_be_visible(timeout=WAIT_MS)
    for name, seen in PAGES.items():
        page.get_by_role("link", name=name, exact=True).first.click()
        expect(page.locator(".ss-head .name")).to_contain_text(name, timeout=WAIT_MS)
        expect(page.locator(seen).first).to_be_visible(timeout=WAIT_MS)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is wider than the window"
        page.screenshot(path=artifacts / f"{name.split()[0].lower()}-{theme}.png", full_page=True)
    watched.check(address)


def test_filters_are_kept_by_the_address(browser: Browser, address: str, demo_sqlite: Demo) -> None:
    watched = watch(browser)
    page = watched.page
    page.goto(f"{address}/groups?run={demo_sqlite.run}&state=ready")
    expect(page.locator(".ss-table tbody tr").first).to_be_visible(timeout=WAIT_MS)
    page.get_by_role("radio", name="all equal").click()
    page.wait_for_url(re.compile(r"rewards=all(\+|%20)equal"))
    expect(page.locator(".ss-table tbody tr")).to_have_count(page.locator(".ss-table .warn").count(), timeout=WAIT_MS)
    told = page.locator(".ss.dim", has_text="that fit").inner_text()
    page.reload()
    expect(page.locator(".ss.dim", has_text="that fit")).to_have_text(told, timeout=WAIT_MS)
    number = page.locator(".ss-table td a").first.inner_text()
    page.locator(".ss-table td a").first.click()
    expect(page.locator(".ss-head .name")).to_have_text(f"Group {number}", timeout=WAIT_MS)
    watched.check(address)


def test_the_least_likely_token_is_framed(browser: Browser, address: str, demo_sqlite: Demo) -> None:
    watched, name = watch(browser), demo_sqlite.spanning
    page = watched.page
    page.goto(f"{address}/trajectory?sample={name[0]}/{name[1]}&colour=staleness")
    expect(generated(page)).to_have_count(len(demo_sqlite.responses[name]), timeout=WAIT_MS)
    assert " behind" in (generated(page).first.get_attribute("title") or "")
    page.get_by_role("button", name="Lowest log-prob").click()
    expect(page.locator(".ss-tokens .hit")).to_have_count(1, timeout=WAIT_MS)
    page.wait_for_url(re.compile("find=lowest"))
    watched.check(address)
