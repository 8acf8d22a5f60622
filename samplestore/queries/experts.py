"""Routed experts of a sample, put together from what its requests stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samplestore.arrayfiles import ArrayFiles
from samplestore.arrays import EXPERTS
from samplestore.engine import Database
from samplestore.queries import arrays


def routed_experts(database: Database, run_id: int, sample_id: int, files: Callable[[], ArrayFiles]) -> arrays.Whole:
    """(experts [rows, layers, top_k], present [rows]) of a sample; rows = prompt + response tokens - 1.

    Row r is the routing of token r of prompt and response while the token after it was made. Rows that no request
    stored (its engine died before its last word) are 0 and not present. [0, 0, 0] where nothing is stored.
    Raises NotInRun, ArrayFileError.
    """
    whole, present = arrays.one(database, run_id, sample_id, EXPERTS, files)
    return (whole, present) if len(whole) else (np.zeros((0, 0, 0), dtype=np.uint8), present)
