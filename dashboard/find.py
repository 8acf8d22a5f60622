"""Finding a place in a response: a text, a token id, the least likely token. No Streamlit here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from samplestore.dashboard.tokenview import Decoder, pieces

MAX_TOKENS = 60_000  # that a text is sought in: they are decoded one after the other
MAX_HITS = 200
ID = re.compile(r"id:\s*(\d{1,10})")


@dataclass(frozen=True, slots=True)
class Hits:
    """tokens   positions of each hit's tokens, in order
    looked_at   so many tokens of all were looked through
    cut         there are more hits
    """

    tokens: list[range]
    looked_at: int
    cut: bool = False

    @property
    def positions(self) -> set[int]:
        return {position for hit in self.tokens for position in hit}


def find(ids: Any, wanted: str, decoder: Decoder | None) -> Hits:
    """Where the tokens `ids` (int32 [n]) say `wanted`, whatever its case; `id:123` finds a token by its id. Without a
    decoder only ids can be found."""
    asked = ID.fullmatch(wanted.strip())
    if asked is not None:
        found = np.nonzero(ids == int(asked[1]))[0].tolist() if int(asked[1]) < 2**31 else []
        return Hits([range(p, p + 1) for p in found[:MAX_HITS]], int(ids.size), len(found) > MAX_HITS)
    if decoder is None or not wanted:
        return Hits([], 0)
    part = ids[:MAX_TOKENS].tolist()
    told = [piece or "" for piece in pieces(decoder, [], part, [])]
    # lower() may change the length of a text; of a single piece that is small, so each is lowered by itself.
    lowered = [piece.lower() for piece in told]
    ends = np.cumsum([len(piece) for piece in lowered]) if lowered else np.zeros(0, np.int64)
    text, target = "".join(lowered), wanted.lower()
    hits: list[range] = []
    at = text.find(target)
    while at >= 0:
        if len(hits) == MAX_HITS:
            return Hits(hits, len(part), cut=True)
        first = int(np.searchsorted(ends, at, side="right"))
        last = int(np.searchsorted(ends, at + len(target) - 1, side="right"))
        hits.append(range(first, last + 1))
        at = text.find(target, at + len(target))
    return Hits(hits, len(part))
