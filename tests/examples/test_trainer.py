"""The demo's trainer on a real store: checkpoints are whole or absent; a crash neither skips nor doubles a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from samplestore.examples import checkpoints, trainer
from samplestore.examples.checkpoints import CheckpointError
from tests.examples.conftest import N_STEPS


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def trained_groups(run: Any) -> list[list[int]]:
    return [[g.number for g in run.replay(step).groups] for step in range(1, N_STEPS + 1)]


def test_it_trains_saves_and_publishes_every_step(store: Any, run: Any, config: trainer.TrainerConfig) -> None:
    numbers = list(trainer.train(store, run, config))
    assert [n["step"] for n in numbers] == [1, 2, 3]
    assert [n["staleness_mean"] for n in numbers] == [0, 1, 2]
    root = config.checkpoints.resolve()
    known = {v.version: (v.step, v.path) for v in run.weight_versions()}
    assert known == {
        0: (None, str(root / "step-000000")),
        **{step: (step, str(root / f"step-{step:06d}")) for step in (1, 2, 3)},
    }
    assert weights(root / "step-000003") != weights(root / "step-000000")
    assert trainer.consumed_group_means(store, run) == [0.5] * 6
    assert run.check() == []
    # an engine loads such a folder like any model
    transformers.AutoTokenizer.from_pretrained(root / "step-000003")
    transformers.AutoModelForCausalLM.from_pretrained(root / "step-000003")


def test_stopped_and_started_it_ends_with_the_same_weights(
    store: Any, run: Any, config: trainer.TrainerConfig, tmp_path: Path
) -> None:
    list(trainer.train(store, run, config))
    whole = weights(config.checkpoints / "step-000003")
    run.rewind(step=0)
    again = replace(config, checkpoints=tmp_path / "again")
    list(trainer.train(store, run, replace(again, steps=1)))
    list(trainer.train(store, run, again))
    assert weights(again.checkpoints / "step-000003") == whole


def test_a_checkpoint_whose_batch_was_never_committed_is_discarded(
    store: Any, run: Any, config: trainer.TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(trainer.train(store, run, replace(config, steps=1)))
    save = checkpoints.save

    def save_and_die(*arguments: Any) -> Path:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            list(trainer.train(store, run, config))
    assert checkpoints.saved_steps(config.checkpoints) == [0, 1, 2]
    assert trainer.last_committed_step(store, run) == 1
    numbers = list(trainer.train(store, run, config))
    assert [n["step"] for n in numbers] == [2, 3]
    assert sorted(number for step in trained_groups(run) for number in step) == list(
        range(6)
    )  # none skipped, none doubled
    assert run.check() == []


def test_committed_batches_that_no_checkpoint_has_seen_are_rewound(
    store: Any, run: Any, config: trainer.TrainerConfig
) -> None:
    list(trainer.train(store, run, config))
    first = trained_groups(run)
    whole = weights(config.checkpoints / "step-000003")
    for step in (2, 3):
        for file in (folder := checkpoints.folder(config.checkpoints, step)).iterdir():
            file.unlink()
        folder.rmdir()
    numbers = list(trainer.train(store, run, config))
    assert [n["step"] for n in numbers] == [2, 3]
    assert trained_groups(run) == first
    assert weights(config.checkpoints / "step-000003") == whole
    assert [v.step for v in run.weight_versions()] == [None, 1, 2, 3, 1, 2, 3]  # restored weights are a new version
    assert run.check() == []


def test_weights_that_were_saved_but_not_published_are_published_at_the_next_start(
    store: Any, run: Any, config: trainer.TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish_weights", die)
        with pytest.raises(KeyboardInterrupt):
            list(trainer.train(store, run, config))
    assert (run.current_version, trainer.last_committed_step(store, run)) == (0, 1)
    trainer.resume(store, run, config)
    assert [(v.version, v.step) for v in run.weight_versions()] == [(0, None), (1, 1)]
    trainer.resume(store, run, config)
    assert run.current_version == 1  # once


def test_a_mistyped_checkpoint_folder_does_not_undo_the_run(
    store: Any, run: Any, config: trainer.TrainerConfig, tmp_path: Path
) -> None:
    list(trainer.train(store, run, config))
    with pytest.raises(CheckpointError, match="--checkpoints"):
        trainer.resume(store, run, replace(config, checkpoints=tmp_path / "elsewhere"))
    assert trainer.last_committed_step(store, run) == N_STEPS


def test_a_save_that_dies_leaves_no_checkpoint(config: trainer.TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.load_model(config.model)
    optimizer = trainer.new_optimizer(model, config)
    with monkeypatch.context() as patch:

        def die(path: Path, *_: Any) -> None:
            path.write_bytes(b"half")
            raise KeyboardInterrupt

        patch.setattr(checkpoints, "_save_optimizer", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(config.checkpoints, 1, model, optimizer, config.model)
    assert checkpoints.saved_steps(config.checkpoints) == []
    checkpoints.save(config.checkpoints, 1, model, optimizer, config.model)  # the remains are in nobody's way
    assert checkpoints.saved_steps(config.checkpoints) == [1]
    assert [p.name for p in config.checkpoints.iterdir()] == ["step-000001"]
    with pytest.raises(CheckpointError, match="never changed"):
        checkpoints.save(config.checkpoints, 1, model, optimizer, config.model)


def test_bytes_are_on_disk_before_the_name_is(config: trainer.TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.load_model(config.model)
    synced: list[str] = []
    monkeypatch.setattr(checkpoints, "_sync", lambda path: synced.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda a, b: (synced.append("RENAME"), rename(a, b))[1])
    saved = checkpoints.save(config.checkpoints, 1, model, trainer.new_optimizer(model, config), config.model)
    before, after = synced[: synced.index("RENAME")], synced[synced.index("RENAME") + 1 :]
    assert set(before) == {p.name for p in saved.iterdir()} | {".step-000001.partial"}
    assert after == [config.checkpoints.name]


def test_a_damaged_checkpoint_is_reported(config: trainer.TrainerConfig) -> None:
    model = checkpoints.load_model(config.model)
    saved = checkpoints.save(config.checkpoints, 1, model, trainer.new_optimizer(model, config), config.model)
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="delete it"):
        checkpoints.load(config.checkpoints, 1)
    saved.rename(checkpoints.folder(config.checkpoints, 2))
    with pytest.raises(CheckpointError, match="not step 2"):
        checkpoints.load(config.checkpoints, 2)


def test_pruning_keeps_the_newest(config: trainer.TrainerConfig) -> None:
    for step in range(5):
        checkpoints.folder(config.checkpoints, step).mkdir(parents=True)
    checkpoints.prune(config.checkpoints, keep=3)
    assert checkpoints.saved_steps(config.checkpoints) == [2, 3, 4]
    assert len(list(config.checkpoints.iterdir())) == 3
