"""The views agree with what the library says of the same things, on both databases."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store, migrations, states, views
from samplestore.errors import DatabaseUnusable
from samplestore.queries import batch_list
from samplestore.queries.metric_names import PREFIX
from samplestore.run import Run
from samplestore.statements import staleness
from samplestore.types import RequestInfo
from tests.docs.pages import page
from tests.support import factory as f


def rows(of: Run | Store, view: str, **where: Any) -> list[dict[str, Any]]:
    table = views.BY_NAME[view].table
    query = sa.select(table).where(*(table.c[name] == value for name, value in where.items()))
    with of.database.reading() as connection:
        return [dict(r) for r in connection.execute(query).mappings()]


def test_every_column_is_told_of(store: Store) -> None:
    for view in views.VIEWS:
        assert list(view.columns) == [c.name for c in view.select.selected_columns], view.name
        assert set(view.key) <= set(view.columns), view.name
        assert rows(store, view.name) == []


def of_many_ages(store: Store, mode: str) -> Run:
    """Ready groups of one, two and unknown versions, an imported one, and a rewind behind them."""
    run = f.make_run(store, mode, prompts=6, max_staleness=2, staleness_mode=mode, stale="skip", groups_per_step=6)
    worker = f.register(run)
    for step in range(3):
        for claim in run.claim(worker, 2):
            f.add(run, claim, 2 + claim.index, step, None)
            f.add(run, claim, 3, max(0, step - 1) if claim.index else step, "stop")
            run.finish(claim)
        run.publish_weights(step=step)
    for claim in run.claim(worker, 2):
        f.answer(run, claim, version=None)
    run.rewind(step=0)
    for step in (1, 2):
        for claim in run.claim(worker, 1):
            f.answer(run, claim, version=run.current_version)
        run.publish_weights(step=step)
    run.import_samples([{"prompt_ids": [9, 9], "response_ids": [7, 8], "log_probs": [-0.5, -0.25]}])
    return run


@pytest.mark.parametrize("mode", list(states.StalenessMode))
def test_staleness_now_is_that_of_the_library(store: Store, mode: str) -> None:
    run = of_many_ages(store, mode)
    told = {r["number"]: r for r in rows(run, "ready_groups", run=mode)}
    assert sorted(told) == [0, 1, 2, 4, 6], "a version that is not known is never ready"
    for each in states.StalenessMode:
        source, lag, ready = staleness.ready_groups(run.id, each)
        query = sa.select(staleness.group.c.number, lag.label("lag")).select_from(source).where(ready)
        with run.database.reading() as connection:
            wanted = {r.number: r.lag for r in connection.execute(query)}
        assert {n: r[f"staleness_{each}"] for n, r in told.items()} == wanted, each
        if each == mode:
            assert {n: r["staleness"] for n, r in told.items()} == wanted
            inside = {n: int(lag is not None and lag <= 2) for n, lag in wanted.items()}
            assert {n: r["in_window"] for n, r in told.items()} == inside and set(inside.values()) == {0, 1}
            assert set(wanted.values()) > {0} and len(set(wanted.values())) >= 3, "they differ in age"
    with run.batch(step=3, groups=sum(inside.values()), timeout=0) as batch:
        assert {g.number for g in batch.groups} == {n for n, yes in inside.items() if yes}


def test_waiting_is_counted_by_the_databases_clock(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    f.finish_all(run, f.register(run))
    f.execute(run, "UPDATE sample_group SET ready_at = ready_at - 60")
    (ready,) = rows(run, "ready_groups")
    assert 60 <= ready["waited_s"] < 600
    assert (ready["dataset"], ready["n_samples"], ready["n_tokens"], ready["in_window"]) == ("default", 2, 6, 1)


def test_an_older_run_without_a_setting_has_its_default(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_staleness=0, stale="skip")
    f.finish_all(run, f.register(run))
    run.publish_weights(step=1)
    assert [(r["staleness"], r["max_staleness"], r["in_window"]) for r in rows(run, "ready_groups")] == [(1, 0, 0)]
    f.execute(run, "UPDATE run SET settings = '{}'")
    assert [(r["staleness"], r["max_staleness"], r["in_window"]) for r in rows(run, "ready_groups")] == [(1, 1, 1)]


def test_fates_are_the_ledgers(store: Store) -> None:
    run = f.make_run(store, prompts=4)
    worker = f.register(run)
    claims = run.claim(worker, 8)
    for claim in claims[:6]:
        f.answer(run, claim)
    f.add(run, claims[6], 5, None)
    f.add(run, claims[7], 2)
    run.release(claims[7], "shutdown")
    run.drop([claims[0].group_id], "operator")
    f.make_run(store, "other")
    told, ledger = rows(run, "token_fate", run="r"), run.ledger(exact=True)
    assert ledger["closed"]
    by_fate: Counter[str] = Counter()
    for row in told:
        by_fate[row["fate"]] += row["tokens"]
    assert dict(by_fate) == {fate: n for fate, n in ledger["by_fate"].items() if n}
    assert {(r["fate"], r["reason"]): r["tokens"] for r in told if r["reason"]} == {("dropped", "operator"): 6}
    assert [r["tokens"] for r in told if r["version"] is None] == [5]
    assert {type(r["tokens"]) for r in told} == {int}


def _call(run: Run, claim: Any, rid: str, engine: str, n: int, reason: str, **info: Any) -> None:
    run.begin_request(claim, rid, engine, resumes=claim.n_tokens > 0)
    f.add(run, claim, n, 0, reason, rid=rid, engine=engine)
    run.end_request(RequestInfo(rid, engine, finish_reason=reason, **info))


def test_causes_of_aborts_name_engine_worker_and_what_they_cost(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        info = {"generated_tokens": 6, "prompt_tokens": 3, "cached_tokens": 0, "lost_reason": "cut"}
        _call(run, claim, f"a{claim.index}", f"http://e{claim.index}", 4, "abort", **info)
        run.release(claim, "weight update")
    run.publish_weights(step=1)
    for claim in run.claim(worker, 2):
        info = {"generated_tokens": 2, "prompt_tokens": 7, "cached_tokens": 5}
        if claim.index:
            _call(run, claim, "b1", "http://e1", 2, "stop", **info)
            run.finish(claim)
        else:
            run.begin_request(claim, "b0", "http://e0", resumes=True)
    f.kill(run, worker)
    other = f.register(run)
    (claim,) = run.claim(other, 1)
    run.fail(claim, "no engine answered")
    told = {(r["kind"], r["engine"], r["worker_id"]): r for r in rows(run, "abort_causes")}
    aborts = {
        (kind, engine, by): (r["reason"], r["version"], r["times"], r["tokens_kept"], r["tokens_lost"],
                             r["prefilled_again"])
        for (kind, engine, by), r in told.items()
    }  # fmt: skip
    assert aborts == {
        ("abort", "http://e0", worker): ("engine", 0, 1, 4, 2, 0),
        ("abort", "http://e1", worker): ("engine", 0, 1, 4, 2, 2),
        ("reap", "http://e0", worker): ("worker dead", None, 1, 4, 0, 0),
        ("fail", None, other): ("no engine answered", None, 1, 0, 0, 0),
    }
    assert sum(r["times"] for r in told.values() if r["kind"] == "abort") == 2


def test_rewards_by_version(store: Store) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"])
    run.add_prompts([{"prompt_ids": [8]}], dataset="test", evaluation=True)
    worker = f.register(run)
    for claim in run.claim(worker, 4):
        f.answer(run, claim, 2 + claim.index, 0, "length" if claim.index else "stop")
    for stage, reward in zip(run.claim_stages(worker, 3), (0.0, 1.0, 0.5), strict=True):
        run.score(stage, reward)
    run.publish_weights(step=7)
    for claim in run.claim(worker, 8):
        f.answer(run, claim, 3, 1)
    run.start_evaluation("test", 1)
    (claim,) = run.claim(worker, 1)
    f.answer(run, claim, 50, 1)
    old, new = sorted(rows(run, "version_rewards"), key=lambda r: r["version"])
    assert (old["version"], old["step"], old["samples"], old["scored"]) == (0, None, 4, 3)
    assert old["reward_mean"] == 0.5 and old["reward_std"] == pytest.approx((0.5 / 3) ** 0.5)
    assert (old["truncated_ratio"], old["mean_tokens"]) == (0.5, 2.5)
    assert (new["version"], new["step"], new["samples"], new["reward_mean"], new["mean_tokens"]) == (1, 7, 4, None, 3.0)


def test_rewards_whose_squares_are_no_numbers(store: Store) -> None:
    """Older releases stored any finite number, and PostgreSQL refuses a product that comes to 0 or to infinity."""
    run = f.make_run(store, prompts=2, stages=["reward"])
    trainer = f.register(run, "trainer")
    f.finish_all(run, f.register(run))
    f.commit(run, f.lease(run, trainer, 0) or 0, trainer)
    for rewards, mean, std in (
        ([1e-200, 5e-324, -1e-170, 0.0], 0.0, 0.0),
        ([1e-200, 1.0, 1.0, 2.0], 1.0, 0.5**0.5),
        ([1e-200, None, -1e-99, 1e-99], 0.0, 1e-99 * (2 / 3) ** 0.5),
        ([1e300, 1e300, 0.0, 0.0], 5e49, 5e49),
        ([-1e300, 1.7e308, -1.7e308, 1e300], 0.0, 1e50),
    ):
        for index, reward in enumerate(rewards):
            f.execute(run, 'UPDATE sample SET reward = :v WHERE (group_id * 2 + "index") % 4 = :i', v=reward, i=index)
        (told,) = rows(run, "version_rewards")
        assert (told["samples"], told["scored"]) == (4, sum(r is not None for r in rewards))
        near = pytest.approx((mean, std), rel=1e-9, abs=0.0)
        assert (told["reward_mean"], told["reward_std"]) == near, rewards
        (step,) = rows(run, "batch_steps")
        assert step["reward_mean"] == told["reward_mean"]
    f.execute(run, "UPDATE sample_group SET reward_mean = (2 * number - 1) * 1e300, reward_std = 1e300 * number")
    (batch,), metrics = batch_list.page(store.database, run.id), run.metrics()
    assert batch["reward_mean"] == metrics[f"{PREFIX}batch/reward_mean"] == 0.0
    assert metrics[f"{PREFIX}batch/reward_std"] == 5e49


def test_equal_rewards_have_no_deviation(store: Store) -> None:
    """0.1 has no exact square: the variance comes out below zero, whose root PostgreSQL refuses."""
    run = f.make_run(store, prompts=6, stages=["reward"], groups_per_step=6)
    worker = f.register(run)
    f.finish_all(run, worker, reward=0.1)
    (row,) = rows(run, "version_rewards")
    assert row["reward_std"] == pytest.approx(0.0, abs=1e-8) and row["scored"] == 12


def test_batches_of_a_step_that_was_trained_twice(store: Store) -> None:
    run = f.make_run(store, prompts=2, stages=["reward"])
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker, reward=0.5)
    for step in (0, 1):
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.publish_weights(step=step)
    run.rewind(step=0)
    batch = f.lease(run, trainer, 1, 1)
    told = rows(run, "batch_steps")
    assert [(r["timeline"], r["step"], r["state"]) for r in told] == [
        (0, 0, "committed"), (0, 1, "rewound"), (1, 1, "leased"),
    ]  # fmt: skip
    assert [(r["staleness_max"], r["staleness_mean"]) for r in told] == [(0, 0.0), (1, 1.0), (1, 1.0)]
    assert [(r["n_samples"], r["reward_mean"], r["truncated_ratio"]) for r in told] == [(2, 0.5, 0.0)] * 3


def test_a_role_that_may_only_read(postgres_url: str) -> None:
    """What docs/howto/sql.md tells an operator to run; and it holds for views that a later upgrade makes anew."""
    (block,) = [b for b in page("docs/howto/sql.md").blocks if "CREATE ROLE reader" in b.text]
    role = f"reader_{uuid.uuid4().hex}"  # roles belong to the server, which tests share
    with samplestore.open(postgres_url) as store:
        run = f.make_run(store, prompts=1)
        f.finish_all(run, f.register(run))
        try:
            for statement in block.text.replace("reader", role).split(";")[:-1]:
                f.execute(run, statement)
            with store.database.writing() as connection, migrations.views_aside(connection):
                pass
            with store.database.reading() as connection:
                connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
                for view in views.VIEWS:
                    connection.execute(sa.select(view.table)).all()
                assert len(connection.execute(sa.select(views.BY_NAME["ready_groups"].table)).all()) == 1
            with pytest.raises(DatabaseUnusable, match="permission denied"):
                with store.database.writing() as connection:
                    connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
                    connection.exec_driver_sql("UPDATE sample SET reward = 1")
        finally:
            f.execute(run, f"DROP OWNED BY {role}")
            f.execute(run, f"DROP ROLE {role}")
