"""Ranks of a trainer: each reads its part of one batch, whoever comes first, and rank 0 alone settles it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from samplestore import Store, ranks
from samplestore.errors import (
    BatchReleased,
    BatchTimeout,
    InvalidSetting,
    LeaseLost,
    OnlyRankZero,
    StepAlreadyCommitted,
    TokensPruned,
    WorldMismatch,
)
from samplestore.planning import plan
from samplestore.queries import plans
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import fanout

from ..support import factory as f
from ..support.processes import wait_until_async

WAIT_S = 60.0


def ready(store: Store, prompts: int = 4, **settings: Any) -> Run:
    """Groups of two samples of 3, 8, 13, ... tokens and different rewards."""
    run = f.make_run(store, prompts=prompts, stages=["reward"], **{"max_staleness": 3, **settings})
    worker = f.register(run)
    for number, claim in enumerate(run.claim(worker, 100)):
        f.answer(run, claim, 3 + 5 * number)
    for number, stage in enumerate(run.claim_stages(worker, 100)):
        run.score(stage, float(number * number))
    return run


def died(run: Run) -> None:
    """The owner of the only batch is reaped; its heart, which is this process's, beats no more."""
    run.database.hearts[run.id].stop()
    f.kill(run, f.value(run, "SELECT owner FROM batch"))


def ids(batch: Any) -> list[int]:
    return [sample.sample_id for sample in batch.samples]


def parts(run: Run, world: int, step: int = 1, groups: int = 4) -> list[Any]:
    return [run.batch(step, groups, rank=rank, world=world, timeout=0) for rank in range(world)]


def test_each_rank_reads_its_part(store: Store) -> None:
    run = ready(store)
    zero, one, two = batches = parts(run, 3)
    whole = f.batch_of(run, zero.id, 0)
    all_ids = ids(whole)
    assert sorted(ids(zero) + ids(one) + ids(two)) == sorted(all_ids) and len(all_ids) == 8
    lengths = {s.sample_id: 3 + s.response_ids.size for s in whole.samples}
    assert zero.plan == [[all_ids[i] for i in rank] for rank in plan([lengths[i] for i in all_ids], 3)]
    together = whole.arrays(advantages="reinforce_pp")
    for batch in batches:
        assert ids(batch) == [i for i in all_ids if i in ids(batch)], "in the order of the batch"
        mine = batch.arrays(advantages="reinforce_pp")
        at = [all_ids.index(i) for i in ids(batch)]
        for name in ("advantages", "rewards", "group_ids", "rollout_mask_sums", "rollout_ids", "response_lengths"):
            assert mine[name].tobytes() == together[name][at].tobytes(), name
        assert mine["n_trained_tokens"] == together["n_trained_tokens"] == together["loss_mask"].sum()
        assert mine["n_rollouts"] == 8
        f.same_arrays(mine, whole.arrays(advantages="reinforce_pp", samples=[whole.samples[i] for i in at]))
    with zero, one, two:
        pass
    assert f.states(run) == ["consumed"] * 4
    f.sound(run)


def test_a_rank_reads_the_tokens_of_no_other(store: Store) -> None:
    """What it does not read may be gone: here the payload of another rank's sample is none."""
    run = ready(store)
    zero, one = parts(run, 2)
    f.execute(run, "UPDATE segment SET payload = :p WHERE sample_id = :s", p=b"\x00", s=ids(zero)[0])
    assert one.arrays()["tokens"].size
    with pytest.raises(TokensPruned):
        f.batch_of(run, zero.id, 0).arrays()


def test_only_rank_0_settles(store: Store) -> None:
    run = ready(store)
    zero, one = parts(run, 2)
    for settle in (one.commit, lambda: one.release("mine")):
        with pytest.raises(OnlyRankZero, match="rank 1 can't"):
            settle()
    with pytest.raises(RuntimeError, match="mine"), one:
        raise RuntimeError("mine")
    assert f.states(run) == ["leased"] * 4, "the error of another rank gives nothing back"
    with run.batch(1, 4, rank=1, world=2, timeout=0):
        pass
    assert f.states(run) == ["leased"] * 4
    zero.release("out of memory")
    with pytest.raises(BatchReleased, match="out of memory"):
        one.require_held()
    with pytest.raises(BatchReleased, match="out of memory"), one:
        pass
    with run.batch(1, 4, rank=0, world=2, timeout=0):
        pass
    for rank in (0, 1):
        with pytest.raises(StepAlreadyCommitted, match="replay"):
            run.batch(1, 4, rank=rank, world=2, timeout=0)
    f.sound(run)


def test_rank_1_comes_first(store: Store) -> None:
    run = ready(store)
    with pytest.raises(BatchTimeout, match=r"rank 0 has not leased step 1 yet.*"):
        run.batch(1, 4, rank=1, world=2, timeout=0)
    assert f.rows(run, "SELECT id FROM batch") == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.batch, 1, 4, rank=1, world=2, timeout=WAIT_S)
        zero = run.batch(1, 4, rank=0, world=2, timeout=WAIT_S)
        one = waiting.result(WAIT_S)
    assert (one.id, one.plan) == (zero.id, zero.plan)


def test_ranks_that_come_at_once(store: Store) -> None:
    run = ready(store)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(run.batch, 1, 4, rank=r, world=3, timeout=WAIT_S) for r in (0, 1, 2, 0)]
        batches = [one.result(WAIT_S) for one in asked]
    assert len({batch.id for batch in batches}) == 1
    assert all(batch.plan == batches[0].plan for batch in batches)
    assert f.states(run) == ["leased"] * 4


def test_a_batch_that_rank_0_gives_back_ends_the_wait(store: Store) -> None:
    run = ready(store)
    run.batch(1, 4, timeout=0).release("of an earlier try")

    def wait(told: str) -> float:
        """Between two looks of rank 1."""
        assert told == "rank 0 has not leased step 1 yet"
        run.batch(1, 4, rank=0, world=2, timeout=0).release("out of memory")
        return 0.0

    with pytest.raises(BatchReleased, match="out of memory"):
        ranks.join(run, 1, 2, wait)


def test_a_rank_of_another_world_waits_for_the_plan_to_be_made_anew(store: Store) -> None:
    run = ready(store)
    zero = run.batch(1, 4, rank=0, world=2, timeout=0)
    with pytest.raises(WorldMismatch, match=r"over 2 ranks.*world=3"):
        run.batch(1, 4, rank=1, world=3, timeout=0)

    def wait(told: str) -> float:
        assert told == "rank 0 holds step 1 for 2 ranks, not 3"
        run.batch(1, 4, rank=0, world=3, timeout=0)
        return 0.0

    assert ranks.join(run, 1, 3, wait).id == zero.id
    with pytest.raises(WorldMismatch):
        ranks.join(run, 1, 2, lambda told: run.settings.heartbeat_ttl_s)


@pytest.mark.parametrize("world", [1, 3, 11])
def test_another_world_shares_out_the_same_groups(store: Store, world: int) -> None:
    run = ready(store)
    before = run.batch(1, 4, rank=0, world=2, timeout=0)
    everything = [s.sample_id for s in before.samples] + ids(run.batch(1, 4, rank=1, world=2, timeout=0))
    again = run.batch(1, 4, rank=0, world=world, timeout=0)
    assert again.id == before.id, "get or create"
    batches = parts(run, world)
    read = [ids(batch) for batch in batches]
    assert sorted(id for of_rank in read for id in of_rank) == sorted(everything)
    assert sum(not of_rank for of_rank in read) == max(0, world - 8), "none is empty that need not be"
    for batch in batches[-2:]:
        assert batch.arrays()["tokens"].dtype == batch.arrays(layout="padded")["tokens"].dtype == np.int64
    if world > 1:
        with pytest.raises(WorldMismatch):
            run.batch(1, 4, rank=1, world=2, timeout=0)


def late(store: Store) -> tuple[Run, list[Claim]]:
    """Three groups that are ready, and the claims of the first one, which is not."""
    run = f.make_run(store, max_staleness=3)
    claims = run.claim(f.register(run), 100)
    for claim in claims[2:]:
        f.answer(run, claim)
    return run, claims[:2]


def numbers(batch: Any) -> list[int]:
    return [group.number for group in batch.groups]


def test_a_trainer_that_died_gets_the_same_groups_for_another_world(store: Store) -> None:
    """Those of the lease that ended, though an older one has become ready meanwhile."""
    run, first = late(store)
    before = run.batch(1, 2, rank=0, world=2, timeout=0)
    held = f.groups_of(run, before.id)
    for claim in first:
        f.answer(run, claim)
    died(run)
    with run.batch(1, 2, rank=0, world=3, timeout=WAIT_S) as after:
        assert (after.id != before.id, after.world) == (True, 3)
        assert f.groups_of(run, after.id) == held == [1, 2]
    with run.batch(2, 2, timeout=0) as batch:
        assert numbers(batch) == [0, 3]
    f.sound(run)


def test_other_wishes_get_other_groups(store: Store) -> None:
    """What was given back goes first only where the same is asked for, and all of it is ready."""
    run, first = late(store)
    run.batch(1, 2, timeout=0).release("no")
    for claim in first:
        f.answer(run, claim)
    with pytest.raises(RuntimeError), run.batch(1, 2, need_logprobs=False, timeout=0) as batch:
        assert numbers(batch) == [0, 1]
        raise RuntimeError
    run.drop([f.group_id(run, 1)], "bad")
    with run.batch(1, 2, need_logprobs=False, timeout=0) as batch:
        assert numbers(batch) == [0, 2]
    f.sound(run)


def test_the_lease_of_a_silent_rank_0_is_not_joined(store: Store) -> None:
    run = ready(store)
    zero = run.batch(1, 4, rank=0, world=2, timeout=0)
    run.database.hearts[run.id].stop()
    f.silence(run, f.value(run, "SELECT owner FROM batch"), 0.6 * run.settings.heartbeat_ttl_s)
    with pytest.raises(BatchTimeout, match="its last life did, and is silent"):
        run.batch(1, 4, rank=1, world=2, timeout=0)
    zero.release("end")


def test_a_replay_is_shared_out_as_well(store: Store) -> None:
    run = ready(store)
    zero, one = parts(run, 2)
    before = [zero.arrays(), one.arrays()]
    zero.commit()
    for rank in (0, 1):
        f.same_arrays(run.replay(1, rank=rank, world=2).arrays(), before[rank])
    again = [ids(run.replay(1, rank=rank, world=3)) for rank in range(3)]
    assert sorted(i for of_rank in again for i in of_rank) == sorted(ids(run.replay(1)))
    assert f.value(run, "SELECT count(*) FROM batch WHERE state = 'committed'") == 1


def test_forks_stay_with_their_sample(store: Store) -> None:
    run, claims = forked(store)
    read = [run.batch(0, 1, rank=rank, world=2, timeout=0) for rank in range(2)]
    assert {tuple(ids(batch)) for batch in read} == {
        (claims[1].sample_id,), (claims[0].sample_id, *(claim.sample_id for claim in claims[2:])),
    }  # fmt: skip
    one = next(batch for batch in read if len(batch.samples) == 3)
    assert one.arrays()["rollout_mask_sums"].tolist() == [5 + 2 + 1] * 3
    assert one.arrays(samples=one.samples[1:2])["rollout_mask_sums"].tolist() == [8.0], "of a part, too"
    assert [batch.arrays()["n_trained_tokens"] for batch in read] == [8 + 3] * 2
    lengths = {s.sample_id: s.prompt_ids.size + s.response_ids.size for batch in read for s in batch.samples}
    assert run.database.read(lambda c: plans.lengths(c, one.id)) == lengths


def forked(store: Store) -> tuple[Run, list[Claim]]:
    """A group of two samples; the first has two forks, one after three tokens, one with a prompt of its own."""
    run = f.make_run(store, prompts=1, groups_per_step=1)
    root, other = run.claim(f.register(run), 10)
    f.add(run, root, 5)
    root.response_ids = np.array(f.ids_of(5), np.int32)
    prompt = np.array([40, 41, 42, 43], np.int32)
    branch = run.transact(lambda tx: fanout.fork(tx, root, 0, "k0", {}, 0, 3, None))
    agent = run.transact(lambda tx: fanout.fork(tx, root, 1, "k1", {}, 1, None, prompt))
    f.add(run, branch, 2, 0, "stop"), f.add(run, agent, 1, 0, "stop")
    f.add(run, other, 3, 0, "stop")
    for claim in (branch, agent, root, other):
        run.transact(lambda tx, c=claim: fanout.end(tx, c, "completed", "stop", False, 0.5))  # type: ignore[misc]
    return run, [root, other, branch, agent]


def test_all_ranks_run_as_many_micro_batches(store: Store) -> None:
    run = ready(store)
    zero, one, two = parts(run, 3)
    numbers = []
    for batch in (zero, one, two):
        made = batch.micro_batches(60)
        numbers.append(len(made))
        assert sorted(s.sample_id for part in made for s in part) == sorted(ids(batch))
        for part in made:
            arrays = batch.arrays(samples=part)
            assert arrays["tokens"].size <= 60 and arrays["n_rollouts"] == 8
    assert len(set(numbers)) == 1 and numbers[0] > 1
    with pytest.raises(InvalidSetting, match="max_tokens"):
        one.micro_batches(30)


def test_ranks_are_checked(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    for rank, world in ((-1, 2), (2, 2), (0, 0), (True, 2), (0, 1.5)):
        for ask in (run.batch, run.replay):
            with pytest.raises(InvalidSetting, match=r"rank|world"):
                ask(1, rank=rank, world=world)  # type: ignore[operator]


# -- asyncio


def test_a_batch_for_an_event_loop(store: Store) -> None:
    run = ready(store)

    async def main() -> None:
        async with run.batch_async(1, 2, timeout=WAIT_S) as batch:
            assert len(batch.samples) == 4
        with pytest.raises(RuntimeError, match="mine"):
            async with run.batch_async(2, 2, timeout=WAIT_S):
                raise RuntimeError("mine")
        with pytest.raises(BatchTimeout):
            async with run.batch_async(3, 3, timeout=0):
                pass

    asyncio.run(main())
    assert f.states(run) == ["consumed", "consumed", "ready", "ready"]
    f.sound(run)


def test_a_cancelled_wait_leaves_no_lease(store: Store) -> None:
    """Cancelled while it waits; and when the lease is there already, but its task has not heard of it."""
    run = ready(store)

    async def ask(step: int, groups: int) -> None:
        async with run.batch_async(step, groups):
            await asyncio.Event().wait()

    async def main() -> None:
        for step, groups in ((1, 5), (2, 4)):
            task = asyncio.create_task(ask(step, groups))
            looked = "SELECT count(*) FROM worker WHERE kind = 'trainer'" if step == 1 else "SELECT count(*) FROM batch"
            await wait_until_async(lambda sql=looked: f.value(run, sql), what="the wait has begun")  # type: ignore[misc]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert f.states(run) == ["ready"] * 4
    f.sound(run)


def test_rank_0_that_was_away_cannot_commit(store: Store) -> None:
    run = ready(store)
    zero, one = parts(run, 2)
    died(run)
    with pytest.raises(LeaseLost):
        zero.commit()
    with pytest.raises(BatchReleased, match="trainer dead"):
        one.require_held()
