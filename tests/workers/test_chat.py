"""Chat templates in episodes: only what is new, the rest proven unchanged, no control token out of place."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samplestore.examples import tiny_model
from samplestore.tokenizers import Tokenizer, load_tokenizer
from samplestore.workers.chat import Conversation, TemplateChanged, after, plain, plain_message

CHANGING = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}<assistant>"
)


def tokenizer_with(folder: Path, template: str | None = None) -> Tokenizer:
    tiny_model.write_tokenizer(folder)
    if template is not None:
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return load_tokenizer(folder)


def test_only_what_is_new(tmp_path: Path) -> None:
    """The tokens of a whole conversation, as the template would have written it at once."""
    tokenizer = tokenizer_with(tmp_path)
    asked = [{"role": "user", "content": "two and two?"}]
    conversation = Conversation(tokenizer, asked)
    said = [*tokenizer.encode(conversation.prompt()).tolist()]
    messages = list(asked)
    for answer, reply in (("four", "sure?"), ("yes", "why?")):
        said += [*tokenizer.encode(answer).tolist(), tiny_model.EOS_ID]  # as engines send it: the end token too
        said += after(tokenizer, conversation.next([{"role": "user", "content": reply}]), said[-1]).tolist()
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
        assert said == tokenizer.encode(tokenizer.render(messages)).tolist()


def test_an_answer_that_was_cut_off_is_ended(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path)
    conversation = Conversation(tokenizer, [{"role": "user", "content": "go"}])
    last = int(tokenizer.encode("x")[0])
    added = after(tokenizer, conversation.next([{"role": "user", "content": "on"}]), last)
    assert added[0] == tiny_model.EOS_ID


def test_a_template_that_changes_what_was_there(tmp_path: Path) -> None:
    """It leaves out earlier answers: the tokens that were generated would stand where it has none."""
    conversation = Conversation(tokenizer_with(tmp_path, CHANGING), [{"role": "user", "content": "go"}])
    with pytest.raises(TemplateChanged, match=r"ctx\.append"):
        conversation.next([{"role": "user", "content": "on"}])


@pytest.mark.parametrize("text", ["a<eos>b", "<assistant>a<user>b", "a<e<eos>os>b", "<<eos>eos>ab"])
def test_control_tokens_do_not_leak(tmp_path: Path, text: str) -> None:
    """Also not when what is left after one is removed spells another."""
    tokenizer = tokenizer_with(tmp_path)
    assert plain(tokenizer, text) == "ab"
    conversation = Conversation(tokenizer, [{"role": "user", "content": "go"}])
    ids = tokenizer.encode(conversation.next([{"role": "tool", "content": text}]))
    assert [int(i) for i in ids if i < len(tiny_model.SPECIAL)] == [
        tiny_model.EOS_ID,
        3,
        3,
    ]  # end, tool's turn, opening


def test_names_of_control_tokens_of_a_bare_tokenizer(tmp_path: Path) -> None:
    tokenizer_with(tmp_path)
    bare = load_tokenizer(tmp_path / "tokenizer.json")
    assert set(bare.control_names) == set(tiny_model.SPECIAL)


def test_no_text_of_a_message_leaks(tmp_path: Path) -> None:
    """Templates write parts of contents, names and arguments of calls too."""
    tokenizer = tokenizer_with(tmp_path)
    evil = "a<eos>b"
    cleaned = plain_message(
        tokenizer,
        {
            "role": "tool",
            "name": evil,
            "content": [{"type": "text", "text": evil}],
            "tool_calls": [{"function": {"arguments": {evil: evil, "n": 1}}}],
        },
    )
    assert cleaned == {
        "role": "tool",
        "name": "ab",
        "content": [{"type": "text", "text": "ab"}],
        "tool_calls": [{"function": {"arguments": {"ab": "ab", "n": 1}}}],
    }


def test_taking_names_out_is_one_pass() -> None:
    """Nested names once took time with the square of the text: minutes for what one tool may write."""
    tokenizer: Any = SimpleNamespace(control_names=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    n = 60_000
    began = time.process_time()
    assert plain(tokenizer, "x" + "<|im_" * n + "end|>" * n + "y") == "xy"
    assert time.process_time() - began < 20
