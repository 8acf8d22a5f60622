"""A trajectory in the terminal: what each weight version wrote, in its colour, with a mark at each change.

The colour is never the only cue: every stretch begins with a mark that names its version, also where there are no
colours. Text of models is escaped: it can do nothing to the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samplestore.cli.output import fancy, note, printable
from samplestore.errors import MissingExtra
from samplestore.states import SegmentKind
from samplestore.words import amount

if TYPE_CHECKING:
    from rich.text import Text

    from samplestore.queries.trajectory import Span

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Okabe and Ito's colours, told apart by colour-blind people too; a version has the same in every sample.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999933")
PROMPT, ENVIRONMENT = "dim", "italic"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that are shown as one: the prompt (span None), or a span. text: decoded, or their ids."""

    span: Span | None
    n_tokens: int
    text: str

    @property
    def label(self) -> str:
        if self.span is None:
            return "prompt"
        if self.span.kind == SegmentKind.ENVIRONMENT:
            return "environment"
        low, high = self.span.version_min, self.span.version_max
        version = "v?" if low is None else f"v{low}" if low == high else f"v{low}-{high}"
        return version if self.span.loss else f"{version}, not trained"

    @property
    def style(self) -> str:
        if self.span is None:
            return PROMPT
        if self.span.kind == SegmentKind.ENVIRONMENT:
            return ENVIRONMENT
        shown = "" if self.span.version_min is None else PALETTE[self.span.version_min % len(PALETTE)]
        return shown if self.span.loss else f"dim {shown}".strip()


def stretches(ids: Sequence[int], n_prompt: int, spans: Sequence[Span], decoder: Any = None) -> list[Stretch]:
    """Prompt and response as stretches; `ids` may end early. A character whose bytes lie in two stretches stands where
    it is complete."""
    found = [Stretch(None, n_prompt, _text(ids[:n_prompt], decoder))]
    response, shown, last = ids[n_prompt:], 0, spans[-1] if spans else None
    whole = None if decoder is None else decoder.decode(response)
    for span in spans:
        start, stop = span.start - n_prompt, min(span.start - n_prompt + span.n_tokens, len(response))
        if stop <= start:
            break
        if whole is None:
            found.append(Stretch(span, stop - start, _text(response[start:stop], None)))
            continue
        # What is certain so far; all of it is a beginning of the whole text, which alone is decoded exactly.
        upto = len(whole) if span is last or stop == len(response) else _certain(decoder, response[:stop], whole)
        found.append(Stretch(span, stop - start, whole[shown : max(shown, upto)]))
        shown = max(shown, upto)
    return found


def _text(ids: Sequence[int], decoder: Any) -> str:
    return " ".join(map(str, ids)) if decoder is None else str(decoder.decode(ids))


def _certain(decoder: Any, ids: Sequence[int], whole: str) -> int:
    """How many characters of the whole text these first ids make."""
    part = decoder.decode(ids).rstrip(REPLACEMENT)
    if whole.startswith(part):
        return len(part)
    return next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))


def marks(listed: Sequence[Stretch]) -> Iterator[str]:
    """What stands before each stretch, and names what ended the one before."""
    left, right = ("⟦", "⟧") if _unicode() else ("[[", "]]")
    ended = None
    for one in listed:
        yield f"{left}{f'{ended} | ' if ended else ''}{one.label}{right}"
        ended = None if one.span is None else one.span.finish_reason


def _unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") in ("utf8", "utf16")


def show(listed: Sequence[Stretch]) -> None:
    """The stretches, in colours on a terminal, and what the colours mean."""
    if not fancy():
        for mark, one in zip(marks(listed), listed, strict=True):
            sys.stdout.write(f"{printable(mark)} {printable(one.text, lines=True)}\n")
        return
    from rich.console import Console
    from rich.text import Text

    drawn = Text(overflow="fold")
    for mark, one in zip(marks(listed), listed, strict=True):
        if one.span is not None and one is listed[1]:
            drawn.append("\n\n")
        drawn.append(printable(mark), style=f"bold reverse {one.style}".strip())
        drawn.append(printable(one.text, lines=True), style=one.style)
    console = Console(file=sys.stdout, highlight=False)
    console.print(_legend(listed))
    console.print(drawn)


def _legend(listed: Sequence[Stretch]) -> Text:
    from rich.text import Text

    tokens: dict[tuple[str, str], int] = {}
    for one in listed:
        tokens[one.label, one.style] = tokens.get((one.label, one.style), 0) + one.n_tokens
    legend = Text("legend: ")
    for (label, style), n in tokens.items():
        legend.append(f" {printable(label)} ", style=f"reverse {style}".strip())
        legend.append(f" {amount(n, 'token')}   ")
    return legend


def known_tokenizer(named: str | None) -> Any:
    """The tokenizer that was named, or the one that workers started here would use; None where neither is there."""
    from samplestore.config import resolve
    from samplestore.tokenizers import TokenizerError, load_tokenizer

    if named is not None:
        return load_tokenizer(named)
    configured = resolve(None, {}).tokenizer
    if configured is None:
        return None
    try:
        return load_tokenizer(configured)
    except (TokenizerError, MissingExtra) as error:  # nobody asked for it here: the sample is shown all the same
        note(f"token ids instead of text: {error}")
        return None
