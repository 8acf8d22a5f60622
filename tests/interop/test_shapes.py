"""Batches in the shapes of verl, AReaL, prime-rl and SkyRL: what their code reads, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tensordict

import samplestore
from samplestore import Store
from samplestore.batch import Batch
from samplestore.errors import BatchTimeout, InvalidSegment, InvalidSetting, SampleStoreError
from samplestore.interop import areal, prime_rl, skyrl, trl, verl
from samplestore.portable.samples import PortableSample

from ..support import factory as f

LP = f.logprobs_of(3)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    """SQLite only: a converter reads a batch, and that both databases give the same batch is tested elsewhere."""
    with samplestore.open(sqlite_url) as opened:
        yield opened


def batch_of(store: Store) -> Batch:
    """Two groups. Of the first, sample 0 is [1 2 1] + 2 tokens, 1 of a tool, 1 of newer weights; sample 1 is 3 tokens,
    truncated. Of the second, the reward of sample 0 could not be read."""
    run = f.make_run(store, prompts=2, stages=["reward"], max_staleness=1)
    worker = f.register(run)
    first, second, *others = run.claim(worker, 9)
    f.add(run, first, 2)
    run.append(first, [90], None, None, kind="environment")
    run.publish_weights(step=0)
    run.append(first, [7], [-2.0], 1, "stop")
    run.finish(first)
    for claim in (second, *others):
        f.answer(run, claim, 3, reason="length" if claim is second else "stop")
    for stage, value in zip(run.claim_stages(worker, 9), [1.0, 0.0, None, 0.5], strict=True):
        run.unparsed(stage, "no number") if value is None else run.score(stage, value)
    return run.batch(step=1, groups=2)


def test_verl(store: Store) -> None:
    batch = batch_of(store)
    made = verl.dataproto(batch, pad_token_id=99, prompt_length=4, torch=False)
    tensors: dict[str, Any] = made["batch"]
    assert {k: (v.dtype.name, v.shape) for k, v in tensors.items()} == {
        **dict.fromkeys(("prompts", "responses", "response_mask"), ("int64", (4, 4))),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), ("int64", (4, 8))),
        **dict.fromkeys(("rollout_log_probs", "rm_scores"), ("float32", (4, 4))),
    }
    assert tensors["input_ids"][:2].tolist() == [[99, 1, 2, 1, 10, 11, 90, 7], [99, 1, 2, 1, 10, 11, 12, 99]]
    assert tensors["attention_mask"][1].tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    assert tensors["position_ids"][1].tolist() == [0, 0, 1, 2, 3, 4, 5, 5], "as verl counts them"
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert tensors["rollout_log_probs"][0].tolist() == [*LP[:2], 0.0, -2.0]
    assert tensors["rm_scores"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0.5, 0]]
    objects = made["non_tensor_batch"]
    assert objects["uid"].tolist() == ["1", "1", "2", "2"] and objects["__num_turns__"].tolist() == [2, 1, 1, 1]
    assert (objects["min_global_steps"][0], objects["max_global_steps"][0]) == (0, 1)
    assert made["meta_info"]["global_steps"] == 1
    with pytest.raises(InvalidSetting, match="at least 4"):
        verl.dataproto(batch, response_length=3)


def test_verl_keys_and_values(store: Store) -> None:
    values = verl.KeyValues(batch_of(store))
    assert values.keys == ["1_0_0", "1_1_0", "2_0_0", "2_1_0"]
    listed = values.kv_list()["train"]
    assert listed["1"] == {"is_prompt": True, "status": "finished", "global_steps": 1}
    assert listed["1_0_0"] == {
        "status": "success", "prompt_len": 3, "response_len": 4, "seq_len": 7, "global_steps": 1,
        "min_global_steps": 0, "max_global_steps": 1,
    }  # fmt: skip
    got = values.kv_batch_get(["2_1_0", "1_0_0"], "train", ["responses", "rm_scores"])
    assert isinstance(got, tensordict.TensorDict) and tuple(got.batch_size) == (2,)
    assert [row.tolist() for row in got["responses"].unbind()] == [f.ids_of(3), [10, 11, 90, 7]]
    assert [row.tolist() for row in got["rm_scores"].unbind()] == [[0, 0, 0.5], [0, 0, 0, 1]]
    with pytest.raises(KeyError):
        values.kv_batch_get("1_0_0", "val")


def told(sample: PortableSample) -> list[tuple[Any, ...]]:
    return [(p.n_tokens, p.kind, p.loss, p.version_min, p.version_max) for p in sample.pieces]


def test_areal_both_ways(store: Store) -> None:
    batch = batch_of(store)
    first, second = areal.trajectories(batch, torch=False)
    assert {k: (v.dtype.name, v.shape) for k, v in first.items()} == {
        **dict.fromkeys(("input_ids", "loss_mask", "versions"), ("int32", (2, 7))),
        "logprobs": ("float32", (2, 7)), "attention_mask": ("bool", (2, 7)), "rewards": ("float32", (2,)),
    }  # fmt: skip
    assert first["versions"].tolist() == [[-1, -1, -1, 0, 0, -1, 1], [-1, -1, -1, 0, 0, 0, 0]]
    assert first["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 0]]
    assert first["logprobs"][0].tolist() == [0, 0, 0, *LP[:2], 0, -2.0]
    assert first["attention_mask"][1].tolist() == [True] * 6 + [False]
    assert (first["rewards"].tolist(), second["rewards"].tolist()) == ([1.0, 0.0], [0.5, 0.5])
    back = areal.samples_of(areal.trajectories(batch)[0])
    assert told(back[0]) == [
        (2, "generated", 1, 0, 0), (1, "environment", 0, None, None), (1, "generated", 1, 1, 1),
    ]  # fmt: skip
    for mine, theirs in zip(batch.groups[0].samples, back, strict=True):
        assert mine.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert mine.response_ids.tolist() == theirs.response_ids.tolist()
        assert theirs.rollout_log_probs is not None and mine.logprobs.tolist() == theirs.rollout_log_probs.tolist()
        assert (mine.versions.tolist(), mine.loss_mask.tolist(), mine.reward) == (
            theirs.weight_versions.tolist(), theirs.loss_mask.tolist(), theirs.reward,
        )  # fmt: skip


@pytest.mark.parametrize(
    "field, value",
    [
        ("logprobs", None), ("versions", [[-1, 0]]), ("loss_mask", [[0, 0, 2]]), ("versions", [[-1, -2, 0]]),
        ("attention_mask", [[0, 1, 1]]), ("loss_mask", [[0, 0, 0]]), ("rewards", [1.0, 2.0]),
        ("logprobs", [[0.0, -1.0, float("nan")]]), ("input_ids", [[1, -5, 3]]), ("versions", [[-1, 2**40, 5]]),
        ("versions", [[-1, 1.5, 5]]), ("loss_mask", [[0, 0.5, 1]]), ("rewards", [float("nan")]), ("rewards", ["x"]),
        ("input_ids", [[1, 2], [3]]), ("logprobs", [[0, None, 1]]),
    ],
)  # fmt: skip
def test_areal_arrays_that_disagree(field: str, value: Any) -> None:
    good = {
        "input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "logprobs": [[0.0, -1.0, -2.0]],
        "versions": [[-1, 5, 5]] if field != "loss_mask" else [[-1, -1, -1]], "attention_mask": [[1, 1, 1]],
        "rewards": [1.0],
    }  # fmt: skip
    if field != "loss_mask":
        assert told(areal.samples_of(good)[0]) == [(2, "generated", 1, 5, 5)]
    with pytest.raises(InvalidSegment) as refused:
        areal.samples_of({**good, field: value})
    assert refused.value.field == field


def test_prime_rl(store: Store) -> None:
    batch = batch_of(store)
    made = prime_rl.training_samples(batch, env_name="gsm8k", temperature=0.5, experts={1: np.zeros((6, 2, 4), "i2")})
    one = made[0]
    assert one["token_ids"] == [1, 2, 1, 10, 11, 90, 7]
    assert one["mask"] == [False] * 3 + [True, True, False, True]
    assert one["logprobs"] == [0.0] * 3 + [*LP[:2], 0.0, -2.0] and one["temperatures"] == [0.5] * 7
    advantage = float(batch.arrays()["advantages"][0])
    assert one["advantages"] == [0.0] * 3 + [advantage] * 4 and advantage > 0
    assert made[2]["advantages"] == [0.0] * 6, "the reward could not be read"
    assert (one["env_name"], one["reward"]) == ("gsm8k", 1.0)
    experts = one["routed_experts"]
    assert (experts["shape"], experts["dtype"], len(experts["data"])) == ([6, 2, 4], "int16", 96)
    back = prime_rl.sample_of(one)
    assert (back.prompt_ids.tolist(), back.response_ids.tolist()) == ([1, 2, 1], [10, 11, 90, 7])
    assert told(back) == [
        (2, "generated", 1, None, None), (1, "environment", 0, None, None), (1, "generated", 1, None, None),
    ]  # fmt: skip
    for bad in (
        {"mask": [True]}, {"mask": [False] * 7}, {"logprobs": [0.0]}, {"token_ids": None}, {"mask": ["x"] * 7},
        {"logprobs": "-1"}, {"reward": "x"}, {"reward": float("nan")}, {"reward": 1e300},
    ):  # fmt: skip
        with pytest.raises(InvalidSegment) as refused:
            prime_rl.sample_of({**one, **bad})
        assert refused.value.field in bad


def test_prime_rl_on_its_wire(store: Store) -> None:
    """msgspec, which prime-rl sends its samples with, on a struct that is declared as its own."""
    fields = [
        ("token_ids", list[int]), ("mask", list[bool]), ("logprobs", list[float]), ("temperatures", list[float]),
        ("env_name", str), ("reward", float | None, None), ("advantages", list[float] | None, None),
    ]  # fmt: skip
    kind = msgspec.defstruct("TrainingSample", fields, array_like=True, omit_defaults=True)
    made = [kind(**fields) for fields in prime_rl.training_samples(batch_of(store), env_name="gsm8k")]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=list[kind]) == made  # type: ignore[valid-type]


def test_skyrl(store: Store) -> None:
    made = skyrl.generator_output(batch_of(store))
    assert made["prompt_token_ids"] == [[1, 2, 1]] * 2 + [[1, 2, 0]] * 2
    assert made["response_ids"][0] == [10, 11, 90, 7] and made["loss_masks"][0] == [1, 1, 0, 1]
    assert made["rollout_logprobs"][0] == [*LP[:2], 0.0, -2.0]
    assert made["rewards"] == [1.0, 0.0, 0.5, 0.5] and made["stop_reasons"] == ["stop", "length", "stop", "stop"]
    assert [t.to_string() for t in made["trajectory_ids"]] == ["1_0", "1_1", "2_0", "2_1"]
    assert made["rollout_metrics"] is None and len(made) == 14


def trainer_of(process: int = 0, processes: int = 1, **more: Any) -> Any:
    """What StoreRollouts reads of TRL's trainer."""
    accelerator = SimpleNamespace(num_processes=processes, process_index=process, is_main_process=process == 0)
    given = {
        "state": SimpleNamespace(global_step=0), "model": SimpleNamespace(training=True), "num_generations": 2,
        "accelerator": accelerator, "args": SimpleNamespace(steps_per_generation=1), **more,
    }  # fmt: skip
    return SimpleNamespace(**given)


def test_trl_gives_each_process_its_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=3)
    f.finish_all(run, f.register(run), reward=0.5)
    sent: list[Any] = []
    monkeypatch.setattr(trl, "_broadcast", lambda made: sent[-1:] if made == [None] else (sent.extend(made), made)[1])
    rollouts, parts = trl.StoreRollouts(run), []
    for process in range(2):
        rollouts._last = None  # each process has its own
        parts.append(rollouts(["a"] * 3, trainer_of(process, 2, num_generations=2)) if process else None)
        parts[-1] = parts[-1] or rollouts(["a"] * 2, trainer_of(0, 2))
    assert [len(p["prompt_ids"]) for p in parts if p] == [2, 1]


def test_trl_tells_every_process_what_went_wrong(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(trl, "_broadcast", lambda made: sent if made == [None] else (sent.extend(made), made)[1])
    run = f.make_run(store)
    mine, theirs = (trl.StoreRollouts(run, timeout=0) for _ in range(2))
    with pytest.raises(BatchTimeout):
        mine(["a"] * 2, trainer_of(0, 2))
    with pytest.raises(SampleStoreError, match=r"the main process has no batch .* BatchTimeout: no batch"):
        theirs(["a"] * 2, trainer_of(1, 2))


@pytest.mark.parametrize(
    "change, name",
    [
        ({"num_generations": 3}, "num_generations"), ({"model": SimpleNamespace(training=False)}, "eval_strategy"),
    ],
)  # fmt: skip
def test_trl_refuses_what_would_not_fit(store: Store, change: dict[str, Any], name: str) -> None:
    run = f.make_run(store, prompts=4, max_staleness=3)
    f.finish_all(run, f.register(run))
    rollouts = trl.StoreRollouts(run, timeout=5)
    with pytest.raises(InvalidSetting, match=name):
        rollouts(["a"] * 2, trainer_of(**change))
    with pytest.raises(InvalidSetting, match="whole groups"):
        rollouts(["a"] * 3, trainer_of())
    rollouts._last = None
    assert rollouts(["a"] * 2, trainer_of())["completion_ids"] == [f.ids_of(3)] * 2
    with pytest.raises(InvalidSetting, match="steps_per_generation"):
        rollouts(["a"] * 2, trainer_of())
