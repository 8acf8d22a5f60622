"""One schema: what Alembic makes, what the models say, and what is checked in are the same, on both databases.

Regenerate the snapshots after a migration with:  SAMPLESTORE_UPDATE_SNAPSHOTS=1 pytest tests/schema
and read the difference before you commit it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

import samplestore
from samplestore import migrations
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, SchemaMismatch
from samplestore.models import Base
from tests.support import factory as f
from tests.support.postgres import Databases
from tests.support.processes import Processes

HERE = Path(__file__).parent
UPDATE = os.environ.get("SAMPLESTORE_UPDATE_SNAPSHOTS") == "1"

POSTGRES_DDL = """
SELECT format('%s.%s %s%s%s%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
              CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END,
              CASE WHEN a.attidentity <> '' THEN ' identity' ELSE '' END,
              coalesce(' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), ''))
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
  LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (c.oid, a.attnum)
 WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT format('%s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid)) FROM pg_constraint
 WHERE connamespace = 'public'::regnamespace AND contype <> 'n'
UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT format('%s WITH %s', relname, reloptions) FROM pg_class
 WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL
"""


def ddl(database: Database) -> list[str]:
    """Every definition in the database, one a line, sorted; Alembic's own table left out."""
    with database.reading() as connection:
        if connection.dialect.name == "sqlite":
            found = connection.execute(sa.text("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")).scalars().all()
            lines = [line for statement in found for line in _sqlite_lines(statement)]
        else:
            lines = list(connection.execute(sa.text(POSTGRES_DDL)).scalars())
    return sorted(line for line in lines if "alembic_version" not in line and "sqlite_sequence" not in line)


def _sqlite_lines(statement: str) -> list[str]:
    """A CREATE TABLE as one line per column or constraint (their order may differ), anything else as it is."""
    flat = re.sub(r"\s+", " ", statement).replace('"', "").strip()
    made = re.match(r"CREATE TABLE (\w+) \( ?(.*?) ?\)$", flat)
    if made is None:
        return [flat]
    parts, depth, start = [], 0, 0
    body = made[2]
    for i, char in enumerate(body):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(body[start:i].strip())
            start = i + 1
    return [f"{made[1]}: {part}" for part in [*parts, body[start:].strip()]]


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Database]:
    """Makes empty databases of one kind."""
    made: list[Database] = []
    kind = str(request.param)

    def make(name: str) -> Database:
        if kind == "sqlite":
            made.append(Database(f"sqlite:///{tmp_path}/{name}.db"))
        else:
            server: Databases = request.getfixturevalue("postgres_server")
            created = server.create(prefix=name)
            request.addfinalizer(lambda: server.drop(created))
            made.append(Database(server.url(created)))
        return made[-1]

    request.addfinalizer(lambda: [d.close() for d in made])
    return make


def test_the_code_needs_the_one_head() -> None:
    scripts = ScriptDirectory.from_config(migrations.alembic_config())
    assert scripts.get_heads() == [migrations.REVISION]
    assert not (migrations.script_folder() / "__init__.py").exists(), "it would shadow the library"


def test_migrations_models_and_snapshot_agree(fresh: Callable[[str], Database]) -> None:
    migrated, created = fresh("migrated"), fresh("created")
    assert migrations.upgrade(migrated) == migrations.REVISION
    assert migrations.differences(migrated) == []
    with created.writing() as connection:
        Base.metadata.create_all(connection)
    told = ddl(migrated)
    assert told == ddl(created)
    assert sum("CHECK" in line for line in told) >= 10 and sum(" WHERE " in line for line in told) >= 8, (
        "both are looked at"
    )
    snapshot = HERE / ("sqlite.sql" if migrated.is_sqlite else "postgres.sql")
    if UPDATE:
        snapshot.write_text("\n".join(told) + "\n")
    assert told == snapshot.read_text().splitlines(), "run: SAMPLESTORE_UPDATE_SNAPSHOTS=1 pytest tests/schema"


def test_the_comparison_sees_checks_and_partial_indexes(fresh: Callable[[str], Database]) -> None:
    """What Alembic's own comparison is blind to."""
    database = fresh("changed")
    migrations.upgrade(database)
    before = ddl(database)
    with database.writing() as connection:
        connection.execute(sa.text("DROP INDEX ix_worker_live"))
        connection.execute(sa.text("CREATE INDEX ix_worker_live ON worker (id) WHERE state = 'dead'"))
    assert ddl(database) != before


def test_upgrading_again_changes_nothing(store: samplestore.Store) -> None:
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    before = f.snapshot(run, leave_out=())
    assert migrations.upgrade(store.database) == migrations.REVISION
    assert f.snapshot(run, leave_out=()) == before
    with store.database.writing() as connection:
        if connection.dialect.name == "sqlite":
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1, "they are on again"


@pytest.mark.parametrize(
    ("found", "cure"), [("0000", "samplestore db upgrade"), ("9999", "pip install -U samplestore")]
)
def test_another_revision_is_refused_with_the_cure(db_url: str, found: str, cure: str) -> None:
    with samplestore.open(db_url) as store:
        f.execute(store, "UPDATE alembic_version SET version_num = :v", v=found)
    with pytest.raises(SchemaMismatch, match=cure) as caught:
        samplestore.open(db_url)
    assert found in str(caught.value) and migrations.REVISION in str(caught.value)


def test_a_database_without_schema_is_refused(postgres_empty_url: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match="samplestore db upgrade"):
        samplestore.open(postgres_empty_url)
    foreign = Database(f"sqlite:///{tmp_path}/foreign.db")
    with foreign.writing() as connection:
        connection.execute(sa.text("CREATE TABLE notes (id INTEGER)"))
    foreign.close()
    with pytest.raises(SchemaMismatch, match="samplestore db upgrade"):
        samplestore.open(str(tmp_path / "foreign.db"))


def test_reading_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(DatabaseMissing, match="samplestore db upgrade"):
        samplestore.open(str(tmp_path / "x.db"), create=False)
    assert [p.name for p in tmp_path.iterdir()] == []


CREATOR = """
import sys, samplestore
print("ready", flush=True)
with open(sys.argv[2]) as go: go.read()  # a pipe: opens when the test opens its other end
with samplestore.open(sys.argv[1]) as store:
    print("created", store.run("same").uuid, flush=True)
"""


def test_two_processes_create_the_same_file(tmp_path: Path, processes: Processes) -> None:
    pipes = [tmp_path / f"go{i}" for i in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    started = [
        processes.start([sys.executable, "-c", CREATOR, str(tmp_path / "new.db"), str(p)], name="creator")
        for p in pipes
    ]
    for process in started:
        process.wait_for_log("ready")
    for pipe in pipes:
        with pipe.open("w"):
            pass
    for process in started:
        assert process.wait(60) == 0, process.log()
    assert len({process.log().split("created ")[1].strip() for process in started}) == 1


def test_a_file_that_is_being_created_is_waited_for(tmp_path: Path) -> None:
    """The file is there and in WAL mode, its tables are not yet committed: what a second process sees."""
    database = Database(f"sqlite:///{tmp_path}/new.db")
    with database.writing():
        pass
    database.close()
    assert (tmp_path / "new.db").stat().st_size > 0
    with samplestore.open(str(tmp_path / "new.db")) as store:
        assert store.run_names() == []
