"""Prompts on their way in: rows are checked, tokenised once, and named by a key of everything they say.

A row is a mapping with

    prompt, text or messages    text, or a list of {"role", "content", ...}; one of the three names, or `RowKeys.prompt`
    prompt_ids                  token ids instead of, or beside, the above: taken as they are, no tokenizer needed
    images                      bytes, data URLs or paths; the engine gets them with the prompt's tokens
    label, metadata, dataset, tools, chat_template_kwargs (or apply_chat_template_kwargs)      all optional

Text is tokenised as it is; messages always go through the chat template. A key with another name is refused, because
a misspelt `label` would otherwise mean training without labels; `RowKeys.extra_to_metadata` keeps such keys instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.images import read_all
from samplestore.media import Image
from samplestore.promptfiles import InvalidRow, PromptFile, PromptFileError, ReadRow, printable, read_rows, show
from samplestore.rowvalues import (
    MAX_ROW_BYTES,
    BadValue,
    check_messages,
    dataset_name,
    parsed,
    plain,
    token_ids,
    whole_label,
)
from samplestore.tokenizers import RESERVED_TEMPLATE_ARGS, TemplateRefused, Tokenizer, as_tokenizer
from samplestore.types import Ids
from samplestore.words import amount

__all__ = [
    "InvalidPrompts", "InvalidRow", "Prompt", "PromptFile", "PromptFileError", "RowKeys", "TokenizerNeeded",
    "content_key", "first_of_each", "prepare", "prepare_all", "read_rows",
]  # fmt: skip

Row: TypeAlias = "ReadRow | Mapping[str, Any] | Prompt"

LISTED = 20  # bad rows that an error message names
MAX_FIELD, MAX_REASON = 240, 320  # characters: keys come from the file, reasons from chat templates too
PROMPT_KEYS = ("prompt", "text", "messages")
TEMPLATE_KEYS = ("chat_template_kwargs", "apply_chat_template_kwargs")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One data set row, ready to be stored. Two prompts are equal when their content keys are.

    content_key    hex sha256 of all the rest
    dataset        "default" when not given
    prompt         what the row said: text ("" when it had token ids only) or messages
    prompt_ids     int32 [n], n > 0
    """

    content_key: str
    dataset: str
    prompt: str | list[dict[str, Any]]
    prompt_ids: Ids
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    template_args: dict[str, Any] | None
    images: tuple[Image, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self.content_key == other.content_key if isinstance(other, Prompt) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.content_key)


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Which keys of a row hold what. A key that is named here must be in every row (null is allowed).

    extra_to_metadata   keep unknown keys in the metadata instead of refusing the row
    """

    prompt: str | None = None
    label: str | None = None
    metadata: str | None = None
    extra_to_metadata: bool = False

    def __post_init__(self) -> None:
        named = [k for k in (self.prompt, self.label, self.metadata) if k is not None]
        others = {"label", "metadata", "dataset", "tools", "prompt_ids", "images", *TEMPLATE_KEYS}
        for role, key in (("prompt", self.prompt), ("label", self.label), ("metadata", self.metadata)):
            if key is not None and (not key or named.count(key) > 1 or key in others - {role}):
                raise InvalidSetting(f"{role}_key", key, "a name that stands for nothing else in a row")

    def prompts(self) -> list[str]:
        """The keys that may hold the prompt; a name given to the label or the metadata is theirs."""
        return (
            [k for k in PROMPT_KEYS if k not in (self.label, self.metadata)] if self.prompt is None else [self.prompt]
        )

    def known(self) -> list[str]:
        """The keys that a row may have."""
        rest = ("prompt_ids", self.label or "label", self.metadata or "metadata", "dataset", "tools", "images")
        return [*self.prompts(), *rest, *TEMPLATE_KEYS]


class InvalidPrompts(SampleStoreError):
    """Rows that were refused; nothing was stored. `rows` has all of them, the message the first 20."""

    def __init__(self, file: str, rows: list[InvalidRow]) -> None:
        self.file, self.rows = file, rows
        listed = "\n".join(f"  {row}" for row in rows[:LISTED])
        more = f"\n  and {len(rows) - LISTED:,} more" if len(rows) > LISTED else ""
        what = "1 row was" if len(rows) == 1 else f"{len(rows):,} rows were"
        super().__init__(
            f"{file}: {what} refused, nothing was stored:\n{listed}{more}\n"
            "Correct them, or store the others with --skip-invalid (skip_invalid=True)."
        )


class TokenizerNeeded(SampleStoreError):
    """Rows with text or messages came without a tokenizer."""

    def __init__(self, source: str, line: int) -> None:
        self.source, self.line = source, line
        super().__init__(
            f"{source}:{line}: has no prompt_ids, so a tokenizer is needed: --tokenizer FOLDER, the model's folder "
            "(tokenizer=... in Python)"
        )


def content_key(
    *,
    dataset: str,
    prompt: Any,
    prompt_ids: Ids,
    label: Any,
    metadata: Any,
    tools: Any,
    template_args: Any,
    images: Sequence[Image] = (),
) -> str:
    """Hex sha256 over all that makes a prompt what it is. The order of keys in an object does not matter."""
    said = [dataset, prompt, label, metadata, tools, template_args, *([[i.digest for i in images]] if images else [])]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii") + b"\0" + np.asarray(prompt_ids, dtype="<i4").tobytes()).hexdigest()


def prepare(
    rows: Iterable[Row],
    tokenizer: Any = None,
    *,
    max_prompt_tokens: int | None = None,
    dataset: str = "default",
    apply_chat_template: bool = False,
    keys: RowKeys | None = None,
    source: str = "rows",
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Prompt | InvalidRow]:
    """Rows to prompts, one by one; what can't be one becomes an InvalidRow.

    rows                 mappings (counted from 1), what read_rows yields, or finished Prompts
    tokenizer            a model's folder, a Tokenizer, or a transformers tokenizer; None if all rows have prompt_ids
    max_prompt_tokens    longer prompts are refused; None is what the model has room for, where its folder tells
    apply_chat_template  text becomes one user message

    Raises TokenizerNeeded, NoChatTemplate and what loading a tokenizer raises: these concern every row.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise InvalidSetting("max_prompt_tokens", max_prompt_tokens, "a whole number above 0, or None")
    try:
        dataset_name(dataset)
    except BadValue as error:
        raise InvalidSetting("dataset", dataset, f"another name: it {error.reason}") from error
    loaded = None if tokenizer is None else as_tokenizer(tokenizer)
    maker = _Maker(loaded, max_prompt_tokens, dataset, apply_chat_template, keys or RowKeys(), source, max_row_bytes)
    return (maker.make(count, row) for count, row in enumerate(rows, 1))


def prepare_all(
    rows: Iterable[Row], tokenizer: Any = None, *, skip_invalid: bool = False, source: str = "rows", **options: Any
) -> tuple[list[Prompt], list[InvalidRow]]:
    """All rows through `prepare` (same options): the prompts, duplicates included, and the refused rows.

    Raises InvalidPrompts, with every refused row, unless skip_invalid.
    """
    prompts: list[Prompt] = []
    invalid: list[InvalidRow] = []
    for made in prepare(rows, tokenizer, source=source, **options):
        if isinstance(made, Prompt):
            prompts.append(made)
        else:
            invalid.append(made)
    if invalid and not skip_invalid:
        raise InvalidPrompts(source, invalid)
    return prompts, invalid


def first_of_each(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """The prompts without repetitions, in order, and how many repetitions there were."""
    all_of_them = list(prompts)
    unique = list({prompt.content_key: prompt for prompt in reversed(all_of_them)}.values())[::-1]
    return unique, len(all_of_them) - len(unique)


@dataclass(frozen=True, slots=True)
class _Maker:
    tokenizer: Tokenizer | None
    max_prompt_tokens: int | None
    dataset: str
    apply_chat_template: bool
    keys: RowKeys
    source: str
    max_row_bytes: int

    def make(self, count: int, row: Row) -> Prompt | InvalidRow:
        line, row = row if isinstance(row, tuple) else (count, row)
        if isinstance(row, InvalidRow):
            return row
        try:
            if isinstance(row, Prompt):
                self._check_ids(row.prompt_ids, "prompt_ids")
                return row
            if not isinstance(row, Mapping):
                raise BadValue("is not a mapping", row)
            return self._prompt(line, row)
        except BadValue as error:
            field = printable(error.field, MAX_FIELD) or "(row)"
            return InvalidRow(self.source, line, field, printable(error.reason, MAX_REASON), error.shown)

    def _prompt(self, line: int, row: Mapping[str, Any]) -> Prompt:
        # Token ids are checked by numpy: walking over each as a JSON value costs a hundred times more.
        said: dict[str, Any] = plain(
            {k: v for k, v in row.items() if k not in ("prompt_ids", "images")}, self.max_row_bytes
        )
        images = read_all(row["images"]) if row.get("images") is not None else ()
        extra = self._extra(said)
        key, prompt = self._said(said, row.get("prompt_ids") is not None, len(images))
        tools = parsed(said, "tools", list) or None
        for i, tool in enumerate(tools or ()):
            if not isinstance(tool, dict):
                raise BadValue("is not an object", tool, f"tools[{i}]")
        template_args = self._template_args(said)
        if row.get("prompt_ids") is not None:
            key, ids = "prompt_ids", token_ids(row["prompt_ids"])
        else:
            if self.tokenizer is None:
                raise TokenizerNeeded(self.source, line)
            ids = self._tokenise(key, prompt, tools, template_args)
        self._check_ids(ids, key)
        ids.setflags(write=False)
        label_key, metadata_key = self.keys.label or "label", self.keys.metadata or "metadata"
        metadata = parsed(said, metadata_key, dict) or {}
        if both := sorted(extra.keys() & metadata.keys()):
            raise BadValue(f"stands in {metadata_key} too", extra[both[0]], both[0])
        parts: dict[str, Any] = {
            "dataset": self.dataset if said.get("dataset") is None else dataset_name(said["dataset"]),
            "prompt": prompt, "prompt_ids": ids, "label": whole_label(said.get(label_key), label_key),
            "metadata": {**metadata, **extra}, "tools": tools, "template_args": template_args, "images": images,
        }  # fmt: skip
        return Prompt(content_key=content_key(**parts), **parts)

    def _extra(self, said: dict[str, Any]) -> dict[str, Any]:
        """The keys that mean nothing here. Raises BadValue unless they are to be kept."""
        for key in (self.keys.prompt, self.keys.label, self.keys.metadata):
            if key is not None and key not in said:
                raise BadValue(f"is missing; the row has {', '.join(map(show, said))}", field=key)
        known = self.keys.known()
        extra = {key: value for key, value in said.items() if key not in known}
        if extra and not self.keys.extra_to_metadata:
            cure = "keep it with --extra-to-metadata, or name it with --prompt-key, --label-key or --metadata-key"
            key = next(iter(extra))
            raise BadValue(f"is not one of {', '.join(known)}; {cure}", extra[key], key)
        return extra

    def _said(self, said: dict[str, Any], has_ids: bool, images: int) -> tuple[str, str | list[dict[str, Any]]]:
        """(key, prompt) of a row: text or messages, checked."""
        keys = self.keys.prompts()
        found = [key for key in keys if said.get(key) is not None]
        if len(found) > 1:
            raise BadValue(f"stands beside {found[0]}: a row has one prompt", said[found[1]], found[1])
        if not found:
            if has_ids:
                return "prompt_ids", ""
            raise BadValue(f"is missing; give {' or '.join(keys)}, or prompt_ids", field=keys[0])
        key, value = found[0], said[found[0]]
        if isinstance(value, str) and key != "messages":
            if not value:
                raise BadValue("is empty", field=key)
            return key, value
        if isinstance(value, list) and key != "text":
            check_messages(key, value, images)
            return key, value
        wanted = {"text": "text", "messages": "a list of messages"}.get(key, "text or a list of messages")
        raise BadValue(f"must be {wanted}", value, key)

    def _template_args(self, said: dict[str, Any]) -> dict[str, Any] | None:
        given = [key for key in TEMPLATE_KEYS if said.get(key) is not None]
        if len(given) > 1:
            raise BadValue(f"stands beside {given[0]}", said[given[1]], given[1])
        args: dict[str, Any] = (parsed(said, given[0], dict) if given else None) or {}
        if taken := sorted(RESERVED_TEMPLATE_ARGS & args.keys()):
            raise BadValue("is not a variable of a template", args[taken[0]], f"{given[0]}.{taken[0]}")
        return args or None

    def _tokenise(self, key: str, prompt: str | list[dict[str, Any]], tools: Any, template_args: Any) -> Ids:
        assert self.tokenizer is not None
        try:
            if isinstance(prompt, str) and not self.apply_chat_template:
                if template_args:
                    why = "has no effect on text, which is tokenised as it is; use --apply-chat-template or messages"
                    raise BadValue(why, template_args, "chat_template_kwargs")
                return self.tokenizer.encode(prompt)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.tokenizer.encode(self.tokenizer.render(messages, tools=tools, template_args=template_args))
        except TemplateRefused as error:
            raise BadValue(str(error), field=key) from error

    def _check_ids(self, ids: Ids, field: str) -> None:
        if not ids.size:
            raise BadValue("has no tokens", field=field)
        limit = self.tokenizer.vocab_size if self.tokenizer else 2**31
        outside = np.flatnonzero((ids < 0) | (ids >= limit))
        if outside.size:
            at = int(outside[0])
            what = f"the vocabulary (0 to {limit - 1:,})" if self.tokenizer else "0 to 2**31 - 1"
            raise BadValue(f"token {at} lies outside {what}", int(ids[at]), field)
        longest, whose = self.max_prompt_tokens, "--max-prompt-tokens"
        if longest is None and self.tokenizer is not None:
            longest, whose = self.tokenizer.longest_prompt, "what an engine of this model takes"
        if longest is not None and ids.size > longest:
            raise BadValue(f"has {amount(ids.size, 'token')}, the limit is {longest:,} ({whose})", field=field)
