"""Parsing of `sampling_params`: what the embedded engine honours, what it refuses, and the limits of each value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .options import BadRequest, ContractError

MAX_STOPS = 64
MAX_COPIES = 128
GREEDY_BELOW = 1e-6

# Parameters that SGLang knows and this engine does not implement, with the values that change nothing. Any other
# value is refused: ignoring one silently would produce samples from a distribution that nobody asked for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (None, True),
    "beam_width": (None, 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """Checked sampling parameters of one request; `max_new_tokens` None means "up to the context limit"."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    stream_interval: int | None = None

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken; log-probs are then those of temperature 1."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


_KNOWN = frozenset(SamplingParams.__dataclass_fields__)


def parse_sampling_params(raw: object) -> SamplingParams:
    """Check the JSON object `raw` (None means all defaults). Raises `ContractError` or `BadRequest`."""
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise ContractError("sampling_params must be an object")
    unknown = sorted(str(key) for key in raw if key not in _KNOWN and key not in _NEUTRAL)
    if unknown:
        raise ContractError(f"Unknown sampling_params: {', '.join(unknown[:10])}")
    for key, neutral in _NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise BadRequest(f"sampling_params.{key} is not supported by the embedded engine; use SGLang for it")
    default = SamplingParams()
    max_new = _integer(raw, "max_new_tokens", None, 0, 2**31) if "max_new_tokens" in raw else default.max_new_tokens
    params = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=_integer(raw, "min_new_tokens", 0, 0, 2**31) or 0,
        temperature=_number(raw, "temperature", 1.0, 0.0, 1e6),
        top_p=_number(raw, "top_p", 1.0, 0.0, 1.0, open_low=True),
        top_k=_top_k(raw),
        min_p=_number(raw, "min_p", 0.0, 0.0, 1.0),
        stop=_stops(raw.get("stop")),
        stop_token_ids=_stop_ids(raw.get("stop_token_ids")),
        ignore_eos=_flag(raw, "ignore_eos", False),
        skip_special_tokens=_flag(raw, "skip_special_tokens", True),
        no_stop_trim=_flag(raw, "no_stop_trim", False),
        n=_integer(raw, "n", 1, 1, MAX_COPIES) or 1,
        sampling_seed=_integer(raw, "sampling_seed", None, -(2**63), 2**63 - 1),
        stream_interval=_integer(raw, "stream_interval", None, 1, 2**31),
    )
    if max_new is not None and params.min_new_tokens > max_new:
        raise BadRequest(f"min_new_tokens must be in [0, max_new_tokens({max_new})], got {params.min_new_tokens}.")
    return params


def _integer(raw: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int | None:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{key} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise BadRequest(f"{key} must be between {low} and {high}, got {value}.")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float, low: float, high: float, open_low: bool = False) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{key} must be a finite number, got {value!r}")
    if not low <= value <= high or (open_low and value == low):
        raise BadRequest(f"{key} must be in {'(' if open_low else '['}{low}, {high}], got {value}.")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r}")
    return value


def _top_k(raw: Mapping[str, Any]) -> int:
    value = _integer(raw, "top_k", -1, -1, 2**31)
    if value is None or value == 0:
        raise BadRequest("top_k must be -1 (disable) or at least 1, got 0.")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise BadRequest("stop must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(len(item) > 1024 for item in stops):
        raise BadRequest(f"stop takes at most {MAX_STOPS} strings of at most 1024 characters")
    return tuple(item for item in stops if item)


def _stop_ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > 4096:
        raise BadRequest("stop_token_ids must be a list of at most 4096 token ids")
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise BadRequest("stop_token_ids must be a list of integers")
    return frozenset(value)
