"""Samples that were generated elsewhere: what is given, looked through before it is stored, and stored as it was seen.

What an export wrote (samplestore.portable.files) comes back as it was: segments, versions, rewards, statuses. Rows of
prompts and responses are those of samplestore.portable.import_rows.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from samplestore import arguments
from samplestore.portable import files as portablefiles
from samplestore.portable.import_rows import DATASET, MAX_SAMPLES, Groups, Imported, read
from samplestore.portable.samples import PortableSample
from samplestore.portable.slime_extras import together
from samplestore.promptfiles import InvalidImport, InvalidRow, PromptFile, PromptFileError
from samplestore.prompts import Prompt, prepare
from samplestore.rowvalues import BadValue
from samplestore.states import FINISHED
from samplestore.words import amount

__all__ = [
    "DATASET", "Imported", "InvalidImport", "Source", "checked", "look_through", "read", "read_portable", "rereadable",
    "same",
]  # fmt: skip

MAX_NAMED = 1000  # refused rows that an error holds


class Source:
    """What is to be imported, readable as often as wanted: rows, PortableSamples, or a file of either.

    name       in messages
    manifest   what an export says of its run, where there is one
    versions   the weight versions that `groups` has met so far
    """

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        self.rows, self.name = rows, name
        self.manifest: dict[str, Any] | None = getattr(rows, "manifest", None)
        self.versions: set[int] = set()

    def groups(self, tokenizer: Any, dataset: str | None) -> Groups:
        """See `read` and `read_portable`."""
        if isinstance(self.rows, portablefiles.PortableFile):
            return self._met(read_portable(self.rows, dataset=dataset))
        if isinstance(self.rows, list) and self.rows and all(isinstance(r, PortableSample) for r in self.rows):
            listed = ((self.name, place, one) for place, one in enumerate(self.rows, 1))
            return self._met(read_portable(listed, dataset=dataset))
        return read(self.rows, tokenizer, dataset=dataset or DATASET, source=self.name)

    def _met(self, groups: Groups) -> Groups:
        for one in groups:
            if isinstance(one, Imported):
                pieces = (p for s in one.samples for p in s.pieces if p.version_min is not None)
                self.versions.update(v for p in pieces for v in (p.version_min, p.version_max) if v is not None)
            yield one


def read_portable(rows: Iterable[portablefiles.Read], *, dataset: str | None = None) -> Groups:
    """Samples of exports (file, line, sample) to groups, one by one. `dataset`: of all, instead of their own."""
    for given in portablefiles.groups(rows):
        if isinstance(given, InvalidRow):
            yield given
            continue
        try:
            yield _portable_group([one for _, _, one in given], dataset)
        except BadValue as error:
            source, line, _ = given[0]
            yield InvalidRow(source, line, error.field or "(group)", error.reason, error.shown)


def _portable_group(given: list[PortableSample], dataset: str | None) -> Imported:
    samples = sorted(together(given), key=lambda one: one.sample)
    if len(samples) > MAX_SAMPLES:
        raise BadValue(f"has {amount(len(samples), 'sample')}, expected 1 to {MAX_SAMPLES}", field="group")
    for one, other in pairwise(samples):
        if one.sample == other.sample:
            raise BadValue(f"sample {one.sample} stands twice in one group", one.id, "id")
    roots = [one for one in samples if one.parent is None]
    by_place = {one.sample: one for one in roots}
    for one in samples:
        if one.parent is not None and one.parent not in by_place:
            raise BadValue(f"is {one.parent}, which is not among the rows of its group", one.id, "parent")
        _require_whole(one, by_place)
    for one in roots[1:]:
        if not np.array_equal(one.prompt_ids, roots[0].prompt_ids) or one.prompt != roots[0].prompt:
            raise BadValue("differs within one group", one.id, "prompt_ids")
    first = roots[0]
    row = {
        ("prompt" if isinstance(first.prompt, str) else "messages"): first.prompt or None,
        "prompt_ids": first.prompt_ids, "label": first.label, "metadata": first.metadata, "tools": first.tools,
        "chat_template_kwargs": first.template_args, "dataset": dataset or first.dataset,
        "images": list(first.images) or None,
    }  # fmt: skip
    prompt = next(iter(prepare([{k: v for k, v in row.items() if v is not None}])))
    if isinstance(prompt, InvalidRow):
        raise BadValue(prompt.reason, field=prompt.field)
    origin = None if first.run_uuid is None else f"{first.run_uuid}/{first.group}"
    return Imported(_portable_key(prompt, samples), prompt, tuple(samples), origin)


def _require_whole(one: PortableSample, roots: dict[int, PortableSample]) -> None:
    """Raises BadValue for what the store could not keep as it is said."""
    if one.status in FINISHED and one.parent is None and not one.response_ids.size:
        raise BadValue(f"has no tokens, and the sample is {one.status}", one.id, "response_ids")
    if one.parent is None or one.parent_upto is None:
        return
    parent, shared = roots[one.parent], slice(one.parent_upto)
    if one.parent_upto > parent.response_ids.size:
        why = f"is {one.parent_upto}, and the parent has {amount(parent.response_ids.size, 'token')}"
        raise BadValue(why, one.id, "parent_upto")
    there = np.zeros(parent.response_ids.size, np.float32) if (p := parent.rollout_log_probs) is None else p
    here = there if one.rollout_log_probs is None else one.rollout_log_probs
    for field, mine, theirs in (
        ("prompt_ids", one.prompt_ids, parent.prompt_ids),
        ("response_ids", one.response_ids[shared], parent.response_ids[shared]),
        ("rollout_log_probs", here[shared], there[shared]),
    ):
        if not np.array_equal(mine, theirs):
            raise BadValue("differs from the parent's in what they share", one.id, field)


def _portable_key(prompt: Prompt, samples: list[PortableSample]) -> str:
    digest = hashlib.sha256(prompt.content_key.encode())
    for one in samples:
        says = [one.sample, one.incarnation, one.status, one.finish_reason, one.reward, one.removed, one.parent]
        said = repr([*says, one.parent_upto, one.pieces, one.rewards, one.rollout_log_probs is None])
        digest.update(said.encode() + one.own_ids.tobytes() + one.own_log_probs.tobytes())
        for seq, array in one.named:
            digest.update(f"|{seq}|{array.name}|{array.dtype}|{array.shape}|".encode() + (array.data or b""))
    return digest.hexdigest()


@contextmanager
def rereadable(rows: Iterable[Any] | str | Path) -> Iterator[Source]:
    """What is to be imported. A pipe gives its bytes once, and nothing at the second reading: it is copied to a
    temporary file first. Raises PromptFileError, SlimeFileError, MissingExtra."""
    if not isinstance(rows, str | Path):
        allowed = "a list of rows, or the path of a file or folder"
        yield Source(arguments.listed("rows", rows, allowed), "rows")
        return
    path = Path(arguments.path("rows", rows))
    if path.is_file() or path.is_dir() or not path.exists():
        yield Source(portablefiles.opened(path, str(path)) or PromptFile(path), str(path))
        return
    with tempfile.NamedTemporaryFile(prefix="samplestore-import-") as copy:
        try:
            with path.open("rb") as pipe:
                shutil.copyfileobj(pipe, copy)
            copy.flush()
        except OSError as error:
            place = quote(tempfile.gettempdir())
            why = f"can't be copied to {copy.name}: {error.strerror or error}. Look at: df -h {place}"
            raise PromptFileError(str(path), why) from error
        file = PromptFile(copy.name)
        file.name = str(path)
        yield Source(portablefiles.opened(Path(copy.name), str(path)) or file, str(path))


def look_through(groups: Iterable[Imported]) -> tuple[bytes, int]:
    """(digest of the keys of all groups in their order, how many there are)."""
    digest, n = hashlib.sha256(), 0
    for one in groups:
        digest.update(one.import_key.encode())
        n += 1
    return digest.digest(), n


def same(
    groups: Iterable[Imported],
    seen: tuple[bytes, int],
    source: str,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Imported]:
    """The groups; PromptFileError at the end unless their digest is that of the reading before. What is stored is what
    was looked through, and not what a file has become since."""
    digest = hashlib.sha256()
    for n, one in enumerate(groups, 1):
        digest.update(one.import_key.encode())
        yield one
        if progress is not None and (n % 100 == 0 or n == seen[1]):
            progress(n, seen[1])
    if digest.digest() != seen[0]:
        raise PromptFileError(source, "was changed while it was read, and nothing of it was stored. Run this again")


def checked(groups: Iterable[Imported | InvalidRow], source: str) -> Iterator[Imported]:
    """The groups, as long as none was refused; at the end InvalidImport, if any was. Nothing is held in memory but the
    first refused rows."""
    refused, kept = 0, []
    for item in groups:
        if isinstance(item, InvalidRow):
            refused += 1
            kept += [item] if refused <= MAX_NAMED else []
        elif not refused:
            yield item
    if refused:
        raise InvalidImport(source, kept, refused)
