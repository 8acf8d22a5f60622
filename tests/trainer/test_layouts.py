"""Batches of made-up runs against a recomputation from what was appended: both layouts, every rank, and the replay."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.batch import Batch
from samplestore.errors import InvalidSetting
from samplestore.run import Run
from samplestore.tensors import BatchSample
from samplestore.types import Claim
from tests.support import factory as f

FIELDS = [name for name in (*vars(BatchSample), "shared", "unscored") if not name.startswith("_")]
FILL = {"tokens": 0, "position_ids": 0, "loss_mask": 0, "rollout_log_probs": 0, "weight_versions": -1}
OF_SAMPLES = ("advantages", "rewards", "rollout_mask_sums", "group_ids", "rollout_ids", "sample_ids")


def plain(value: Any) -> Any:
    return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value


@dataclass
class Written:
    """What one sample was given, token by token."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    unscored: bool = False

    def rows(self, window: int, current: int) -> dict[str, list[float]]:
        mask = [
            t and current - v <= window and not self.unscored for t, v in zip(self.trained, self.versions, strict=True)
        ]
        front = len(self.prompt)
        return {
            "tokens": [*self.prompt, *self.ids], "position_ids": list(range(front + len(self.ids))),
            "loss_mask": [0] * front + [int(on) for on in mask], "rollout_log_probs": [0.0] * front + self.logprobs,
            "weight_versions": [-1] * front + self.versions,
        }  # fmt: skip


class Maker:
    """A run whose groups, segments, versions, failures and rewards are drawn."""

    def __init__(self, store: Store, seed: int) -> None:
        self.draw = random.Random(seed)
        self.groups = self.draw.randint(2, 4)
        self.run = f.make_run(
            store, prompts=0, samples_per_prompt=self.draw.randint(2, 4), groups_per_step=self.groups, max_attempts=1,
            max_staleness=9, on_failed="short", stages=["reward"],
        )  # fmt: skip
        prompts = [[self.draw.randrange(99) for _ in range(self.draw.randint(1, 6))] for _ in range(self.groups)]
        self.run.add_prompts([{"prompt_ids": ids, "label": i} for i, ids in enumerate(prompts)])
        self.run.admit()
        worker = f.register(self.run)
        claims = self.run.claim(worker, 99)
        self.written = {c.sample_id: Written(c.prompt_ids.tolist()) for c in claims}
        self.version = 0
        for _ in range(2):
            for claim in claims:
                for _ in range(self.draw.randint(0, 2)):
                    self.append(claim, self.draw.choice(["generated", "generated", "environment"]))
            self.version = self.run.publish_weights(step=self.version).version
        for i, claim in enumerate(claims):
            self.end(claim, fails=i > 0 and self.draw.random() < 0.15)
        for stage in self.run.claim_stages(worker, 99):
            self.written[stage.sample_id].unscored = self.draw.random() < 0.2
            if self.written[stage.sample_id].unscored:
                self.run.unparsed(stage, "no number")
            else:
                self.run.score(stage, self.draw.choice([0.0, 1.0, -2.5]))

    def append(self, claim: Claim, kind: str, reason: str | None = None) -> None:
        n, made = self.draw.randint(1, 5), self.written[claim.sample_id]
        ids, generated = [self.draw.randrange(999) for _ in range(n)], kind == "generated"
        logprobs = [float(np.float32(-self.draw.random())) for _ in range(n)] if generated else None
        self.run.append(claim, ids, logprobs, self.version if generated else None, reason, kind)
        made.ids += ids
        made.logprobs += logprobs or [0.0] * n
        made.trained += [generated] * n
        made.versions += [self.version if generated else -1] * n

    def end(self, claim: Claim, fails: bool) -> None:
        if fails:
            self.run.fail(claim, "it fails")
            del self.written[claim.sample_id]
            return
        self.append(claim, "generated", "stop")
        self.run.finish(claim)

    def check(self, batch: Batch, window: int) -> dict[str, Any]:
        packed, padded = batch.arrays(), batch.arrays(layout="padded")
        with pytest.raises(InvalidSetting, match=r"'paked' .* packed \| padded\. Did you mean 'packed'\?"):
            batch.arrays(layout="paked")
        assert sorted(packed["sample_ids"].tolist()) == sorted(self.written)
        for array in (*packed.values(), *padded.values()):
            assert array.flags.c_contiguous and array.flags.aligned and array.flags.writeable, (
                "as torch.from_numpy wants"
            )
        for sample in batch.samples:
            sent = copy.copy(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sample)))))  # and on
            assert [plain(getattr(sent, name)) for name in FIELDS] == [plain(getattr(sample, name)) for name in FIELDS]
        for row, sample_id in enumerate(packed["sample_ids"].tolist()):
            start, stop = packed["cu_seqlens"][row : row + 2]
            for name, wanted in self.written[sample_id].rows(window, batch.current_version).items():
                found = packed[name][start:stop]
                assert found.tolist() == np.array(wanted, found.dtype).tolist(), name
                assert padded[name].dtype == found.dtype
                assert padded[name][row].tolist() == [
                    *found.tolist(),
                    *[FILL[name]] * (padded[name].shape[1] - len(wanted)),
                ]
            assert padded["attention_mask"][row].sum() == stop - start
        assert packed["cu_seqlens"][-1] == packed["tokens"].size
        assert packed["n_trained_tokens"] == packed["loss_mask"].sum() == padded["loss_mask"].sum()
        return packed


def rank_of(run: Run, batch: Batch, whole: dict[str, Any], budget: int) -> int:
    """Whether a rank's numbers are those of the whole batch; how many micro-batches it has."""
    mine, place = batch.arrays(), {id: i for i, id in enumerate(whole["sample_ids"].tolist())}
    at = [place[s.sample_id] for s in batch.samples]
    for name in OF_SAMPLES:
        np.testing.assert_array_equal(mine[name], whole[name][at], name)
    assert (mine["n_trained_tokens"], mine["n_rollouts"]) == (whole["n_trained_tokens"], whole["n_rollouts"])
    parts = batch.micro_batches(budget)
    for part in parts:
        assert batch.arrays(samples=part)["tokens"].size <= budget
        assert batch.arrays(samples=part, layout="padded")["tokens"].shape[0] == len(part)
    return len(parts)


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_is_what_was_appended(store: Store, seed: int) -> None:
    made = Maker(store, seed)
    run, window = made.run, seed % 3
    options: dict[str, Any] = {"stale": "mask", "max_staleness": window, "timeout": 0}
    whole = made.check(run.batch(0, **options), window)
    longest = int(np.diff(whole["cu_seqlens"]).max())
    for world in (2, 3, 5):
        ranks = [run.batch(0, rank=rank, world=world, **options) for rank in range(world)]
        assert sorted(s.sample_id for rank in ranks for s in rank.samples) == sorted(made.written)
        assert len({rank_of(run, rank, whole, longest + 3) for rank in ranks}) == 1, "as many on each"
    run.batch(0, **options).commit()
    run.publish_weights(step=0)
    f.same_arrays(run.replay(0).arrays(), whole)
    f.sound(run)


def test_samples_of_another_batch_are_refused(store: Store) -> None:
    run = f.make_run(store, groups_per_step=1)
    f.finish_all(run, f.register(run))
    first, second = (run.batch(step, timeout=0) for step in range(2))
    with pytest.raises(InvalidSetting, match="samples of this batch"):
        first.arrays(samples=second.samples)
