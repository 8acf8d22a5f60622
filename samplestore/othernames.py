"""Names that a setting has elsewhere, or almost has: what somebody who writes one of them means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

RUN = {  # slime's flags, by the name of the run's setting
    "n_samples_per_prompt": "samples_per_prompt", "rollout_batch_size": "groups_per_step", "num_epoch": "epochs",
    "rollout_seed": "seed", "rollout_max_response_len": "max_new_tokens", "rollout_temperature": "sampling",
    "rollout_top_p": "sampling", "rollout_top_k": "sampling", "rollout_stop": "sampling",
    "rollout_stop_token_ids": "sampling", "rollout_skip_special_tokens": "sampling",
    "partial_rollout": "mode", "mask_offpolicy_in_partial_rollout": "mask_offpolicy", "group_rm": "group_stages",
    "dynamic_sampling_filter_path": "group_filters", "rollout_sample_filter_path": "sample_filters",
    "buffer_filter_path": "order", "prompt_data": "datasets", "temperature": "sampling", "top_p": "sampling",
    "max_response_len": "max_new_tokens",
}  # fmt: skip
WORKER = {  # and by that of the worker's
    "sglang_router_ip": "router", "sglang_router_port": "router", "sglang_server_concurrency": "concurrency",
    "use_rollout_routing_replay": "routed_experts", "custom_generate_function_path": "episode", "rm_type": "reward",
    "custom_rm_path": "reward", "rm_url": "reward", "dynamic_sampling_filter_path": "group_filter",
    "rollout_sample_filter_path": "sample_filter", "hf_checkpoint": "tokenizer",
    "rollout_max_response_len": "max_new_tokens", "rollout_temperature": "sampling", "rollout_top_p": "sampling",
}  # fmt: skip


def meant(name: str, known: Iterable[str], elsewhere: dict[str, str]) -> str | None:
    """The one of `known` that `name` stands for, if any: slime's flags are written with - or _."""
    plain = name.removeprefix("--").replace("-", "_").lower()
    known = list(known)
    if (found := elsewhere.get(plain)) in known:
        return found
    if plain in known:
        return plain
    return next(iter(get_close_matches(plain, known, n=1)), None)
