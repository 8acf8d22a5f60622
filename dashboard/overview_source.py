"""Where the overview gets its numbers: what is cheap at every look, counts over a large run more seldom."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
import streamlit as st

from samplestore.dashboard import source
from samplestore.dashboard.source import FRESH_S
from samplestore.engine import Database
from samplestore.models import Run as RunRow
from samplestore.queries import abort_list, browse, fleet, ledger, metrics, status, why
from samplestore.queries.metric_names import PREFIX
from samplestore.run import Run
from samplestore.states import GroupState

LOOK_BACK_S = 3600.0  # of the aborts on the first page


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything on the first page. `status`, `ledger`: see samplestore.queries; `why` as JSON."""

    database: str
    settings: dict[str, Any]
    status: dict[str, Any]
    ledger: dict[str, Any]
    why: dict[str, Any]
    recent: list[dict[str, Any]]
    metrics: dict[str, float]
    over_time: dict[str, Any]
    rate: tuple[float, float] | None = None


TOTALS_SHARE = 0.05  # of the time, at most, goes into counting a whole run


KEEP_S = 600.0


@st.cache_resource(max_entries=32, show_spinner=False)
def _took(url: str, run_name: str) -> list[float]:
    """[seconds that counting took when it was last done]"""
    return [0.0]


def _turn(url: str, run_name: str) -> int:
    """Changes when totals should be read again: every second of a small run, more seldom of a large one."""
    seconds = _took(url, run_name)[0] / TOTALS_SHARE
    return int(time.time() // max(FRESH_S, 2.0 ** math.ceil(math.log2(seconds)) if seconds else 0.0))


@st.cache_data(ttl=KEEP_S, max_entries=32, show_spinner=False)
def _totals(url: str, run_name: str, turn: int, _of: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """(status, ledger): counts over a whole run, which cost with its length."""
    database, began = source.opened(url).database, time.monotonic()
    told = status.totals_of(database, _of.id), ledger.read(database, _of.id, exact=False)
    _took(url, run_name)[0] = time.monotonic() - began
    return told


def _now(database: Database, run_id: int) -> dict[str, Any]:
    """What of a status costs nothing, as of now."""
    with database.reading() as c:
        row = c.execute(
            sa.select(RunRow.state, RunRow.current_version, RunRow.timeline, RunRow.epoch).where(RunRow.id == run_id)
        ).one()
        lags = status.staleness_histogram(c, run_id, GroupState.READY)
    return {**row._mapping, "staleness": lags}


@st.cache_data(ttl=FRESH_S, max_entries=32, show_spinner=False)
def _overview(url: str, run_name: str, _of: Run) -> Overview:
    database, of = source.opened(url).database, _of
    told, book = _totals(url, run_name, _turn(url, run_name), of)
    live, engines = fleet.workers(database, of.id), fleet.engines(database, of.id)
    told = {
        **told, **_now(database, of.id), "as_of": live["as_of"], "totals_as_of": told["as_of"], "engines": engines,
        "workers": [*live["live"], *({**w, "samples": 0} for w in live["ended"])],
    }  # fmt: skip
    return Overview(
        database.shown_url,
        of.settings.as_json(),
        told,
        book,
        why.why(database, of.id, of.settings).as_json(),
        browse.recent(database, of.id, 8),
        metrics.read(database, of.id, of.settings),
        abort_list.over_time(database, of.id, LOOK_BACK_S),
    )


def read(of: Run) -> Overview:
    source.store()
    data = _overview(source.database_url(), of.name, of)
    # Both of one look: the ledger's totals may be older than the rest of the page.
    generated = int(data.metrics[f"{PREFIX}tokens/generated"])
    return replace(data, rate=token_rate(of, data.status["as_of"], generated))


RATE_S, RATE_POINTS = 60.0, 240  # tokens per second are those of the last minute


@st.cache_resource(max_entries=32, show_spinner=False)
def _looks(url: str, run_id: int) -> deque[tuple[float, int]]:
    """(when, tokens generated until then) of the last looks, of all readers of this server together."""
    return deque(maxlen=RATE_POINTS)


def token_rate(of: Run, as_of: float, generated: int) -> tuple[float, float] | None:
    """(tokens stored a second, over how many seconds), from what was seen before; None at the first look. The ledger's
    total is kept, so this reads nothing."""
    looks = _looks(source.database_url(), of.id)
    if not looks or as_of > looks[-1][0]:
        looks.append((as_of, generated))
    seen = list(looks)  # other sessions append meanwhile
    first = next(((at, n) for at, n in seen if at >= as_of - RATE_S), None)
    if first is None or as_of - first[0] < FRESH_S:
        return None
    return max(0, generated - first[1]) / (as_of - first[0]), as_of - first[0]
