"""The queries behind the pages of groups, samples, aborts, batches, workers and sizes, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from samplestore.dashboard import charts
from samplestore.dashboard.readonly import open_read_only
from samplestore.errors import InvalidSetting
from samplestore.models import Event, SampleGroup
from samplestore.queries import (
    abort_list,
    aborts,
    batch_list,
    data_page,
    evaluation,
    fleet,
    group_list,
    group_page,
    sample_page,
    trajectory,
)
from samplestore.queries.events import Follower
from samplestore.queries.group_list import GroupFilter
from samplestore.run import Run
from samplestore.store import Store
from tests.support import factory as f
from tests.support.demo_data import Demo
from tests.support.meter import measured

FOREVER_S = 86_400.0


@pytest.fixture
def opened(demo: Demo) -> Iterator[tuple[Store, Run]]:
    store = open_read_only(demo.url)
    yield store, store.existing_run(demo.run)
    store.database.reader.dispose()


def numbers(run: Run, where: GroupFilter, **options: Any) -> list[int]:
    """Of all pages."""
    found: list[int] = []
    after = None
    while True:
        page = group_list.page(run.database, run.id, where, after=after, **options)
        found += [r["number"] for r in page.rows]
        after = page.after
        if after is None:
            return found


def rows_of(run: Run) -> list[Any]:
    with run.database.reading() as c:
        return list(c.execute(sa.select(SampleGroup.__table__).order_by(SampleGroup.number.desc())))


def test_pages_of_groups_hold_each_group_once(opened: tuple[Store, Run]) -> None:
    _, run = opened
    everything = [r.number for r in rows_of(run)]
    assert numbers(run, GroupFilter(), limit=4) == everything
    scored = [r for r in rows_of(run) if r.reward_std is not None]
    widest = [r.number for r in sorted(scored, key=lambda r: (-r.reward_std, -r.number))]
    assert numbers(run, GroupFilter(), limit=4, order="spread") == widest and len(widest) > 8


@pytest.mark.parametrize(
    "where,fits",
    [
        (GroupFilter(states=("dropped", "stale")), lambda r: r.state in ("dropped", "stale")),
        (GroupFilter(zero_std=True), lambda r: r.reward_std == 0),
        (GroupFilter(zero_std=False, states=("ready",)), lambda r: (r.reward_std or 0) > 0 and r.state == "ready"),
        (GroupFilter(reward_min=0.5, reward_max=0.75), lambda r: r.reward_mean in (0.5, 0.75)),
        (GroupFilter(dataset="nowhere"), lambda r: False),
        (GroupFilter(until=0.0), lambda r: False),
        (GroupFilter(since=1.0, zero_std=True), lambda r: r.reward_std == 0),
    ],
)
def test_filters_combine(where: GroupFilter, fits: Any, opened: tuple[Store, Run]) -> None:
    _, run = opened
    expected = [r.number for r in rows_of(run) if fits(r)]
    assert numbers(run, where, limit=3) == expected
    page = group_list.page(run.database, run.id, where, limit=3)
    assert page.matching == (None if where.only_states else len(expected))


def test_text_is_found_as_it_is_written(opened: tuple[Store, Run]) -> None:
    _, run = opened
    with run.database.reading() as c:
        named = sa.text("SELECT number FROM sample_group g JOIN prompt p ON p.id = g.prompt_id WHERE prompt_ids = :ids")
        of_hostile = sa.text("SELECT prompt_ids FROM prompt ORDER BY position LIMIT 1")
        hostile = c.execute(named, {"ids": c.execute(of_hostile).scalar_one()}).scalars().all()
    for text in ("<SCRIPT>alert('prompt')</script>", "Ignore the page:", "onerror=alert(1)> What is 2 + 2?"):
        assert numbers(run, GroupFilter(text=text)) == sorted(hostile, reverse=True), text
    assert numbers(run, GroupFilter(text="Émile")) and len(numbers(run, GroupFilter(text="apples"))) > 10
    # What means something to LIKE or JSON means only itself here.
    for text in ("100%", "_", '"', "\\", "!"):
        assert numbers(run, GroupFilter(text=text)) == [], text


def test_a_group_of_a_worker_or_of_a_version(opened: tuple[Store, Run], demo: Demo) -> None:
    _, run = opened
    of_version = numbers(run, GroupFilter(version=3))
    assert demo.spanning[0] in of_version and 0 not in of_version
    by = [numbers(run, GroupFilter(worker=id)) for id in (1, 2)]
    assert by[0] and by[1] and by[0] != by[1] and numbers(run, GroupFilter(worker=10**9)) == []


@pytest.mark.parametrize("after", ["x", "1e9", "nan~3", "0.5~-1", "~", "1~2~3", "9" * 30])
def test_a_page_that_nobody_gave_is_refused(after: str, opened: tuple[Store, Run]) -> None:
    _, run = opened
    with pytest.raises(InvalidSetting, match="after"):
        order = "newest" if "~" in after else "spread"
        group_list.page(run.database, run.id, GroupFilter(), after=after, order=order)
    with pytest.raises(InvalidSetting, match="no_state"):
        group_list.page(run.database, run.id, GroupFilter(states=("no_state",)))
    with pytest.raises(InvalidSetting, match="order"):
        group_list.page(run.database, run.id, GroupFilter(), order="random")


def test_a_filter_that_fits_nothing_looks_at_a_stretch(opened: tuple[Store, Run], monkeypatch: Any) -> None:
    _, run = opened
    monkeypatch.setattr(group_list, "LOOK", 10)
    page = group_list.page(run.database, run.id, GroupFilter(dataset="nowhere"))
    assert (page.rows, page.matching, page.high - page.low, page.after) == ([], 0, 10, str(page.low))
    everything = [r.number for r in rows_of(run) if r.reward_std == 0]
    assert numbers(run, GroupFilter(zero_std=True)) == everything, "the pages go on to the end"


def test_a_group_with_its_batches(opened: tuple[Store, Run]) -> None:
    store, run = opened
    found = group_page.read(store.database, run.id, 3)
    assert found is not None and found.group["state"] == "consumed" and len(found.samples) == 4
    assert [b["step"] for b in found.batches] == [1] and found.batches[0]["staleness"] is not None
    assert group_page.read(store.database, run.id, 10_000) is None


def test_evidence_of_a_sample(opened: tuple[Store, Run], demo: Demo) -> None:
    store, run = opened
    t = trajectory.read(store.database, run.id, *demo.with_tool, start=0, limit=5000)
    assert t is not None
    found = sample_page.evidence(store.database, t.sample["id"], t.sample["group_id"], t.incarnation)
    assert [s["name"] for s in found.stages] == ["reward"] and found.stages[0]["outcome"] == "ok"
    assert found.arrays == ["entropy", "trainer_log_probs"] and found.calls == []
    assert [r["finish_reason"] for r in found.requests].count("abort") >= 1
    values = sample_page.array_window(store.database, run.id, t, "trainer_log_probs", run.array_files)
    assert values.shape == t.tokens.ids.shape
    tail = t.spans[-1].n_tokens
    assert np.isfinite(values[-tail:]).all() and np.isnan(values[:-tail]).all()
    for start, limit in ((len(values) - 5, 16), (0, 16), (len(values) // 2, 7)):
        part = trajectory.read(store.database, run.id, *demo.with_tool, start=start, limit=limit)
        assert part is not None
        got = sample_page.array_window(store.database, run.id, part, "trainer_log_probs", run.array_files)
        whole = values[part.tokens.start : part.tokens.start + part.tokens.ids.size]
        assert np.array_equal(got, whole, equal_nan=True)


def test_the_least_likely_token(opened: tuple[Store, Run], demo: Demo, monkeypatch: Any) -> None:
    store, run = opened
    t = trajectory.read(store.database, run.id, *demo.with_tool, start=0, limit=5000)
    assert t is not None
    expected = int(np.nanargmin(t.tokens.logprobs))
    for window in (trajectory.MAX_WINDOW, 16):
        monkeypatch.setattr(trajectory, "MAX_WINDOW", window)
        assert sample_page.least_likely(store.database, run.id, *demo.with_tool, None) == (
            expected, pytest.approx(float(t.tokens.logprobs[expected])),
        )  # fmt: skip
        first, ids = sample_page.response_ids(store.database, run.id, *demo.with_tool, None)
        assert first == 0 and ids.tolist() == t.tokens.ids.tolist()
    assert sample_page.least_likely(store.database, run.id, 10_000, 0, None) is None
    assert sample_page.staleness_of(store.database, run.id, [0, 4, 99]) == {0: 4, 4: 0}


def test_aborts_over_time_add_up(opened: tuple[Store, Run]) -> None:
    store, run = opened
    told = abort_list.over_time(store.database, run.id, FOREVER_S)
    with store.database.reading() as c:
        n = c.execute(sa.select(sa.func.count()).where(Event.kind.in_(aborts.KINDS))).scalar_one()
    assert sum(b["times"] for b in told["bars"]) == n > 30
    assert [p["version"] for p in told["publishes"]] == [1, 2, 3, 4] and not told["publishes_cut"]
    assert all(told["since"] <= b["at"] < told["until"] for b in told["bars"])
    assert {"abort: engine", "fail", "release: weight update"} <= {b["why"] for b in told["bars"]}
    told = abort_list.over_time(store.database, run.id, 1e-6)
    assert told["bars"] == [] and told["publishes"] == []


def test_bars_stand_still_while_the_clock_goes_on(opened: tuple[Store, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is in the same bar at every look, until it leaves on the left."""
    store, run = opened
    span = 4800.0  # a bar is 100 s
    with store.database.reading() as c:
        last = float(c.execute(sa.select(sa.func.max(Event.at))).scalar_one())
    now = last // 100.0 * 100.0 + 250.0
    seen = []
    for later in (1.0, 7.0, 49.0, 51.0, 99.0, 260.0):
        monkeypatch.setattr(abort_list, "db_now", lambda at=now + later: sa.literal(at, sa.Double))
        told = abort_list.over_time(store.database, run.id, span)
        assert told["since"] == (now + later - span) // 100.0 * 100.0 and told["until"] == now + later
        seen.append(told["bars"])
        chart = charts.over_time(told).to_dict()
        ends = chart["layer"][0]["encoding"]["x"]["scale"]["domain"]
        first, last = (datetime.fromisoformat(f"{end}+00:00").timestamp() for end in ends)
        assert first == told["since"] and last % 100.0 == 0.0 and last >= now + later > last - 100.0
    assert seen[0] and all(bars == seen[0] for bars in seen)


def test_pages_of_aborts_hold_each_once(opened: tuple[Store, Run]) -> None:
    store, run = opened
    seen: list[int] = []
    before = None
    while page := abort_list.latest(store.database, run.id, before=before, limit=7):
        seen += [r["id"] for r in page]
        before = (page[-1]["at"], page[-1]["id"])
    with store.database.reading() as c:
        query = sa.select(Event.id).where(Event.kind.in_(aborts.KINDS)).order_by(Event.at.desc(), Event.id.desc())
        assert seen == list(c.execute(query).scalars())
    fails = abort_list.latest(store.database, run.id, kind="fail")
    assert {r["kind"] for r in fails} == {"fail"} and len(fails) == 2
    resumed = abort_list.resumed_after(store.database, run.id, FOREVER_S)
    assert 0 < resumed["resumed"] <= resumed["interrupted"] and resumed["waiting"] == 3


def test_batches_and_their_groups(opened: tuple[Store, Run]) -> None:
    store, run = opened
    first, second = batch_list.page(store.database, run.id, limit=2)
    assert first["step"] == second["step"] + 1 and first["staleness_max"] <= 2 and first["n_groups"] == 4
    groups = batch_list.groups(store.database, run.id, first["id"])
    assert first["staleness_mean"] == pytest.approx(sum(g["staleness"] for g in groups) / 4)
    assert first["reward_mean"] == pytest.approx(sum(g["reward_mean"] for g in groups) / 4)
    older = batch_list.page(store.database, run.id, below=second["id"])
    assert older and max(b["id"] for b in older) < second["id"]
    assert batch_list.groups(store.database, run.id, 10**6) == []


def test_a_rewind_is_told(store: Store) -> None:
    run = f.make_run(store)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    f.commit(run, f.lease(run, trainer, 0) or 0, trainer)
    run.publish_weights("/w/0", step=0)
    run.rewind(0)
    newest, first = batch_list.timelines(store.database, run.id)
    assert (newest["number"], newest["parent"], newest["forked_at_step"]) == (1, 0, 0) and first["parent"] is None


def test_workers_that_live_and_those_that_ended(store: Store) -> None:
    run = f.make_run(store)
    gone, silent, live = (f.register(run) for _ in range(3))
    run.goodbye(gone, "out of memory")
    f.silence(run, silent, 1000.0)
    (claim,) = run.claim(live, 1)
    told = fleet.workers(store.database, run.id)
    assert [w["id"] for w in told["live"]] == [silent, live] and [w["samples"] for w in told["live"]] == [0, 1]
    assert told["live"][0]["heartbeat_age_s"] > 900 and claim.owner == live
    assert [(w["id"], w["error"]) for w in told["ended"]] == [(gone, "out of memory")]
    assert fleet.workers(store.database, run.id, ended_below=gone)["ended"] == []


def test_sizes(opened: tuple[Store, Run]) -> None:
    store, run = opened
    told = data_page.sizes(store.database, run.id)
    assert told["bytes"] > 100_000 and told["retention_step"] == -1 and told["run"]["n_groups"] > 20
    tables = {t["table"]: t for t in told["tables"]}
    assert {"sample", "segment", "event"} <= set(tables)
    if store.database.is_sqlite:
        assert tables["sample"]["rows"] >= 90 and (tables["sample"]["at_most"] or told["analyzed"])
    else:
        assert tables["segment"]["bytes"] > 8192 and told["wal_bytes"] is None


def test_no_question_of_a_page_reads_a_whole_table(demo_sqlite: Demo) -> None:
    """Each finds its rows by an index, or on a stretch of group numbers: a scan would be slower with each step."""
    store = open_read_only(demo_sqlite.url)
    run, db = store.existing_run(), store.database
    everything = GroupFilter(("ready",), 0, 3, 0.0, 1.0, False, 3, 1, "default", "apples", 0.0, 1e12)
    batch = batch_list.page(db, run.id)[0]["id"]
    questions: list[Any] = [
        lambda: group_list.page(db, run.id, everything),
        lambda: group_list.page(db, run.id, GroupFilter(("ready", "open")), after="20"),
        lambda: group_list.page(db, run.id, GroupFilter(zero_std=False), order="spread"),
        lambda: group_page.read(db, run.id, 3),
        lambda: sample_page.evidence(db, 3, 1, 0),
        lambda: sample_page.staleness_of(db, run.id, [1, 2]),
        lambda: abort_list.over_time(db, run.id, 600.0),
        lambda: abort_list.latest(db, run.id, before=(1e10, 10**6)),
        lambda: abort_list.resumed_after(db, run.id, 600.0),
        lambda: batch_list.page(db, run.id),
        lambda: batch_list.groups(db, run.id, batch),
        lambda: evaluation.newest(db, run.id, 10),
        lambda: fleet.workers(db, run.id),
        lambda: data_page.sizes(db, run.id),
    ]
    with measured(db) as reading:
        for question in questions:
            question()
    assert len(reading.plans) > len(questions)
    assert reading.whole_tables() == []
    store.database.reader.dispose()


def test_the_guard_can_fail(demo_sqlite: Demo) -> None:
    store = open_read_only(demo_sqlite.url)
    with measured(store.database) as reading, store.database.reading() as c:
        c.execute(sa.text("SELECT sum(reward) FROM sample")).scalar()
    assert reading.whole_tables()
    store.database.reader.dispose()


@pytest.mark.parametrize("kinds", [(), ("publish", "nothing"), ("release", "abort")])
def test_the_newest_events_are_those_of_all_kinds(kinds: tuple[str, ...], opened: tuple[Store, Run]) -> None:
    store, run = opened
    with store.database.reading() as c:
        query = sa.select(Event.id).where(Event.run_id == run.id).order_by(Event.id.desc())
        ids = list(c.execute(query.where(Event.kind.in_(kinds)) if kinds else query).scalars())
    for size in (3, 40, 1000):
        assert [e["id"] for e in Follower(store.database, run.id, kinds).newest(size)] == ids[:size][::-1]
    assert Follower(store.database, 10**6, kinds).newest(5) == []
