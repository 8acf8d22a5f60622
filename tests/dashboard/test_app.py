"""The pages, run by Streamlit's own test runner on both databases."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import streamlit as st
from streamlit.testing.v1 import AppTest

import samplestore
from samplestore.dashboard import frame, overview_parts, overview_source, source
from samplestore.dashboard.readonly import open_read_only
from samplestore.models import Event, Sample, SampleGroup
from samplestore.urls import sqlite_module
from tests.support.demo_data import Demo

APP = str(Path(samplestore.__file__).parent.parent / "dashboard" / "app.py")
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    yield
    st.cache_data.clear()
    st.cache_resource.clear()


def start(monkeypatch: pytest.MonkeyPatch, url: str, tokenizer: Path | None = None) -> AppTest:
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", url)
    monkeypatch.setenv("SAMPLESTORE_DASHBOARD_TOKENIZER", str(tokenizer or ""))
    return AppTest.from_file(APP, default_timeout=TIMEOUT_S)


def html(at: AppTest) -> str:
    assert not at.exception, at.exception
    return "\n".join(str(e.value) for e in at.html if "<style>" not in str(e.value))


def text(at: AppTest) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html(at)).split())


def page(at: AppTest, name: str, **query: str) -> AppTest:
    at.run()
    for key, value in query.items():
        at.query_params[key] = value
    return at.switch_page(f"page_{name}.py").run()


def trajectory(at: AppTest, **query: str) -> AppTest:
    return page(at, "trajectory", **query)


def test_overview_shows_what_the_database_holds(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo.url).run()
    shown = text(at)
    with open_read_only(demo.url).database.reading() as c:
        by_status = sa.select(Sample.status, sa.func.count()).group_by(Sample.status)
        by_state = sa.select(SampleGroup.state, sa.func.count()).group_by(SampleGroup.state)
        counted = {name: n for query in (by_status, by_state) for name, n in c.execute(query)}
        held = c.execute(sa.select(sa.func.count()).where(Sample.owner.is_not(None))).scalar_one()
        released = c.execute(
            sa.select(sa.func.count()).where(Event.kind == "release", Event.reason == "weight update")
        ).scalar_one()
    for name, n in counted.items():
        assert f"{name} {n}" in shown
    assert f"{held} of them in flight" in shown
    assert "weights v4" in shown and "running" in shown and demo.run in shown
    assert "1 of 3 engines does not serve v4 yet" in shown
    assert len(at.get("vega_lite_chart")) == 2
    spec = "".join(str(chart.proto) for chart in at.get("vega_lite_chart"))
    assert f"release: weight update: {released}" in spec
    assert "as of" in shown and "every 5 s" in shown


def test_the_ledger_bar_adds_up_to_its_total(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo.url).run()
    bar = next(str(e.value) for e in at.html if "Token ledger" in str(e.value))
    total = int(re.search(r"<b>([\d,]+)</b> tokens generated", bar)[1].replace(",", ""))  # type: ignore[index]
    drawn = sum(int(n) for n in re.findall(r"flex:(\d+) 0 0", bar))
    told = sum(int(n.replace(",", "")) for n in re.findall(r"<b>([\d,]+)</b></span>", bar))
    assert drawn == told == total > 5_000


def test_a_ledger_that_does_not_add_up_is_said_so(demo_sqlite: Demo) -> None:
    store = open_read_only(demo_sqlite.url)
    book = store.existing_run().ledger()
    store.database.reader.dispose()
    data = overview_source.Overview("db", {}, {}, book, {}, [], {}, {})
    assert "do not add up" not in overview_parts.token_ledger(data)
    book["by_fate"]["ready"] += 1
    assert "do not add up" in overview_parts.token_ledger(data)


def test_hostile_names_stay_text(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo.url).run()
    assert "reward-&lt;img src=x onerror=alert(9)&gt;" in html(at)
    assert "<img" not in html(at)


def test_a_trajectory_shows_each_token_under_its_weights(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    group, index = demo.spanning
    at = trajectory(start(monkeypatch, demo.url, demo.tokenizer), sample=f"{group}/{index}")
    shown = html(at)
    block = next(str(e.value) for e in at.html if "ss-tokens" in str(e.value))
    assert len(re.findall(r'<span class="t(?: m)?"', block)) == len(demo.responses[demo.spanning])
    assert re.findall(r">(v\d) ▸<", block) == ["v2", "v3", "v4"]
    assert f"Sample {group}/{index}" in shown
    assert "The answer is" in "".join(re.sub(r"<[^>]+>", "", block))


def test_colour_by_log_prob_is_in_the_address(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/".join(map(str, demo_sqlite.spanning))
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample=name, colour="log-prob")
    assert "rgba(213,94,0," in html(at)
    assert "Tokens are shown as ids" in text(at)


def test_without_a_sample_one_that_spans_weights_is_shown(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, demo.url))
    assert re.search(r"weights v(\d) → v(\d)", text(at))


@pytest.mark.parametrize(
    "sample,told",
    [("99999/0", "There is no such sample"), ("../../etc/passwd", "There is no such sample"), ("<b>", "&lt;b&gt;")],
)
def test_a_wrong_address_is_explained(
    sample: str, told: str, demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample=sample)
    assert told in html(at)


def test_choosing_another_sample_changes_the_address(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample="0/0")
    at.segmented_control[0].set_value(1).run()
    assert at.query_params["sample"] in ("0/1", ["0/1"])
    assert "Sample 0/1" in text(at)
    at.number_input[0].set_value(2).run()
    assert "Sample 2/0" in text(at)


def test_a_missing_database_is_told_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, f"sqlite:///{tmp_path / 'none.db'}").run()
    assert "There is no database here" in text(at) and "samplestore db upgrade" in text(at)
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_runs(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, db_url).run()
    assert "has no runs yet" in text(at) and "samplestore add-prompts" in text(at)


def test_an_unknown_run_names_those_that_exist(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo_sqlite.url)
    at.query_params["run"] = "no-such-run"
    assert demo_sqlite.run in text(at.run())


def test_another_run_can_be_chosen(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        store.run("older")
        store.run("newer")
    at = start(monkeypatch, db_url).run()
    assert "newer running" in text(at)
    at.query_params["sample"] = "3/1"
    at.selectbox[0].set_value("older").run()
    assert "older running" in text(at)
    assert at.query_params["run"] in ("older", ["older"]) and "sample" not in at.query_params


def test_a_run_that_is_not_listed_can_be_opened(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of runs has an end; an address leads to any of them."""
    monkeypatch.setattr(frame, "RUNS", 2)
    with samplestore.open(sqlite_url) as store:
        for name in ("oldest", "older", "newer", "newest"):
            store.run(name)
    at = start(monkeypatch, sqlite_url)
    at.query_params["run"] = "oldest"
    at.run()
    (choice,) = at.selectbox
    assert choice.options == ["oldest", "newest", "newer"] and choice.value == "oldest"
    assert "--run oldest" in text(at)
    choice.set_value("newer").run()
    assert "--run newer" in text(at) and at.query_params["run"] in ("newer", ["newer"])


def test_a_run_without_prompts_and_without_samples(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = store.run("empty")
        assert "has no prompts yet" in text(start(monkeypatch, db_url).run())
        run.add_prompts([{"prompt_ids": [1, 2, 3]}])
        run.admit()
    st.cache_data.clear()
    shown = text(start(monkeypatch, db_url).run())
    assert "no rollout worker is connected" in shown and "Why is no batch ready?" in shown
    assert "No sample has tokens yet" in shown and "No group is ready" in shown
    assert "No sample has tokens yet" in text(trajectory(start(monkeypatch, db_url)))
    assert "this is its prompt" in text(trajectory(start(monkeypatch, db_url), sample="0/0"))


def test_tokens_of_an_unknown_version_stay_unknown(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = store.run("unknown", samples_per_prompt=1, groups_per_step=1)
        run.add_prompts([{"prompt_ids": [1, 2, 3]}])
        run.admit()
        (claim,) = run.claim(run.register(), 1)
        run.append(claim, [5, 6], [-0.1, -0.2], None, "stop")
        run.finish(claim)
    at = trajectory(start(monkeypatch, db_url), sample="0/0")
    assert "staleness now unknown" in text(at) and "v? ▸" in html(at)
    overview = text(start(monkeypatch, db_url).run())
    assert "1 group has tokens of an unknown weight version" in overview


def test_another_schema_is_told_with_the_command(
    demo_sqlite: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('0000')")
    shown = text(start(monkeypatch, str(path)).run())
    assert "another schema" in shown and "0000" in shown and "samplestore db upgrade" in shown


def test_a_locked_database_is_told(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplestore.dashboard.readonly.BUSY_S", 0.1)
    path = sqlite_url.removeprefix("sqlite:///")
    # The same library as the store's: two copies of SQLite in one process do not see each other's locks.
    connection = sqlite_module().connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        shown = text(start(monkeypatch, sqlite_url).run())
    finally:
        connection.close()
    assert "The database is locked" in shown


def test_the_last_numbers_stay_while_the_database_is_locked(
    demo_sqlite: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = start(monkeypatch, demo_sqlite.url).run()
    st.cache_data.clear()

    def locked(*_: object) -> None:
        raise source.Problem("locked", "The database is locked", "Someone holds it.")

    monkeypatch.setattr(overview_source, "read", locked)
    shown = text(at.run())
    assert "The database is locked" in shown and "old" in shown and "Token ledger" in shown


def test_reading_writes_nothing(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(demo_sqlite.url.removeprefix("sqlite:///"))
    before = path.read_bytes()
    store = open_read_only(demo_sqlite.url)
    with pytest.raises(sa.exc.OperationalError, match="readonly"), store.database.reading() as connection:
        connection.execute(sa.update(Sample).values(priority=1))
    store.database.reader.dispose()
    trajectory(start(monkeypatch, demo_sqlite.url, demo_sqlite.tokenizer))
    assert path.read_bytes() == before
