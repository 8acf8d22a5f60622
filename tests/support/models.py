"""Tiny random models in folders that the embedded engine and every SGLang release of the table can serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]

VOCAB, EOS = 384, 1
EXPERTS, TOP_K, LAYERS = 8, 2, 2
CORPUS = [
    "samples are stored before they are acknowledged",
    "What is 17 + 25? The answer is 42.",
    "for step in range(10): print(step * step)",
    "<think>carry the one</think> 3 * 4 = 12, naïve café déjà vu",
]


def build_tokenizer(folder: Path, vocab_size: int = VOCAB, special: Sequence[str] = ()) -> None:
    """A byte-level BPE tokenizer with <|end|> (id 1) as its end token; other special ones have the ids from 2 on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    fast: Any = PreTrainedTokenizerFast
    others = {"extra_special_tokens": list(special)} if special else {}
    fast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", **others).save_pretrained(folder)
    # transformers 4 (SGLang 0.5.9) does not know the class that transformers 5 writes.
    patch(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def build_model(folder: Path, seed: int, kind: Kind = "llama", hidden: int = 64, context: int = 1024) -> Path:
    """Save a random 2-layer model and its tokenizer in `folder`; the seed decides the weights."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(folder)
    torch.manual_seed(seed)
    model = _model(kind, hidden, context)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that the distribution is far from uniform, so that a wrong cache shows in the log-probs.
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    # The names of transformers 4: without them SGLang 0.5.9 reads other rotary frequencies, or fails.
    older: dict[str, Any] = {"rope_theta": 10000.0, "torch_dtype": "float32"}
    if kind == "qwen3_moe":
        older["num_experts"] = EXPERTS
    patch(folder / "config.json", **older)
    return folder


def _model(kind: Kind, hidden: int, context: int) -> Any:
    import transformers as t

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "tie_word_embeddings": kind == "qwen2",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**shape))
    if kind == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**shape))
    shape["head_dim"] = hidden // 4
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**shape))
    experts: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": hidden // 2,
    }
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True))


def with_nan(folder: Path, source: Path) -> Path:
    """A copy of the model in `source` whose logits are all NaN."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def patch(file: Path, drop: str = "", **values: Any) -> None:
    """Set values of a JSON object in a file, and leave one out."""
    known = json.loads(file.read_text())
    known.pop(drop, None)
    file.write_text(json.dumps({**known, **values}, indent=2))
