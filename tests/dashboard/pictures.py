"""Makes the pictures of docs/images anew: .venv/bin/python -m tests.dashboard.pictures [CHROMIUM]. It takes a minute,
since the demo's tokens per second are those of one."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.dashboard.browsing import FLAGS, WAIT_MS, serving, watch

FOLDER = Path(__file__).parents[2] / "docs" / "images"
CHARTS = '[data-testid="stVegaLiteChart"] svg, [data-testid="stVegaLiteChart"] canvas'


def overview(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator(".ss-verdict")).to_contain_text("Healthy", timeout=2 * WAIT_MS)
    expect(page.locator(CHARTS)).to_have_count(2, timeout=WAIT_MS)
    expect(page.locator(".ss-card", has_text="Tokens per second")).to_contain_text("last 6", timeout=2 * WAIT_MS)


# A sample of the list of interruptions that is complete now, and whose weights change where the picture shows it.
SHORT = """() => {
  for (const row of document.querySelectorAll(".ss-table tr")) {
    const cells = [...row.querySelectorAll("td")].map(cell => cell.innerText);
    if (cells.length === 7 && cells[6].includes("completed") && +cells[4] > 20 && +cells[4] < 90)
      return row.querySelector("a").getAttribute("href");
  }
}"""


def trajectory(page: Page, address: str) -> None:
    page.goto(f"{address}/aborts")
    expect(page.locator(".ss-table a").first).to_be_visible(timeout=WAIT_MS)
    page.goto(f"{address}/{page.evaluate(SHORT)}")
    expect(page.locator(".ss-tokens .ss-badge").nth(2)).to_be_visible(timeout=WAIT_MS)


def main() -> None:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "/usr/bin/chromium"
    with (
        tempfile.TemporaryDirectory() as logs,
        serving(Path(logs), "--demo") as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, go in (("overview", overview), ("trajectory", trajectory)):
            for theme in ("light", "dark"):
                watched = watch(browser, theme, height=890, width=1360)
                go(watched.page, address)
                watched.page.mouse.move(0, 0)
                watched.page.screenshot(path=FOLDER / f"dashboard-{name}-{theme}.png")
                watched.check(address)
                watched.page.close()
        browser.close()


if __name__ == "__main__":
    main()
