"""The read-only queries behind the pages, on both databases, against what the demo wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

import samplestore
from samplestore.dashboard.readonly import open_read_only
from samplestore.errors import InvalidSetting
from samplestore.models import PromptRow, Sample, SampleGroup, Segment
from samplestore.queries import browse, trajectory
from samplestore.run import Run
from samplestore.store import Store
from tests.support.demo_data import Demo


@pytest.fixture
def opened(demo: Demo) -> Iterator[tuple[Store, Run]]:
    store = open_read_only(demo.url)
    yield store, store.existing_run(demo.run)
    store.database.reader.dispose()


def test_windows_of_any_size_add_up_to_what_was_written(demo: Demo, opened: tuple[Store, Run]) -> None:
    store, run = opened
    with store.database.reading() as connection:
        prompt = connection.execute(
            sa.select(PromptRow.prompt_ids).join(SampleGroup, SampleGroup.prompt_id == PromptRow.id)
            .where(SampleGroup.number == demo.spanning[0])
        ).scalar_one()  # fmt: skip
    expected = [*np.frombuffer(prompt, "<i4").tolist(), *demo.responses[demo.spanning]]
    for size in (1_000, 37, 7):
        seen: list[int] = []
        while True:
            found = trajectory.read(store.database, run.id, *demo.spanning, start=len(seen), limit=size)
            assert found is not None
            assert found.tokens.start == len(seen)
            assert found.tokens.before.tolist() == expected[max(0, len(seen) - 8) : len(seen)]
            seen += found.tokens.ids.tolist()
            assert found.tokens.after.tolist() == expected[len(seen) : len(seen) + 8]
            assert found.n_tokens == len(expected)
            if len(seen) >= found.n_tokens:
                break
        assert seen == expected


def test_log_probs_belong_to_their_tokens(demo: Demo, opened: tuple[Store, Run]) -> None:
    store, run = opened
    found = trajectory.read(store.database, run.id, *demo.with_tool, start=0, limit=5000)
    assert found is not None
    assert sum(s.n_tokens for s in found.spans) == found.n_response
    for s in found.spans:
        got = found.tokens.logprobs[s.start : s.start + s.n_tokens]
        if s.kind == "environment":
            assert s.logprob_sum is None and s.loss == 0 and all(got != got)
        else:
            assert s.logprob_sum == pytest.approx(float(got.sum(dtype="float64")), abs=1e-3)
    assert [s.kind for s in found.spans].count("environment") == 1
    assert all(found.tokens.logprobs[: found.n_prompt] != found.tokens.logprobs[: found.n_prompt])


def test_neighbouring_flushes_are_one_span_and_versions_are_not(demo: Demo, opened: tuple[Store, Run]) -> None:
    store, run = opened
    found = trajectory.read(store.database, run.id, *demo.spanning)
    assert found is not None
    assert [s.version_min for s in found.spans] == [2, 3, 4]
    assert found.sample["n_segments"] > len(found.spans)
    assert [s.finish_reason for s in found.spans] == ["abort", "abort", "stop"]
    kinds = [e["kind"] for e in found.events]
    assert kinds.count("resume") == 2 and kinds.count("release") >= 2 and "publish" in kinds
    assert found.sample["staleness"] == 2


def test_a_former_life_can_be_read(demo: Demo, opened: tuple[Store, Run]) -> None:
    store, run = opened
    former = trajectory.read(store.database, run.id, *demo.requeued, incarnation=0)
    now = trajectory.read(store.database, run.id, *demo.requeued)
    assert former is not None and now is not None
    assert (former.incarnation, now.incarnation) == (0, 1)
    assert former.n_response > 0
    assert "requeue" in [e["kind"] for e in former.events]


def test_what_does_not_exist_is_none(opened: tuple[Store, Run]) -> None:
    store, run = opened
    assert trajectory.read(store.database, run.id, 10_000, 0) is None
    assert trajectory.read(store.database, run.id, 0, 99) is None
    assert browse.samples(store.database, run.id, 10_000) == []


def test_pages_of_groups_hold_every_group_once(opened: tuple[Store, Run]) -> None:
    store, run = opened
    numbers: list[int] = []
    below = None
    while page := browse.groups(store.database, run.id, below=below, limit=7):
        numbers += [g["number"] for g in page]
        below = page[-1]["number"]
    with store.database.reading() as connection:
        total = connection.execute(sa.select(sa.func.count()).select_from(SampleGroup)).scalar_one()
    assert numbers == list(range(total))[::-1]
    assert {g["state"] for g in browse.groups(store.database, run.id, state="consumed")} == {"consumed"}
    with pytest.raises(InvalidSetting, match="no_such_state"):
        browse.groups(store.database, run.id, state="no_such_state")


def test_recent_samples_have_tokens(opened: tuple[Store, Run]) -> None:
    store, run = opened
    recent = browse.recent(store.database, run.id, 10)
    assert len(recent) == 10
    assert all(r["n_tokens"] > 0 for r in recent)
    assert [r["moved_at"] for r in recent] == sorted((r["moved_at"] for r in recent), reverse=True)


def test_no_page_costs_with_the_size_of_the_run(demo_sqlite: Demo) -> None:
    """Each query finds its rows by an index: a scan would make the page slower with every step of the run."""
    store = open_read_only(demo_sqlite.url)
    run, seen = store.existing_run(), []
    sa.event.listen(store.database.reader, "before_cursor_execute", lambda *call: seen.append((call[2], call[3])))
    browse.groups(store.database, run.id, below=20)
    browse.groups(store.database, run.id, state="ready")
    browse.samples(store.database, run.id, 3)
    browse.recent(store.database, run.id)
    trajectory.read(store.database, run.id, *demo_sqlite.spanning)
    asked = [(query, values) for query, values in seen if query.startswith("SELECT")]
    assert len(asked) >= 9
    with store.database.reading() as connection:
        for query, values in asked:
            plan = [row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values)]
            bounded = ("SCAN CONSTANT ROW", "SCAN newest")  # newest: a list of RECENT_GROUPS groups
            scans = [step for step in plan if step.startswith("SCAN") and not step.startswith(bounded)]
            assert not scans, (query, plan)
    store.database.reader.dispose()


def test_a_damaged_payload_is_refused(demo_sqlite: Demo, tmp_path: Path) -> None:
    copy = tmp_path / "damaged.db"
    shutil.copyfile(demo_sqlite.url.removeprefix("sqlite:///"), copy)
    with samplestore.open(str(copy)) as store:
        run = store.existing_run()
        group, index = demo_sqlite.spanning
        of = sa.select(Sample.id).join(SampleGroup).where(SampleGroup.number == group, Sample.index == index)
        short = sa.update(Segment).where(Segment.sample_id == of.scalar_subquery(), Segment.seq == 0)
        store.database.write(lambda c: c.execute(short.values(payload=b"\x01abc")))
        with pytest.raises(ValueError, match="damaged"):
            trajectory.read(store.database, run.id, group, index)
