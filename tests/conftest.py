"""Fixtures for every test: fresh migrated databases of both kinds, stores on them, and processes that always end.

This file, contract/ and support/ are installed as samplestore.testing: hence the relative imports in them, and none of
the rest of the tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .support import everyday
from .support.postgres import Databases, PostgresServer, shared_databases
from .support.processes import Processes
from .support.router import Router

if TYPE_CHECKING:
    from samplestore import Store

BACKENDS = ("sqlite", "postgres")
OPTION = "--samplestore-url"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        help="test on this server only: postgresql://USER@HOST/DATABASE, where USER may create databases (each test "
        "gets one of its own), or sqlite: for files in a temporary folder",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out. With a URL, leave out what is about the other kind of database."""
    everyday.mark(items)
    if url := config.getoption(OPTION, default=None):
        other = "sqlite" if str(url).startswith("postgres") else "postgres"
        kept = [item for item in items if not _needs(item, other)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _needs(item: pytest.Item, backend: str) -> bool:
    chosen = getattr(getattr(item, "callspec", None), "params", {}).get("db_url")
    return chosen == backend or (
        chosen is None and any(n.startswith(backend) for n in getattr(item, "fixturenames", ()))
    )


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes; all of them, and their children, are killed at the end of the test. Logs lie in tmp_path."""
    folder = tmp_path / "logs"
    folder.mkdir()
    running = Processes(folder)
    yield running
    running.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file, only ever copied."""
    from samplestore import migrations

    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    assert migrations.upgrade(f"sqlite:///{path}") == migrations.REVISION
    # Rows still in the WAL would be missing from the copies.
    wal = path.with_name(path.name + "-wal")
    assert not wal.exists() or wal.stat().st_size == 0, "closing the migrated database left a WAL behind"
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """The URL of a fresh migrated SQLite file, tmp_path/rollouts.db."""
    path = tmp_path / "rollouts.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """The PostgreSQL server that tests share: never kill it, a test that does asks for postgres_crash_server."""
    databases = shared_databases(request.config.getoption(OPTION, default=None))
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Databases) -> Iterator[str]:
    """The name of a migrated database, only ever used as a template."""
    from samplestore import migrations

    name = postgres_server.create(prefix="template")
    assert migrations.upgrade(postgres_server.url(name)) == migrations.REVISION
    yield name
    postgres_server.drop(name)


@pytest.fixture
def postgres_url(postgres_server: Databases, postgres_template: str) -> Iterator[str]:
    """The URL of a fresh migrated PostgreSQL database, dropped after the test."""
    name = postgres_server.create(template=postgres_template)
    yield postgres_server.url(name)
    postgres_server.drop(name)


@pytest.fixture
def postgres_empty_url(postgres_server: Databases) -> Iterator[str]:
    """The URL of a PostgreSQL database without any schema."""
    name = postgres_server.create(prefix="empty")
    yield postgres_server.url(name)
    postgres_server.drop(name)


@pytest.fixture
def postgres_crash_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of its own, with fsync on, that the test may kill and start again."""
    server = PostgresServer.launch(fsync=True)
    yield server
    server.close()


@pytest.fixture(params=BACKENDS)
def db_url(request: pytest.FixtureRequest) -> str:
    """A fresh migrated database: the test runs once on SQLite and once on PostgreSQL."""
    # Asked for by name so that the SQLite half runs where there is no PostgreSQL.
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def store(db_url: str) -> Iterator[Store]:
    """An open store on db_url."""
    import samplestore

    opened = samplestore.open(db_url)
    yield opened
    opened.close()


@pytest.fixture
def router(processes: Processes) -> Router:
    """A real sglang-router without engines; add them with router.add_worker(url)."""
    return Router.start(processes)
