"""A response of 32,000 tokens in a real browser: it is read, walked through and searched as a short one is.

Each step has a bound that a busy machine keeps; how long it took is printed (pytest -s), and told in
docs/howto/dashboard.md.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

import samplestore
from samplestore.dashboard import demo_text
from samplestore.tokenizers import load_tokenizer
from tests.dashboard.browsing import serving, watch
from tests.support import factory as f

pytestmark = pytest.mark.browser

TOKENS, FLUSH, WINDOW = 32_000, 32, 2000
LOWEST = 29_122  # of the response
WITHIN_S = 20.0
NEEDLE = "pineapple"


@pytest.fixture(scope="module")
def long(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Arguments of a dashboard whose only sample has TOKENS tokens. A word stands near its end, and nowhere else."""
    folder = tmp_path_factory.mktemp("long")
    shutil.copyfile(sqlite_template, folder / "long.db")
    tokenizer = load_tokenizer(demo_text.build_tokenizer(folder / "tokenizer") / "tokenizer.json")
    rng = random.Random(1)
    ids = np.empty(0, np.int32)
    while ids.size < TOKENS:
        text = demo_text.long_answer(rng, "Émile", rng.randint(3, 19), rng.randint(2, 9), 2)
        ids = np.concatenate([ids, tokenizer.encode(text)])
    ids = ids[:TOKENS]
    needle = tokenizer.encode(f" {NEEDLE} ")
    ids[TOKENS - 500 : TOKENS - 500 + needle.size] = needle
    logprobs = -np.random.default_rng(0).uniform(0.0, 2.0, TOKENS).astype(np.float32)
    logprobs[LOWEST] = -9.0
    with samplestore.open(f"sqlite:///{folder / 'long.db'}") as store:
        run = f.make_run(store, "long", prompts=1, samples_per_prompt=1, groups_per_step=1)
        (claim,) = run.claim(f.register(run), 1)
        for at in range(0, TOKENS, FLUSH):
            part = slice(at, at + FLUSH)
            run.append(claim, ids[part], logprobs[part], 0, "stop" if at + FLUSH >= TOKENS else None)
        run.finish(claim)
        n_prompt = int(claim.prompt_ids.size)
    yield f"sqlite:///{folder / 'long.db'}", str(folder / "tokenizer"), str(n_prompt)


def test_a_long_response_can_be_read(
    browser: Browser, long: tuple[str, ...], tmp_path: Path, artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, tokenizer, n_prompt = long
    took: dict[str, float] = {}
    watched = watch(browser)
    page = watched.page
    tokens, hits = page.locator(".ss-tokens .t"), page.locator(".ss-tokens .hit")
    shown = page.locator(".ss.dim", has_text="prompt included")

    def timed(name: str, step: Callable[[], Any]) -> None:
        began = time.monotonic()
        step()
        took[name] = time.monotonic() - began

    def opened() -> None:
        page.goto(f"{address}/trajectory?run=long&sample=0/0")
        expect(tokens).to_have_count(WINDOW)

    def later() -> None:
        page.get_by_role("button", name="later ▸", exact=True).click()
        expect(shown).to_contain_text("tokens 2,001 to 4,000 of")
        expect(tokens.first).to_have_attribute("title", re.compile(f"response token {WINDOW - int(n_prompt)} "))

    def last() -> None:
        page.get_by_role("button", name="last ▸▸").click()
        expect(shown).to_contain_text(f"to {TOKENS + int(n_prompt):,} of {TOKENS + int(n_prompt):,}")
        expect(tokens.last).to_have_attribute("title", re.compile(f"response token {TOKENS - 1} "))

    def first() -> None:
        page.get_by_role("button", name="◂◂ first").click()
        expect(shown).to_contain_text("tokens 1 to 2,000 of")

    def search() -> None:
        box = page.get_by_placeholder("Find text, or id:123")
        box.fill(NEEDLE)
        box.press("Enter")
        expect(page.get_by_text("Found 1 time; none in this window")).to_be_visible()

    def to_hit() -> None:
        page.get_by_role("button", name="found later ▸").click()
        expect(hits.first).to_have_attribute("id", "found")

    def lowest() -> None:
        page.get_by_role("button", name="Lowest log-prob").click()
        expect(hits).to_have_count(1)
        expect(hits).to_have_attribute("title", re.compile(f"response token {LOWEST} .*log-prob -9.000"))

    def jump() -> None:
        page.get_by_role("link", name="go there").click()
        expect(hits).to_be_in_viewport()

    def colour() -> None:
        page.get_by_role("radio", name="log-prob", exact=True).click()
        expect(hits).to_have_attribute("style", re.compile(r"rgba\(213"))

    with serving(tmp_path, "--db", url, "--tokenizer", tokenizer) as address:
        timed("opened", opened)
        assert len("".join(tokens.all_inner_texts())) > WINDOW
        for step in (later, last, first, search, to_hit, lowest, jump, colour):
            timed(step.__name__, step)
        page.screenshot(path=artifacts / "long.png")
        watched.check(address)
    with capsys.disabled():
        print("\n32,000 tokens: " + ", ".join(f"{name} {s:.1f} s" for name, s in took.items()))
    slow = {name: s for name, s in took.items() if s > WITHIN_S}
    assert not slow
