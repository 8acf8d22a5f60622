"""What a stage of a group is given of samples that were forked: what they are, and no emptied ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplestore import Store
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import episodes, fanout
from samplestore.workers.filters import Filterer
from samplestore.workers.rewards import RewardSample
from samplestore.workers.scoring import RewardStage

from ..support import factory as f

OWN = [900, 901, 902]


def opened(store: Store, **settings: Any) -> tuple[Run, Claim]:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=0, group_stages=["rank"], **settings
    )
    (claim,) = run.claim(f.register(run), 1)
    f.add(run, claim, 5)
    claim.response_ids = np.array(f.ids_of(5), np.int32)
    return run, claim


def fork(run: Run, claim: Claim, number: int, upto: int | None = None) -> Claim:
    prompt = np.array(OWN, np.int32) if upto is None else None
    return run.transact(lambda tx: fanout.fork(tx, claim, number, f"k{number}", {"n": number}, number, upto, prompt))


def test_a_filter_sees_a_fork_with_the_index_of_its_rollout(store: Store) -> None:
    """Group 0 has the indices 0 and 1 of the run; its forks must not have those of group 1."""
    run = f.make_run(store, prompts=2, group_filters=["custom"])
    claims = run.claim(f.register(run), 4)
    for claim in claims:
        f.add(run, claim, 5)
    child = fork(run, claims[1], 0)
    f.add(run, child, 2, finish_reason="stop")
    run.transact(lambda tx: episodes.finish(tx, child, "completed", "stop", False, None))
    run.transact(lambda tx: fanout.end(tx, claims[1], "completed", "stop", False, None))
    for claim in (claims[0], *claims[2:]):
        run.finish(claim, "completed")
    seen: list[list[int]] = []
    for stage in run.claim_stages(claims[0].owner, 10):
        filterer = Filterer(run.settings, None)  # type: ignore[arg-type]
        seen.append([filterer._sample(stage, place)["index"] for place in range(len(stage.members))])
    assert seen == [[0, 1, 1], [2, 3]]


class Words:
    def decode(self, ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


def test_members_have_what_came_before_them(store: Store) -> None:
    run, root = opened(store)
    agent, branch = fork(run, root, 0), fork(run, root, 1, upto=4)
    for claim in (agent, branch):
        f.add(run, claim, 2, finish_reason="stop")
        run.transact(lambda tx, c=claim: episodes.finish(tx, c, "completed", "stop", False, None))  # type: ignore[misc]
    run.transact(lambda tx: fanout.end(tx, root, "completed", "stop", False, None))
    (rank,) = run.claim_stages(root.owner, 10)
    told = {m.sample_id: (m.prompt_ids.tolist(), m.response_ids.tolist()) for m in rank.members}
    assert [(m.index, m.root) for m in rank.members] == [(0, 0), (1, 0), (2, 0)]
    prompt, two = [1, 2, 0], f.ids_of(2)
    assert told == {
        root.sample_id: (prompt, f.ids_of(5)),
        agent.sample_id: (OWN, two),
        branch.sample_id: ([*prompt, *f.ids_of(4)], two),
    }
    made: list[RewardSample] = [RewardStage(None, Words()).sample(rank, m) for m in rank.members]  # type: ignore[arg-type]
    seen = {s.sample_id: s for s in made}
    assert (seen[agent.sample_id].tokens, seen[agent.sample_id].response_length) == ([*OWN, *two], 2)
    assert seen[agent.sample_id].response == Words().decode(two)
    run.score_group(rank, [0.0, 1.0, 0.5])
    f.sound(run)


def test_an_emptied_fork_is_no_member(store: Store) -> None:
    """A judge would see an empty answer, and its reward would count in the group's mean."""
    run, root = opened(store)
    f.add(run, fork(run, root, 0, upto=4), 2)
    run.requeue([root.sample_id], "again")
    (again,) = run.claim(root.owner, 1)
    f.add(run, again, 5)
    run.transact(lambda tx: fanout.end(tx, again, "completed", "stop", False, None))
    (rank,) = run.claim_stages(root.owner, 10)
    assert [m.sample_id for m in rank.members] == [root.sample_id]
    run.score_group(rank, [1.0])
    group = f.group(run, root.group_id)
    assert (group["state"], group["reward_mean"]) == ("ready", 1.0)
    f.sound(run)
