"""The settings that say what is served and when: data sets, curriculum, the order of ready groups. Checked here by
their text; SQL is checked once more by the database when a run is made (verbs/prompts.py: probe)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from samplestore.errors import InvalidSetting

FIFO, OLDEST, SQL = "fifo", "oldest", "sql:"
MAX_SQL, MAX_DATASETS = 4000, 200
ORDERS = f'"{FIFO}", "{OLDEST}", or "{SQL}EXPRESSION" over the columns of sample_group'
A_SELECT = f"one SELECT (or WITH ... SELECT) of at most {MAX_SQL} characters without ; and comments"
SHARE = '{"weight": above 0, "epochs": a whole number above 0 or null, "priority": a whole number}'


@dataclass(frozen=True, slots=True)
class Share:
    """How one data set is served.

    weight    its part of the groups, relative to the other data sets of its priority
    epochs    passes over it; None: those of the run
    priority  data sets of a lower one are served first
    """

    weight: float = 1.0
    epochs: int | None = None
    priority: int = 0


def check(order: Any, datasets: Any, curriculum: Any) -> None:
    """Raises InvalidSetting."""
    if order not in (FIFO, OLDEST) and not (isinstance(order, str) and order.startswith(SQL) and _one(order[4:])):
        raise InvalidSetting("order", order, ORDERS)
    shares(datasets)
    if curriculum is not None:
        if not (isinstance(curriculum, str) and _one(curriculum) and re.match(r"\s*(select|with)\b", curriculum, re.I)):
            raise InvalidSetting("curriculum", curriculum, A_SELECT)
        if datasets:
            raise InvalidSetting("curriculum", curriculum, "nothing, where datasets are named: both say what is next")


def shares(datasets: Any) -> dict[str, Share]:
    """The data sets of a run's setting. Raises InvalidSetting."""
    if not isinstance(datasets, dict) or len(datasets) > MAX_DATASETS:
        raise InvalidSetting("datasets", datasets, f"an object of at most {MAX_DATASETS} {{NAME: {SHARE}}}")
    found = {}
    for name, said in datasets.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200 or "\x00" in name:
            raise InvalidSetting("datasets", name, "names of 1 to 200 characters")
        if not isinstance(said, dict) or not said.keys() <= {"weight", "epochs", "priority"}:
            raise InvalidSetting(f"datasets.{name}", said, SHARE)
        share = Share(**said)
        weighs = _number(share.weight) and math.isfinite(share.weight) and 0 < share.weight <= 1e9
        passes = share.epochs is None or (_whole(share.epochs) and 0 < share.epochs < 2**31)
        if not weighs or not passes or not (_whole(share.priority) and abs(share.priority) < 2**31):
            raise InvalidSetting(f"datasets.{name}", said, SHARE)
        found[name] = share
    return found


def _one(sql: str) -> bool:
    """Whether this is one piece of SQL. It is the operator's and trusted; this keeps a slip of the pen out."""
    return len(sql.strip()) > 0 and len(sql) <= MAX_SQL and not re.search(r";|--|/\*|\x00", sql)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
