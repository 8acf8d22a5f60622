"""What is served next: data sets by weight, epochs and priority, and a curriculum. Reproducible across restarts, and N
workers cannot overshoot."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store
from samplestore.errors import InvalidSetting
from samplestore.models import Run as RunRow
from samplestore.queries.serving import exhausted
from samplestore.run import Run
from samplestore.verbs.serve import drawn

from ..support import factory as f


def filled(store: Store, name: str = "r", sizes: dict[str, int] | None = None, **settings: Any) -> Run:
    """A run with data sets of these sizes, nothing admitted, one sample a group."""
    run = store.run(name, **{"samples_per_prompt": 1, "groups_per_step": 10, "max_staleness": 0, **settings})
    for dataset, size in ({"a": 5, "b": 50} if sizes is None else sizes).items():
        run.add_prompts([{"prompt_ids": [1, i]} for i in range(size)], dataset=dataset)
    return run


def served(run: Run) -> list[tuple[str, int, int]]:
    """(data set, epoch, place in the data set) of all groups in creation order."""
    found = f.rows(
        run,
        "SELECT p.dataset AS d, g.epoch AS e, p.dataset_position AS p FROM sample_group g "
        "JOIN prompt p ON p.id = g.prompt_id WHERE g.run_id = :r ORDER BY g.number",
        r=run.id,
    )
    return [(r["d"], r["e"], r["p"]) for r in found]


def spend(run: Run, rounds: int, worker: int | None = None) -> None:
    """Admit, and drop what was admitted, so that the next round admits as many again."""
    for _ in range(rounds):
        run.admit()
        open_ones = f.rows(run, "SELECT id FROM sample_group WHERE run_id = :r AND state = 'open'", r=run.id)
        run.drop([r["id"] for r in open_ones], "used")


def test_data_sets_are_mixed_by_weight_and_each_epoch_serves_every_prompt_once(store: Store) -> None:
    run = filled(store, datasets={"a": {"weight": 1}, "b": {"weight": 3}})
    spend(run, 20)
    order = served(run)
    assert len(order) == 200
    share = Counter(d for d, _, _ in order)
    assert 30 <= share["a"] <= 70, "a quarter of 200, by a seeded draw"
    for name, size in (("a", 5), ("b", 50)):
        mine = [(e, p) for d, e, p in order if d == name]
        assert [e for e, _ in mine] == [i // size for i in range(len(mine))]
        whole = len(mine) // size * size
        assert set(Counter(mine[:whole]).values()) == {1} and {p for _, p in mine[:whole]} == set(range(size))
    counts = f.rows(run, "SELECT name, n_served FROM dataset ORDER BY name")
    assert counts == [{"name": name, "n_served": share[name]} for name in "ab"]
    f.sound(run)


def test_the_order_is_the_same_after_restarts_and_depends_on_the_seed(store: Store, db_url: str) -> None:
    mix = {"a": {"weight": 1}, "b": {"weight": 1}}
    at_once = filled(store, "once", groups_per_step=60, datasets=mix)
    at_once.admit()
    filled(store, "parts", groups_per_step=1, datasets=mix)
    for _ in range(60):
        with samplestore.open(db_url) as again:
            spend(again.existing_run("parts"), 1)
    other = filled(store, "other", groups_per_step=60, datasets=mix, seed=1)
    other.admit()
    parts = store.existing_run("parts")
    assert served(at_once) == served(parts)
    assert [d for d, _, _ in served(at_once)] != [d for d, _, _ in served(other)]


def test_lower_priorities_go_first_up_to_their_epochs(store: Store) -> None:
    run = filled(
        store, sizes={"a": 3, "b": 4},
        datasets={"a": {"priority": -1, "epochs": 2}, "b": {"epochs": 1}},
    )  # fmt: skip
    assert run.admit() == 10
    order = served(run)
    assert [(d, e) for d, e, _ in order] == [("a", 0)] * 3 + [("a", 1)] * 3 + [("b", 0)] * 4
    found = f.rows(run, "SELECT priority FROM sample ORDER BY id")
    assert [r["priority"] for r in found] == [-1] * 6 + [0] * 4
    spend(run, 1)
    assert run.admit() == 0
    assert "all epochs of the data sets a, b" in dict(run.why().reasons)["prompts_used_up"]
    run.add_prompts([{"prompt_ids": [9, 9]}], dataset="a")
    assert run.admit() == 1, "prompts that come later are served too"
    assert served(run)[-1] == ("a", 1, 3)


def test_a_data_set_without_epochs_of_its_own_has_those_of_the_run(store: Store) -> None:
    run = filled(store, sizes={"a": 2}, datasets={"a": {}}, epochs=2)
    assert run.admit() == 4


def test_workers_that_admit_at_the_same_moment_do_not_overshoot(store: Store) -> None:
    run = filled(store, datasets={"a": {}, "b": {}}, groups_per_step=23)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: run.admit(), range(24)))
    assert sum(made) == 23 == len(served(run)) and max(made) == 23
    alone = filled(store, "alone", datasets={"a": {}, "b": {}}, groups_per_step=23)
    alone.admit()
    assert served(run) == served(alone)


def test_prompts_of_a_data_set_that_the_run_never_serves_are_refused(store: Store) -> None:
    run = filled(store, sizes={}, datasets={"a": {}})
    with pytest.raises(InvalidSetting, match="one that the run serves: a"):
        run.add_prompts([{"prompt_ids": [1]}], dataset="b")
    assert f.value(run, "SELECT count(*) FROM dataset") == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"datasets": {"a": {"weight": 0}}}, {"datasets": {"a": {"weight": float("inf")}}},
        {"datasets": {"a": {"share": 1}}}, {"datasets": {"a": 1}}, {"datasets": ["a"]},
        {"datasets": {"a": {"epochs": 0}}}, {"datasets": {"": {}}}, {"datasets": {"a": {"priority": 0.5}}},
        {"curriculum": "DELETE FROM prompt"}, {"curriculum": "SELECT 1; SELECT 2"}, {"curriculum": 1},
        {"curriculum": "SELECT id FROM nothing"}, {"curriculum": "SELECT id FROM prompt WHERE id = :x"},
        {"curriculum": "SELECT id FROM prompt", "datasets": {"a": {}}},
        {"curriculum": "WITH d AS (DELETE FROM prompt RETURNING id) SELECT id FROM d"},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(store: Store, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        store.run("r", **bad)
    assert store.run_names() == []


def test_draws_follow_the_weights() -> None:
    names = [drawn(7, i, {"a": 1.0, "b": 2.0, "c": 1.0}) for i in range(4000)]
    share = Counter(names)
    assert names == [drawn(7, i, {"a": 1.0, "b": 2.0, "c": 1.0}) for i in range(4000)]
    assert all(abs(share[name] / 4000 - want) < 0.04 for name, want in (("a", 0.25), ("b", 0.5), ("c", 0.25)))


# Prompts that were never tried first, then those whose last mean reward is nearest to a half.
HALF_SOLVED = """
SELECT p.id FROM prompt p LEFT JOIN sample_group g ON g.prompt_id = p.id AND g.reward_mean IS NOT NULL
WHERE p.run_id = :run AND p.position >= 0
GROUP BY p.id ORDER BY count(g.id) > 0, min(abs(coalesce(g.reward_mean, 0.5) - 0.5)), p.id LIMIT :n
"""


@pytest.mark.parametrize(
    "writes",
    [
        "WITH d AS (SELECT 1) DELETE FROM prompt RETURNING id",
        "WITH d AS (SELECT 1 AS one) UPDATE prompt SET position = 7 WHERE id = (SELECT one FROM d) RETURNING id",
        "WITH d AS (SELECT 1 AS one) INSERT INTO event (run_id, at, kind) SELECT one, 1, 'x' FROM d RETURNING id",
    ],
)
def test_a_curriculum_that_writes_is_told_so(store: Store, writes: str) -> None:
    with pytest.raises(InvalidSetting, match="SQL that only reads"):
        store.run("r", curriculum=writes)
    assert store.run_names() == []


def test_a_curriculum_chooses_the_next_prompts(store: Store) -> None:
    run = filled(store, sizes={"a": 4}, groups_per_step=4, stages=["reward"], curriculum=HALF_SOLVED)
    worker, trainer = f.register(run), f.register(run, "trainer")
    assert run.admit() == 4
    assert served(run) == [("a", 0, i) for i in range(4)]
    for claim in run.claim(worker, 10):
        f.answer(run, claim)
    for stage, reward in zip(run.claim_stages(worker, 10), (1.0, 0.5, 0.0, 0.4), strict=True):
        run.score(stage, reward)
    batch = f.lease(run, trainer, 0, 2)
    assert batch is not None
    f.commit(run, batch, trainer)
    assert run.admit() == 2
    assert served(run)[4:] == [("a", 1, 1), ("a", 1, 3)]
    assert f.value(run, "SELECT n_served FROM dataset") == 6
    assert "prompts_used_up" not in dict(run.why().reasons)
    f.sound(run)


def test_a_curriculum_that_has_no_more_ends_the_run(store: Store) -> None:
    never = "SELECT id FROM prompt WHERE run_id = :run AND id NOT IN (SELECT prompt_id FROM sample_group) ORDER BY id"
    run = filled(store, sizes={"a": 13}, curriculum=never)
    spend(run, 3)
    assert [p for _, _, p in served(run)] == list(range(13)), "never more than there is room for"
    assert "curriculum gives no prompt" in dict(run.why().reasons)["prompts_used_up"]


@pytest.mark.parametrize(
    ("curriculum", "said"),
    [
        ("SELECT 'x' FROM prompt WHERE run_id = :run", "first column are ids"),
        ("SELECT id + 100000 FROM prompt WHERE run_id = :run", "is none"),
    ],
)
def test_what_a_curriculum_gives_is_checked(store: Store, curriculum: str, said: str) -> None:
    run = filled(store, sizes={"a": 2}, curriculum=curriculum)
    before = f.snapshot(run)
    with pytest.raises(InvalidSetting, match=said):
        run.admit()
    assert f.snapshot(run) == before, "nothing was admitted"


def test_a_curriculum_that_fails_at_the_moment_says_so(store: Store) -> None:
    """It ran on no rows when the run was made, and does not on these: the smallest whole number has no absolute."""
    broken = (
        "SELECT id FROM prompt WHERE run_id = :run AND abs(-9223372036854775807 - 1 + dataset_position) > 0 LIMIT :n"
    )
    run = filled(store, sizes={"a": 2}, curriculum=broken)
    with pytest.raises(InvalidSetting, match="the database said"):
        run.admit()
    assert f.states(run) == []
    assert "the database said" in dict(run.why().reasons)["curriculum_fails"]
    row = run.database.read(lambda c: c.execute(sa.select(RunRow.__table__)).one())
    with pytest.raises(InvalidSetting, match="the database said"):  # what a worker asks before it ends
        run.database.read(lambda c: exhausted(c, row, run.settings))
