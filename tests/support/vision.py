"""A tiny random vision-language model that every SGLang from 0.5.13 on can serve, its pictures, and what its log-probs
must be: a Qwen2.5-VL of transformers, with a processor that is written by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .models import EOS, LAYERS, VOCAB, build_tokenizer, patch

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, PLACE, VIDEO = range(2, 6)  # their ids, after those of padding and end
PATCH, MERGE = 14, 2  # pixels of a patch's side; patches of a token's side
# A line for each message. Qwen's own differs in words, not in what it writes for an image.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def build_vision_model(folder: Path, seed: int, hidden: int = 64, context: int = 1024) -> Path:
    """Save a random model of two layers for text and two for images in `folder`; the seed decides the weights."""
    import torch
    import transformers as t

    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(folder, special=SPECIAL)
    # a folder without a template ends SGLang's start: it warms up with a picture in a message
    patch(folder / "tokenizer_config.json", tokenizer_class="Qwen2TokenizerFast", chat_template=TEMPLATE)
    (folder / "preprocessor_config.json").write_text("{}")
    patch(
        folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2_5_VLProcessor", patch_size=PATCH, temporal_patch_size=2, merge_size=MERGE,
        min_pixels=(PATCH * MERGE) ** 2, max_pixels=64 * (PATCH * MERGE) ** 2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    text: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": hidden,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    places: dict[str, Any] = {
        "image_token_id": PLACE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
    }  # fmt: skip
    torch.manual_seed(seed)
    config: Any = t.Qwen2_5_VLConfig
    made = config(text_config=text, vision_config=vision, tie_word_embeddings=False, **places)
    kind: Any = t.Qwen2_5_VLForConditionalGeneration
    model = kind(made).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)  # as those of build_model
    model.save_pretrained(folder)
    # as published checkpoints of this family have it: the language model's values on the top level
    patch(folder / "config.json", drop="text_config", **text, rope_scaling=text["rope_parameters"], rope_theta=10000.0)
    return folder


def picture(seed: int, height: int = 56, width: int = 56) -> bytes:
    """A PNG of random pixels. Sides are multiples of 28, so that no processor has to resize it: a token for each
    square of 28 x 28."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def widened(ids: list[int], pictures: list[bytes]) -> list[int]:
    """The prompt as the model sees it: each place as often as its picture has tokens."""
    tokens = iter([_patches(one)[1].prod() // MERGE**2 for one in pictures])
    return [token for id in ids for token in [id] * (int(next(tokens)) if id == PLACE else 1)]


def load_vision(folder: Path) -> Any:
    import torch
    import transformers as t

    loader: Any = t.Qwen2_5_VLForConditionalGeneration
    return loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def logprobs(
    model: Any, prompt: list[int], pictures: list[bytes], response: list[int], banned: list[int]
) -> npt.NDArray[np.float64]:
    """Log-probs of a response at temperature 1, with logits of minus infinity for the banned ids: float64 [n]."""
    import torch

    ids = torch.tensor([[*widened(prompt, pictures), *response]])
    given: dict[str, Any] = {"mm_token_type_ids": (ids == PLACE).long()}
    if pictures:
        made = [_patches(one) for one in pictures]
        given["pixel_values"] = torch.tensor(np.concatenate([patches for patches, _ in made]))
        given["image_grid_thw"] = torch.tensor(np.stack([grid for _, grid in made]))
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0].double()
        logits[:, banned] = -torch.inf
        told = torch.log_softmax(logits, dim=-1)[-len(response) - 1 : -1]
    result: npt.NDArray[np.float64] = told.gather(1, ids[0, -len(response) :, None]).squeeze(1).numpy()
    return result


def _patches(png: bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """(pixels [patches, 3 x 2 x 14 x 14], [frames, rows, columns] of patches). Patches of a token are neighbours; a
    picture is a film of two equal frames."""
    from PIL import Image

    pixels = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.float32) / 255 - 0.5) / 0.5
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    cut = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    films: Any = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
    return films.reshape(rows * columns, -1), np.array([1, rows, columns])
