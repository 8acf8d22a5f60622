"""The demo's tiny model and its task."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from samplestore.examples import tiny_model, tiny_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    tiny_model.build(path, seed=1)
    return path


def score(response: str, label: str = "c") -> float:
    return tiny_task.reward(SimpleNamespace(response=response, label=label))


def test_one_seed_gives_the_same_bytes_and_another_does_not(folder: Path, tmp_path: Path) -> None:
    tiny_model.build(tmp_path / "same", seed=1)
    tiny_model.build(tmp_path / "other", seed=2)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes(), name
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_building_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_model.build(tmp_path / "m", seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_is_never_overwritten(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="empty directory"):
        tiny_model.build(folder, seed=2)


def test_it_loads_as_a_small_float32_llama(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "llama" and model.config.vocab_size < 512
    assert model.config.eos_token_id == tiny_model.EOS_ID
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 200_000


def test_the_tokenizer_is_one_token_a_character_and_comes_back(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "c c: it's 9!\nok"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert tokenizer.eos_token_id == tiny_model.EOS_ID


def test_the_chat_template(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<user>a<assistant>b<eos><user>c<assistant>"
    assert len(tokenizer(text, add_special_tokens=False).input_ids) == 8


def test_prompts_name_their_letter_and_are_seeded() -> None:
    rows = tiny_task.prompts(300, seed=3)
    assert rows == tiny_task.prompts(300, seed=3) != tiny_task.prompts(300, seed=4)
    assert {row["label"] for row in rows} == set(tiny_task.LETTERS)
    assert all(set(row["prompt"]) <= {row["label"], " ", ":"} and row["label"] in row["prompt"] for row in rows)


def test_rewards_by_hand() -> None:
    assert score("c" * 24) == score("c" * 64) == 1
    assert score("c" * 32, label="d") == 0
    assert score("") == 0
    assert score("cd" * 20) == pytest.approx(0.5)
    assert score("cc") == pytest.approx(2 / 24)  # short answers count as padded
    assert score("c" * 96) == pytest.approx(64 / 96)  # endless ones lose
