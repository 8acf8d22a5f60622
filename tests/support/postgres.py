"""A real PostgreSQL server for the tests, without network and without a package of its own.

SAMPLESTORE_TEST_POSTGRES_URL names a server to use; otherwise the machine's own binaries start one in a temporary
folder, reachable through a socket in it. Where neither exists the tests are skipped, but fail with CI=true.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL, make_url

from .processes import Process, Processes, in_ci, pids, wait_until

ENV_URL = "SAMPLESTORE_TEST_POSTGRES_URL"
FILE_COPY_SINCE = 150_000  # server_version_num of the first release with STRATEGY
HOW_TO_GET_ONE = f"install one (Debian: apt-get install postgresql) or set {ENV_URL}=postgresql://USER@HOST/DATABASE"


def unavailable(reason: str) -> NoReturn:
    """Skip, but fail in CI: a green run there must mean that PostgreSQL was tested."""
    if in_ci():
        pytest.fail(f"{reason}; {HOW_TO_GET_ONE}", pytrace=False)
    pytest.skip(f"{reason}; {HOW_TO_GET_ONE}")


def binaries() -> Path | None:
    """The folder of initdb and postgres: on PATH, else the newest of /usr/lib/postgresql."""
    if found := shutil.which("initdb"):
        folder = Path(found).resolve().parent
        if (folder / "postgres").exists():
            return folder
    installed = [path for path in Path("/usr/lib/postgresql").glob("[0-9]*/bin") if (path / "initdb").exists()]
    return max(installed, key=lambda path: float(path.parent.name), default=None)


class Databases:
    """Makes and drops databases on one server.

    url   of a database on it that exists, for administration; its user may create databases
    """

    def __init__(self, url: URL) -> None:
        self._admin = url.set(drivername="postgresql+psycopg")

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of `database`."""
        return self._admin.set(database=database).render_as_string(hide_password=False)

    def connect(self, database: str | None = None) -> psycopg.Connection:
        """A plain autocommit psycopg connection."""
        url = self._admin.set(drivername="postgresql", database=database or self._admin.database)
        return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True, connect_timeout=10)

    def create(self, template: str | None = None, prefix: str = "test") -> str:
        """The name of a new database, empty or a copy of `template` (which nobody may be connected to)."""
        name = f"samplestore_{prefix}_{uuid.uuid4().hex[:12]}"
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        with self.connect() as connection:
            if template:
                statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
                if connection.info.server_version >= FILE_COPY_SINCE:
                    statement += sql.SQL(" STRATEGY file_copy")
            connection.execute(statement)
        return name

    def drop(self, name: str) -> None:
        """Drop a database, ending sessions that a failed test left open."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def close(self) -> None:
        """Nothing to stop: the server belongs to someone else."""


class PostgresServer(Databases):
    """A server of our own, made with initdb. Can be killed and started again on the same data.

    fsync      off (faster) unless a test is about what survives
    settings   further postgresql.conf settings, e.g. {"max_connections": "20"}
    """

    def __init__(self, folder: Path, *, fsync: bool = False, settings: Mapping[str, str] | None = None) -> None:
        """Use PostgresServer.launch(): `folder` is removed by close()."""
        bin_dir = binaries()
        if bin_dir is None:
            unavailable("no PostgreSQL binaries on this machine")
        self._bin = bin_dir
        self._user = _unprivileged_user()
        self.folder, self.data = folder, folder / "data"
        switch = "on" if fsync else "off"
        self._settings = {"fsync": switch, "full_page_writes": switch, **(settings or {})}
        self._processes = Processes(folder)
        self._process: Process | None = None
        super().__init__(
            URL.create("postgresql", username="postgres", database="postgres", query={"host": str(folder)})
        )

    @classmethod
    def launch(cls, *, fsync: bool = False, settings: Mapping[str, str] | None = None) -> PostgresServer:
        """A running server. Skips the test (fails in CI) where there are no binaries."""
        # Not pytest's tmp_path: its parents are closed to other users, and a socket's path may have 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="samplestore-pg-", dir="/tmp" if os.path.isdir("/tmp") else None))
        server = None
        try:
            server = cls(folder, fsync=fsync, settings=settings)
            server._initdb()
            server.start()
        except BaseException:
            if server:
                server.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _servers.add(server)
        return server

    def _initdb(self) -> None:
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        process = self._processes.start(
            [self._bin / "initdb", "-D", self.data, *options], name="initdb", user=self._user, cwd=self.folder
        )
        if process.wait(120) != 0:
            raise AssertionError(f"initdb failed\n{process.log()}")

    def start(self) -> None:
        """Start on the existing data and wait until it answers; does recovery after a kill."""
        if self._process and self._process.alive():
            raise AssertionError("this server runs already")
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder), **self._settings}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        self._process = self._processes.start(
            [self._bin / "postgres", "-D", self.data, *options], name="postgres", user=self._user, cwd=self.folder
        )
        self._process.wait_for(self._answers, what="it takes connections", timeout=60)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """What the server has written since it was last started."""
        assert self._process is not None
        return self._process.log()

    def kill(self) -> None:
        """kill -9 the postmaster and wait until its backends are gone too (they refuse a new start while they live)."""
        assert self._process is not None
        self._process.kill()
        for pid in self._backends():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it had noticed by itself
        wait_until(lambda: not self._backends(), what="PostgreSQL backends gone", timeout=10)

    def kill_and_restart(self) -> None:
        """The crash of a database server: kill -9, then recovery on the same data."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """An orderly end that does not wait for sessions (a fast shutdown)."""
        assert self._process is not None
        self._process.signal(signal.SIGINT)
        self._process.wait(60)

    def _backends(self) -> list[int]:
        """Processes that work in the data folder. Their environment is no help: they write their titles over it."""
        return [pid for pid in pids() if _cwd(pid) == str(self.data)]

    def close(self) -> None:
        """Stop the server and remove its data."""
        if self._process and self._process.alive():
            self._process.signal(signal.SIGQUIT)  # an immediate shutdown: the data is thrown away
            try:
                self._process.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._processes.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        _servers.discard(self)


_servers: weakref.WeakSet[PostgresServer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root: the account to run it as, or None where we are not root."""
    if os.geteuid() != 0:
        return None
    names = {account.pw_name for account in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in names:
            return name
    unavailable("root may not run PostgreSQL and this machine has neither a user postgres nor nobody")


def _cwd(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it ended, or belongs to another user
        return None


def shared_databases(url: str | None = None) -> Databases:
    """The server that most tests share: that of `url`, else the one that the environment names, else one of our own."""
    if not (given := url or os.environ.get(ENV_URL)):
        return PostgresServer.launch()
    databases = Databases(make_url(given))
    try:
        databases.connect().close()
    except psycopg.OperationalError as error:
        pytest.fail(f"the PostgreSQL server that was named does not answer: {error}", pytrace=False)
    return databases
