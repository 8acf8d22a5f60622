"""Samples of the store as slime's Sample.to_dict(), and back. Pure functions; nothing of slime or torch is needed.

What slime's fields cannot say (segments, portable id, named rewards, ...) stands under one more key, KEY, which slime
keeps as an attribute. What slime says and the store has no place for stands in the prompt's metadata, one object for
each sample of the group under metadata[EXTRAS][its place], and is given back: to_slime(from_slime(values)) has the
values again.
A sample that slime changed meanwhile is what slime's fields say; KEY then counts as far as it agrees with them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from samplestore import arrays, codec
from samplestore.arrays import EXPERTS, TEACHER, Prepared
from samplestore.errors import InvalidSegment
from samplestore.portable import rows as portablerows
from samplestore.portable import samples as portable
from samplestore.portable import slime_values
from samplestore.portable.samples import Piece, PortableSample
from samplestore.portable.slime_extras import EXTRAS, parted
from samplestore.promptfiles import show
from samplestore.rowvalues import MAX_ROW_BYTES, BadValue, is_finite, plain
from samplestore.states import SampleStatus, SegmentKind
from samplestore.types import UNKNOWN_VERSION, Floats
from samplestore.words import amount

if TYPE_CHECKING:
    from samplestore.tensors import BatchSample

KEY = "samplestore"  # of a slime dict: what only the store knows
MAX_KNOWN = 1 << 30  # bytes under KEY; arrays are among them
STATUSES = tuple(status.value for status in SampleStatus)
# Columns of a row that slime's own fields hold already.
_SAID = (
    "prompt", "messages", "prompt_ids", "label", "metadata", "chat_template_kwargs", "response", "response_ids",
    "rollout_log_probs", "loss_mask", "weight_versions", "version_min", "version_max", "status", "reward",
)  # fmt: skip


def to_slime(sample: PortableSample, *, torch: Any = None) -> dict[str, Any]:
    """slime's Sample.to_dict() of a sample: tokens (prompt, then response), loss_mask, rollout_log_probs as lists,
    weight_versions as text (those of its tokens, oldest first, each once), status as text.

    torch   the module, where tensors among what slime said are wanted back as such; else they are numpy arrays
    """
    metadata, extras = parted(sample.metadata)
    made = _fields(sample, metadata)
    for key, value in extras.get(str(sample.sample), {}).items():
        made[key] = slime_values.back(value, torch)
    if sample.run_uuid is not None:
        row = portable.to_row(sample)
        told = {k: v for k, v in row.items() if k not in _SAID and v is not None}
        if sample.shared_versions is not None and sample.parent_upto:
            told["shared_versions"] = sample.shared_versions.tolist()
        told["arrays"] = [a for a in told["arrays"] if a["name"] not in (EXPERTS, TEACHER)]
        for one in told["arrays"]:
            one["data"] = base64.b64encode(one["data"]).decode()
        made[KEY] = {"format": portable.FORMAT, **told}
    return made


def of_batch(
    sample: BatchSample, *, prompt: str | list[dict[str, Any]] = "", size: int = 1, response: str = ""
) -> PortableSample:
    """A sample of a batch, with the loss mask that the batch's policies gave it; for to_slime(of_batch(sample)).

    prompt, response   as slime should see them: a batch has token ids only
    size               samples_per_prompt of the run: slime's index is group_index * size + index
    """
    pieces = tuple(
        Piece(
            run.size, (SegmentKind.ENVIRONMENT if run.version < 0 else SegmentKind.GENERATED).value,
            int(run.trained), None if run.version < 0 else run.version, None if run.version < 0 else run.version,
        )
        for run in sample.runs
    )  # fmt: skip
    return PortableSample(
        group=sample.group_number, sample=sample.index, group_size=size, prompt=prompt, response=response,
        prompt_ids=sample.prompt_ids, response_ids=sample.response_ids, rollout_log_probs=sample.logprobs,
        pieces=pieces, status=sample.status, finish_reason=sample.finish_reason, reward=sample.reward,
        label=sample.label, metadata=sample.metadata, removed=sample.removed,
    )  # fmt: skip


def _fields(sample: PortableSample, metadata: dict[str, Any]) -> dict[str, Any]:
    named: dict[str, list[Prepared]] = {}
    for _, one in sample.named:
        named.setdefault(one.name, []).append(one)
    n = sample.response_ids.size
    made = {
        "group_index": sample.group,
        "index": sample.group * sample.group_size + sample.sample if sample.rollout_id is None else sample.rollout_id,
        "rollout_id": None,
        "prompt": codec.own(sample.prompt),
        "tokens": [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()],
        "response": sample.response or "",
        "response_length": n,
        "label": codec.own(sample.label),
        "reward": sample.reward,
        "loss_mask": sample.loss_mask.tolist(),
        "weight_versions": [str(v) for v in dict.fromkeys(sample.weight_versions.tolist()) if v != UNKNOWN_VERSION],
        "rollout_log_probs": None if sample.rollout_log_probs is None else sample.rollout_log_probs.tolist(),
        "remove_sample": sample.removed is not None,
        "teacher_log_probs": _whole(named.get(TEACHER), n),
        "status": sample.status,
        "metadata": codec.own(metadata),
    }
    made["rollout_id"] = made["index"]
    if sample.template_args is not None:
        made["apply_chat_template_kwargs"] = codec.own(sample.template_args)
    experts = named.get(EXPERTS, [])
    if len(experts) == 1 and experts[0].rows == len(made["tokens"]) - 1 and experts[0].data is not None:
        made["rollout_routed_experts"] = _decoded(experts[0])
    return made


def _whole(parts: Sequence[Prepared] | None, n: int) -> list[float] | None:
    """A number for every response token, where the store has that."""
    if not parts or any(p.data is None for p in parts) or sum(p.rows for p in parts) != n:
        return None
    listed: list[float] = np.concatenate([_decoded(p) for p in parts]).tolist()
    return listed


def _decoded(one: Prepared) -> Any:
    return codec.decode_array(one.dtype, one.shape, one.data or b"")


def from_slime(values: Mapping[str, Any], *, group: int = 0, sample: int = 0, size: int = 1) -> PortableSample:
    """The sample of slime's Sample.to_dict() (of the newest slime and of older ones: only tokens, response_length and
    status must be there). `group`, `sample`, `size`: its place, where KEY names none.

    Tokens with loss mask 1 were generated, and carry log-probs; without any they count as brought from elsewhere.
    Masked ones without log-probs (0.0) are an environment's. The version of tokens is what weight_versions says if it
    names one; with several, nobody knows which token is whose. Raises BadValue with the field.
    """
    slime_values.count(values)
    plainly = {key: slime_values.as_numpy(value, str(key)) for key, value in values.items()}
    made = _sample(plainly, group, sample, size)
    try:
        known = plain(plainly.get(KEY), MAX_KNOWN)  # ours is plain
    except BadValue:
        known = None
    if isinstance(known, Mapping) and known.get("format") == portable.FORMAT:
        made = _with_known(made, known)
    said = {k: v for k, v in plainly.items() if k != KEY}
    again = _fields(made, made.metadata)
    extras = {
        k: slime_values.kept(values[k], k)
        for k, v in said.items()
        if k not in again or not slime_values.equal(again[k], v)
    }
    if extras:
        made.metadata = {**made.metadata, EXTRAS: {str(made.sample): extras}}
    return made


def _sample(said: Mapping[str, Any], group: int, sample: int, size: int) -> PortableSample:
    tokens, n = _ids(said, "tokens"), said.get("response_length")
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < len(tokens):
        raise BadValue(f"must be a whole number from 0, below the {len(tokens)} tokens", n, "response_length")
    mask = _per_token(said, "loss_mask", n)
    probs = _log_probs(said, n)
    status = said.get("status")
    if not isinstance(status, str) or status not in STATUSES:
        raise BadValue(f"must be one of {', '.join(STATUSES)}", status, "status")
    cut = len(tokens) - n
    prompt, metadata, reward = said.get("prompt"), said.get("metadata"), said.get("reward")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise BadValue("must be an object", metadata, "metadata")
    removed = said.get("remove_sample")
    if not isinstance(removed, bool | int | None):
        raise BadValue("must be true or false", removed, "remove_sample")
    if EXTRAS in (metadata or {}):
        raise BadValue("is a key that the store keeps for itself", field=f"metadata.{EXTRAS}")
    number = None
    if is_finite(reward):
        number = codec.reward(reward)
    elif reward is not None and not isinstance(reward, Mapping):
        raise BadValue(f"must be {codec.REWARDS}, or an object of them", reward, "reward")
    pieces = _pieces(mask, probs, _version(said))
    return PortableSample(
        group=group, sample=sample, group_size=size, prompt=prompt if isinstance(prompt, str | list) else "",
        prompt_ids=tokens[:cut], response_ids=tokens[cut:], rollout_log_probs=probs, pieces=pieces, status=status,
        reward=number, label=_json(said, "label"), metadata=dict(metadata or {}),
        template_args=_json(said, "apply_chat_template_kwargs") or None,
        removed="slime" if removed else None, named=_named(said, len(tokens), n, len(pieces)),
    )  # fmt: skip


def _ids(said: Mapping[str, Any], key: str) -> Any:
    try:
        ids = codec.token_ids(said.get(key), key)
    except (InvalidSegment, TypeError) as error:
        raise BadValue(getattr(error, "reason", "is no list of token ids"), field=key) from error
    if not ids.size:
        raise BadValue("has no tokens", field=key)
    return ids


def _json(said: Mapping[str, Any], key: str) -> Any:
    try:
        return plain(said.get(key), MAX_ROW_BYTES)
    except BadValue as error:
        raise error.inside(key) from None


def _per_token(said: Mapping[str, Any], key: str, n: int) -> Any:
    """loss_mask; 1 everywhere where it is left out."""
    if said.get(key) is None:
        return np.ones(n, np.int32)
    try:
        mask = codec.token_ids(said[key], key)
    except InvalidSegment as error:
        raise BadValue(error.reason, field=key) from error
    if mask.size != n:
        raise BadValue(f"has {amount(mask.size, 'value')} for {amount(n, 'response token')}", field=key)
    if mask.size and int(mask.max()) > 1:
        raise BadValue("must be 0 or 1", int(mask.max()), key)
    return mask


def _log_probs(said: Mapping[str, Any], n: int) -> Floats | None:
    given = said.get("rollout_log_probs")
    if given is None:
        return None
    if not isinstance(given, list | tuple | np.ndarray):
        raise BadValue("must be a list of numbers", given, "rollout_log_probs")
    if not n and len(given) == 0:
        return None
    try:
        return codec.finite_logprobs(given, n, required=False)
    except InvalidSegment as error:
        raise BadValue(error.reason, field="rollout_log_probs") from error


def _version(said: Mapping[str, Any]) -> int | None:
    """The version of all tokens, where the list names one that is a number."""
    listed = said.get("weight_versions")
    listed = listed.tolist() if isinstance(listed, np.ndarray) else [] if listed is None else listed
    if not isinstance(listed, list | tuple):
        raise BadValue("must be a list", listed, "weight_versions")
    told = {v if isinstance(v, str) else show(v) for v in listed}
    one = told.pop() if len(told) == 1 else ""
    return int(one) if one.isascii() and one.isdigit() and len(one) <= 9 else None


def _pieces(mask: Any, probs: Floats | None, version: int | None) -> tuple[Piece, ...]:
    made = []
    for start, stop in codec.runs_of(mask):
        loss = int(mask[start])
        has = probs is not None and bool(loss or np.any(probs[start:stop]))
        kind = SegmentKind.GENERATED if has else SegmentKind.ENVIRONMENT
        by = version if has else None
        made.append(Piece(stop - start, kind.value, loss, by, by, log_probs=has))
    return tuple(made)


def _named(said: Mapping[str, Any], n_tokens: int, n: int, pieces: int) -> tuple[tuple[int, Prepared], ...]:
    made = []
    for key, name, rows in (("rollout_routed_experts", EXPERTS, n_tokens - 1), ("teacher_log_probs", TEACHER, n)):
        value = said.get(key)
        if value is None or not pieces:
            continue
        try:
            array = np.asarray(value, np.float32 if name == TEACHER else None)
            if array.ndim and len(array) != rows:
                raise BadValue(f"has {amount(len(array), 'row')}, expected {rows}", field=key)
            one = arrays.stored(name, *codec.encode_array(array))
        except InvalidSegment as error:
            raise BadValue(error.reason, field=key) from error
        except (ValueError, TypeError, OverflowError) as error:
            raise BadValue(f"is no array of numbers: {error}", field=key) from error
        made.append((pieces - 1, one))
    return tuple(made)


def _with_known(made: PortableSample, known: Mapping[str, Any]) -> PortableSample:
    """With what the store wrote under KEY, unless slime's fields say something else by now."""
    row = portable.to_row(made)
    try:
        said = {k: row[k] for k in _SAID if k != "weight_versions"}  # slime knows which there are, not of which tokens
        shared = codec.as_ids(known.get("shared_versions") or [])
        mine = portablerows.from_row({**said, **{k: v for k, v in known.items() if k not in _SAID}})
        if mine.parent_upto and shared.size == mine.parent_upto:
            mine.shared_versions = shared.astype(np.int32)
    except (BadValue, InvalidSegment):  # masked, cut or changed in slime: its fields count, and only who it is is known
        try:
            identity = portablerows.identity(known)
        except BadValue:
            return made
        return replace(made, **identity)
    mine.rollout_log_probs, removed = made.rollout_log_probs, made.removed
    mine.removed = mine.removed if removed else None
    mine.named = (*mine.named, *made.named)
    return mine
