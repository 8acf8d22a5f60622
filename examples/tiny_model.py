"""A tiny Llama, made on the spot: random weights, one token per character, nothing to download.

The folder that `build` writes is an ordinary Hugging Face checkpoint (config.json, model.safetensors, tokenizer.json,
tokenizer_config.json), so engines, trainer and dashboard treat it like any other model.

    python -m samplestore.examples.tiny_model DIRECTORY --seed 0
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path
from typing import Any

PAD, EOS, USER, ASSISTANT, UNKNOWN = "<pad>", "<eos>", "<user>", "<assistant>", "<unk>"
SPECIAL = (PAD, EOS, USER, ASSISTANT, UNKNOWN)
CHARACTERS = string.ascii_lowercase + string.digits + " .,:!?'-\n"
EOS_ID = SPECIAL.index(EOS)
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ ('{USER}' if message['role'] == 'user' else '{ASSISTANT}') + message['content'] }}}}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def vocabulary() -> dict[str, int]:
    """Token text to id: the five special tokens first, then one id per character."""
    return {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}


def build(path: Path, seed: int) -> None:
    """Write a random two-layer Llama (float32, about 70 thousand weights) and its tokenizer into `path`.

    The same seed gives the same bytes, another seed other weights. `path` is made if it is missing.
    Raises FileExistsError when `path` already holds a model, since overwriting would change weights under an engine.
    """
    if (path / "model.safetensors").exists():
        raise FileExistsError(f"{path} already holds a model; build into an empty directory")
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    _write_model(path, seed)


def write_tokenizer(path: Path) -> None:
    """Only the tokenizer: for whoever has no need of weights. Needs no torch."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    # A BPE without merges is a character tokenizer; characters outside the vocabulary become <unk>.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _write_model(path: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    # Of saving 0.3 MB.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        # Tied: what attention copies out of the prompt is at once a vote for that same token, so a random model can
        # discover copying by trial and error. Untied it would first have to learn a second alphabet.
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=vocabulary()[PAD],
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Llama checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.directory, arguments.seed)
    print(f"wrote {arguments.directory}")


if __name__ == "__main__":
    main()
