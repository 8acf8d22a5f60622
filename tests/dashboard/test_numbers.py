"""Numbers of the pages, against a run that was written by hand and SQL that has nothing to do with the pages' own."""

from __future__ import annotations

import pytest

import samplestore
from samplestore.run import Run
from tests.dashboard.test_app import fresh_caches, html, page, start, text
from tests.support import factory as f

__all__ = ["fresh_caches"]

REWARDS = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]  # of the two samples of groups 0 to 3
VERSIONS = [0, 0, 1, 2]  # that wrote them


def write(run: Run) -> None:
    """Four finished groups under three versions, of which one is trained on; a group whose samples were interrupted
    with three tokens each, of which one goes on."""
    worker, trainer = f.register(run), f.register(run, "trainer")
    for rewards, version in zip(REWARDS, VERSIONS, strict=True):
        while run.current_version < version:
            run.publish_weights(path=f"/w/{run.current_version}", step=run.current_version)
        for claim in run.claim(worker, 2):
            f.answer(run, claim, 10, version)
        for stage in sorted(run.claim_stages(worker, 2), key=lambda stage: stage.sample_id):
            run.score(stage, rewards[stage.sample_id % 2 == 0])
    batch = f.lease(run, trainer, 0, 1, max_staleness=4)
    assert batch is not None
    f.commit(run, batch, trainer)
    for claim in run.claim(worker, 2):
        f.add(run, claim, 3, 2)
        run.release(claim, "weight update")
    (again,) = run.claim(worker, 1)
    run.begin_request(again, "r1", "http://e:1", 1.0, resumes=True)
    f.add(run, again, 5, 2)


@pytest.fixture
def url(db_url: str) -> str:
    with samplestore.open(db_url) as store:
        write(f.make_run(store, "by hand", prompts=5, groups_per_step=1, max_staleness=4, stages=["reward"]))
    return db_url


def test_the_overview(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(start(monkeypatch, url).run())
    with samplestore.open(url) as store:
        tokens = f.value(store, "SELECT sum(n_tokens) FROM segment")
        lags = f.rows(
            store,
            "SELECT r.current_version - g.oldest_version AS lag, count(*) AS n FROM sample_group g "
            "JOIN run r ON r.id = g.run_id WHERE g.state = 'ready' GROUP BY 1 ORDER BY 1",
        )
    assert tokens == 4 * 2 * 10 + 2 * 3 + 5 == 91
    assert f"{tokens} tokens generated and stored = {tokens} kept + 0 wasted" in shown
    for part in ("consumed 20", "ready 60", "in flight 8", "resumable 3", "dropped 0", "stale 0"):
        assert part in shown, part
    assert [(r["lag"], r["n"]) for r in lags] == [(0, 1), (1, 1), (2, 1)]
    assert "3 groups; the window ends at 4 behind" in shown
    assert "pending 0 aborted 2 completed 8" in shown and "1 of them in flight" in shown
    assert "2 events since" in shown


def test_what_the_histogram_is_drawn_from(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = start(monkeypatch, url).run()
    kept = at.session_state["last_overview"][2]
    assert kept.status["staleness"] == {"0": 1, "1": 1, "2": 1}


def test_groups_of_which_nothing_is_learned(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = page(start(monkeypatch, url), "groups", rewards="all equal")
    assert html(at).count("≡ all equal") == 2 and "showing 2 of 2 that fit" in text(at)
    with samplestore.open(url) as store:
        flat = f.rows(
            store,
            "SELECT g.number FROM sample_group g JOIN sample s ON s.group_id = g.id WHERE s.reward IS NOT NULL "
            "GROUP BY g.number HAVING min(s.reward) = max(s.reward) ORDER BY g.number",
        )
    assert [r["number"] for r in flat] == [0, 2]


def test_interruptions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(page(start(monkeypatch, url), "aborts"))
    assert "Resumed after 50 % 1 of 2 samples; 1 waiting, 0 ended otherwise" in shown
    assert "Kept by resuming 3 tokens in 1 resume " in shown
    assert "release weight update 2 6 " in shown, "twice, with six tokens"


def test_a_batch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(page(start(monkeypatch, url), "batches", batch="1"))
    assert "Step 0 timeline 0; 1 group, in its order" in shown
    assert "0 0 ● committed v2 1 2 20 2.00 2 1.000 1 " in shown, "staleness 2, reward 1.0, all equal"
