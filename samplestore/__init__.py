"""samplestore: a durable, queryable rollout store for RL post-training.

    store = samplestore.open("rollouts.db")
    run = store.run("gsm8k", samples_per_prompt=8)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "open": "samplestore.store",
    "Store": "samplestore.store",
    "Run": "samplestore.models",
    "Sample": "samplestore.models",
    "Segment": "samplestore.models",
    "SampleGroup": "samplestore.models",
    "BatchGroup": "samplestore.models",
    "BatchRow": "samplestore.models",
    "DatasetRow": "samplestore.models",
    "EngineRow": "samplestore.models",
    "EpisodeStep": "samplestore.models",
    "EvaluationRow": "samplestore.models",
    "Event": "samplestore.models",
    "EventTotal": "samplestore.models",
    "LedgerTotal": "samplestore.models",
    "RequestTotal": "samplestore.models",
    "PromptImage": "samplestore.models",
    "PromptRow": "samplestore.models",
    "Request": "samplestore.models",
    "SegmentArray": "samplestore.models",
    "Stage": "samplestore.models",
    "Timeline": "samplestore.models",
    "WeightVersionRow": "samplestore.models",
    "Worker": "samplestore.models",
    "WeightVersion": "samplestore.types",
    "Claim": "samplestore.types",
    "StageClaim": "samplestore.types",
    "RequestInfo": "samplestore.types",
    "RunSettings": "samplestore.runsettings",
    "SampleStoreError": "samplestore.errors",
    "LeaseLost": "samplestore.errors",
    "BatchTimeout": "samplestore.errors",
}

if TYPE_CHECKING:
    from samplestore.errors import BatchTimeout, LeaseLost, SampleStoreError
    from samplestore.models import (
        BatchGroup,
        BatchRow,
        DatasetRow,
        EngineRow,
        EpisodeStep,
        EvaluationRow,
        Event,
        EventTotal,
        LedgerTotal,
        PromptImage,
        PromptRow,
        Request,
        RequestTotal,
        Run,
        Sample,
        SampleGroup,
        Segment,
        SegmentArray,
        Stage,
        Timeline,
        WeightVersionRow,
        Worker,
    )  # fmt: skip
    from samplestore.runsettings import RunSettings
    from samplestore.store import Store, open
    from samplestore.types import Claim, RequestInfo, StageClaim, WeightVersion

__all__ = [
    "BatchGroup",
    "BatchRow",
    "BatchTimeout",
    "Claim",
    "DatasetRow",
    "EngineRow",
    "EpisodeStep",
    "EvaluationRow",
    "Event",
    "EventTotal",
    "LeaseLost",
    "LedgerTotal",
    "PromptImage",
    "PromptRow",
    "Request",
    "RequestInfo",
    "RequestTotal",
    "Run",
    "RunSettings",
    "Sample",
    "SampleGroup",
    "SampleStoreError",
    "Segment",
    "SegmentArray",
    "Stage",
    "StageClaim",
    "Store",
    "Timeline",
    "WeightVersion",
    "WeightVersionRow",
    "Worker",
    "__version__",
    "open",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samplestore' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
