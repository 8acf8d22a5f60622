"""Finished samples of slime as the store takes them in. What a user's own functions made of them is read with care."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from samplestore import codec
from samplestore.errors import InvalidSegment
from samplestore.portable import slime_extras, slime_samples
from samplestore.portable.samples import PortableSample, Reward
from samplestore.promptfiles import InvalidRow
from samplestore.rowvalues import MAX_ROW_BYTES, BadValue, plain, whole_label
from samplestore.slime.objects import status_of
from samplestore.states import FINISHED
from samplestore.verbs.imports import REWARD_STAGE
from samplestore.verbs.stages import OK

DATASET = "slime"
FINISH_REASONS = {"completed": "stop", "truncated": "length"}
FIELDS = (
    "prompt", "tokens", "response_length", "reward", "loss_mask", "weight_versions", "rollout_log_probs",
    "remove_sample", "teacher_log_probs", "rollout_routed_experts",
)  # fmt: skip
# what reading a sample raises that is no sample of slime's shape; whatever else it is, is a fault of ours
ODD = (BadValue, InvalidSegment, TypeError, ValueError, AttributeError, OverflowError)


class Portables:
    """Finished samples, group by group; samples of a group with another prompt, as sub-agents have them, are a group of
    their own. What breaks a promise of the store, or is no sample of slime's shape, is an InvalidRow.

    places    slime's group_index of each group that was read, by its number here
    left_out  how many were unfinished, by status
    """

    def __init__(self, args: Any, samples: Iterable[Any]) -> None:
        self.args, self.samples = args, samples
        self.places: dict[int, Any] = {}
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[str, int, PortableSample] | InvalidRow]:
        found: dict[Any, list[tuple[int, Any]]] = {}
        for line, sample in enumerate(self.samples, 1):
            try:
                if (key := self._group(line, sample)) is not None:
                    found.setdefault(key, []).append((line, sample))
            except ODD as error:
                yield _invalid(line, error)
        for number, ((place, *_), members) in enumerate(found.items()):
            self.places[number] = place if isinstance(place, int) else None
            for at, (line, sample) in enumerate(members):
                try:
                    yield DATASET, line, _portable(self.args, sample, number, at, len(members))
                except ODD as error:
                    yield _invalid(line, error)

    def _group(self, line: int, sample: Any) -> tuple[Any, ...] | None:
        """What the samples of one group share; None for one that is not finished."""
        status, n, tokens = status_of(sample), int(sample.response_length or 0), list(sample.tokens or ())
        if status not in FINISHED:
            self.left_out[codec.clean_text(status, 40)] += 1
            return None
        if not 0 < n < len(tokens):
            self.left_out["without a response"] += 1
            return None
        place = sample.group_index if sample.group_index is not None else ("", line)
        return place, tuple(tokens[: len(tokens) - n]), str(sample.prompt)


def _invalid(line: int, error: Exception) -> InvalidRow:
    if isinstance(error, BadValue):
        return InvalidRow(DATASET, line, error.field or "(sample)", error.reason, error.shown)
    return InvalidRow(DATASET, line, "(sample)", codec.clean_text(f"{type(error).__name__}: {error}", 300))


def _portable(args: Any, sample: Any, group: int, place: int, size: int) -> PortableSample:
    """With all that the store has a place for. What else slime says of it is left out, or every sample would have a
    prompt of its own. Raises BadValue."""
    values = {key: getattr(sample, key) for key in FIELDS if hasattr(sample, key)}
    values |= {"status": status_of(sample), "label": _label(sample.label), "metadata": _json(sample.metadata or {})}
    made = slime_samples.from_slime(values, group=group, sample=place, size=size)
    made.metadata = {k: v for k, v in made.metadata.items() if k != slime_extras.EXTRAS}
    made.reward = reward_of(args, sample)
    if made.reward is not None:
        made.rewards = (Reward(REWARD_STAGE, outcome=OK, value=made.reward),)
    made.finish_reason = FINISH_REASONS[made.status]
    return made


def reward_of(args: Any, sample: Any) -> float | None:
    """The number, of an object the one that --reward-key names; None where there is none."""
    value, key = sample.reward, getattr(args, "reward_key", None)
    if isinstance(value, dict):
        value = value.get(key) if key else None
    try:
        return codec.reward(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _label(value: Any) -> Any:
    try:
        return whole_label(_json(value), "label")
    except BadValue:
        return str(value)


def _json(value: Any) -> Any:
    """What both databases can hold of it; of anything else its text."""
    try:
        return plain(value, MAX_ROW_BYTES)
    except BadValue:
        if isinstance(value, dict):
            return {str(k): _json(v) for k, v in value.items()}
        return repr(value)[:1000]
