"""Names that a setting has elsewhere, or almost has: what somebody who writes one of them means."""

from __future__ import annotations

from collections.abc import Iterable

from samplestore.words import close_to

RUN = {  # slime's flags, by the name of the run's setting
    "n_samples_per_prompt": "samples_per_prompt", "rollout_batch_size": "groups_per_step", "num_epoch": "epochs",
    "rollout_seed": "seed", "rollout_max_response_len": "max_new_tokens", "rollout_temperature": "sampling",
    "rollout_top_p": "sampling", "rollout_top_k": "sampling", "rollout_stop": "sampling",
    "rollout_stop_token_ids": "sampling", "rollout_skip_special_tokens": "sampling",
    "partial_rollout": "mode", "mask_offpolicy_in_partial_rollout": "mask_offpolicy", "group_rm": "group_stages",
    "dynamic_sampling_filter_path": "group_filters", "rollout_sample_filter_path": "sample_filters",
    "buffer_filter_path": "order", "prompt_data": "datasets", "temperature": "sampling", "top_p": "sampling",
    "rollout_shuffle": "seed", "max_response_len": "max_new_tokens",
}  # fmt: skip
WORKER = {  # and by that of the worker's
    "sglang_router_ip": "router", "sglang_router_port": "router", "sglang_server_concurrency": "concurrency",
    "use_rollout_routing_replay": "routed_experts", "custom_generate_function_path": "episode", "rm_type": "reward",
    "custom_rm_path": "reward", "rm_url": "reward", "dynamic_sampling_filter_path": "group_filter",
    "rollout_sample_filter_path": "sample_filter", "hf_checkpoint": "tokenizer",
    "rollout_max_response_len": "max_new_tokens", "rollout_temperature": "sampling", "rollout_top_p": "sampling",
}  # fmt: skip

TRAINER = {  # slime's, for what is no setting here but said by the trainer
    "global_batch_size": "run.batch(step, groups=N)", "advantage_estimator": "run.batch(step, advantages=NAME)",
    "max_tokens_per_gpu": "samplestore.datasets.torch_dataset(max_tokens=N)", "use_tis": "samplestore.ratios.truncated",
    "tis_clip": "samplestore.ratios.truncated", "num_rollout": "the trainer's own loop",
}  # fmt: skip


def plain_name(name: str) -> str:
    """slime's flags are written with - or _."""
    return name.removeprefix("--").replace("-", "_").lower()


def advice(name: str, known: Iterable[str], elsewhere: dict[str, str], form: str = "{}") -> str:
    """What to write instead of `name`: the one that is meant, in the `form` given, or one of all."""
    if said := TRAINER.get(plain_name(name)):
        return f"{said}, in the trainer: it is no setting"
    known = list(known)
    if close := meant(name, known, elsewhere):
        return f"{form.format(close)}, if that is meant"
    return f"one of: {', '.join(known)}"


def meant(name: str, known: Iterable[str], elsewhere: dict[str, str]) -> str | None:
    """The one of `known` that `name` stands for, if any."""
    plain = plain_name(name)
    if plain in TRAINER:
        return None  # similar names of settings would lead astray
    known = list(known)
    if (found := elsewhere.get(plain)) in known:
        return found
    if plain in known:
        return plain
    return next(iter(close_to(plain, known)), None)
