"""A response as turns: what the model said, what its environment answered, and the recorded calls of its episode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samplestore.dashboard import look, parts
from samplestore.dashboard.look import line
from samplestore.dashboard.tokenview import Decoder
from samplestore.queries.episodes import STARTED, RecordedCall
from samplestore.queries.trajectory import Span, Trajectory
from samplestore.words import amount

MAX_TURNS = 200
MAX_TEXT = 20_000  # characters of a turn
MAX_IDS = 3_000  # token ids of a turn, where there is no tokenizer
MAX_CALLS = 200


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, stop) of prompt and response together; versions of the generated ones, in order."""

    kind: str
    start: int
    stop: int
    loss: int
    versions: tuple[int | None, ...] = ()


def turns(t: Trajectory) -> list[Turn]:
    """The prompt, then neighbouring spans of one kind as one turn, whichever weights and requests they are of."""
    made = [Turn("prompt", 0, t.n_prompt, 0)] if t.n_prompt else []
    for span in t.spans:
        last = made[-1] if made else None
        if last is not None and last.kind == span.kind and last.stop == span.start and last.loss == span.loss:
            made[-1] = Turn(last.kind, last.start, span.start + span.n_tokens, last.loss, _versions(last, span))
        else:
            made.append(Turn(span.kind, span.start, span.start + span.n_tokens, span.loss, _versions(None, span)))
    return made


def _versions(turn: Turn | None, span: Span) -> tuple[int | None, ...]:
    before = () if turn is None else turn.versions
    if span.kind != "generated" or (before and before[-1] == span.version_min):
        return before
    return (*before, span.version_min)


def html(t: Trajectory, ids: Any, decoder: Decoder | None) -> str:
    """ids: int32 [n] of prompt and response together; they may end early, and then it is said."""
    every = turns(t)
    made = [_turn(turn, ids, decoder) for turn in every[:MAX_TURNS]]
    if len(every) > MAX_TURNS:
        made.append(f'<div class="dim">showing {MAX_TURNS} of {len(every)} turns</div>')
    note = f"{amount(len(every), 'turn')}; what is not trained on is said"
    return parts.section("Conversation", note, "".join(made))


def _turn(turn: Turn, ids: Any, decoder: Decoder | None) -> str:
    who = {"generated": "model", "prompt": "prompt"}.get(turn.kind, turn.kind)
    colour = {"generated": look.SKY, "prompt": look.GREY}.get(turn.kind, look.ORANGE)
    versions = " → ".join(look.version_key(v) for v in turn.versions[:12])
    masked = ' <span class="dim">not trained on</span>' if turn.kind != "prompt" and not turn.loss else ""
    mine = ids[turn.start : turn.stop]
    size = amount(turn.stop - turn.start, "token")
    if mine.size < turn.stop - turn.start:
        masked += f' <span class="warn">▲ only the first {look.count(mine.size)} of them are shown</span>'
    shown, cut = _ids(mine) if decoder is None else _text(decoder.decode(mine))
    head = f'<div class="who">{look.esc(who)} <span class="dim">{size}</span> {versions}{masked}</div>'
    return f'<div class="ss-turn" style="--c:{colour}">{head}<div class="ss-text">{shown}</div>{cut}</div>'


def _text(text: str) -> tuple[str, str]:
    """(HTML, what was cut off)"""
    cut = f'<div class="dim">the first {MAX_TEXT:,} characters</div>' if len(text) > MAX_TEXT else ""
    return look.esc(look.visible(text, MAX_TEXT)), cut


def _ids(mine: Any) -> tuple[str, str]:
    cut = f'<div class="dim">the first {MAX_IDS:,} token ids</div>' if mine.size > MAX_IDS else ""
    return " ".join(str(i) for i in mine[:MAX_IDS].tolist()), cut


def calls(found: Sequence[RecordedCall]) -> str:
    """The calls of an episode's function, as they were recorded."""
    columns = [
        ("call", "r"),
        ("kind", "n"),
        ("name", "n"),
        ("state", "n"),
        ("tokens", "n"),
        ("asked", ""),
        ("result", ""),
    ]
    rows: list[list[Any]] = []
    for c in found[:MAX_CALLS]:
        state = parts.mark("warn", "started, outcome unknown") if c.state == STARTED else look.esc(c.state)
        where = "–" if c.start is None else f"{c.start} to {'…' if c.stop is None else c.stop}"
        result = f'<span class="bad">{line(c.error, 400)}</span>' if c.error else _json(c.result)
        rows.append([str(c.number), look.esc(c.kind), line(c.name, 60), state, where, _json(c.asked), result])
    note = "" if len(found) <= MAX_CALLS else f"the first {MAX_CALLS} of {len(found)}"
    return parts.section("Calls of its episode", note, parts.table(columns, rows))


def _json(value: Any) -> str:
    return "–" if value is None else line(json.dumps(value, ensure_ascii=False, default=str), 300)
