"""The demo run on both databases, built once: the dashboard only reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import demo_data
from tests.support.demo_data import Demo
from tests.support.postgres import Databases
from tests.support.processes import in_ci

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = os.environ.get("SAMPLESTORE_TEST_CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="session")
def demo_sqlite(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    shutil.copyfile(sqlite_template, folder / "demo.db")
    return demo_data.build(f"sqlite:///{folder / 'demo.db'}", folder / "tokenizer", heartbeat_ttl_s=3600.0)


@pytest.fixture(scope="session")
def demo_postgres(
    postgres_server: Databases, postgres_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Demo]:
    name = postgres_server.create(template=postgres_template, prefix="demo")
    folder = tmp_path_factory.mktemp("demo_postgres")
    yield demo_data.build(postgres_server.url(name), folder / "tokenizer", heartbeat_ttl_s=3600.0)
    postgres_server.drop(name)


@pytest.fixture(params=["sqlite", "postgres"])
def demo(request: pytest.FixtureRequest) -> Demo:
    found = request.getfixturevalue(f"demo_{request.param}")
    assert isinstance(found, Demo)
    return found


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path. Skips without one, but fails in CI: a green run there must mean that a browser was used."""
    if not Path(CHROMIUM).exists():
        reason = f"no {CHROMIUM}; install one (Debian: apt-get install chromium) or set SAMPLESTORE_TEST_CHROMIUM"
        if in_ci():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return CHROMIUM


@pytest.fixture
def browser(chromium: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    from tests.dashboard.browsing import FLAGS

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots lie."""
    folder = Path(os.environ.get("SAMPLESTORE_TEST_ARTIFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
