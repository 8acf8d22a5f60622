"""What a sample's page says of lives that are over, of forks, and of groups that were evaluated: each number belongs to
what is shown."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

import samplestore
from samplestore import Store
from samplestore.dashboard import sample_parts
from samplestore.queries import browse, trajectory
from samplestore.run import Run
from tests.contract.forking import PROMPT, end, fork, opened
from tests.dashboard.test_app import fresh_caches, html, page, start, text
from tests.support import factory as f

__all__ = ["fresh_caches"]


def told(run: Run, group: int, index: int, life: int | None = None) -> tuple[str, trajectory.Trajectory]:
    found = trajectory.read(run.database, run.id, group, index, incarnation=life)
    assert found is not None
    shown = " ".join(re.sub(r"<[^>]+>", " ", sample_parts.summary(run, found)).split())
    return shown, found


def test_a_former_life_has_its_own_numbers(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_staleness=9)
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 4, 0)
    run.append(claim, [7, 8, 9], None, None, kind="environment")
    f.add(run, claim, 2, run.publish_weights(path="/w", step=0).version)
    run.requeue([claim.sample_id], "again")
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 1, 1, finish_reason="stop")
    run.finish(claim)

    now, _ = told(run, 0, 0)
    assert (
        "status completed (stop)" in now and "response 1 token, 1 trained on" in now and "aborts, resumes 0, 0" in now
    )
    former, found = told(run, 0, 0, 0)
    assert "status superseded" in former and "weights v0 → v1" in former
    assert "response 9 tokens, 6 trained on" in former and "aborts, resumes –" in former
    mean = (sum(f.logprobs_of(4)) + sum(f.logprobs_of(2))) / 6
    assert f"mean log-prob {mean:.3f}" in former and "reward –" in former and "staleness now –" in former
    assert sample_parts.life(found)["version_min"] == 0


def test_a_fork_says_where_it_comes_from(store: Store) -> None:
    run, root = opened(store)
    branch, agent = fork(run, root, 0, 0, upto=3), fork(run, root, 1, 1, prompt=PROMPT)
    for claim in (branch, agent, root):
        f.add(run, claim, 2, finish_reason="stop")
        end(run, claim)
    shown, found = told(run, 0, 1)
    assert "It branches off sample 0/0 after 3 response tokens" in shown and "prompt 3 tokens" in shown
    assert found.tokens.ids.tolist() == [1, 2, 0, *f.ids_of(2)]
    shown, found = told(run, 0, 2)
    assert "It was forked by sample 0/0 with a prompt of its own" in shown
    assert found.n_prompt == 0, "the prompt of its group is not what it was given"
    assert found.tokens.ids.tolist() == [*PROMPT.tolist(), *f.ids_of(2)]
    assert "forked" not in told(run, 0, 0)[0] and "branches" not in told(run, 0, 0)[0]


def test_an_evaluated_group_is_told_as_such(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store, prompts=1, samples_per_prompt=1, stages=["reward"])
        run.add_prompts([{"prompt_ids": [5], "label": 1}], dataset="test", evaluation=True)
        worker = f.register(run)
        run.start_evaluation("test", 1)
        f.finish_all(run, worker, 5)
        assert f.fates(run)["dropped"] == 5
        (row,) = [r for r in browse.recent(run.database, run.id) if r["group_state"] == "dropped"]
        assert row["group_reason"] == "evaluation"
        number = row["group"]
    at = start(monkeypatch, db_url)
    shown = text(at.run())
    assert "evaluated 5" in shown and "0 wasted" in shown and "dropped 0" in shown
    table = text(page(at, "batches"))
    assert "No trainer has taken a batch" in table and "Evaluations" in table
    assert "test v0 ● done 1 1.000 100.0 % – 0.0 % 5 " in table
    assert "evaluated" in text(page(at, "groups")) and "▲" not in text(page(at, "group", group=str(number)))


PNG = b"\x89PNG\r\n\x1a\n" + b"not a picture, but named like one"


def test_images_of_a_prompt_are_counted(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    row: dict[str, Any] = {"prompt_ids": [1, 2, 3], "images": [image, image]}
    with samplestore.open(db_url) as store:
        run = store.run("seen", samples_per_prompt=1, groups_per_step=1)
        run.add_prompts([row])
        run.admit()
        (claim,) = run.claim(f.register(run), 1)
        f.answer(run, claim)
    at = start(monkeypatch, db_url)
    assert "prompt 3 tokens, 2 images" in text(page(at, "trajectory"))
    shown = html(page(at, "group", group="0"))
    assert "2 images" in shown and shown.count(f'src="{image}"') == 2
