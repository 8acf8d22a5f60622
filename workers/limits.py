"""How a worker generates: its limits, its sampling parameters, and what they mean for log-probs and resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from samplestore.workers.experts import ExpertShape

GREEDY_BELOW = 1e-6
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # each request begins with the first symbol
PER_REQUEST = ("stop", "stop_regex", "frequency_penalty", "presence_penalty", "repetition_penalty")
EXPERT_FIELDS = ("return_routed_experts", "routed_experts_start_len")
CONTEXT_MARGIN = 6  # SGLang refuses prompts within 6 tokens of its context, and stops 2 before it


@dataclass(frozen=True, slots=True)
class Limits:
    """How a worker generates. Tokens and seconds."""

    mode: str
    slice_tokens: int
    flush_tokens: int
    flush_seconds: float
    max_new_tokens: int
    sampling: dict[str, Any]
    versions_may_change: bool  # weights change under running requests (weight_update="keep")
    routed_experts: ExpertShape | None = None  # ask for them, and this is what an answer must look like
    prepare_array: Callable[..., Any] | None = None  # run.prepare_array: a large array goes into a file of its own
    resumes: bool = True  # what ends early goes on from its stored tokens; else it starts again from its prompt
    sampling_seed: int | None = None  # of sample 0 of each group; the next one has the next

    def over(self, sampling: dict[str, Any] | None, max_new_tokens: int | None) -> Limits:
        """These limits with what a sample brings of its own, as those of an evaluation do."""
        if sampling is None and max_new_tokens is None:
            return self
        given = {**self.sampling, **(sampling or {})}
        return replace(self, sampling=given, max_new_tokens=max_new_tokens or self.max_new_tokens)

    @property
    def may_be_cut(self) -> bool:
        """Whether one response may be made by several requests."""
        return self.resumes or self.mode == "sliced"

    def cut_in_two(self) -> str | None:
        """What a response that several requests make gets less of than one of one request; None: nothing."""
        names = [name for name in PER_REQUEST if self.sampling.get(name)]
        if not names or not self.may_be_cut:
            return None
        return (
            f"{', '.join(names)}: engines heed this within a request. In a sample that is resumed or made in slices a "
            "stop string that the cut divides is not seen, and penalties count from the cut. For exact ones: "
            "stop_token_ids, or a run with resume=False and --mode stream"
        )


def is_greedy(sampling: dict[str, Any]) -> bool:
    """Whether the likeliest token is taken, without a draw."""
    return float(sampling.get("temperature", 1.0)) < GREEDY_BELOW or sampling.get("top_k") == 1


def carried_temperature(sampling: dict[str, Any]) -> float | None:
    """The temperature that log-probs of SGLang carry (they are taken after it, before top-k and top-p). Temperature 0
    means greedy there, and its log-probs are those of temperature 1. With top_k 1 they depend on what else is in the
    batch: None, nobody can tell."""
    temperature = float(sampling.get("temperature", 1.0))
    if temperature < GREEDY_BELOW:
        return 1.0
    return None if sampling.get("top_k") == 1 and temperature != 1.0 else temperature
