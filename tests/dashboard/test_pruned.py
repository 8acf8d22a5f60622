"""A sample whose tokens were pruned can still be looked at: everything but its tokens is there."""

from __future__ import annotations

import pytest

import samplestore
from samplestore.queries import trajectory as query
from tests.dashboard.test_app import fresh_caches, html, start, text, trajectory
from tests.support import factory as f

__all__ = ["fresh_caches"]


@pytest.fixture
def pruned(db_url: str) -> str:
    with samplestore.open(db_url) as store:
        run = f.make_run(store)
        worker, trainer = f.register(run), f.register(run, "trainer")
        f.finish_all(run, worker, n=6)
        f.commit(run, f.lease(run, trainer, 0) or 0, trainer)
        assert run.prune(keep_steps=0).groups == 2
    return db_url


def test_spans_and_prompt_are_left(pruned: str) -> None:
    with samplestore.open(pruned) as store:
        run = store.existing_run("r")
        found = query.read(store.database, run.id, 0, 0)
        assert found is not None and found.pruned
        assert (found.n_prompt, found.n_response, [s.n_tokens for s in found.spans]) == (3, 6, [6])
        assert found.tokens.ids.tolist()[:2] == [1, 2] and found.tokens.ids.size == 3 and not found.tokens.after.size
        far = query.read(store.database, run.id, 0, 0, start=8)
        assert far is not None and far.tokens.ids.size == 3, "the nearest page that is left"
        whole = query.read(store.database, run.id, 2, 0)
        assert whole is not None and not whole.pruned and whole.tokens.ids.size == 9


def test_the_page_says_so(pruned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trajectory(start(monkeypatch, pruned), sample="0/0")
    assert "The response was pruned" in text(at) and "consumed" in text(at)
    assert "ss-tokens" in html(at), "its prompt"
    assert "pruned" not in text(trajectory(start(monkeypatch, pruned), sample="2/0"))
