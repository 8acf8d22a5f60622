"""Two kinds of world: scripted engines, and whole stacks with embedded engines behind a real router."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from samplestore import migrations
from tests.crash import extras
from tests.crash.world import Tally, World
from tests.support.models import build_model, build_tokenizer
from tests.support.postgres import PostgresServer


def _say(text: str) -> None:
    print(text, flush=True)


class Level:
    """Makes worlds of one kind, one after the other, in a folder."""

    def __init__(self, populate: Callable[[Level, World], None], folder: Path) -> None:
        self.populate, self.folder, self.say, self.full = populate, folder, _say, populate is full_level
        self.tokenizer = folder / "tokenizer"
        self.tokenizer.mkdir()
        build_tokenizer(self.tokenizer)
        self._server: PostgresServer | None = None
        self._old: dict[bool, extras.OldDatabases] = {}

    def old_databases(self, server: PostgresServer | None) -> extras.OldDatabases:
        key = server is not None
        if key not in self._old:
            self._old[key] = extras.OldDatabases(self.folder, server)
        return self._old[key]

    @classmethod
    @contextmanager
    def open(cls, populate: Callable[[Level, World], None], folder: Path) -> Iterator[Level]:
        level = cls(populate, folder)
        try:
            yield level
        finally:
            if level._server is not None:
                level._server.close()

    @property
    def server(self) -> PostgresServer:
        if self._server is None:
            self._server = PostgresServer.launch(fsync=True)
        return self._server

    def survive(self, backend: str, seed: int, limit: int, tally: Tally, prompts: int = 120) -> None:
        """One world. Raises Broken; then its files stay."""
        place = self.folder / f"{backend}-{seed}"
        place.mkdir()
        server = self.server if backend == "postgres" else None
        name = None if server is None else server.create(prefix="crash")
        url = f"sqlite:///{place / 'rollouts.db'}" if server is None or name is None else server.url(name)
        migrations.upgrade(url)
        world = World(
            url, place, seed, limit, tally, self.tokenizer, prompts=prompts, server=server, full=self.full, say=self.say
        )
        self.populate(self, world)
        world.go()
        if server is not None and name is not None:
            server.drop(name)
        shutil.rmtree(place)


def store_level(level: Level, world: World) -> None:
    """Two scripted engines, three workers of which one scores, a trainer."""
    engines = [world.add_scripted_engine(f"engine-{i}", pace_s=0.04) for i in range(2)]
    targets = [part for url in engines for part in ("--engine", url)]
    world.add_worker("worker-0", targets, scores=False)
    world.add_worker("worker-1", targets, scores=False)
    world.add_worker("scorer-0", targets, scores=True)
    world.add_trainer("scripted", exact=True)
    _extras(level, world)


def _extras(level: Level, world: World) -> None:
    old = level.old_databases(world.server)
    world.extras.append(lambda _: extras.kill_migration(world, old))
    world.extras.append(lambda number: extras.kill_prune(world, number))
    if world.server is not None:
        world.extras.append(world.kill_server)


def full_level(level: Level, world: World) -> None:
    """Two embedded engines behind a real router, two workers of which one scores, a trainer."""
    model = level.folder / "model"
    if not model.exists():
        build_model(model, seed=1)
    engines = [world.add_embedded_engine(f"engine-{i}", model) for i in range(2)]
    targets = ["--router", world.add_router(engines)]
    world.add_worker("worker-0", targets, scores=False)
    world.add_worker("scorer-0", targets, scores=True)
    world.add_trainer(str(model), exact=False)
    _extras(level, world)


LEVELS: dict[str, Callable[[Level, World], None]] = {"store": store_level, "full": full_level}
