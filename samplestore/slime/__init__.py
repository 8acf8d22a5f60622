"""slime (and Miles) with a store, without a fork of either: functions and classes that slime's flags name.

    --data-source-path                    samplestore.slime.StoreDataSource
    --rollout-function-path               samplestore.slime.generate_rollout
    --rollout-sample-hook-path            samplestore.slime.observe
    --rollout-all-samples-process-path    samplestore.slime.observe_all
    --custom-async-data-buffer-path       samplestore.slime.StoreDataBuffer      (Miles)

docs/from-slime.md says which of them go together. Neither slime nor torch nor ray is imported.
"""

from samplestore.slime.buffer import StoreDataBuffer
from samplestore.slime.observer import observe, observe_all
from samplestore.slime.rollout import generate_rollout, publish_weights
from samplestore.slime.settings import NotConfigured
from samplestore.slime.source import StoreDataSource

__all__ = [
    "NotConfigured",
    "StoreDataBuffer",
    "StoreDataSource",
    "generate_rollout",
    "observe",
    "observe_all",
    "publish_weights",
]
