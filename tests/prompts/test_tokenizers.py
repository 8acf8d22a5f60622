"""Tokenizers: from disk only, decoding whole responses, rendering with the model's template."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore.tokenizers import (
    NoChatTemplate,
    TemplateRefused,
    Tokenizer,
    TokenizerError,
    as_tokenizer,
    load_tokenizer,
)
from tests.prompts.conftest import build_model

USER = [{"role": "user", "content": "2 + 2"}]


def test_utf8_boundary(tokenizer: Tokenizer) -> None:
    """Case utf8-boundary: wherever segments split, the text is that of all ids at once."""
    text = "naïve 🙂 done"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    broken = 0
    for cut in range(1, len(ids)):
        segments = [ids[:cut], ids[cut:]]
        joined = "".join(tokenizer.decode(part) for part in segments)
        broken += "\N{REPLACEMENT CHARACTER}" in joined
        assert tokenizer.decode(np.concatenate(segments)) == text
    assert broken >= 4, "no split fell inside a character: the test shows nothing"


def test_decode_keeps_special_tokens_unless_told(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("done<|im_end|>")
    assert ids[-1] == 2, "a special token spelled out in text is that token"
    assert tokenizer.decode(ids) == "done<|im_end|>"
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=True) == "done"


def test_ids_that_the_tokenizer_lacks_are_seen(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(text).tolist() for text in ("fox", "done"))
    assert tokenizer.decode([*a, 9999, -1, *b]) == "fox\ufffd\ufffddone"
    assert tokenizer.decode([9999, *a]) == "\ufffdfox"
    assert tokenizer.decode([]) == ""


def test_agrees_with_transformers(model: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(model, local_files_only=True)
    rendered = hf.apply_chat_template(USER, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render(USER)).tolist() == rendered
    assert tokenizer.decode(rendered) == hf.decode(rendered)
    assert tokenizer.vocab_size == len(hf)
    wrapped = as_tokenizer(hf)
    assert wrapped.encode("naïve 🙂").tolist() == tokenizer.encode("naïve 🙂").tolist()
    assert wrapped.decode(rendered) == tokenizer.decode(rendered)
    assert wrapped.vocab_size == tokenizer.vocab_size


def test_render_uses_tools_and_arguments(tokenizer: Tokenizer) -> None:
    assert tokenizer.render(USER) == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.render(USER, tools=[{"name": "add"}], template_args={"thinking": False})
    assert '"name": "add"' in rendered and rendered.endswith("<think></think>")


def test_template_errors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused, match="no such role here"):
        tokenizer.render([{"role": "forbidden", "content": "x"}])
    with pytest.raises(TemplateRefused, match="tokenize"):
        tokenizer.render(USER, template_args={"tokenize": True})
    with pytest.raises(NoChatTemplate, match="has no chat template"):
        load_tokenizer(build_model(tmp_path / "base", chat_template=None)).render(USER)


def test_bare_tokenizer_json(model: Path, tokenizer: Tokenizer) -> None:
    bare = load_tokenizer(model / "tokenizer.json")
    assert bare.encode("naïve 🙂").tolist() == tokenizer.encode("naïve 🙂").tolist()
    with pytest.raises(NoChatTemplate, match="give the model's folder"):
        bare.render(USER)


def test_length_limits_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "cutting")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values))
    text = "the quick brown fox and 2 + 2 = 4"
    for path in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.decode(loaded.encode(text)) == text


def test_vocab_size_is_bounded_by_the_models_embedding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = build_model(tmp_path / "small")
    for config in ({"vocab_size": 50}, {"text_config": {"vocab_size": 50}}):
        (folder / "config.json").write_text(json.dumps(config))
        assert load_tokenizer(folder).vocab_size == 50
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100_000}))
    assert load_tokenizer(folder).vocab_size == tokenizer.vocab_size
    (folder / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json"):
        _ = load_tokenizer(folder).vocab_size


def test_hub_names_are_refused_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tokenizer opened a socket")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(TokenizerError, match=r"hf download some-lab/Some-7B --local-dir \./Some-7B"):
        load_tokenizer("some-lab/Some-7B")
    load_tokenizer(model).render(USER)


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no file or folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer \(looked for tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="int is not a tokenizer"):
        as_tokenizer(3)
