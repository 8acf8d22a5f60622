"""Lets SGLang start beside a CPU build of torch. Python imports this file by itself: launch.py puts its folder first on
the path of servers on machines without a GPU.

Two modules need something just before they are imported:

torchvision   The package index has it built for CUDA. Beside a CPU torch it fails, because it describes operators
              that its library, which cannot be loaded, should have defined. Defining their names is enough.
state_capturer.base   Keeps routed experts in memory that CUDA has pinned. On a CPU ordinary memory does. Releases
              before 0.5.21 do not ask for an allocator: there routed experts need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_kept: list[Any] = []  # a torch.library.Library takes its definitions along when it is collected


def _define_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(name + signature)  # type: ignore[no-untyped-call]
    _kept.append(library)


def _allocate_routed_experts_on_the_cpu() -> None:
    import torch

    try:
        from sglang.srt.mem_cache.pool_host import common
    except ModuleNotFoundError:
        return  # 0.5.12 and older

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)


class _Before(MetaPathFinder):
    """Calls a function once, when a module is about to be imported, and leaves the import to others."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if action := self.actions.pop(name, None):
            action()


sys.meta_path.insert(
    0,
    _Before(
        {
            "torchvision": _define_torchvision_operators,
            "sglang.srt.state_capturer.base": _allocate_routed_experts_on_the_cpu,
        }
    ),
)
