"""Rows of exports, checked: whoever wrote them, a PortableSample comes out, or the field that is wrong."""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samplestore import arrays, codec
from samplestore.arrays import Prepared
from samplestore.errors import InvalidSegment
from samplestore.portable.manifests import MAX_NUMBER
from samplestore.portable.samples import STATUSES, Piece, PortableSample, Reward
from samplestore.rowvalues import MAX_ROW_BYTES, BadValue, is_finite, plain
from samplestore.states import GroupState, SegmentKind, StageStatus
from samplestore.types import Ids
from samplestore.words import amount

ID = re.compile(r"([0-9a-f-]{36})/(\d{1,18})/(\d{1,9})/(\d{1,9})")
MAX_PIECES = 1_000_000
MAX_COUNT = 2**31  # sums of counters fit into both databases
SETTLED = (StageStatus.DONE, StageStatus.FAILED)  # of stages; a pending one would wait for whoever had it there


def from_row(row: Mapping[str, Any]) -> PortableSample:
    """The sample of a row that to_row made, once JSON or Parquet gave it back. Columns that are left out are None;
    those that nobody knows are ignored: later versions may add some. Raises BadValue with the field."""
    uuid, *numbers = _portable_id(row.get("id"))
    prompt = row["messages"] if row.get("messages") is not None else row.get("prompt") or ""
    prompt_ids = _tokens(row, "prompt_ids")
    ids = _tokens(row, "response_ids", empty=True)
    probs = None
    if row.get("rollout_log_probs") is not None:
        try:
            probs = codec.finite_logprobs(row["rollout_log_probs"], ids.size, required=True)
        except InvalidSegment as error:
            raise BadValue(error.reason, field="rollout_log_probs") from error
    made = PortableSample(
        run_uuid=uuid, run=_text(row, "run") or "", group=numbers[0], sample=numbers[1], incarnation=numbers[2],
        dataset=_text(row, "dataset") or "default", prompt=prompt, prompt_ids=prompt_ids, label=row.get("label"),
        metadata=_object(row, "metadata"), tools=row.get("tools"), template_args=row.get("chat_template_kwargs"),
        images=_images(row), response=_text(row, "response"), response_ids=ids,
        rollout_log_probs=probs, pieces=tuple(_piece(p, i) for i, p in enumerate(_list(row, "segments"))),
        status=_one_of(row, "status", STATUSES), finish_reason=_text(row, "finish_reason"),
        reward=_float(row, "reward"), rewards=tuple(_reward(r, i) for i, r in enumerate(_list(row, "rewards"))),
        removed=_text(row, "removed"), n_aborts=_int(row, "n_aborts") or 0, n_resumes=_int(row, "n_resumes") or 0,
        group_state=_one_of(row, "group_state", tuple(GroupState)),
        group_reason=_text(row, "group_reason"), group_size=_int(row, "group_size") or 1,
        epoch=_int(row, "epoch") or 0, timeline=_int(row, "timeline") or 0, step=_int(row, "consumed_step"),
        position=_int(row, "batch_position"), rollout_id=_int(row, "rollout_id"), parent=_int(row, "parent"),
        parent_upto=_int(row, "parent_upto"), created_at=_float(row, "created_at"),
        finished_at=_float(row, "finished_at"), named=tuple(_array(a, i) for i, a in enumerate(_list(row, "arrays"))),
    )  # fmt: skip
    _agree(made, row)
    if made.parent_upto and row.get("weight_versions") is not None:
        made.shared_versions = np.asarray(row["weight_versions"][: made.parent_upto], np.int32)
    return made


def identity(row: Mapping[str, Any]) -> dict[str, Any]:
    """Who a sample is, of a row. Raises BadValue."""
    uuid, group, sample, incarnation = _portable_id(row.get("id"))
    return {
        "run_uuid": uuid, "group": group, "sample": sample, "incarnation": incarnation, "run": _text(row, "run") or "",
        "dataset": _text(row, "dataset") or "default", "group_size": _int(row, "group_size") or 1,
        "rollout_id": _int(row, "rollout_id"),
    }  # fmt: skip


def _agree(made: PortableSample, row: Mapping[str, Any]) -> None:
    """Raises BadValue where columns of one row contradict each other: it was changed by hand, or cut short."""
    shared = made.parent_upto or 0
    if made.parent_upto is not None and made.parent is None:
        raise BadValue("stands without a parent", made.parent_upto, "parent_upto")
    if shared > made.response_ids.size:
        raise BadValue(f"is {shared} for {amount(made.response_ids.size, 'token')}", field="parent_upto")
    total, own = sum(p.n_tokens for p in made.pieces), made.own_ids.size
    if total != own:
        raise BadValue(f"have {amount(total, 'token')}, the sample has {own} of its own", field="segments")
    if made.own_prompt and made.pieces and made.pieces[0].n_tokens != made.prompt_ids.size:
        raise BadValue("does not begin with the fork's prompt", field="segments")
    if made.rollout_log_probs is None and any(p.log_probs for p in made.pieces):
        raise BadValue("is missing, and segments say that there are some", field="rollout_log_probs")
    for name, told in (("loss_mask", made.loss_mask), ("weight_versions", made.weight_versions)):
        said = row.get(name)
        if said is None:
            continue
        try:
            values = np.asarray(said, np.int64)
            if values.ndim != 1:
                raise BadValue("must be a list of whole numbers", said, name)
            begin = shared if name == "weight_versions" else 0  # those of shared tokens are the parent's to say
            same = values.shape == told.shape and np.array_equal(values[begin:], told[begin:])
            same = same and values.min(initial=0) >= -(2**31) and values.max(initial=0) < 2**31
        except (TypeError, ValueError, OverflowError):
            same = False
        if not same:
            n = len(said) if isinstance(said, list | tuple | np.ndarray) else told.size
            why = f"has {amount(n, 'value')}" if n != told.size else "differs from what the segments say"
            raise BadValue(f"{why} ({amount(told.size, 'token')})", field=name)
    places = Counter((seq, one.name) for seq, one in made.named)
    if twice := next((name for (_, name), n in places.items() if n > 1), None):
        raise BadValue("stands twice beside one segment", twice, "arrays")
    names = Counter(one.name for one in made.rewards)
    if twice := next((name for name, n in names.items() if n > 1), None):
        raise BadValue("stands twice in one sample", twice, "rewards")
    for seq, one in made.named:
        if not 0 <= seq < len(made.pieces):
            raise BadValue(f"{one.name} stands beside segment {seq}, which is not there", field="arrays")


def _portable_id(value: Any) -> tuple[str, int, int, int]:
    found = ID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise BadValue("must be run_uuid/group/sample/incarnation", value, "id")
    return found[1], int(found[2]), int(found[3]), int(found[4])


def _tokens(row: Mapping[str, Any], key: str, *, empty: bool = False) -> Ids:
    try:
        ids = codec.token_ids(row.get(key) if row.get(key) is not None else [], key)
    except InvalidSegment as error:
        raise BadValue(error.reason, field=key) from error
    if not ids.size and not empty:
        raise BadValue("has no tokens", field=key)
    return ids


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > MAX_PIECES:
        raise BadValue("must be a list", value, key)
    return list(value)


def _images(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Data URLs only: a path would be opened, and whoever wrote the row is not who owns the files here."""
    listed = _list(row, "images")
    for place, one in enumerate(listed):
        if not isinstance(one, str) or not one.startswith("data:"):
            raise BadValue("must be a data URL", one, f"images[{place}]")
    return tuple(listed)


def _object(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise BadValue("must be an object", value, key)
    return dict(value or {})


def _text(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadValue("must be text", value, key)
    return value if value is None else str(_storable(value, key))


def _storable(value: Any, key: str) -> Any:
    """A copy that both databases hold as it is."""
    try:
        return plain(value, MAX_ROW_BYTES)
    except BadValue as error:
        raise error.inside(key) from None


def _int(row: Mapping[str, Any], key: str, low: int = 0) -> int | None:
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value < MAX_COUNT):
        raise BadValue(f"must be a whole number from {low}, below {MAX_COUNT}", value, key)
    return value


def _float(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if not is_finite(value):
        raise BadValue(f"must be {codec.REWARDS}", value, key)
    return codec.reward(value)  # an old export may have what is 0 by now


def _one_of(row: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str:
    value = row.get(key)
    if not isinstance(value, str) or value not in [str(a) for a in allowed]:
        raise BadValue(f"must be one of {', '.join(map(str, allowed))}", value, key)
    return str(value)


def _piece(said: Any, place: int) -> Piece:
    try:
        if not isinstance(said, Mapping):
            raise BadValue("is not an object", said)
        n = _int(said, "n_tokens", 1)
        if n is None:
            raise BadValue("is missing", field="n_tokens")
        low, high = _int(said, "version_min"), _int(said, "version_max")
        if high is not None and high >= MAX_NUMBER:
            raise BadValue(f"must be below {MAX_NUMBER}", high, "version_max")
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise BadValue(f"is {low}, and version_max is {high}", field="version_min")
        made = Piece(
            n, _one_of(said, "kind", tuple(SegmentKind)), _int(said, "loss") or 0, low, high,
            bool(_int(said, "log_probs")), _int(said, "attempt") or 0, _text(said, "request"),
            _text(said, "finish_reason"),
        )  # fmt: skip
        if made.loss not in (0, 1):
            raise BadValue("must be 0 or 1", made.loss, "loss")
        if made.kind == SegmentKind.GENERATED and made.loss and not made.log_probs:
            raise BadValue("tokens that are trained on have no log-probs", field="log_probs")
        return made
    except BadValue as error:
        raise error.inside(place).inside("segments") from None


def _reward(said: Any, place: int) -> Reward:
    try:
        if not isinstance(said, Mapping):
            raise BadValue("is not an object", said)
        name = _text(said, "name")
        if not name or len(name) > 100:
            raise BadValue("must be a name of 1 to 100 characters", name, "name")
        details = said.get("details")
        if details is not None and not isinstance(details, Mapping):
            raise BadValue("must be an object", details, "details")
        return Reward(
            name, _one_of(said, "status", SETTLED), _text(said, "outcome"), _float(said, "value"),
            None if details is None else _storable(details, "details"),
        )  # fmt: skip
    except BadValue as error:
        raise error.inside(place).inside("rewards") from None


def _array(said: Any, place: int) -> tuple[int, Prepared]:
    try:
        if not isinstance(said, Mapping):
            raise BadValue("is not an object", said)
        seq, shape, data = _int(said, "seq"), said.get("shape"), said.get("data")
        if not isinstance(shape, list | tuple) or not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
            raise BadValue("must be a list of whole numbers", shape, "shape")
        if isinstance(data, str):
            data = base64.b64decode(data, validate=True)
        if not isinstance(data, bytes):
            raise BadValue("must be bytes (base64 in JSON)", type(data).__name__, "data")
        return seq or 0, arrays.stored(str(said.get("name")), str(said.get("dtype")), [int(n) for n in shape], data)
    except (binascii.Error, ValueError) as error:
        raise BadValue(f"is no array: {error}", field=f"arrays[{place}]") from None
    except InvalidSegment as error:
        raise BadValue(error.reason, field=f"arrays[{place}]") from None
    except BadValue as error:
        raise error.inside(place).inside("arrays") from None
