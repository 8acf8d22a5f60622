"""Prompts that the store serves and slime generates: its stock rollout function with this store as its data source."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec
from samplestore.arguments import MAX_WHOLE
from samplestore.batches import Wait
from samplestore.errors import InvalidSegment, InvalidSetting, LeaseLost, WorkerDead
from samplestore.heart import Heart
from samplestore.models import Sample
from samplestore.portable import exports, slime_samples
from samplestore.portable.samples import PortableSample
from samplestore.run import Run, advance
from samplestore.slime import objects, readable
from samplestore.states import CLAIMABLE, FINISHED, SampleStatus, SegmentKind, StalenessMode, StalePolicy
from samplestore.tokenizers import Tokenizer
from samplestore.types import Claim
from samplestore.verbs import appends, batches, flow, prompts, stages
from samplestore.verbs import samples as verbs
from samplestore.verbs.tx import Tx
from samplestore.words import amount

log = logging.getLogger("samplestore.slime")
table = Sample.__table__

REWARD = "reward"
REASONS = {**readable.FINISH_REASONS, "aborted": "abort", "pending": "abort"}


def _key(sample: Any) -> str:
    return str(getattr(sample, objects.PORTABLE_ID, ""))


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a sample with one loss mask."""

    ids: Any
    logprobs: Any
    loss: int


class Served:
    """Samples that this process has claimed for slime, by what they carry as `samplestore_id`."""

    def __init__(self, run: Run, args: Any) -> None:
        if run.settings.stages and run.settings.stages != (REWARD,):
            raise InvalidSetting("stages", list(run.settings.stages), f'["{REWARD}"]: slime gives one reward itself')
        self.run, self.args = run, args
        self.owner = self._register()
        self.claims: dict[str, Claim] = {}
        self.groups: dict[str, int] = {}  # ids of their groups
        self.told: dict[str, int] = {}  # how many weight_versions a claimed sample had when it was given
        self.versions: dict[str, int | None] = {}  # what slime's engines report, by this process
        self.steps: set[int] = set()  # of them
        self.labels = f"slime-{self.owner}-"  # also after an absence: the engines count on

    def _register(self) -> int:
        owner = self.run.register("rollout", "slime")
        self.run.database.on_close.append(Heart(self.run, owner).leave)
        return owner

    # -- out

    def take(self, n_groups: int, timeout_s: float | None, step: int) -> list[list[Any]]:
        """Up to n_groups groups, at least one: finished ones that no batch has taken (after a crash), then those that
        are claimed to be generated, what was aborted first. While the run has none, a wait for `step`.
        Raises BatchTimeout."""
        wait = Wait(step, timeout_s, None, self.run.why)
        while True:
            found = self._finished(n_groups)
            for wanted in (0, n_groups):  # what the window has; then what slime asks for beyond it
                if len(found) < n_groups:
                    self.run.transact(partial(prompts.admit, wanted=min(wanted, n_groups - len(found))))
                    found += self._claim(n_groups - len(found))
            if found:
                return found
            wait.check()
            wait.sleep()

    def _finished(self, n_groups: int) -> list[list[Any]]:
        """Groups that are ready and were not given to slime in this process: it does not generate them again."""
        rules = self.run.settings
        window = None if rules.stale == StalePolicy.MASK else rules.max_staleness
        given = set(self.groups.values())
        query = batches.ready(
            self.run.id, n_groups + len(given), StalenessMode(rules.staleness_mode), window, rules.order, lock=False
        )
        ids = self.run.database.read(lambda c: [row.id for row in c.execute(query)])
        return self._read([id for id in ids if id not in given][:n_groups], {})

    def _claim(self, n_groups: int) -> list[list[Any]]:
        """Whole groups: slime generates them together, and stops them together, where some of them have no token yet. A
        claim by samples would take those that have some, of more groups than it may complete, time and again."""

        def claim(tx: Tx) -> list[Claim]:
            return verbs.claim(tx, self.owner, MAX_WHOLE, False, flow.whole_groups(tx, n_groups))

        try:
            claims = self.run.transact(claim)
        except WorkerDead:  # this process was away for longer than its ttl: what it had claimed is somebody else's
            self.owner, self.claims = self._register(), {}
            return []
        try:
            return self._read(
                list(dict.fromkeys(c.group_id for c in claims)), {(c.group_number, c.index): c for c in claims}
            )
        except BaseException as error:
            self._give_back(claims, error)
            raise

    def _give_back(self, claims: Iterable[Claim], error: BaseException) -> None:
        """All of them, whatever becomes of one: it is `error` that has to be told."""
        for claim in claims:
            try:
                self.run.release(claim, "could not be given to slime")
            except Exception as also:
                error.add_note(f"sample {claim.sample_id} could not be given back: {type(also).__name__}: {also}")

    def _read(self, ids: Sequence[int], mine: dict[tuple[int, int], Claim]) -> list[list[Any]]:
        """These groups as slime's samples; without those of which somebody else has a sample."""
        made = []
        for group_id in ids:
            part = exports.Part(None, [group_id], {})
            members = list(exports.samples(self.run, self.run.uuid, part, exports.Selection(), self._tokenizer))
            own = [mine[one.group, one.sample] for one in members if (one.group, one.sample) in mine]
            if len(own) < sum(one.status in CLAIMABLE for one in members):
                for claim in own:
                    self.run.release(claim, "its group is not whole")
                continue
            made.append([self._sample(one, mine.get((one.group, one.sample)), group_id) for one in members])
        return made

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return objects.tokenizer_of(self.args)

    def _sample(self, one: PortableSample, claim: Claim | None, group_id: int) -> Any:
        """A sample as slime begins with it: with its tokens where it has some, else with its prompt only."""
        values = slime_samples.to_slime(one)
        key = values[objects.PORTABLE_ID] = f"{self.run.uuid}/{one.group}/{one.sample}"
        self.groups[key] = group_id
        tokenizer = self._tokenizer
        if not isinstance(one.prompt, str) or not one.prompt:
            values["prompt"] = tokenizer.decode(one.prompt_ids) if tokenizer is not None else one.prompt
        if claim is not None:
            self.claims[key], self.told[key] = claim, len(values["weight_versions"] or ())
            if one.response_ids.size and not values["response"]:
                raise InvalidSetting("hf_checkpoint", None, "the model's folder: slime resumes a sample by its text")
            values["status"] = (SampleStatus.ABORTED if one.response_ids.size else SampleStatus.PENDING).value
            if not one.response_ids.size:
                values |= {"tokens": [], "rollout_log_probs": None, "loss_mask": None}
            elif bool(np.all(one.loss_mask)):
                values["loss_mask"] = None  # slime counts a mask as one of partial rollouts
        return objects.sample_of(self.args, values)

    # -- back

    def store(self, samples: Iterable[Any], step: int) -> tuple[set[int], list[Any]]:
        """Record what slime made of samples: finished ones are finished, others go back, to be resumed. Each is one
        transaction. step: of training, that it is generated for. Returns (ids of their groups, samples that were not
        served by this process)."""
        listed = [(_key(sample), sample) for sample in samples]
        self._publish([v for key, sample in listed if key in self.claims for v in self._said(key, sample)], step)
        groups, others = set(), []
        if doubled := len(listed) - len({key or id(sample) for key, sample in listed}):
            log.warning("%d samples are not recorded: slime made several of one that it was given. Here a rollout of "
                        "several samples is an episode with forks: docs/howto/episodes.md", doubled)  # fmt: skip
        for key, sample in listed:
            claim, group_id = self.claims.get(key), self.groups.get(key)
            if group_id is None:
                others.append(sample)
                continue
            groups.add(group_id)
            if claim is None:
                continue  # it was finished already
            try:
                try:
                    self._store(claim, sample, self._version(key, sample))
                except InvalidSegment as error:
                    log.warning("sample %d is generated again: %s", claim.sample_id, error)
                    self.run.fail(claim, f"slime: {error}")
            except LeaseLost as error:  # this process was away for too long; somebody else generates it
                log.warning("what slime generated is not recorded: %s", error)
            self.claims.pop(key, None)  # not before: a write that failed is made again when slime says it again
        return groups, others

    def forget(self, samples: Iterable[Any]) -> None:
        """They are no longer in slime's hands: what is ready of them, or aborted, may be given again."""
        for sample in samples:
            self.groups.pop(_key(sample), None)
            self.told.pop(_key(sample), None)

    def note_removed(self, tx: Tx, samples: Iterable[Any]) -> None:
        """What slime's filters took out of the loss, of finished samples that were given: a replay has loss mask 0."""
        for sample in samples:
            group_id = self.groups.get(_key(sample))
            if group_id is not None and getattr(sample, "remove_sample", False):
                place = int(_key(sample).rpartition("/")[2])
                mine = (table.c.group_id == group_id) & (table.c.index == place)
                tx.execute(sa.update(table).where(mine).values(removed="slime"))

    def _store(self, claim: Claim, sample: Any, version: int | None) -> None:
        status = objects.status_of(sample)
        pieces = new_pieces(claim, sample)
        reward = readable.reward_of(self.args, sample)

        def write(tx: Tx) -> None:
            for place, piece in enumerate(pieces):
                generated = piece.loss == 1 or bool(np.any(piece.logprobs))
                reason = REASONS.get(status) if place == len(pieces) - 1 else None
                appends.append(
                    tx, claim, claim.seq + place, piece.ids, piece.logprobs if generated else None, version, reason,
                    (SegmentKind.GENERATED if generated else SegmentKind.ENVIRONMENT).value, piece.loss,
                    abort_reason="slime",
                )  # fmt: skip
            if status in FINISHED:
                kept = reward is not None and REWARD in self.run.settings.stages
                for stage in verbs.finish(tx, claim, status, REASONS[status], kept):
                    assert reward is not None
                    stages.score(tx, stage, reward, None, None)
            elif status == SampleStatus.FAILED:
                verbs.fail(tx, claim, "slime: failed")
            else:
                verbs.release(tx, claim, "slime stopped it")

        self.run.transact(write)
        for piece in pieces:
            advance(claim, claim.seq, len(piece.ids), None)

    def _said(self, key: str, sample: Any) -> list[str]:
        """What engines reported since the sample was given: what it had then are the store's own numbers."""
        said = sample.weight_versions
        return [str(v) for v in said[self.told.get(key, 0) :]] if isinstance(said, list | tuple) else []

    def _version(self, key: str, sample: Any) -> int | None:
        """The run's version for what the engine reported last."""
        said = self._said(key, sample)
        return self.versions[said[-1]] if said else None

    def _publish(self, said: Iterable[str], step: int) -> None:
        """Weights that are new are published in the order of the engines, and the newest as the weights after the step
        before. slime counts from the beginning in each process, so its numbers are known by this process only. A number
        below a known one is not published: versions rise, and its tokens would look newer than they are."""
        new = sorted((v for v in dict.fromkeys(said) if v not in self.versions), key=_number)
        for label in new:
            known = [_number(v) for v, version in self.versions.items() if version is not None]
            if _number(label) < max((n for n in known if n < math.inf), default=-1):
                log.warning("weight version %.40r came after newer ones: its tokens have no version", label)
                self.versions[label] = None
                continue
            after = step - 1 if step and label == new[-1] else None
            self.versions[label] = self._published(label, after)

    def _published(self, label: str, step: int | None) -> int:
        """The run's version of a new label. The current one, if it has this step from the process before, is the same
        weights under another name; from this process it is other ones."""
        step = None if step in self.steps else step
        made = self.run.publish_weights(None, step, codec.clean_text(f"{self.labels}{label}", 200)).version
        if step is not None:
            self.steps.add(step)  # not before: the call is repeated as it was, if its answer was lost
        return made


def _number(label: str) -> float:
    """Of an engine that counts. Other labels are in no order: they come last, as they were met."""
    return int(label) if label.isascii() and label.isdigit() and len(label) < 16 else math.inf


def new_pieces(claim: Claim, sample: Any) -> Sequence[Piece]:
    """What slime added to a claimed sample. Raises InvalidSegment where it has another prompt or another beginning, its
    lengths disagree, or a function of the user's made something else of it than slime's types."""
    try:
        return _pieces(claim, sample)
    except InvalidSegment:
        raise
    except readable.ODD as error:
        raise InvalidSegment(f"it is no sample of slime's: {type(error).__name__}: {error}", field="sample") from error


def _pieces(claim: Claim, sample: Any) -> Sequence[Piece]:
    n, tokens = int(sample.response_length or 0), codec.token_ids(list(sample.tokens or ()), "tokens")
    if not n and not claim.n_tokens:
        return ()
    prompt, response = tokens[: tokens.size - n], tokens[tokens.size - n :]
    if not np.array_equal(prompt, claim.prompt_ids):
        raise InvalidSegment("its prompt has other tokens than the store's: is it the same tokenizer?", field="tokens")
    known = claim.n_tokens
    if not np.array_equal(response[:known], claim.response_ids):
        raise InvalidSegment(f"its first {known} response tokens are not those that are stored", field="tokens")
    mask = np.ones(n, np.int32) if sample.loss_mask is None else codec.token_ids(sample.loss_mask, "loss_mask")
    if mask.size != n:
        raise InvalidSegment(f"{amount(mask.size, 'value')} for {amount(n, 'response token')}", field="loss_mask")
    probs = codec.finite_logprobs(sample.rollout_log_probs, n, required=True)
    assert probs is not None
    return [
        Piece(response[known + start : known + stop], probs[known + start : known + stop], int(mask[known + start]))
        for start, stop in (codec.runs_of(mask[known:]) if n > known else ())
    ]
