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
    "rollout_shuffle": "seed", "max_response_len": "max_new_tokens", "n": "samples_per_prompt",
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

SAMPLING = frozenset(  # what SGLang takes in sampling_params
    """max_new_tokens min_new_tokens temperature top_p top_k min_p stop stop_token_ids stop_regex ignore_eos
    no_stop_trim skip_special_tokens spaces_between_special_tokens n beam_width frequency_penalty presence_penalty
    repetition_penalty logit_bias sampling_seed stream_interval custom_params json_schema regex ebnf
    structural_tag""".split()
)
OF_OTHER_ENGINES = {  # the same by the names of OpenAI's interface, vLLM and transformers
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "max_length": "max_new_tokens",
    "min_tokens": "min_new_tokens", "min_length": "min_new_tokens", "seed": "sampling_seed", "stop_sequences": "stop",
    "stop_strings": "stop", "eos_token_id": "stop_token_ids", "guided_json": "json_schema", "guided_regex": "regex",
    "guided_grammar": "ebnf",
}  # fmt: skip
OBJECTS = ("sampling", "reward_weights", "datasets")  # settings that are objects, and so are not given key by key


def plain_name(name: str) -> str:
    """slime's flags are written with - or _."""
    return name.removeprefix("--").replace("-", "_").lower()


def advice(name: str, known: Iterable[str], elsewhere: dict[str, str], form: str = "{}") -> str:
    """What to write instead of `name`: the one that is meant, in the `form` given, or one of all."""
    if said := TRAINER.get(plain_name(name)):
        return f"{said}, in the trainer: it is no setting"
    known = list(known)
    if said := _in_an_object(plain_name(name), known, form):
        return f"{said}, if that is meant"
    if close := meant(name, known, elsewhere):
        return f"{form.format(close)}, if that is meant"
    return f"one of: {', '.join(known)}"


def _in_an_object(plain: str, known: list[str], form: str) -> str | None:
    """How `sampling.top_p`, or `top_p` alone, is given: the object, on one line."""
    head, _, key = plain.rpartition(".")
    if not head and plain != "n" and (parameter := plain.removeprefix("rollout_")) in SAMPLING:  # workers refuse n
        head, key = "sampling", parameter
    if head not in OBJECTS or head not in known:
        return None
    if head == "sampling" and key in known:
        return form.format(key)
    if "VALUE" in form:  # of the command line, whose shell needs the quotes
        return form.format(head).replace("VALUE", f"""'{{"{key}": VALUE}}'""")
    return f'{head}={{"{key}": ...}}'


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
