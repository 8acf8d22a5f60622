"""What a page may change, and that without --allow-actions it may change nothing."""

from __future__ import annotations

import json

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

import samplestore
from samplestore.dashboard import actions, groups, source
from samplestore.dashboard.readonly import ENV_ACTIONS
from samplestore.run import Run
from tests.dashboard.test_app import fresh_caches, page, start, text, trajectory
from tests.support import factory as f

__all__ = ["fresh_caches"]


@pytest.fixture
def url(db_url: str) -> str:
    """Two groups: one that is done and ready, one with a sample in flight."""
    with samplestore.open(db_url) as store:
        run = f.make_run(store, "r", prompts=2)
        worker = f.register(run)
        claims = run.claim(worker, 3)
        for claim in claims[:2]:
            f.answer(run, claim)
    return db_url


def opened(url: str) -> Run:
    return samplestore.open(url).existing_run("r")


def labels(at: AppTest) -> list[str]:
    return [b.label for b in at.button]


def test_nothing_is_offered_or_done_without_the_flag(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_ACTIONS, raising=False)
    at = start(monkeypatch, url)
    for name, query in (("groups", {}), ("group", {"group": "0"}), ("trajectory", {"sample": "0/0"})):
        shown = labels(page(at, name, **query))
        assert not any(word in label for label in shown for word in ("Requeue", "Drop", "Abort")), name
    with pytest.raises(source.Problem, match="--allow-actions"):
        actions.perform("r", actions.DROP, [1], "because")
    assert f.states(opened(url))[0] == "ready"


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ACTIONS, "1")


def audited(run: Run) -> dict[str, object]:
    (event,) = f.events(run, actions.KIND)
    details = event["details"]  # SQLite hands JSON out as text
    return {"reason": event["reason"], **(json.loads(details) if isinstance(details, str) else details)}


def test_a_group_is_dropped_with_a_reason(url: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, url), "group", group="0")
    drop = next(b for b in at.button if b.label == "Drop group 0")
    assert drop.disabled, "it needs a reason"
    next(t for t in at.text_input if t.label == "Reason").set_value("bad prompt").run()
    next(b for b in at.button if b.label == "Drop group 0").click().run()
    assert "drop: 1 of group 0" in text(at) and "dropped" in text(at)
    run = opened(url)
    assert f.states(run)[0] == "dropped"
    told = audited(run)
    assert (told["reason"], told["action"], told["n"]) == ("bad prompt", "drop", 1)
    assert "by the dashboard" in str(told["by"])


def test_a_sample_is_requeued(url: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, url), sample="0/0")
    next(t for t in at.text_input if t.label == "Reason").set_value("tool was broken").run()
    next(b for b in at.button if b.label == "Requeue sample 0/0").click().run()
    run = opened(url)
    assert f.rows(run, "SELECT incarnation, status FROM sample ORDER BY id LIMIT 1") == [
        {"incarnation": 1, "status": "pending"}
    ]
    assert audited(run)["action"] == "requeue" and len(f.events(run, "requeue")) == 1


def test_what_is_in_flight_is_aborted(url: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, url), "group", group="1")
    reason = next(t for t in at.text_input if t.label == "Reason" and "abort" in str(t.key))
    reason.set_value("too long").run()
    next(b for b in at.button if b.label == "Abort group 1").click().run()
    run = opened(url)
    assert [e["reason"] for e in f.events(run, "abort_inflight")] == ["too long"]
    assert audited(run)["action"] == "abort"


def test_what_can_not_be_done_is_told_and_not_recorded(
    url: str, allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", url)
    with pytest.raises(samplestore.errors.SampleStoreError):
        actions.perform("r", actions.DROP, [10**6], "because")
    assert f.events(opened(url), actions.KIND) == []


def test_all_groups_of_a_list(url: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, url), "groups")
    next(t for t in at.text_input if t.label == "Reason").set_value("new data").run()
    next(b for b in at.button if b.label == "Drop 2 groups shown above").click().run()
    run = opened(url)
    assert f.states(run) == ["dropped", "dropped"] and audited(run)["n"] == 2


def test_what_was_seen_is_dropped_and_not_what_came_since(
    db_url: str, allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list shows the newest groups; the run admits others before the operator clicks."""
    monkeypatch.setattr(groups, "ROWS", 1)
    with samplestore.open(db_url) as store:
        run = f.make_run(store, "r", prompts=3, max_staleness=0)
        at = page(start(monkeypatch, db_url), "groups")
        next(t for t in at.text_input if t.label == "Reason").set_value("bad prompt").run()
        run.drop([f.group_id(run, 0)], "makes room")
        assert run.admit() == 1
        st.cache_data.clear()
        next(b for b in at.button if b.label == "Drop 1 group shown above").click().run()
        assert f.states(run) == ["dropped", "dropped", "open"], "group 1 was shown, group 2 never"


def test_a_click_that_comes_too_late_says_why(url: str, allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, url), "groups")
    next(t for t in at.text_input if t.label == "Reason").set_value("bad prompt").run()
    run = opened(url)
    trainer = run.register("trainer", "t")
    assert f.lease(run, trainer, step=0, groups=1) is not None  # group 0 is the trainer's now
    next(b for b in at.button if b.label == "Drop 2 groups shown above").click().run()
    assert "That did not work" in text(at) and f.states(run) == ["leased", "open"]
    assert f.events(run, actions.KIND) == []
