"""A batch as arrays: packed (one row of all tokens) or padded (one row a sample).

B samples, T tokens in all, L the longest sample; a sample's tokens are prompt then response.

| name | packed | padded | |
| --- | --- | --- | --- |
| tokens | int64 [T] | int64 [B, L] | 0 where padded |
| position_ids | int64 [T] | int64 [B, L] | |
| cu_seqlens | int32 [B+1] | - | where samples begin and end |
| attention_mask | - | int64 [B, L] | 1 on tokens, right padding |
| loss_mask | float32 [T] | float32 [B, L] | 1 on response tokens that are trained |
| rollout_log_probs | float32 [T] | float32 [B, L] | nats; 0 where there is none |
| weight_versions | int32 [T] | int32 [B, L] | -1 on prompts, padding and where unknown |
| prompt_lengths, response_lengths | int64 [B] | int64 [B] | |
| rewards, advantages | float32 [B] | float32 [B] | NaN where it could not be had (loss_mask is 0 there) |
| group_ids, sample_ids | int64 [B] | int64 [B] | |
| rollout_ids | int64 [B] | int64 [B] | one for a sample and its forks, which share one weight in the loss |
| rollout_mask_sums | float32 [B] | float32 [B] | trained tokens of its rollout: a mean over rollouts divides by it |
| n_trained_tokens | int64 [] | int64 [] | trained tokens of the whole batch: a mean over tokens divides by it |
| n_rollouts | int64 [] | int64 [] | rollouts of the whole batch |

Of a rank, or of a micro-batch, [B] and [T] are its own samples and tokens. The advantages, the sums and the two numbers
are those of the whole batch all the same. Packed arrays of [T] are parts of one piece of memory, 28 bytes a token,
which stays as long as one of them does: copy the one that is to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import codec, responses
from samplestore.advantages import advantages
from samplestore.arguments import one_of
from samplestore.arrays import EXPERTS
from samplestore.errors import InvalidSegment, InvalidSetting, MissingExtra
from samplestore.types import Floats, Ids
from samplestore.words import amount

Arrays = dict[str, npt.NDArray[Any]]
Lengths = npt.NDArray[np.int64]
LAYOUTS = ("packed", "padded")
JOINED = 128  # runs that are joined at once: what holds them meanwhile is small, and stays in the processor's cache
PER_TOKEN: dict[str, tuple[Any, Any]] = {
    "tokens": (np.int64, 0),
    "position_ids": (np.int64, 0),
    "loss_mask": (np.float32, 0),
    "rollout_log_probs": (np.float32, 0),
    "weight_versions": (np.int32, -1),
}


class BatchSample:
    """One trajectory of a batch, n response tokens. It can be pickled.

    prompt      its tokens, p of them, as samplestore.responses keeps them
    runs        the response in the same way; what is [p] or [n] is made of them when asked for
    shared      response tokens at its front that belong to what it was forked from
    unscored    the run gives rewards, and this one could not be read: loss_mask is 0 everywhere
    """

    def __init__(
        self, row: Any, about: Any, prompt: responses.Run, runs: responses.Runs, shared: int = 0, unscored: bool = False
    ) -> None:
        """row, about   of the sample, and of its group with its prompt: the rest is read from them when asked for, for
        a batch has thousands of samples, and few of their fields are looked at"""
        self._row, self._about = row, about
        self.prompt, self.runs, self.shared, self.unscored = prompt, runs, shared, unscored

    def __repr__(self) -> str:
        tokens = f"{self.prompt.size:,} + {amount(responses.length(self.runs), 'token')}"
        return f"<BatchSample {self.group_number}/{self.index}: {tokens}, {self.status}, reward {self.reward}>"

    def __getstate__(self) -> dict[str, Any]:
        """The rows' types are made when they are read: another process does not know them."""
        return {name: SimpleNamespace(**v._asdict()) if hasattr(v, "_asdict") else v for name, v in vars(self).items()}

    @property
    def sample_id(self) -> int:
        return int(self._row.id)

    @property
    def group_id(self) -> int:
        return int(self._row.group_id)

    @property
    def group_number(self) -> int:
        return int(self._about.number)

    @property
    def index(self) -> int:
        return int(self._row.place)

    @property
    def reward(self) -> float | None:
        value: float | None = self._row.reward
        return value

    @property
    def status(self) -> str:
        return str(self._row.status)

    @property
    def finish_reason(self) -> str | None:
        reason: str | None = self._row.finish_reason
        return reason

    @cached_property
    def label(self) -> Any:
        return codec.own(self._about.label)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Its own copy: what is changed in it does not reach its siblings."""
        made: dict[str, Any] = codec.own(self._about.meta or {})
        return made

    @property
    def images(self) -> tuple[str, ...]:
        """Digests; batch.images has their bytes. None where a fork has a prompt of its own."""
        own_prompt = self._row.parent_id is not None and self._row.parent_upto is None
        return () if own_prompt else tuple(self._about.images or ())

    @property
    def rollout_id(self) -> int:
        """Of what it was forked from; its own id else: samples of one rollout share one weight."""
        return int(self._row.parent_id or self._row.id)

    @property
    def removed(self) -> str | None:
        """Why a sample filter took it out of the loss: then loss_mask is 0 everywhere."""
        reason: str | None = self._row.removed
        return reason

    @cached_property
    def prompt_ids(self) -> Ids:
        """int32 [p]"""
        return responses.ids([self.prompt])

    @cached_property
    def response_ids(self) -> Ids:
        """int32 [n]"""
        return responses.ids(self.runs)

    @cached_property
    def logprobs(self) -> Floats:
        """float32 [n]; 0.0 where a token has none (loss_mask is 0 there)."""
        return responses.logprobs(self.runs)

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [n]; after the batch's staleness policy."""
        return responses.loss_mask(self.runs)

    @cached_property
    def versions(self) -> Ids:
        """int32 [n]; -1 where unknown or not generated."""
        return responses.versions(self.runs)


@dataclass(frozen=True)
class Whole:
    """What each rank must know of the whole batch, N samples in its order, whichever of them it trains.

    sample_ids, group_ids, rollout_ids   int64 [N]
    rewards                              float32 [N]; NaN where it could not be had
    trained                              int64 [N]; tokens with loss mask 1
    """

    sample_ids: Lengths
    group_ids: Lengths
    rollout_ids: Lengths
    rewards: Floats
    trained: Lengths

    @classmethod
    def of(cls, rows: Sequence[Any], rewards: Sequence[float], trained: Sequence[int]) -> Whole:
        """From the rows of the samples (id, group_id, parent_id), and the other two of each."""
        ids = np.array([row.id for row in rows], np.int64)
        groups = np.array([row.group_id for row in rows], np.int64)
        rollouts = np.array([row.parent_id or row.id for row in rows], np.int64)
        return cls(ids, groups, rollouts, np.array(rewards, np.float32), np.array(trained, np.int64))

    def places(self, samples: Sequence[BatchSample]) -> npt.NDArray[np.intp]:
        """Where these samples stand in the batch. Raises InvalidSetting."""
        all_of_it, ids = self.sample_ids.tolist(), [sample.sample_id for sample in samples]
        if ids == all_of_it:
            return np.arange(len(ids))
        at = {id: place for place, id in enumerate(all_of_it)}
        if strange := [id for id in ids if id not in at]:
            raise InvalidSetting("samples", strange, "samples of this batch: batch.samples, batch.micro_batches(...)")
        return np.array([at[id] for id in ids], dtype=np.intp)

    def of_rollouts(self) -> tuple[Floats, int]:
        """(trained tokens of the rollout that each sample belongs to, float32 [N]; how many rollouts there are)."""
        rollouts, place = np.unique(self.rollout_ids, return_inverse=True)
        return np.bincount(place, self.trained, rollouts.size)[place].astype(np.float32), rollouts.size


def arrays(samples: Sequence[BatchSample], whole: Whole, layout: str = "packed", method: str = "grpo") -> Arrays:
    """numpy arrays of `samples` as the module says. Raises InvalidSetting for another layout or method, and for samples
    of another batch."""
    one_of("layout", layout, LAYOUTS)
    result, prompts, lengths = _packed(samples)
    if layout == "padded":
        result = _padded(result, lengths)
    mine = whole.places(samples)
    mask_sums, n_rollouts = whole.of_rollouts()
    result |= {
        "prompt_lengths": prompts,
        "response_lengths": lengths - prompts,
        "rewards": whole.rewards[mine],
        "advantages": advantages(whole.rewards, whole.group_ids, method, whole.rollout_ids)[mine],
        "group_ids": whole.group_ids[mine],
        "sample_ids": whole.sample_ids[mine],
        "rollout_ids": whole.rollout_ids[mine],
        "rollout_mask_sums": mask_sums[mine],
        "n_trained_tokens": np.array(whole.trained.sum(), np.int64),
        "n_rollouts": np.array(n_rollouts, np.int64),
    }
    return result


def _packed(samples: Sequence[BatchSample]) -> tuple[Arrays, Lengths, Lengths]:
    """(arrays, tokens of each prompt, tokens of each sample). All at once, not sample by sample: what a sample costs is
    a call of numpy for each of its arrays."""
    parts: list[responses.Run] = []
    first = []  # of each sample, among the parts
    for sample in samples:
        first.append(len(parts))
        parts.append(sample.prompt)
        parts += sample.runs
    ids, logprobs, trained, versions = zip(*parts, strict=True) if parts else ((), (), (), ())
    sizes = np.array([*map(len, ids)], np.int64) // 4
    lengths = np.add.reduceat(sizes, first) if first else sizes
    ends = np.concatenate([[0], np.cumsum(lengths)])
    made, at = _in_one_block(int(ends[-1])), 0
    for place in range(0, len(parts), JOINED):
        some = slice(place, place + JOINED)
        stop = at + int(sizes[some].sum())
        made["tokens"][at:stop] = responses.joined(ids[some], "<i4")
        made["rollout_log_probs"][at:stop] = responses.joined(logprobs[some], "<f4")
        at = stop
    places = np.arange(int(lengths.max(initial=0)))
    np.concatenate([places[:0], *[places[:length] for length in lengths.tolist()]], out=made["position_ids"])
    made["loss_mask"][:] = np.repeat(np.array(trained, np.float32), sizes)
    made["weight_versions"][:] = np.repeat(np.array(versions, np.int32), sizes)
    return {**made, "cu_seqlens": ends.astype(np.int32)}, sizes[first], lengths


def _in_one_block(size: int) -> Arrays:
    """PER_TOKEN's arrays [size], not yet filled, in one piece of memory. Fresh memory costs as much as what is written
    to it, page by page; of one large piece the allocator keeps what a step gives back, in large pages.
    """
    widths = {name: np.dtype(kind).itemsize for name, (kind, _) in PER_TOKEN.items()}
    block = np.empty(size * sum(widths.values()), np.uint8)
    made, at = {}, 0
    for name in sorted(widths, key=lambda name: -widths[name]):  # the widest first: then each begins where it may
        stop = at + size * widths[name]
        made[name], at = block[at:stop].view(PER_TOKEN[name][0]), stop
    return made


def _padded(packed: Arrays, lengths: Lengths) -> Arrays:
    there = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    made: Arrays = {}
    for name, (dtype, fill) in PER_TOKEN.items():
        made[name] = np.full(there.shape, fill, dtype)
        made[name][there] = packed[name]
    return {**made, "attention_mask": there.astype(np.int64)}


def named(
    samples: Sequence[BatchSample], name: str, parts: Mapping[int, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]],
    layout: str, like: npt.NDArray[Any],
) -> Arrays:  # fmt: skip
    """A named array as NAME [T, ...] or [B, L, ...], 0 where a token has no row, and NAME_present (uint8) of the same
    first dimensions. parts: (rows, present) by sample id; the last row is of the last token, of routed experts of the
    one before it. like: no rows, of the dtype and shape that the batch has."""
    lengths = np.array([s.prompt.size + responses.length(s.runs) for s in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    tables = [like, *(rows for rows, _ in parts.values())]
    if len({table.shape[1:] for table in tables}) > 1:
        shapes = sorted({str(list(table.shape[1:])) for table in tables})
        raise ValueError(f"{name} has other shapes from sample to sample: {', '.join(shapes)}")
    whole = np.zeros((int(lengths.sum()), *tables[0].shape[1:]), np.result_type(*tables))
    there = np.zeros(len(whole), np.uint8)
    for sample, length, stop in zip(samples, lengths.tolist(), ends.tolist(), strict=True):
        if sample.sample_id in parts:
            rows, present = parts[sample.sample_id]
            end = stop - (name == EXPERTS)
            n = min(len(rows), end - (stop - length))  # a fork's own tokens are the last of its sequence
            whole[end - n : end], there[end - n : end] = rows[len(rows) - n :], present[len(rows) - n :]
    made: Arrays = {name: whole, f"{name}_present": there}
    if layout == "packed":
        return made
    place = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    padded = {key: np.zeros((*place.shape, *value.shape[1:]), value.dtype) for key, value in made.items()}
    for key, value in made.items():
        padded[key][place] = value
    return padded


def per_sample(samples: Sequence[BatchSample], values: Any, name: str) -> list[Floats]:
    """`values` as float32 [n] for each sample, n its response tokens. The other way round than `arrays`.

    values   packed [T] or padded [B, L] as `arrays` lays these samples out, the entry of a token at its own place; or
             a sequence of [n], one a sample. numpy or torch
    Raises InvalidSegment for another shape.
    """
    prompts = np.array([s.prompt.size for s in samples], dtype=np.int64)
    answers = np.array([responses.length(s.runs) for s in samples], dtype=np.int64)
    lengths = prompts + answers
    if isinstance(values, Sequence):
        rows = [_plain(row, name) for row in values]
        found, wanted = [list(row.shape) for row in rows], [[n] for n in answers.tolist()]
        if found != wanted:
            pairs = zip(samples, found, wanted, strict=False)
            told = f"{amount(len(found), 'row')} for {amount(len(wanted), 'sample')}"
            for sample, has, needs in pairs:
                if has != needs:
                    told = f"shape {has} for sample {sample.sample_id}, expected {needs}: its response"
                    break
            raise InvalidSegment(f"{name} has {told}", field=name)
        return rows
    table = _plain(values, name)
    padded, packed = [len(samples), int(lengths.max(initial=0))], [int(lengths.sum())]
    if list(table.shape) not in (padded, packed):
        raise InvalidSegment(
            f"{name} has shape {list(table.shape)}, expected {packed} (packed) or {padded} (padded), the prompt's "
            "tokens too, each entry at its own token", field=name,
        )  # fmt: skip
    starts = np.cumsum(lengths) - lengths if list(table.shape) == packed else np.zeros_like(lengths)
    lines = [table] * len(samples) if table.ndim == 1 else list(table)
    first, last = starts + prompts, starts + lengths
    return [line[a:b] for line, a, b in zip(lines, first.tolist(), last.tolist(), strict=True)]


def _plain(values: Any, name: str) -> Floats:
    """As float32 on the CPU."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    try:
        return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidSegment(f"{name} is no array of numbers: {str(error)[:200]}", field=name) from None


def as_torch(made: Arrays, device: Any, pin_memory: bool | None = None) -> dict[str, Any]:
    """Arrays as torch tensors on `device`; on the CPU they share the arrays' memory, unless it is to be pinned.

    pin_memory   put them into page-locked memory first, from which a GPU fetches them while the CPU goes on; None does
                 so where `device` is one. It is the copy that the driver would make otherwise
    Raises MissingExtra, InvalidSetting where there is nothing to pin memory for.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("batch.tensors()", "trainer") from None
    tensors = {name: torch.from_numpy(array) for name, array in made.items()}
    if pin_memory or (pin_memory is None and device is not None and torch.device(device).type == "cuda"):
        if not torch.cuda.is_available():
            name, given, instead = ("pin_memory", True, "False") if pin_memory else ("device", str(device), '"cpu"')
            raise InvalidSetting(name, given, f"{instead}: torch sees no GPU here")
        tensors = {name: t.pin_memory() for name, t in tensors.items()}
    return tensors if device is None else {name: t.to(device, non_blocking=True) for name, t in tensors.items()}
