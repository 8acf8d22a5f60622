"""Each page and its states, run by Streamlit's own test runner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import streamlit as st
from streamlit.testing.v1 import AppTest

import samplestore
from samplestore.dashboard import overview_source, source, tokenview
from samplestore.dashboard.readonly import open_read_only
from samplestore.queries import fleet, group_list
from tests.dashboard.test_app import fresh_caches, html, page, start, text, trajectory
from tests.support import factory as f
from tests.support.demo_data import Demo

__all__ = ["fresh_caches"]

PAGES = ("groups", "group", "trajectory", "aborts", "fleet", "batches", "data")


def test_every_page_shows_the_run(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo.url, demo.tokenizer)
    for name in PAGES:
        shown = text(page(at, name))
        assert f"run {demo.run}" in shown and "■" not in shown, name
        assert "secret" not in shown and "<img" not in html(at), name


def test_every_page_of_an_empty_run_says_what_to_do(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        store.run("empty")
    at = start(monkeypatch, db_url)
    for name, told in (
        ("groups", "A worker admits them: samplestore worker"),
        ("group", "A worker admits them: samplestore worker"),
        ("aborts", "No sample was interrupted"),
        ("fleet", "Start one with: samplestore worker"),
        ("batches", "with run.batch(step=0)"),
        ("data", "Nothing was pruned"),
    ):
        assert told in text(page(at, name)), name


def test_every_page_without_a_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, f"sqlite:///{tmp_path / 'none.db'}")
    for name in PAGES:
        assert "There is no database here" in text(page(at, name)), name
    assert list(tmp_path.iterdir()) == []


def test_filters_of_groups_are_in_the_address(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, demo_sqlite.url), "groups", rewards="all equal", state="ready")
    shown = text(at)
    n = int(re.search(r"showing (\d+) of (\d+) that fit", shown)[1])  # type: ignore[index]
    assert n > 0 and html(at).count("≡ all equal") == n == len(re.findall(r"group\?run=", html(at)))
    at.segmented_control(key="rewards").set_value("differ").run()
    assert "≡ all equal" not in html(at) and int(re.search(r"of (\d+) that fit", text(at))[1]) > 0  # type: ignore[index]
    at.text_input(key="text").set_value("no such words").run()
    assert "showing 0 of 0 that fit" in text(at) and "Clear them" in text(at)
    next(b for b in at.button if b.label == "Clear filters").click().run()
    assert re.search(r"showing \d+ of a run of \d+ groups", text(at))


def test_pages_of_groups_and_of_what_was_not_looked_through(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplestore.dashboard.groups.ROWS", 4)
    monkeypatch.setattr(group_list, "LOOK", 10)
    at = page(start(monkeypatch, demo_sqlite.url), "groups", rewards="differ")
    seen = re.findall(r"group\?run=[^&]+&amp;group=(\d+)", html(at))
    assert "older ones were not looked through" in text(at)
    for _ in range(12):
        following = next(b for b in at.button if b.label.startswith("Next page"))
        if following.disabled:
            break
        following.click().run()
        seen += re.findall(r"group\?run=[^&]+&amp;group=(\d+)", html(at))
    with source.store().database.reading() as c:
        query = sa.text("SELECT number FROM sample_group WHERE reward_std > 0 ORDER BY number DESC")
        assert [int(n) for n in seen] == list(c.execute(query).scalars())


def test_any_address_gives_a_page(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, demo_sqlite.url)
    for name, told, query in (
        ("groups", "showing", {"stale_from": "x", "state": "nope", "version": "-7", "order": "<b>", "age": "2 y"}),
        ("groups", "what the page before gave", {"after": "~~"}),
        ("group", "There is no such group", {"group": "99999"}),
        ("trajectory", "There is no such sample", {"sample": "9" * 15 + "/0"}),
        ("trajectory", "does not name one", {"sample": "9" * 18 + "/0"}),
        ("group", "Group ", {"group": "9" * 40}),
        ("aborts", "Latest", {"after": "nan~x", "span": "0", "kind": "<b>"}),
        ("fleet", "Workers", {"after": "-1"}),
        ("batches", "has no batch 777", {"batch": "777", "after": "x"}),
    ):
        assert told in text(page(at, name, **query)), (name, query)


def test_a_group_and_two_of_its_samples(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    group, index = demo.spanning
    other = next(i for g, i in sorted(demo.responses) if g == group and i != index)
    at = page(start(monkeypatch, demo.url, demo.tokenizer), "group", group=str(group), a=str(index), b=str(other))
    shown = text(at)
    assert f"Group {group}" in shown and re.search(r"The first \d+ tokens are the same", shown)
    blocks = [str(e.value) for e in at.html if 'class="ss-tokens"' in str(e.value)]
    assert len(blocks) == 2
    for block, sample in zip(blocks, (index, other), strict=True):
        assert len(re.findall(r'<span class="t(?: m)?"', block)) == len(demo.responses[(group, sample)])
    assert len(at.get("vega_lite_chart")) == 1 and "Rewards 4 of 4 scored" in shown
    next(b for b in at.button if b.label.startswith("group after")).click().run()
    assert f"Group {group + 1}" in text(at) and "a" not in at.query_params


def test_a_sample_and_its_life(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample="/".join(map(str, demo_sqlite.spanning)))
    lane = next(str(e.value) for e in at.html if 'class="ss-lane"' in str(e.value))
    told = re.sub(r"<[^>]+>", " ", lane)
    order = [
        "created",
        "▶ v2",
        "released: weight update",
        "resumed with",
        "▶ v3",
        "▶ v4",
        "completed (stop)",
        "★ reward",
    ]
    at_last = [told.index(words) for words in order]
    assert at_last == sorted(at_last)
    assert "Engine calls" in text(at) and "what its stages said" in text(at)


def test_every_colour(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample="/".join(map(str, demo_sqlite.with_tool)))
    words = {"staleness": "behind", "segment": "segment ", "entropy": "entropy: "}
    words[tokenview.BY_DIFFERENCE] = "trainer − rollout: "
    for by in (*tokenview.ALWAYS, tokenview.BY_DIFFERENCE, "entropy", "trainer_log_probs"):
        at.segmented_control(key="colour").set_value(by).run()
        block = next(str(e.value) for e in at.html if 'class="ss-tokens"' in str(e.value))
        coloured = re.findall(r'<span class="t(?: m)?" style="[^"]+" title="([^"]+)"', block)
        assert coloured, by
        of_model = [title for title in coloured if "environment" not in title]
        assert all(words.get(by, "") in title for title in of_model), by


def test_a_text_is_found(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/".join(map(str, demo_sqlite.with_tool))
    at = trajectory(start(monkeypatch, demo_sqlite.url, demo_sqlite.tokenizer), sample=name, find="CALCULATOR says")
    block = next(str(e.value) for e in at.html if 'class="ss-tokens"' in str(e.value))
    marked = "".join(re.sub("<[^>]+>", "", s) for s in re.findall(r'<span class="t hit".*?</span>', block))
    assert "calculator says" in marked and "Found 1 time; framed below: go there" in text(at)
    at.text_input(key="find").set_value("nowhere to be found").run()
    assert "Not found among" in text(at) and '"t hit' not in html(at)
    next(b for b in at.button if b.label == "Lowest log-prob").click().run()
    assert re.search(r"The lowest log-prob is -\d", text(at)) and html(at).count('class="t hit"') == 1
    at.text_input(key="find").set_value("").run()
    assert '"t hit' not in html(at)


def test_without_a_tokenizer_ids_are_found(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    id = demo_sqlite.responses[demo_sqlite.spanning][5]
    name = "/".join(map(str, demo_sqlite.spanning))
    at = trajectory(start(monkeypatch, demo_sqlite.url), sample=name, find=f"id:{id}")
    assert re.search(r"Found \d+ times?", text(at)) and 'class="t hit"' in html(at)
    at.text_input(key="find").set_value("words").run()
    assert "Only id:NUMBER can be found" in text(at)


def test_a_conversation(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(
        start(monkeypatch, demo_sqlite.url, demo_sqlite.tokenizer),
        sample="/".join(map(str, demo_sqlite.with_tool)),
        view="conversation",
    )
    turns = re.findall(r'class="who">(\w+)', html(at))
    assert turns == ["prompt", "model", "environment", "model"] and "ss-tokens" not in html(at)
    assert "{&quot;result&quot;: 42.0}" in html(at) and "not trained on" in text(at)


def test_aborts_of_a_kind(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, demo.url), "aborts", kind="fail")
    table = next(str(e.value) for e in at.html if "<th" in str(e.value) and ">now</th>" in str(e.value))
    assert "engine timed out after 600 s: &lt;b&gt;" in table and "weight update" not in table
    # Not 10 min: the demo's events grow old while the tests before this one run.
    at.segmented_control(key="span").set_value("6 h").run()
    assert len(at.get("vega_lite_chart")) == 1 and "Kept by resuming" in text(at) and "Over time (UTC)" in text(at)


def test_silent_workers_and_failed_engines(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store, "sick")
        silent = f.register(run)
        f.silence(run, silent, 500.0)
        f.execute(
            run,
            "INSERT INTO engine (run_id, url, state, attempt, failures, not_before, error, created_at, updated_at, "
            "generated_tokens) VALUES (:r, 'http://e:1', 'failed', 0, 3, 0, '<script>x</script>', 0, 0, 0)",
            r=run.id,
        )
    at = start(monkeypatch, db_url)
    shown = text(page(at, "fleet"))
    assert "1 of them silent" in shown and "■" in shown and "<script>" not in html(at)
    shown = text(at.switch_page("page_overview.py").run())
    assert shown.index("stopped sending heartbeats") < shown.index("no batch yet"), "alarms first"
    assert "1 of 1 engine failed" in shown and "samplestore reap --run sick" in shown


def test_lists_are_turned_over_to_their_end(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplestore.dashboard.batches.ROWS", 2)
    at = page(start(monkeypatch, demo_sqlite.url), "batches")
    seen = []
    while True:
        seen += [int(n) for n in re.findall(r"batch=(\d+)", html(at))]
        older = next(b for b in at.button if b.label == "Older ▸")
        if older.disabled:
            break
        older.click().run()
    assert seen == [3, 2, 1] and "after" in at.query_params
    next(b for b in at.button if b.label == "◂ Newest").click().run()
    assert "after" not in at.query_params and "batch=3" in html(at)
    monkeypatch.setattr("samplestore.dashboard.batches.ROWS", 40)
    assert not at.run().button, "one page needs no buttons"


def test_the_newest_group_has_none_after_it(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = len(demo_groups(demo_sqlite)) - 1
    at = page(start(monkeypatch, demo_sqlite.url), "group", group=str(newest))
    assert {b.label: b.disabled for b in at.button} == {"◂ group before": False, "group after ▸": True}
    assert f"Group {newest}" in text(at)


def demo_groups(demo: Demo) -> list[int]:
    store = open_read_only(demo.url)
    with store.database.reading() as c:
        found = list(c.execute(sa.text("SELECT number FROM sample_group ORDER BY number")).scalars())
    store.database.reader.dispose()
    return found


def test_a_batch_opens_its_groups(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, demo_sqlite.url), "batches", batch="2")
    assert "timeline 0; 4 groups, in its order" in text(at) and "class=on" in html(at)


def test_tokens_per_second_need_two_looks(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", demo_sqlite.url)
    of: Any = type("Of", (), {"id": 1})
    st.cache_resource.clear()
    assert overview_source.token_rate(of, 1000.0, 50) is None
    assert overview_source.token_rate(of, 1010.0, 250) == (20.0, 10.0)
    assert overview_source.token_rate(of, 1065.0, 1350) == (20.0, 55.0), "the first look is older than a minute"


def test_tokens_per_second_are_of_the_look_and_not_of_older_totals(
    db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Totals of a large run are counted more seldom than the page is drawn; its clock goes on."""
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", db_url)
    monkeypatch.setattr(overview_source, "_turn", lambda *_: 0)
    clock, workers = [1000.0], fleet.workers
    monkeypatch.setattr(fleet, "workers", lambda *at: {**workers(*at), "as_of": clock[0]})
    with samplestore.open(db_url) as store:
        run = f.make_run(store)
        claim = run.claim(f.register(run), 1)[0]
        assert overview_source.read(run).rate is None
        f.add(run, claim, 50)
        clock[0] += 10.0
        overview_source._overview.clear()
        told = overview_source.read(run)
    assert told.ledger["generated"] == 0, "the totals are the old ones"
    assert told.rate == (5.0, 10.0)


def test_a_sample_without_log_probs_has_no_mean(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store, prompts=0)
        rows = [{"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0, "status": "completed"}]
        run.import_samples(rows)
    assert "mean log-prob –" in text(page(start(monkeypatch, db_url), "trajectory", sample="0/0"))


def test_a_page_at_work_stays_when_the_database_is_locked(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    at: AppTest = page(start(monkeypatch, demo_sqlite.url), "fleet")
    st.cache_data.clear()

    def locked(*_: object) -> None:
        raise source.Problem("locked", "The database is locked", "Someone holds it.")

    monkeypatch.setattr(source, "workers_and_engines", locked)
    shown = text(at.run())
    assert "The database is locked" in shown and "s old" in shown and "rollout-node1" in shown


def test_no_page_holds_a_transaction_while_it_draws(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stays open keeps a WAL from being started afresh, and PostgreSQL from cleaning up."""
    drawn, html = [], st.html

    def watched(*args: Any, **more: Any) -> Any:
        drawn.append(source.opened(demo_sqlite.url).database.reader.pool.checkedout())  # type: ignore[attr-defined]
        return html(*args, **more)

    monkeypatch.setattr(st, "html", watched)
    at = start(monkeypatch, demo_sqlite.url)
    for name in PAGES:
        text(page(at, name))
    assert len(drawn) > 3 * len(PAGES) and set(drawn) == {0}
