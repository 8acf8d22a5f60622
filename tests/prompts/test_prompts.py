"""Rows to prompts: every refusal names its field; the content key is stable; nothing changes on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samplestore.errors import InvalidSetting
from samplestore.prompts import (
    InvalidPrompts,
    InvalidRow,
    Prompt,
    RowKeys,
    TokenizerNeeded,
    content_key,
    first_of_each,
    prepare,
    prepare_all,
    read_rows,
)
from samplestore.tokenizers import NoChatTemplate, Tokenizer, load_tokenizer

USER = [{"role": "user", "content": "2 + 2"}]
NESTED: Any = 1
for _ in range(100):
    NESTED = [NESTED]


def one(row: Any, tokenizer: Any = None, **options: Any) -> Prompt:
    (made,) = prepare([row], tokenizer, **options)
    assert isinstance(made, Prompt), made
    return made


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "is missing; give prompt or text or messages, or prompt_ids"),
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": 3}, "prompt", "must be text or a list of messages"),
    ({"text": USER}, "text", "must be text"),
    ({"messages": "hello"}, "messages", "must be a list of messages"),
    ({"prompt": "a", "text": "b"}, "text", "stands beside prompt"),
    ({"prompt": []}, "prompt", "is an empty list"),
    ({"prompt": ["hello"]}, "prompt[0]", "must be a message"),
    ({"prompt": [*USER, {"content": "x"}]}, "prompt[1].role", "must be text such as"),
    ({"prompt": [{"role": "user"}]}, "prompt[0].content", "is missing"),
    ({"prompt": [{"role": "user", "content": 3}]}, "prompt[0].content", "must be text or a list of text parts"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "prompt[0].content[0]",
        "URLs are not fetched",
    ),
    ({"prompt": [{"role": "forbidden", "content": "x"}]}, "prompt", "the chat template refused the messages"),
    ({"prompt": "a\0b"}, "prompt", "has a NUL character at character 1, which PostgreSQL can't store"),
    ({"prompt": "ab\ud83d"}, "prompt", "has a lone surrogate at character 2"),
    ({"prompt": "a", "metadata": {"x\0": 1}}, "metadata.x\\x00", "has a NUL character at character 1"),
    ({"prompt": "a", "label": float("nan")}, "label", "is not a finite number"),
    ({"prompt": "a", "metadata": {"s": [1, float("inf")]}}, "metadata.s[1]", "is not a finite number"),
    ({"prompt": "a", "metadata": {"n": 2**2000}}, "metadata.n", "integer of more than 1024 bits"),
    ({"prompt": "a", "metadata": {1: 2}}, "metadata", "has a key that is not text"),
    ({"prompt": "a", "label": {1, 2}}, "label", "is of type set"),
    ({"prompt": "a", "label": NESTED}, "label" + "[0]" * 63, "is nested more than 64 levels deep"),
    ({"prompt": "a", "metadata": [1]}, "metadata", "must be an object"),
    ({"prompt": "a", "metadata": "{1"}, "metadata", "is a string that is not JSON"),
    ({"prompt": "a", "metadata": '{"a": [NaN]}'}, "metadata.a[0]", "is not a finite number"),
    ({"prompt": "a", "tools": {"name": "x"}}, "tools", "must be a list"),
    ({"prompt": "a", "tools": ["x"]}, "tools[0]", "is not an object"),
    ({"prompt": USER, "chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
    ({"prompt": USER, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize", "not a variable"),
    (
        {"prompt": USER, "chat_template_kwargs": {}, "apply_chat_template_kwargs": {}},
        "apply_chat_template_kwargs",
        "besi",
    ),
    ({"prompt": "a", "chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs", "has no effect on text"),
    ({"prompt": "a", "dataset": ""}, "dataset", "must be text, and not empty"),
    ({"prompt": "a", "dataset": "x" * 201}, "dataset", "at most 200"),
    ({"prompt": "a", "lable": 3}, "lable", "is not one of prompt, text, messages, prompt_ids, label"),
    ({"prompt_ids": []}, "prompt_ids", "has no tokens"),
    ({"prompt_ids": "1 2"}, "prompt_ids", "must be a list of token ids"),
    ({"prompt_ids": [1, 2.0]}, "prompt_ids", "token 1 is not a whole number"),
    ({"prompt_ids": [True]}, "prompt_ids", "token 0 is not a whole number"),
    ({"prompt_ids": [1, -1]}, "prompt_ids", "token 1 is outside 0 to 2**31 - 1"),
    ({"prompt_ids": [2**31]}, "prompt_ids", "token 0 is outside 0 to 2**31 - 1"),
    ({"prompt_ids": [1, 2**80]}, "prompt_ids", "token 1 is outside 0 to 2**31 - 1"),
    ({"prompt_ids": [1, 5000]}, "prompt_ids", "token 1 lies outside the vocabulary (0 to"),
]


@pytest.mark.parametrize(("row", "field", "reason"), REFUSALS, ids=[f"{i}-{r[1][:30]}" for i, r in enumerate(REFUSALS)])
def test_refusals_name_line_and_field(tokenizer: Tokenizer, row: dict[str, Any], field: str, reason: str) -> None:
    good, refused, after = prepare([{"prompt": "fine"}, row, {"prompt": "fine"}], tokenizer, source="data.jsonl")
    assert isinstance(good, Prompt) and isinstance(after, Prompt)
    assert isinstance(refused, InvalidRow), refused
    assert (refused.source, refused.line, refused.field) == ("data.jsonl", 2, field)
    assert reason in refused.reason
    assert len(str(refused)) < 600


def test_a_row_that_is_no_mapping(tokenizer: Tokenizer) -> None:
    (refused,) = prepare([["prompt"]], tokenizer)  # type: ignore[list-item]
    assert isinstance(refused, InvalidRow) and refused.reason == "is not a mapping"


def test_messages_are_bounded_and_cannot_drive_a_terminal(tokenizer: Tokenizer) -> None:
    (refused,) = prepare([{"prompt": "a", "\x1b[31m" + "k" * 500: "\x1b]0;x\x07" * 10_000}], tokenizer)
    assert isinstance(refused, InvalidRow)
    assert len(str(refused)) < 900 and str(refused).isprintable()


def test_too_long_prompts_are_refused_with_the_limit(tokenizer: Tokenizer) -> None:
    n = one({"prompt": "the quick brown fox " * 20}, tokenizer).prompt_ids.size
    rows = [{"prompt": "the quick brown fox " * 20}, {"messages": USER * 50}, {"prompt_ids": [5] * (n + 1)}]
    made = list(prepare(rows, tokenizer, max_prompt_tokens=n))
    assert isinstance(made[0], Prompt), "a prompt of exactly the limit passes"
    assert [(m.field, m.reason) for m in made[1:] if isinstance(m, InvalidRow)][1] == (
        "prompt_ids", f"has {n + 1} tokens, the limit is {n} (--max-prompt-tokens)",
    )  # fmt: skip
    with pytest.raises(InvalidSetting):
        prepare(rows, tokenizer, max_prompt_tokens=0)


def test_without_a_limit_the_models_positions_are_one(model: Path, tmp_path: Path) -> None:
    """Engines refuse what comes within 6 tokens of their context: at the door such a prompt gets the reason at once."""
    for file in model.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 40}')
    made = list(prepare([{"prompt_ids": [5] * 33}, {"prompt_ids": [5] * 34}], str(tmp_path)))
    assert isinstance(made[0], Prompt) and isinstance(made[1], InvalidRow)
    assert made[1].reason == "has 34 tokens, the limit is 33 (what an engine of this model takes)"


def test_ids_of_the_tokenizer_beyond_the_model_never_pass(model: Path, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model has embeddings: such an id would crash the engine."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 40}')
    (refused,) = prepare([{"prompt": "the quick"}], tmp_path)
    assert isinstance(refused, InvalidRow) and "lies outside the vocabulary (0 to 39)" in refused.reason


def test_row_size_is_bounded(tokenizer: Tokenizer) -> None:
    (refused,) = prepare([{"prompt": "a", "label": ["x" * 100] * 20}], tokenizer, max_row_bytes=1000)
    assert isinstance(refused, InvalidRow) and "larger than 1,000 bytes" in refused.reason


def test_text_is_tokenised_as_it_is(tokenizer: Tokenizer) -> None:
    made = one({"text": "naïve 🙂", "label": "4", "metadata": {"big": 2**70}, "tools": [{"name": "t"}]}, tokenizer)
    assert tokenizer.decode(made.prompt_ids) == made.prompt == "naïve 🙂"
    assert (made.dataset, made.label, made.metadata) == ("default", "4", {"big": 2**70})
    assert made.prompt_ids.dtype == np.int32 and not made.prompt_ids.flags.writeable


def test_messages_go_through_the_template(tokenizer: Tokenizer) -> None:
    row = {"prompt": USER, "tools": '[{"name": "add"}]', "apply_chat_template_kwargs": {"thinking": False}}
    made = one(row, tokenizer)
    assert tokenizer.decode(made.prompt_ids) == tokenizer.render(
        USER, tools=[{"name": "add"}], template_args={"thinking": False}
    )
    assert made.prompt == USER and made.tools == [{"name": "add"}] and made.template_args == {"thinking": False}
    wrapped = one({"prompt": "2 + 2", "chat_template_kwargs": {"thinking": False}}, tokenizer, apply_chat_template=True)
    assert wrapped.prompt == "2 + 2", "what the row said"
    assert tokenizer.decode(wrapped.prompt_ids) == tokenizer.render(USER, template_args={"thinking": False})


def test_prompt_ids_need_no_tokenizer() -> None:
    for ids in ([5, 6], (5, 6), np.array([5, 6])):
        made = one({"prompt_ids": ids, "label": 1})
        assert made.prompt_ids.tolist() == [5, 6] and made.prompt == ""
    assert one({"prompt_ids": [5, 6], "prompt": USER}).prompt == USER


def test_what_concerns_every_row_is_raised_at_once(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TokenizerNeeded, match=r"rows:2: .*--tokenizer FOLDER"):
        list(prepare([{"prompt_ids": [1]}, {"prompt": "a"}]))
    with pytest.raises(NoChatTemplate):
        prepare_all([{"prompt": USER}], load_tokenizer(model / "tokenizer.json"), skip_invalid=True)


def test_keys_by_other_names(tokenizer: Tokenizer) -> None:
    row = {"question": "2 + 2", "answer": "4", "info": {"id": 7}, "level": 3}
    keys = RowKeys(prompt="question", label="answer", metadata="info", extra_to_metadata=True)
    made = one(row, tokenizer, keys=keys)
    assert (made.prompt, made.label, made.metadata) == ("2 + 2", "4", {"id": 7, "level": 3})
    assert one({"prompt": "a", "text": "gold"}, tokenizer, keys=RowKeys(label="text")).label == "gold"
    cases: list[tuple[dict[str, Any], RowKeys, str, str]] = [
        (row, RowKeys(prompt="question", label="answr"), "answr", "is missing; the row has 'question', 'answer'"),
        (row, RowKeys(prompt="question", label="answer"), "info", "keep it with --extra-to-metadata"),
        ({**row, "id": 1}, keys, "id", "stands in info too"),
    ]
    for bad, with_keys, field, reason in cases:
        (refused,) = prepare([bad], tokenizer, keys=with_keys)
        assert isinstance(refused, InvalidRow) and refused.field == field and reason in refused.reason
    for wrong in ({"prompt": "label"}, {"label": "a", "metadata": "a"}, {"label": ""}, {"metadata": "tools"}):
        with pytest.raises(InvalidSetting):
            RowKeys(**wrong)


def test_prepare_all_and_its_error(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a"}, *({"prompt": ""} for _ in range(25)), {"prompt": "a"}]
    with pytest.raises(InvalidPrompts) as caught:
        prepare_all(rows, tokenizer, source="f.jsonl")
    message = str(caught.value)
    assert len(caught.value.rows) == 25 and caught.value.file == "f.jsonl"
    assert "f.jsonl:2: prompt: is empty" in message and "f.jsonl:21:" in message and "f.jsonl:22:" not in message
    assert "25 rows were refused" in message and "and 5 more" in message and "--skip-invalid" in message
    prompts, invalid = prepare_all(rows, tokenizer, skip_invalid=True)
    assert (len(prompts), len(invalid)) == (2, 25)
    assert first_of_each([*prompts, one({"prompt": "b"}, tokenizer)])[1] == 1
    assert [p.prompt for p in first_of_each([*prompts, one({"prompt": "b"}, tokenizer)])[0]] == ["a", "b"]


def test_finished_prompts_pass_and_are_checked(tokenizer: Tokenizer) -> None:
    made = one({"prompt_ids": [5, 5000]})
    assert one(made) is made
    (refused,) = prepare([made], tokenizer)
    assert isinstance(refused, InvalidRow) and "outside the vocabulary" in refused.reason


def test_every_part_is_in_the_key() -> None:
    base = {"prompt_ids": [1, 2], "prompt": "a", "label": 1}
    others: list[dict[str, Any]] = [
        {"prompt_ids": [1, 3]}, {"prompt": "b"}, {"label": 2}, {"label": 1.5}, {"label": True}, {"label": "1"},
        {"metadata": {"k": None}}, {"metadata": {"k": 1}}, {"dataset": "x"}, {"tools": [{}]},
        {"chat_template_kwargs": {"k": 1}}, {"label": None},
    ]  # fmt: skip
    keys = {one({**base, **other}).content_key for other in ({}, *others)}
    assert len(keys) == len(others) + 1
    assert one({**base, "label": 1.0}).content_key in keys, "SQLite gives it back as 1"
    assert one({**base, "tools": [], "metadata": {}, "chat_template_kwargs": None}) == one(base), "absent and empty"


def test_the_key_does_not_change_between_releases() -> None:
    """A new key for old rows would store every data set a second time on the next add-prompts."""
    row = {
        "prompt_ids": [1, 2],
        "messages": [{"role": "user", "content": "ï"}],
        "label": 4.5,
        "metadata": {"b": 1, "a": []},
    }
    expected = "615f50fac3db8e6bacccf39c34368b1b32c84772d9d1164979af7c1331f7b8d5"
    assert one(row).content_key == expected


unicode_text = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(unicode_text, max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(unicode_text, max_size=8), inner, max_size=4),
    max_leaves=12,
)
objects = json_values.filter(lambda value: isinstance(value, dict))
labels = json_values.filter(lambda value: not isinstance(value, int | float) or abs(value) < 2**63)


def _reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in reversed(value)}
    return [_reordered(item) for item in value] if isinstance(value, list) else value


@given(
    text=st.text(unicode_text, min_size=1),
    label=labels,
    metadata=objects,
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=10),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_key_is_stable_and_rows_survive_json(
    tmp_path: Path, text: str, label: Any, metadata: Any, ids: list[int]
) -> None:
    row = {"prompt": text, "label": label, "metadata": metadata, "prompt_ids": ids}
    made = one(row)
    assert (made.prompt, made.label, made.metadata, made.prompt_ids.tolist()) == (text, label, metadata, ids)
    assert one(_reordered(row)).content_key == made.content_key
    for ascii_only in (True, False):
        (tmp_path / "row.jsonl").write_text(
            json.dumps(row, ensure_ascii=ascii_only) + "\n", encoding="utf-8", newline=""
        )
        assert list(prepare(read_rows(tmp_path / "row.jsonl"))) == [made]
    stored = {name: json.loads(json.dumps(getattr(made, name))) for name in ("prompt", "label", "metadata", "tools")}
    key = content_key(
        dataset=made.dataset, prompt_ids=made.prompt_ids, template_args=made.template_args, **stored
    )  # what a reader of the database would compute
    assert key == made.content_key


def test_importing_stays_light() -> None:
    code = (
        "import sys, samplestore.prompts, samplestore.cli.add_prompts; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'pyarrow', 'jinja2', 'pandas', 'rich.progress'}; "
        "bad = heavy & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": ""})
