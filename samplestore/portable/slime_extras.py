"""What slime says of a sample and the store has no place for: it stands in the prompt's metadata, under EXTRAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from samplestore.portable.samples import PortableSample

EXTRAS = "slime_sample"  # of a prompt's metadata: {place of the sample in its group: what only slime knows}


def parted(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(a group's metadata, what slime said of its samples by their places). A prompt may have EXTRAS as a key of its
    own: what is no object of objects was not written here, and stays where it is."""
    own = dict(metadata)
    extras = own.get(EXTRAS)
    if not isinstance(extras, Mapping) or not extras or not all(isinstance(v, Mapping) for v in extras.values()):
        return own, {}
    del own[EXTRAS]
    return own, {place: dict(one) for place, one in extras.items()}


def together(samples: Sequence[PortableSample]) -> list[PortableSample]:
    """The samples of one group with one metadata: that of the first, and what slime said of each under EXTRAS."""
    both = [parted(one.metadata) for one in samples]
    every = {place: extras for _, of_each in both for place, extras in of_each.items()}
    shared = both[0][0] if both else {}
    for one, (own, _) in zip(samples, both, strict=True):
        extras = dict(every.get(str(one.sample), {}))
        if own != shared:
            extras.setdefault("metadata", own)
        if one.label != samples[0].label:
            extras.setdefault("label", one.label)
        if extras:
            every[str(one.sample)] = extras
    if not every:
        return list(samples)
    metadata = {**shared, EXTRAS: every}
    return [replace(one, metadata=metadata, label=samples[0].label) for one in samples]
