"""Checkpoints that are whole or absent: model, tokenizer, optimizer and the step, in a folder that engines can load.

    CHECKPOINTS/step-000017/    config.json model.safetensors tokenizer.json ... optimizer.safetensors trainer.json

A save writes into a hidden folder beside it, forces that to the disk and renames it. Whoever reads `step-000017`, be it
an engine or the trainer after a crash, finds a complete checkpoint or none. Nothing is pickled: loading runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(Exception):
    """A checkpoint that cannot be read or must not be replaced; the message says which and what to do."""


def folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def saved_steps(root: Path) -> list[int]:
    """The steps of all complete checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(_NAME.fullmatch(entry.name), entry) for entry in root.iterdir()]
    return sorted(int(name[1]) for name, entry in found if name is not None and entry.is_dir())


def save(root: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, tokenizer_from: Path) -> Path:
    """Write the checkpoint of `step` and return its folder. `model` is a transformers model; the tokenizer's files are
    copied from the folder `tokenizer_from`. Raises CheckpointError if that step is saved already."""
    target = folder(root, step)
    if target.exists():
        raise CheckpointError(f"{target} exists; a saved checkpoint is never changed, since engines may be reading it")
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{target.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)  # what a killed trainer left behind
    partial.mkdir()
    model.save_pretrained(partial)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copyfile(tokenizer_from / name, partial / name)
    _save_optimizer(partial / "optimizer.safetensors", model, optimizer)
    (partial / "trainer.json").write_text(json.dumps({"step": step}) + "\n")
    # Without these the rename could reach the disk before the bytes do: a complete name on an empty file.
    for path in (*partial.iterdir(), partial):
        _sync(path)
    partial.rename(target)
    _sync(root)
    return target


def load(root: Path, step: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a checkpoint (float32, on the CPU) and its optimizer state, for `restore_optimizer`.
    Raises CheckpointError."""
    from safetensors.torch import load_file

    path = folder(root, step)
    try:
        said = json.loads((path / "trainer.json").read_text())
        if said != {"step": step}:
            raise CheckpointError(f"{path} says that it is {said}, not step {step}; it was renamed or edited")
        return load_model(path), load_file(path / "optimizer.safetensors")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it to go on from the one before it") from error


def load_model(path: Path) -> Any:
    """A float32 causal language model from a folder. Raises CheckpointError if it is none."""
    if not (path / "config.json").is_file():  # transformers would take the name for one of a model hub
        raise CheckpointError(f"{path} is no folder of a model (config.json is not there). Give one with --model")
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def _save_optimizer(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Adam's moments under the names of the parameters that they belong to."""
    import torch
    from safetensors.torch import save_file

    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}/{key}"] = torch.as_tensor(value).detach().contiguous()
    save_file(state, path)


def restore_optimizer(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Put the moments that `load` returned back. Learning rate and the like stay as `optimizer` has them."""
    parameters = dict(model.named_parameters())
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"optimizer state for {name!r}, which the model does not have")
        optimizer.state[parameters[name]][moment] = value


def discard_after(root: Path, step: int) -> list[int]:
    """Delete checkpoints beyond `step`, newest first, and say which."""
    gone = [s for s in reversed(saved_steps(root)) if s > step]
    for s in gone:
        _delete(folder(root, s))
    return gone


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. `keep` must leave what engines may still be loading."""
    for step in saved_steps(root)[:-keep]:
        _delete(folder(root, step))


def _delete(path: Path) -> None:
    # Renamed first: a trainer killed half-way through must not leave half a checkpoint under a complete name.
    doomed = path.with_name(f".{path.name}.deleted")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
