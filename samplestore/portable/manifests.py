"""What an export says of its run, checked: whoever wrote it, weight versions and timelines come out as trees."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from samplestore.rowvalues import BadValue, plain

MAX_ITEMS = 1_000_000  # weight versions, and timelines
MAX_NUMBER = 2**30  # the run counts on from the highest
MAX_TEXT = 4000
UUID = re.compile(r"[0-9a-f-]{36}")

Items = dict[int, dict[str, Any]]  # by number, ascending: parents come before children


def checked(told: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what an import uses of a manifest.

    run_uuid         of the run that was exported
    counts           {"samples": n, "tokens": n} of the rows
    timelines        {number: {"parent", "forked_at_step"}}, and `timeline`: the current one
    weight_versions  {number: {"label", "path", "timeline", "parent", "step", "depth", "common_depth"}}, and
                     `current_version`
    Raises BadValue with the field.
    """
    uuid, counts = told.get("run_uuid"), told.get("counts")
    if not isinstance(uuid, str) or not UUID.fullmatch(uuid):
        raise BadValue("must be the uuid of a run", uuid, "run_uuid")
    if not isinstance(counts, Mapping):
        raise BadValue("must be an object", counts, "counts")
    timelines = _items(told, "timelines", "number", _timeline)
    versions = _items(told, "weight_versions", "version", _version)
    _trees(timelines, versions)
    current = _whole(told, "current_version")
    if current not in versions:
        raise BadValue("is no version that the manifest lists", current, "current_version")
    timeline = _whole(told, "timeline")
    if timeline != versions[current]["timeline"]:
        raise BadValue("is not the timeline of the current version", timeline, "timeline")
    _share(versions, current)
    return {
        "run_uuid": uuid, "counts": {name: _whole(counts, name, 2**62) for name in ("samples", "tokens")},
        "timelines": timelines, "timeline": timeline, "weight_versions": versions, "current_version": current,
    }  # fmt: skip


def _items(
    told: Mapping[str, Any], key: str, number: str, read: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Items:
    listed = told.get(key)
    if not isinstance(listed, list) or len(listed) > MAX_ITEMS:
        raise BadValue(f"must be a list of at most {MAX_ITEMS:,}", listed, key)
    made: Items = {}
    for place, one in enumerate(listed):
        try:
            if not isinstance(one, Mapping):
                raise BadValue("is not an object", one)
            at = _whole(one, number)
            if at in made:
                raise BadValue("stands twice in the list", at, number)
            made[at] = read(one)
        except BadValue as error:
            raise error.inside(place).inside(key) from None
    return dict(sorted(made.items()))


def _timeline(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"parent": _optional(one, "parent"), "forked_at_step": _optional(one, "forked_at_step", low=-1)}


def _version(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "label": _text(one, "label"), "path": None if one.get("path") is None else _text(one, "path"),
        "timeline": _whole(one, "timeline"), "parent": _optional(one, "parent"), "step": _optional(one, "step"),
        "depth": _whole(one, "depth"), "common_depth": 0,
    }  # fmt: skip


def _trees(timelines: Items, versions: Items) -> None:
    for number, one in timelines.items():
        _require_parent("timelines", number, one, timelines)
    labels: set[str] = set()
    for number, one in versions.items():
        _require_parent("weight_versions", number, one, versions)
        field = f"weight_versions[version {number}]"
        if one["timeline"] not in timelines:
            raise BadValue("is no timeline that the manifest lists", one["timeline"], f"{field}.timeline")
        if one["label"] in labels:
            raise BadValue("is the label of another version", one["label"], f"{field}.label")
        labels.add(one["label"])
        above = versions.get(one["parent"])
        # A restored version, which begins a timeline, has the depth of what it restores, and a second name of the same
        # weights theirs. Others are an update ahead, or more, where a version between was never met.
        low = 0 if above is None else above["depth"] + (above["timeline"] == one["timeline"] and not _same(above, one))
        high = low if above is None or above["timeline"] != one["timeline"] else number
        if not low <= one["depth"] <= high:
            raise BadValue(f"must be from {low} to {high}, by its parent", one["depth"], f"{field}.depth")


def _same(above: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    """Whether a version may be its parent under another label, as verbs/weights.py publishes it."""
    return one["step"] is not None and (above["step"], above["path"]) == (one["step"], one["path"])


def _require_parent(key: str, number: int, one: Mapping[str, Any], listed: Items) -> None:
    """Number 0 is the root, and all others descend from it."""
    parent = one["parent"]
    if parent is None if number == 0 else (parent in listed and parent < number):
        return
    raise BadValue("must be a lower number of the list, and none of 0", parent, f"{key}[number {number}].parent")


def _share(versions: Items, current: int) -> None:
    """common_depth: that of the last ancestor on the line of the current version (statements/staleness.py)."""
    line, at = set(), current
    while at is not None:
        line.add(at)
        at = versions[at]["parent"]
    for number, one in versions.items():
        one["common_depth"] = one["depth"] if number in line else versions[one["parent"]]["common_depth"]


def _whole(said: Mapping[str, Any], key: str, below: int = MAX_NUMBER, low: int = 0) -> int:
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < below:
        raise BadValue(f"must be a whole number from {low}, below {below}", value, key)
    return value


def _optional(said: Mapping[str, Any], key: str, low: int = 0) -> int | None:
    return None if said.get(key) is None else _whole(said, key, low=low)


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise BadValue(f"must be text of 1 to {MAX_TEXT} characters", value, key)
    try:
        return str(plain(value, 4 * MAX_TEXT))
    except BadValue as error:
        raise error.inside(key) from None
