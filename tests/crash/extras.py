"""Jobs that are killed beside a running world: a migration of an old database, and a prune of the living one."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command

import samplestore
from samplestore import migrations
from samplestore.engine import Database
from tests.crash import children
from tests.crash.proof import require
from tests.crash.world import POLL_S, World
from tests.support import factory
from tests.support.postgres import PostgresServer

FIRST = "0001"
KEEP_STEPS = 4  # the trainer goes back by 3 at most
TIMEOUT_S = 60.0


def _run(world: World, what: str, name: str, faults: str, **values: Any) -> int:
    """Run a job to its end. Its exit code."""
    job = children.Job(what, values, world.folder / "logs" / f"{name}.log", faults)
    process = world.context.Process(target=children.main, args=(job,), daemon=True)
    process.start()
    end = time.monotonic() + TIMEOUT_S
    while process.is_alive():
        world.look()  # one of them may have stopped with the writer gate in its hand
        process.join(POLL_S)
        if time.monotonic() > end:
            process.kill()
            require(False, f"{name} hangs\n{world.tail(name)}")
    return int(process.exitcode)


class OldDatabases:
    """Copies of one populated database of the first revision."""

    def __init__(self, folder: Path, server: PostgresServer | None) -> None:
        self.server, self.file = server, folder / "old.db"
        self.template = server.create(prefix="old") if server else ""
        url = self._url(self.template)
        migrations.upgrade(url)
        with samplestore.open(url) as store:
            run = factory.make_run(store, prompts=6, stages=["reward"], max_staleness=2)
            worker, trainer = factory.register(run), factory.register(run, "trainer")
            factory.finish_all(run, worker)
            batch = factory.lease(run, trainer, 1)
            assert batch is not None
            factory.commit(run, batch, trainer)
            run.goodbye(worker)
            run.goodbye(trainer)
        self.after = picture(url)
        database = Database(url)
        with database.writing() as connection:
            command.downgrade(migrations.alembic_config(connection), FIRST)
        database.close()
        self.before = picture(url)
        self.copies = 0

    def _url(self, name: str) -> str:
        return self.server.url(name) if self.server else f"sqlite:///{self.file}"

    def copy(self) -> str:
        self.copies += 1
        if self.server:
            return self.server.url(self.server.create(template=self.template, prefix="old"))
        path = self.file.with_name(f"old-{self.copies}.db")
        shutil.copyfile(self.file, path)
        return f"sqlite:///{path}"

    def drop(self, url: str) -> None:
        if self.server:
            self.server.drop(sa.make_url(url).database or "")
        else:
            for path in self.file.parent.glob(Path(url).name + "*"):
                path.unlink()


def picture(url: str) -> tuple[str | None, dict[str, int]]:
    """Revision, and rows of every table."""
    database = Database(url)
    try:
        with database.reading() as connection:
            names = [n for n in sa.inspect(connection).get_table_names() if n != "alembic_version"]
            counts = {n: connection.execute(sa.text(f"SELECT count(*) FROM {n}")).scalar_one() for n in sorted(names)}
            return migrations.revision_of(connection), counts
    finally:
        database.close()


def kill_migration(world: World, old: OldDatabases) -> None:
    """An upgrade that is killed leaves the old state, and the next one does it all."""
    rng = random.Random(f"{world.seed}/migration/{old.copies}")
    url = old.copy()
    at = rng.randint(1, int(migrations.REVISION) - int(FIRST))
    code = _run(world, "upgrade", "migration", f"migrating=kill@{at}", url=url)
    require(code == -signal.SIGKILL, f"the migration ended with {code}\n{world.tail('migration')}")
    world.count("migration migrating")
    require(picture(url) == old.before, f"a killed migration left {picture(url)} of {old.before}")
    require(_run(world, "upgrade", "migration", "", url=url) == 0, world.tail("migration"))
    require(picture(url) == old.after, f"the second upgrade left {picture(url)}, not {old.after}")
    with samplestore.open(url, create=False) as store:
        findings = store.existing_run("r").check()
        require(not findings, f"check after a migration: {findings}")
    old.drop(url)


def kill_prune(world: World, number: int) -> None:
    """A prune that is killed between two slices, while everybody works."""
    rng = random.Random(f"{world.seed}/prune/{number}")
    args = ["prune", "--db", world.url, "--run", "r", "--keep-steps", str(KEEP_STEPS)]
    code = _run(world, "command", "prune", f"pruning=kill@{rng.choice([1, 1, 1, 2, 3])}", args=args)
    require(code in (0, -signal.SIGKILL), f"prune ended with {code}\n{world.tail('prune')}")
    if code:  # else there was too little to prune
        world.count("prune pruning")
    world.proof.after_a_death()
