"""A model's tokenizer and chat template, from disk only. Needs the `prompts` extra; imported libraries load late."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.errors import MissingExtra, SampleStoreError
from samplestore.types import Ids

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
ENGINE_MARGIN = 7  # SGLang refuses prompts that come within 6 tokens of its context, and a response needs one
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# Arguments of the rendering call itself: a row that set one would change how it is called, not what the template says.
RESERVED_TEMPLATE_ARGS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "self"}
)


class TokenizerError(SampleStoreError):
    """A tokenizer that can't be loaded or used."""


class NoChatTemplate(TokenizerError):
    """Messages came, and the tokenizer has no chat template."""

    def __init__(self, source: str, why: str) -> None:
        self.source = source
        super().__init__(f"{source} {why}. Messages need a chat template; text prompts (prompt: a string) do not.")


class TemplateRefused(TokenizerError):
    """The chat template, or the tokenizer, raised on one prompt."""


class Tokenizer:
    """Encodes, renders and decodes. Made by load_tokenizer or as_tokenizer; not thread-safe while first used.

    source   where it came from, for messages
    """

    def __init__(self, source: str, *, folder: Path | None = None, backend: Any = None, hf: Any = None) -> None:
        self.source = source
        self._folder, self._backend, self._given = folder, backend, hf

    @cached_property
    def _hf(self) -> Any:
        """The transformers tokenizer: what the engines use too, so that ids agree. None for a bare tokenizer.json."""
        if self._given is not None or self._folder is None:
            return self._given
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtra("tokenising with a model's folder", "prompts") from error
        try:
            return AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call]
                str(self._folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever the files make transformers raise: KeyError, OSError, pickle, Rust errors
            raise TokenizerError(f"no tokenizer could be loaded from {self.source}: {error}") from error

    @cached_property
    def _known(self) -> npt.NDArray[np.bool_]:
        """bool [largest id + 1]: the ids that the tokenizer has."""
        vocab = self._backend.get_vocab(with_added_tokens=True) if self._backend is not None else self._hf.get_vocab()
        ids = np.fromiter(vocab.values(), dtype=np.int64, count=len(vocab))
        known = np.zeros(int(ids.max(initial=-1)) + 1, dtype=np.bool_)
        known[ids] = True
        return known

    @cached_property
    def control_names(self) -> list[str]:
        """The texts that stand for control tokens (<|im_end|>, <eos>), the longest first."""
        if self._hf is not None:
            added = getattr(self._hf, "added_tokens_decoder", {}).values()
            found = {*self._hf.all_special_tokens, *(t.content for t in added if t.special)}
        else:
            found = {t.content for t in self._backend.get_added_tokens_decoder().values() if t.special}
        return sorted((name for name in map(str, found) if name), key=lambda name: (-len(name), name))

    @cached_property
    def vocab_size(self) -> int:
        """Ids from here on never pass: the largest id of the tokenizer + 1, or the model's embedding rows (config.json)
        where those are fewer, since an id without a row would crash the engine."""
        rows = self._model_says("vocab_size")
        return min(self._known.size, rows) if rows else self._known.size

    @cached_property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that an engine of this model takes: its positions (config.json) without those
        that engines keep free. None where the model does not say."""
        positions = self._model_says("max_position_embeddings")
        return None if positions is None else max(1, positions - ENGINE_MARGIN)

    def _model_says(self, name: str) -> int | None:
        return _model_count(self._folder / "config.json", name) if self._folder else None

    def warm(self) -> None:
        """Load now what the first `encode` or `render` would: seconds, in which an event loop would stand still. Where
        it can't be had that is theirs to say."""
        with contextlib.suppress(TokenizerError, MissingExtra):
            self.encode("")
            _ = self.control_names

    def encode(self, text: str) -> Ids:
        """int32 [n]: the text as it is, no special tokens added; those spelled out in it (<|im_start|>) count as such.
        Raises TemplateRefused."""
        try:
            if self._hf is not None:
                ids = self._hf.encode(text, add_special_tokens=False, verbose=False)
            else:
                ids = self._backend.encode(text, add_special_tokens=False).ids
        except SampleStoreError:
            raise
        except Exception as error:  # a tokenizer without an unknown token raises its library's bare Exception
            raise TemplateRefused(f"the tokenizer refused the text: {error}") from error
        return np.asarray(ids, dtype=np.int32)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages as the model's chat template writes them, the opening of the answer included.

        Raises NoChatTemplate, and TemplateRefused where the template raises on these messages.
        """
        args = dict(template_args or {})
        if taken := sorted(RESERVED_TEMPLATE_ARGS & args.keys()):
            raise TemplateRefused(f"{taken[0]} is not an argument that a row may set")
        if self._hf is None:
            raise NoChatTemplate(self.source, "is a tokenizer without its folder: give the model's folder instead")
        if not getattr(self._hf, "chat_template", None):
            raise NoChatTemplate(self.source, "has no chat template: put a chat_template.jinja into it")
        try:
            text = self._hf.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False, **args
            )
        except ImportError as error:
            raise MissingExtra("rendering chat templates", "prompts") from error
        except Exception as error:  # a template is a program: it can raise anything on messages it did not expect
            raise TemplateRefused(f"the chat template refused the messages: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise TemplateRefused(f"the chat template made {type(text).__name__}, not text")
        return text

    def decode(self, ids: Iterable[int] | npt.NDArray[np.integer[Any]], *, skip_special_tokens: bool = False) -> str:
        """The text of ALL ids of a response, int [n], at once.

        Never decode per segment and join: a character whose bytes lie in two segments would become two U+FFFD.
        Models pad their vocabulary and may sample an id that the tokenizer does not have; it becomes one U+FFFD.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        inside = (array >= 0) & (array < self._known.size)
        inside[inside] = self._known[array[inside]]
        unknown = np.flatnonzero(~inside)
        if not unknown.size:
            return self._decode_known(array.tolist(), skip_special_tokens)
        parts = np.split(array, unknown)  # every part but the first begins with an unknown id
        texts = [self._decode_known(p[min(i, 1) :].tolist(), skip_special_tokens) for i, p in enumerate(parts)]
        return UNDECODABLE.join(texts)

    def _decode_known(self, ids: list[int], skip_special_tokens: bool) -> str:
        if not ids:
            return ""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer in a model's folder, or a bare tokenizer.json (no chat template then). Never downloads.

    Raises TokenizerError, also for the name of a model on a hub; MissingExtra.
    """
    where = Path(path)
    if where.is_dir():
        if not any((where / name).is_file() for name in TOKENIZER_FILES):
            raise TokenizerError(f"{where} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
        file = where / "tokenizer.json"
        return Tokenizer(str(where), folder=where, backend=_load_backend(file) if file.is_file() else None)
    if where.is_file():
        return Tokenizer(str(where), backend=_load_backend(where))
    name = str(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        folder = f"./{name.split('/')[1]}"
        raise TokenizerError(
            f"there is no folder {name}. If that is a model on a hub: samplestore reads tokenizers from disk only. "
            f"Fetch it first: hf download {name} --local-dir {folder} and then use --tokenizer {folder}"
        )
    raise TokenizerError(f"there is no file or folder {name}; use --tokenizer FOLDER, a model's folder")


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """A Tokenizer from a Tokenizer, a path, or a loaded transformers tokenizer."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | PathLike):
        return load_tokenizer(tokenizer)
    if all(hasattr(tokenizer, name) for name in ("encode", "apply_chat_template", "get_vocab", "decode")):
        source = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        return Tokenizer(source, hf=tokenizer)
    raise TokenizerError(
        f"{type(tokenizer).__name__} is not a tokenizer; give a model's folder, load_tokenizer(folder), or a "
        "transformers tokenizer"
    )


def _load_backend(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise MissingExtra("reading tokenizer.json", "prompts") from error
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every bad file
        raise TokenizerError(f"{file} is no tokenizer.json: {error}") from error
    # A tokenizer.json can carry a length to cut at and to pad to: prompts would be changed without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _model_count(config: Path, name: str) -> int | None:
    """A size in a model's config.json; None where there is no such file or entry. Raises TokenizerError."""
    if not config.is_file():
        return None
    try:
        with config.open("rb") as file:
            values = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{config} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{config} is not a JSON object")
    text = values.get("text_config")  # models that also see images keep the language model's values here
    found = values.get(name, text.get(name) if isinstance(text, dict) else None)
    return found if isinstance(found, int) and found > 0 else None
