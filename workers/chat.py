"""Chat templates for episodes: only what is new is rendered, and what was there is proven unchanged.

Generated tokens are never made of text again. The engine's tokens stay as they came; a template adds what stands
between one answer and the next, and is held to it: rendered with everything before, it must begin with exactly that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samplestore.errors import SampleStoreError
from samplestore.tokenizers import Tokenizer
from samplestore.types import Ids

Message = Mapping[str, Any]


class TemplateChanged(SampleStoreError):
    """The chat template writes the earlier messages in another way once there are more of them."""

    def __init__(self, before: str, after: str) -> None:
        self.before, self.after = before, after
        super().__init__(
            f"the chat template changes what stands before an answer: it was ...{before!r}, and with more messages it "
            f"is ...{after!r}. Use a template that only adds, or give the text of the next turn with ctx.append"
        )


def plain(tokenizer: Tokenizer, content: str) -> str:
    """The text without the names of control tokens. A tokenizer takes "<|im_end|>" for the token, wherever it stands:
    in a tool's output, or in one agent's answer within the prompt of another, it would end a turn that nobody ended."""
    names = tokenizer.control_names
    if not any(name in content for name in names):
        return content
    by_length: dict[int, set[str]] = {}
    for name in names:
        by_length.setdefault(len(name), set()).add(name)
    ends = re.compile("[" + re.escape("".join({name[-1] for name in names})) + "]")
    # One pass: what is kept never ends in a name. Taking names out again and again, since removing one can put the
    # halves of another together, would take time with the square of what a tool wrote.
    kept: list[str] = []
    at = 0
    for found in ends.finditer(content):
        kept.extend(content[at : found.end()])
        at = found.end()
        for length, these in by_length.items():
            if "".join(kept[-length:]) in these:
                del kept[-length:]
                break
    return "".join(kept) + content[at:]


def plain_message(tokenizer: Tokenizer, message: Message) -> dict[str, Any]:
    """Every text in it without the names of control tokens: templates write parts of contents, arguments of calls and
    names too."""
    made: dict[str, Any] = _plain_value(tokenizer, dict(message))
    return made


def _plain_value(tokenizer: Tokenizer, value: Any) -> Any:
    if isinstance(value, str):
        return plain(tokenizer, value)
    if isinstance(value, Mapping):
        return {_plain_value(tokenizer, k): _plain_value(tokenizer, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(tokenizer, v) for v in value]
    return value


class Conversation:
    """The messages of an episode, as far as its template has written them.

    messages   of the prompt; answers follow as marks, since their text is never rendered
    """

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Any = None, template_args: Any = None
    ) -> None:
        self.tokenizer, self.tools, self.template_args = tokenizer, tools, template_args
        self.messages: list[Message] = list(messages)
        self.answers = 0

    def copy(self) -> Conversation:
        """For a branch, which goes on from here by itself."""
        made = Conversation(self.tokenizer, self.messages, self.tools, self.template_args)
        made.answers = self.answers
        return made

    def prompt(self) -> str:
        """What opens the first answer."""
        return self._render(self.messages)

    def next(self, added: Sequence[Message]) -> str:
        """The text between the end of an answer and the opening of the next one, which answers `added`. Control tokens
        that their texts spell are left out. Raises TemplateChanged, TemplateRefused, NoChatTemplate."""
        mark = f"ANSWER{self.answers}OFTHISEPISODE"
        new = [plain_message(self.tokenizer, message) for message in added]
        before = self._render(self.messages)
        messages = [*self.messages, {"role": "assistant", "content": mark}, *new]
        whole = self._render(messages)
        head = before + mark
        if not whole.startswith(head):
            at = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(whole))
            raise TemplateChanged(head[max(0, at - 40) : at + 40], whole[max(0, at - 40) : at + 40])
        self.messages, self.answers = messages, self.answers + 1
        return whole[len(head) :]

    def _render(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.render(messages, tools=self.tools, template_args=self.template_args)


def after(tokenizer: Tokenizer, text: str, last: int | None) -> Ids:
    """int32 [n]: the tokens of `text`, without its first where that is the token that ended the answer: engines send
    the end of a turn as its last token."""
    ids = tokenizer.encode(text)
    return ids[1:] if last is not None and ids.size and int(ids[0]) == last else np.asarray(ids, np.int32)
