"""Lets SGLang start beside a CPU build of torch. Python imports this file by itself: launch.py puts its folder first on
the path of servers on machines without a GPU.

Some modules need something just before they are imported:

torchvision   The package index has it built for CUDA. Beside a CPU torch it fails, because it describes operators
              that its library, which cannot be loaded, should have defined. Defining their names is enough.
state_capturer.base   Keeps routed experts in memory that CUDA has pinned. On a CPU ordinary memory does. Releases
              before 0.5.21 do not ask for an allocator: there routed experts need a GPU.
models.qwen3_5   Asks for four kernels as it is imported, and the image processor of all Qwen models imports it. Their
              names are enough: no other model calls them.
server_args, model_runner, sampler   --enable-deterministic-inference: the attention backend of CPUs is not among those
              that it allows, the kernels that do not depend on the batch are for GPUs, and the hash that seeds are
              drawn by has no CPU build. The hash is computed with torch, bit for bit; the kernels are left out, so that
              the last bits of log-probs depend on what else is in the batch. From 0.5.21 on.
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


def _define_kernels_of_qwen3_5() -> None:
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in (
        "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):  # fmt: skip
        library.define(f"{name}() -> ()")  # type: ignore[no-untyped-call]
    _kept.append(library)


def _allow_seeds_with_torch_native() -> None:
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # not only ModuleNotFoundError: some have the package, without this in it
        return  # 0.5.18 and older

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _leave_out_batch_invariant_kernels() -> None:
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda: None


def _define_murmur_hash() -> None:
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")  # type: ignore[no-untyped-call]
    library.impl("murmur_hash32_cpu", _like_murmur_hash32, "Meta")  # type: ignore[no-untyped-call]
    _kept.append(library)


def _murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """uint32 [n, m]: MurmurHash3 of 16 bytes (seed, position, column), for n seeds with their positions and m columns.
    In int64, whose products wrap around: only their lower 32 bits count."""
    import torch

    low = 0xFFFFFFFF

    def rotated(x: Any, by: int) -> Any:
        return ((x << by) | (x >> (32 - by))) & low

    signed = seed.view(torch.int64)[:, None]
    hashed = torch.zeros((seed.shape[0], columns.shape[0]), dtype=torch.int64)
    for block in (signed & low, (signed >> 32) & low, positions.long()[:, None] & low, columns.long()[None, :] & low):
        mixed = rotated((block * 0xCC9E2D51) & low, 15)
        hashed = (rotated(hashed ^ ((mixed * 0x1B873593) & low), 13) * 5 + 0xE6546B64) & low
    hashed ^= 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & low
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & low
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


def _like_murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    import torch

    return torch.empty((seed.shape[0], columns.shape[0]), dtype=torch.uint32, device=seed.device)


def _allocate_routed_experts_on_the_cpu() -> None:
    import torch

    try:
        from sglang.srt.mem_cache.pool_host import common
    except ImportError:
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
            "sglang.srt.models.qwen3_5": _define_kernels_of_qwen3_5,
            "sglang.srt.server_args": _allow_seeds_with_torch_native,
            "sglang.srt.model_executor.model_runner": _leave_out_batch_invariant_kernels,
            "sglang.srt.layers.sampler": _define_murmur_hash,
            "sglang.srt.state_capturer.base": _allocate_routed_experts_on_the_cpu,
        }
    ),
)
