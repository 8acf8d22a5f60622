"""Loading a model folder completely and safely before anything is replaced by it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .options import CheckpointError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
Shapes = dict[str, tuple[int, ...]]


def load_model(folder: str, dtype: str, expected: Shapes | None = None) -> Any:
    """The causal LM in `folder` in evaluation mode on the CPU, its parameters in memory of their own.

    `expected` (parameter name -> shape) is what the model being served has; a checkpoint that differs is refused.
    Only safetensors files are read and no code from the folder is run. Raises `CheckpointError`.
    """
    root = Path(folder)
    _check_files(root)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(
            str(root),
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{root} can't be loaded: {_short(error)}") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CheckpointError(f"{root} lacks {len(missing)} tensors, first {missing[0]}; the checkpoint is incomplete")
    if report.get("mismatched_keys"):
        raise CheckpointError(f"{root} has tensors of other shapes: {sorted(report['mismatched_keys'])[:3]}")
    if expected is not None:
        _check_same(root, expected, parameter_shapes(model), sorted(report.get("unexpected_keys") or ()))
    with torch.no_grad():
        for parameter in model.parameters():
            # Loaded parameters can be views of the memory-mapped file: a trainer that overwrites the folder would
            # change the weights being served, and one that truncates it would kill the process with SIGBUS.
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(False)
    return model.eval()


def parameter_shapes(model: Any) -> Shapes:
    """Name -> shape of every parameter of a loaded model."""
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in `folder`. Raises `CheckpointError` with what to type when there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{folder} has no usable tokenizer ({_short(error)}); add --skip-tokenizer-init to serve token ids only"
        ) from error


def eos_token_ids(folder: str, model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every id that ends a generation, from config, generation config and tokenizer."""
    found: set[int] = set()
    sources = [getattr(model.config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    if (Path(folder) / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder}/generation_config.json is not readable: {_short(error)}") from error
        sources.append(generation.eos_token_id)
    for source in sources:
        if isinstance(source, int):
            found.add(source)
        elif isinstance(source, Iterable):
            found.update(int(item) for item in source)
    return frozenset(found)


def model_limits(model: Any) -> tuple[int, int, int]:
    """(vocabulary size, longest context in tokens, layers). Raises `CheckpointError` for models it can't cache."""
    config = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    context = int(getattr(config, "max_position_embeddings", 0) or 2048)
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention"} or (not kinds and window):
        if not window or kinds - {"full_attention", "sliding_attention"}:
            raise CheckpointError(f"layers of kinds {sorted(kinds)} are not supported on the CPU; use SGLang for them")
        # Inside its window a sliding layer is the same as a full one, and the cache here knows full ones only.
        context = min(context, int(window))
    return int(model.get_input_embeddings().weight.shape[0]), context, int(config.num_hidden_layers)


def _check_files(root: Path) -> None:
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder; give one with config.json and *.safetensors")
    if not (root / "config.json").is_file():
        raise CheckpointError(f"{root} has no config.json; give a Hugging Face model folder")
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{root} has no *.safetensors file; save the model with safe serialization")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (safe_open isn't iterable)
                    kind = opened.get_slice(name).get_dtype()
                    if kind not in _FLOATS:
                        raise CheckpointError(f"{file} stores {name} as {kind}; only float tensors can be served")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged or cut short: {_short(error)}") from error
    try:
        AutoConfig.from_pretrained(str(root), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{root}/config.json can't be used: {_short(error)}") from error


def _check_same(root: Path, expected: Shapes, found: Shapes, unexpected: list[str]) -> None:
    if unexpected:
        raise CheckpointError(f"{root} has {len(unexpected)} tensors that the model lacks, first {unexpected[0]}")
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{root} doesn't fit the model being served: {name} is {found.get(name)}, served {expected.get(name)}"
            )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
