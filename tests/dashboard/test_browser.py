"""The pages in a real browser: what is drawn, what hostile texts can't do, and whom the page talks to.

Screenshots lie in SAMPLESTORE_TEST_ARTIFACTS, or in pytest's temporary folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, TimeoutError, expect

from tests.dashboard.browsing import WAIT_MS, serving, watch
from tests.support.demo_data import Demo

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(chromium: str, demo_sqlite: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `samplestore dashboard` on the demo."""
    logs = tmp_path_factory.mktemp("dashboard_logs")
    with serving(logs, "--db", demo_sqlite.url, "--tokenizer", str(demo_sqlite.tokenizer)) as at:
        yield at


def generated(page: Page) -> Any:
    """The tokens of the response."""
    return page.locator(".ss-tokens .t:not(.p)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_overview_answers_on_the_first_screen(browser: Browser, address: str, artifacts: Path, theme: str) -> None:
    watched = watch(browser, theme, height=760)
    page = watched.page
    page.goto(address)
    expect(page.locator(".ss-verdict")).to_contain_text("1 of 3 engines does not serve v4 yet", timeout=WAIT_MS)
    expect(page.locator(".ss-card")).to_have_count(6)
    expect(page.locator('[data-testid="stVegaLiteChart"] svg, [data-testid="stVegaLiteChart"] canvas')).to_have_count(
        2, timeout=WAIT_MS
    )
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


def choose(page: Page, choice: Locator, address: re.Pattern[str]) -> None:
    """Click until the address says so: a click into a page that is still being drawn is lost."""
    for _ in range(5):
        choice.click()
        try:
            page.wait_for_url(address, timeout=WAIT_MS / 5)
        except TimeoutError:
            continue
        return
    page.wait_for_url(address, timeout=1)


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
    expect(generated(page)).to_have_count(len(demo_sqlite.responses[names[0]]), timeout=WAIT_MS)
    choose(page, page.get_by_text("log-prob", exact=True), re.compile(r"colour=log-prob"))
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


def test_nothing_jumps_when_charts_come(browser: Browser, address: str) -> None:
    watched = watch(browser)
    page, held = watched.page, list[Route]()
    # The charts' code, which a browser asks for when the page is there.
    page.route("**/*VegaLite*.js", lambda route: held.append(route))
    page.goto(f"{address}/?refresh=Paused")
    below = page.locator(".ss-title", has_text="Latest trajectories")
    expect(below).to_be_visible(timeout=WAIT_MS)
    before = below.bounding_box()
    assert held and page.locator("canvas, svg.marks").count() == 0
    for route in held:
        route.continue_()
    expect(page.locator('[data-testid="stVegaLiteChart"] svg, [data-testid="stVegaLiteChart"] canvas')).to_have_count(
        2, timeout=WAIT_MS
    )
    after = below.bounding_box()
    assert before is not None and after is not None and abs(after["y"] - before["y"]) <= 2
    watched.check(address)


@pytest.mark.parametrize("width", [1000, 1280])
def test_no_choice_is_cut_in_a_narrow_window(browser: Browser, address: str, width: int) -> None:
    watched = watch(browser, width=width)
    page = watched.page
    for name, choice in (("", "Paused"), ("aborts", "Paused"), ("fleet", "Paused"), ("groups", "differ")):
        page.goto(f"{address}/{name}")
        last = page.get_by_role("radio", name=choice)
        expect(last).to_be_visible(timeout=WAIT_MS)
        box = last.bounding_box()
        assert box is not None
        there = [box["x"] + box["width"] - 3, box["y"] + box["height"] / 2]
        seen = "([x, y]) => document.elementFromPoint(x, y)?.closest('[role=radio]')?.innerText"
        assert page.evaluate(seen, there) == choice, name
    page.goto(address)
    asked = page.get_by_text("What is staleness?")
    expect(asked).to_be_visible(timeout=WAIT_MS)
    asked.click()
    expect(page.get_by_text("the current weight version minus", exact=False)).to_be_visible(timeout=WAIT_MS)
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
