"""One schema: what Alembic makes, what the models say, and what is checked in are the same, on both databases.

Regenerate the snapshots after a migration with:  SAMPLESTORE_UPDATE_SNAPSHOTS=1 pytest tests/schema
and read the difference before you commit it."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

import samplestore
from samplestore import codec, migrations, views
from samplestore.engine import Database
from samplestore.errors import DowngradeRefused, RunSettingsConflict, SampleStoreError, SchemaMismatch
from samplestore.models import Base
from samplestore.runsettings import RunSettings
from samplestore.store import Store
from samplestore.types import EngineFacts
from samplestore.verbs import weights
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
UNION ALL SELECT format('VIEW %s: %s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod))
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relkind = 'v' AND c.relnamespace = 'public'::regnamespace
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


def view_texts(database: Database) -> dict[str, str | None]:
    """The definitions of views, as the database shows them. Not in a snapshot: releases of PostgreSQL differ there."""
    with database.reading() as connection:
        found = sa.inspect(connection)
        texts = {name: found.get_view_definition(name) for name in found.get_view_names()}
    assert set(texts) == set(views.BY_NAME)
    return texts


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
        for statement in views.create(connection.dialect.name):
            connection.exec_driver_sql(statement)
    told = ddl(migrated)
    assert told == ddl(created)
    assert sum("CHECK" in line for line in told) >= 10 and sum(" WHERE " in line for line in told) >= 8, (
        "both are looked at"
    )
    assert view_texts(migrated) == view_texts(created), "write a migration that makes the changed views anew"
    snapshot = HERE / ("sqlite.sql" if migrated.is_sqlite else "postgres.sql")
    if UPDATE:
        snapshot.write_text("\n".join(told) + "\n")
    assert told == snapshot.read_text().splitlines(), "run: SAMPLESTORE_UPDATE_SNAPSHOTS=1 pytest tests/schema"


OLD = [s.revision for s in ScriptDirectory.from_config(migrations.alembic_config()).walk_revisions()][1:]


def fill(database: Database, revision: str) -> None:
    """The rows that samplestore of that revision wrote: two runs in which everything happened once."""
    with database.writing() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        for name, told in json.loads((HERE / f"rows_{revision}.json").read_text()).items():
            rows = [dict(zip(told["columns"], map(_value, row), strict=True)) for row in told["rows"]]
            if rows:
                connection.execute(sa.insert(tables.tables[name]), rows)
            if rows and "id" in told["columns"] and connection.dialect.name == "postgresql":
                connection.execute(
                    sa.text(f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), (SELECT max(id) FROM {name}))")
                )


def _value(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) and set(value) == {"base64"} else value


def everything(database: Database) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, by the columns that the database has."""
    with database.reading() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        return {
            table.name: [dict(r) for r in connection.execute(sa.select(table).order_by(*table.primary_key)).mappings()]
            for table in tables.sorted_tables
            if table.name not in ("alembic_version", "sqlite_sequence")
        }


@pytest.mark.parametrize("revision", OLD)
def test_a_database_of_every_revision_comes_up_with_all_it_holds(
    fresh: Callable[[str], Database], revision: str
) -> None:
    database = fresh("old")
    migrations.upgrade(database, revision)
    fill(database, revision)
    before = everything(database)
    assert min(len(before[name]) for name in ("run", "sample", "segment", "engine", "request", "batch")) >= 2
    assert migrations.upgrade(database) == migrations.REVISION
    for name, rows in everything(database).items():
        if name not in before:
            continue  # a table that a later revision made
        kept = [{column: row[column] for column in old} for row, old in zip(rows, before[name], strict=True)]
        assert kept == before[name], name
    assert ddl(database) == (HERE / ("sqlite.sql" if database.is_sqlite else "postgres.sql")).read_text().splitlines()
    _goes_on(Store(database))


def _goes_on(store: Store) -> None:
    """Old runs are sound, and work on them goes on."""
    for name in store.run_names():
        f.sound(store.existing_run(name))
    with store.database.reading() as connection:
        assert all(connection.execute(sa.select(view.table)).all() for view in views.VIEWS), "each shows rows"
    run = store.existing_run("old")
    (engine,) = f.rows(run, "SELECT * FROM engine WHERE state = 'live' AND run_id = :r", r=run.id)
    told = run.transact(
        lambda tx: weights.see_engine(
            tx, engine["url"], "default", facts=EngineFacts(counter=5), counter_seen_at=engine["counter_at"]
        )
    )
    seen = 0 if engine["counter"] is None else 5  # the first reading is the base; a lower one is a new process's
    assert (told["counter"], told["generated_tokens"]) == (5, engine["generated_tokens"] + seen)
    assert f.finish_all(run, f.register(run))
    f.sound(run)


@pytest.mark.parametrize("revision", OLD)
def test_a_downgrade_takes_back_what_an_upgrade_did(fresh: Callable[[str], Database], revision: str) -> None:
    database = fresh("down")
    migrations.upgrade(database, revision)
    fill(database, revision)
    if revision >= "0006":  # what somebody made on top stays
        f.execute(Store(database), "CREATE VIEW mine AS SELECT version, reward_mean FROM version_rewards")
    schema, rows = ddl(database), everything(database)
    migrations.upgrade(database)
    assert ddl(database) != schema
    if loses_telemetry(database, revision):
        f.execute(Store(database), "UPDATE engine SET counter = NULL, context_length = NULL, release = NULL")
    assert migrations.downgrade(database, revision) == revision == migrations.current(database)
    assert ddl(database) == schema and everything(database) == rows
    assert migrations.upgrade(database) == migrations.REVISION, "and up again"
    _goes_on(Store(database))


def loses_telemetry(database: Database, revision: str) -> bool:
    return revision < "0002" and bool(f.value(Store(database), "SELECT count(*) FROM engine WHERE counter > 0"))


def test_a_downgrade_that_would_lose_something_is_refused(fresh: Callable[[str], Database]) -> None:
    database = fresh("kept")
    migrations.upgrade(database, "0002")
    fill(database, "0002")
    before, schema = everything(database), ddl(database)
    with pytest.raises(DowngradeRefused, match=r"what \d+ engines told .* samplestore restore"):
        migrations.downgrade(database, "0001")
    assert migrations.current(database) == "0002" and ddl(database) == schema and everything(database) == before
    migrations.upgrade(database)
    f.execute(Store(database), "UPDATE segment SET payload = :p WHERE seq = 0", p=codec.PRUNED_PAYLOAD)
    with pytest.raises(DowngradeRefused, match="segments that were pruned"):
        migrations.downgrade(database, "0002")
    assert migrations.current(database) == migrations.REVISION


def test_a_downgrade_loses_no_evaluation_filter_or_order(fresh: Callable[[str], Database]) -> None:
    database = fresh("served")
    migrations.upgrade(database)
    store = Store(database)
    run = f.make_run(store, "mixed", prompts=0, admit=False, datasets={"a": {}})
    run.add_prompts([{"prompt_ids": [1]}], dataset="a")
    run.admit()
    with pytest.raises(DowngradeRefused, match=r"the setting datasets=\{'a': \{\}\} of run 'mixed'"):
        migrations.downgrade(database, "0003")
    _set(store, datasets={})
    for clear, said in (
        ("UPDATE dataset SET chunk_stop = 0", "1 data sets with an order of their own"),
        ("UPDATE sample SET removed = NULL", "2 samples that a filter took out of the loss"),
        ("UPDATE dataset SET purpose = 'train'", "1 data sets for evaluation"),
        ("DELETE FROM evaluation", "1 evaluations"),
    ):
        if "removed" in clear:
            f.execute(store, "UPDATE sample SET removed = 'truncated'")
        if "purpose" in clear:
            run.add_prompts([{"prompt_ids": [2]}], dataset="test", evaluation=True)
        if "DELETE" in clear:
            f.execute(store, "UPDATE dataset SET purpose = 'eval' WHERE name = 'test'")
            run.start_evaluation("test")
            f.execute(store, "UPDATE dataset SET purpose = 'train'")
        with pytest.raises(DowngradeRefused, match=said):
            migrations.downgrade(database, "0003")
        assert migrations.current(database) == migrations.REVISION
        f.execute(store, clear)
    assert migrations.downgrade(database, "0003") == "0003"


def _set(store: Store, **settings: Any) -> None:
    """Write over stored settings, which no verb does."""
    table = Base.metadata.tables["run"]
    with store.database.writing() as connection:
        stored = connection.execute(sa.select(table.c.settings)).scalar_one()
        connection.execute(sa.update(table).values(settings={**stored, **settings}))


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"reward_weights": {"a": 0.1}, "stages": ["a"]}, {"sample_deadline_s": 60.0}, {"sample_filters": ["truncated"]},
    {"curriculum": "SELECT id FROM prompt WHERE run_id = :run LIMIT :n"}, {"resume": False}, {"mask_offpolicy": True},
    {"order": "oldest"}, {"max_inflight_groups": 3}, {"group_stages": ["judge"]}, {"sampling_seed": 0},
    {"mode": "sync"},
]  # fmt: skip


def test_a_downgrade_loses_no_setting(fresh: Callable[[str], Database]) -> None:
    database = fresh("settings")
    migrations.upgrade(database)
    store = Store(database)
    f.make_run(store, "plain", prompts=0)
    plain = store.existing_run("plain").settings.as_json()
    for other in OTHER_SETTINGS:
        name = next(iter(other))
        RunSettings.parse(other)  # it is one that a run may have
        _set(store, **{**plain, **other})
        with pytest.raises(DowngradeRefused, match=f"the setting {name}=.* of run 'plain'.* samplestore restore"):
            migrations.downgrade(database, "0003")
        assert migrations.current(database) == migrations.REVISION
    _set(store, **plain)
    assert migrations.downgrade(database, "0003") == "0003"
    stored = f.value(store, "SELECT settings FROM run")
    assert set(stored if isinstance(stored, dict) else json.loads(stored)) <= _of_0004()["SETTINGS_0003"]
    migrations.upgrade(database)
    assert store.existing_run("plain").settings.as_json() == plain


def _of_0004() -> dict[str, Any]:
    script = ScriptDirectory.from_config(migrations.alembic_config()).get_revision("0004")
    return vars(script.module)


def test_a_downgrade_knows_every_setting_of_its_time() -> None:
    """A setting that is in neither list would keep every run from going back."""
    then, now = _of_0004(), RunSettings().as_json()
    assert then["DEFAULTS_0004"] == {k: v for k, v in now.items() if k not in then["SETTINGS_0003"]}


def test_what_older_runs_have_served_is_counted(fresh: Callable[[str], Database]) -> None:
    database = fresh("served")
    migrations.upgrade(database, "0003")
    fill(database, "0003")
    migrations.upgrade(database)
    store = Store(database)
    counted = """SELECT d.name, d.n_served, count(g.id) AS groups, count(DISTINCT p.id) AS prompts, d.n_prompts
      FROM dataset d JOIN prompt p ON p.run_id = d.run_id AND p.dataset = d.name
      LEFT JOIN sample_group g ON g.prompt_id = p.id GROUP BY d.run_id, d.name, d.n_served, d.n_prompts"""
    told = f.rows(store, counted)
    assert sum(d["n_served"] for d in told) == f.value(store, "SELECT count(*) FROM sample_group") > 0
    assert all((d["n_served"], d["n_prompts"]) == (d["groups"], d["prompts"]) for d in told)


def test_a_downgrade_knows_its_way(fresh: Callable[[str], Database]) -> None:
    database = fresh("way")
    migrations.upgrade(database)
    assert migrations.downgrade(database, migrations.REVISION) == migrations.REVISION
    for unknown in ("0000", "9999", "base", "-1"):
        with pytest.raises(SchemaMismatch):
            migrations.downgrade(database, unknown)
    f.execute(Store(database), "UPDATE alembic_version SET version_num = '9999'")
    before = ddl(database)
    with pytest.raises(SchemaMismatch, match="pip install"):
        migrations.downgrade(database, "0001")
    with pytest.raises(SchemaMismatch, match="pip install"):
        migrations.upgrade(database)
    assert (migrations.current(database), ddl(database)) == ("9999", before)


REMAKE = """
from alembic import op
import sqlalchemy as sa
revision, down_revision = "x1", None
def upgrade():
    with op.batch_alter_table("parent", recreate="always") as table:
        table.add_column(sa.Column("more", sa.Integer()))
"""


def test_remaking_a_table_keeps_the_rows_that_refer_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's trap: to change a column a table is made anew, and dropping the old one deletes every child row by
    ON DELETE CASCADE, without a word. The second half shows that the trap is there: without the guard they are gone."""
    folder = tmp_path / "scripts"
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_text((migrations.script_folder() / "env.py").read_text())
    (folder / "versions" / "x1.py").write_text(REMAKE)
    monkeypatch.setattr(migrations, "script_folder", lambda: folder)

    def made(name: str) -> Database:
        database = Database(f"sqlite:///{tmp_path}/{name}.db")
        with database.writing() as connection:
            for statement in (
                "CREATE TABLE parent (id INTEGER PRIMARY KEY, a INTEGER)",
                "CREATE TABLE child (id INTEGER PRIMARY KEY, of INTEGER REFERENCES parent (id) ON DELETE CASCADE)",
                "INSERT INTO parent VALUES (1, 2), (3, 4)",
                "INSERT INTO child VALUES (1, 1), (2, 3), (3, 3)",
            ):
                connection.exec_driver_sql(statement)
        return database

    guarded, bare = made("guarded"), made("bare")
    assert migrations.upgrade(guarded) == "x1"
    assert f.value(Store(guarded), "SELECT count(*) FROM child") == 3
    with guarded.writing() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1, "they are on again"
    with bare.writing() as connection:
        command.upgrade(migrations.alembic_config(connection), "head")
    assert f.value(Store(bare), "SELECT count(*) FROM child") == 0, "the trap is gone: then the guard may go too"
    guarded.close(), bare.close()


def test_tables_that_views_read_can_be_changed(fresh: Callable[[str], Database]) -> None:
    """Both databases refuse it as long as the views are there, each in its way: then the change is taken back."""
    database = fresh("views")
    migrations.upgrade(database)
    before, texts = ddl(database), view_texts(database)

    def change(connection: sa.Connection) -> None:
        op = Operations(MigrationContext.configure(connection))
        with op.batch_alter_table("sample", recreate="always" if database.is_sqlite else "never") as table:
            table.alter_column("reward", type_=sa.Numeric())

    with pytest.raises(sa.exc.DBAPIError, match="view"), database.writing() as connection:
        change(connection)
    assert ddl(database) == before
    with database.writing() as connection, migrations.views_aside(connection):
        change(connection)
    assert any("sample" in line and "reward" in line and "NUMERIC" in line.upper() for line in ddl(database))
    if database.is_sqlite:
        assert view_texts(database) == texts
    assert set(view_texts(database)) == set(texts)
    with database.reading() as connection:
        assert connection.execute(sa.select(views.BY_NAME["version_rewards"].table)).all() == []


def test_a_migration_that_orphans_rows_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scripts"
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_text((migrations.script_folder() / "env.py").read_text())
    orphan = REMAKE.partition("def upgrade")[0] + "def upgrade():\n    op.execute('DELETE FROM parent WHERE id = 3')\n"
    (folder / "versions" / "x1.py").write_text(orphan)
    monkeypatch.setattr(migrations, "script_folder", lambda: folder)
    database = Database(f"sqlite:///{tmp_path}/a.db")
    with database.writing() as connection:
        connection.exec_driver_sql("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE child (id INTEGER PRIMARY KEY, of INTEGER REFERENCES parent (id))")
        connection.exec_driver_sql("INSERT INTO parent VALUES (1), (3)")
        connection.exec_driver_sql("INSERT INTO child VALUES (2, 3)")
    with pytest.raises(SampleStoreError, match="1 row would lose a parent"):
        migrations.upgrade(database)
    assert f.value(Store(database), "SELECT count(*) FROM parent") == 2
    assert migrations.current(database) is None
    database.close()


MIGRATE = """
import sys
from samplestore import migrations
print("reached", getattr(migrations, sys.argv[2])(sys.argv[1], *sys.argv[3:]), flush=True)
"""


@pytest.mark.parametrize("direction", ["upgrade", pytest.param("downgrade", marks=pytest.mark.slow)])
def test_a_migration_that_is_killed_leaves_the_old_state(
    fresh: Callable[[str], Database], processes: Processes, direction: str
) -> None:
    """kill -9 when all of a revision is applied and nothing is committed; then the same again, to the end."""
    database = fresh("killed")
    url = database.url.render_as_string(hide_password=False)
    start, end = ("0001", migrations.REVISION) if direction == "upgrade" else (migrations.REVISION, "0001")
    migrations.upgrade(database, "0001")
    fill(database, "0001")
    migrations.upgrade(database, start)
    before, schema = everything(database), ddl(database)
    for arrival in (1, 2):  # between two revisions, and after the last
        process = processes.start(
            [sys.executable, "-c", MIGRATE, url, direction, end],
            env={"SAMPLESTORE_FAULTS": f"migrating=kill@{arrival}"},
        )
        assert process.wait(60) == -9 and "reached" not in process.log(), process.log()
        assert migrations.current(database) == start
        assert everything(database) == before and ddl(database) == schema
    process = processes.start([sys.executable, "-c", MIGRATE, url, direction, end])
    assert process.wait(60) == 0, process.log()
    assert migrations.current(database) == end
    if direction == "upgrade":
        _goes_on(Store(database))


def test_a_run_stored_before_a_setting_existed_has_its_default(store: samplestore.Store) -> None:
    run = f.make_run(store, weight_update="keep")
    stored = {k: v for k, v in run.settings.as_json().items() if k not in ("weight_update", "max_attempts")}
    with store.database.writing() as connection:
        connection.execute(sa.update(Base.metadata.tables["run"]).values(settings=stored))
    again = store.run("r")
    assert (again.settings.weight_update, again.settings.max_attempts) == ("abort", 3)
    assert again.settings.samples_per_prompt == run.settings.samples_per_prompt
    with pytest.raises(RunSettingsConflict, match="weight_update"):
        store.run("r", weight_update="keep")


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


def test_a_run_in_steps_is_not_taken_back_to_code_without_them(fresh: Callable[[str], Database]) -> None:
    """0003 would run it as async. What it knows of a run's settings is kept, what it does not know is left out."""
    database = fresh("modes")
    migrations.upgrade(database)
    store = Store(database)
    store.run("plain", samples_per_prompt=3)
    store.run("steps", mode="sync")
    with pytest.raises(DowngradeRefused, match="the setting mode='sync' of run 'steps'"):
        migrations.downgrade(database, "0003")
    with database.writing() as connection:
        connection.execute(sa.text("DELETE FROM timeline WHERE run_id = 2"))
        connection.execute(sa.text("DELETE FROM weight_version WHERE run_id = 2"))
        connection.execute(sa.text("DELETE FROM run WHERE id = 2"))
    assert migrations.downgrade(database, "0003") == "0003"
    (settings,) = (row["settings"] for row in f.rows(Store(database), "SELECT settings FROM run"))
    told = json.loads(settings) if isinstance(settings, str) else settings
    assert told["samples_per_prompt"] == 3 and "mode" not in told and "resume" not in told
    migrations.upgrade(database)
    assert Store(database).existing_run("plain").settings.mode == "async"
