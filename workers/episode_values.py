"""What an episode's function gives, checked: JSON within bounds, and text as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samplestore import codec
from samplestore.errors import EpisodeLimit, InvalidSetting
from samplestore.rowvalues import BadValue, plain
from samplestore.types import Ids
from samplestore.workers.chat import plain as without_control
from samplestore.workers.chat import plain_message

MAX_RESULT_BYTES = 256 * 1024  # of a step's result, arguments or saved state, as JSON
MAX_APPEND_BYTES = 4 * 1024 * 1024  # of a text, before it is made tokens


@dataclass(frozen=True, slots=True)
class Values:
    """tokenizer: of the worker, or None"""

    sample_id: int
    tokenizer: Any

    def json(self, what: str, value: Any) -> Any:
        """A plain copy. Raises EpisodeLimit, InvalidSetting."""
        try:
            return plain(value, MAX_RESULT_BYTES)
        except BadValue as error:
            if "larger than" in error.reason:
                raise EpisodeLimit(self.sample_id, f"{what} of a call as JSON, in bytes", MAX_RESULT_BYTES) from None
            field = f"{what}.{error.field}" if error.field else what
            raise InvalidSetting(field, error.shown, f"what JSON can hold: it {error.reason}") from None

    def ids(self, content: Any, control: bool = False) -> Ids:
        """int32 [n] of token ids, or of text; text without the names of control tokens, unless `control`. Raises
        InvalidSegment, InvalidSetting, EpisodeLimit."""
        if not isinstance(content, str):
            return codec.token_ids(content)
        tokenizer = self.needs_tokenizer("text")
        if len(content) > MAX_APPEND_BYTES:
            raise EpisodeLimit(self.sample_id, f"a text of {len(content):,} characters", MAX_APPEND_BYTES)
        ids: Ids = tokenizer.encode(content if control else without_control(tokenizer, content))
        return ids

    def prompt(self, prompt: Any, template_args: Any) -> tuple[Ids, Any]:
        """(int32 [n], n > 0; text or messages as they are said) of a prompt: text, messages or token ids."""
        said: Any = prompt if isinstance(prompt, str) else ""
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            tokenizer = self.needs_tokenizer("a prompt of messages")
            said = [plain_message(tokenizer, m) for m in self.json("prompt", [dict(m) for m in prompt])]
            ids: Ids = tokenizer.encode(tokenizer.render(said, template_args=template_args))
        else:
            ids = self.ids(prompt)
        if not ids.size:
            raise InvalidSetting("prompt", "", "text, messages or token ids that are not empty")
        return ids, said

    def needs_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InvalidSetting("tokenizer", None, f"samplestore worker --tokenizer DIR: {what} needs it")
        return self.tokenizer
