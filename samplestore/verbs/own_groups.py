"""Groups that come back into their own run, from an export of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec
from samplestore.errors import ImportConflict
from samplestore.models import PromptRow, Sample, SampleGroup, Segment, Stage
from samplestore.states import StageStatus
from samplestore.verbs.tx import Tx

prompt, group, sample, segment, stage = (t.__table__ for t in (PromptRow, SampleGroup, Sample, Segment, Stage))

# What is wrong with a group that was exported from this very run.
OLDER = "is of this run, which has it not: the database is older than the export"
LESS = "is of this run, which has less of it: the database is older than the export"
ANOTHER = "is of this run, whose group of that number is another: a backup was restored, and both copies went on"


class OwnGroups:
    """The run's own groups, against what an export says of them.

    A number alone is no proof: when a backup was restored, and the run went on in both copies, each has groups with the
    same numbers, and those of the other copy would be taken for present and left out in silence. Compared is what never
    changes of a group: the tokens of its prompt, the tokens and log-probs of each life of a sample, and the settled
    rewards of its stages. What comes later is no difference: more tokens, rewards or lives, another state, tokens that
    were pruned.
    """

    def __init__(self, tx: Tx, row: Any) -> None:
        self.tx, self.row = tx, row

    def has(self, one: Any) -> bool:
        """Whether the group was exported from this very run. Raises ImportConflict where it is none of its groups."""
        uuid, _, number = (one.origin or "").partition("/")
        if uuid != self.row.uuid:
            return False
        if (why := self._unlike(one, int(number))) is not None:
            raise ImportConflict(one.origin, why)
        return True

    def _unlike(self, one: Any, number: int) -> str | None:
        mine = (group.c.run_id == self.tx.run_id) & (group.c.number == number) & group.c.evaluation_id.is_(None)
        asked = sa.select(group.c.id, prompt.c.prompt_ids).join(prompt, prompt.c.id == group.c.prompt_id).where(mine)
        here = self.tx.execute(asked).one_or_none() if number < self.row.n_groups else None
        if here is None:
            return OLDER
        # not by its content key, in which the name of its data set is: that may be given anew
        if not np.array_equal(codec.ids_from(here.prompt_ids), one.prompt.prompt_ids):
            return ANOTHER
        lives, forks = self._lives(here.id, {s.incarnation for s in one.samples})
        rewards = self._rewards(here.id) if any(s.rewards for s in one.samples) else {}
        # A fork that slime changed comes back without its parent (slime_samples.py): whose its tokens are is not told.
        compared = [s for s in one.samples if s.parent is not None or s.sample not in forks]
        unlike = (*(_unlike_life(s, lives) for s in compared), *(self._unlike_rewards(s, rewards) for s in one.samples))
        return next((why for why in unlike if why is not None), None)

    def _lives(self, group_id: int, wanted: Collection[int]) -> tuple[dict[tuple[int, int], list[Any]], set[int]]:
        """Segments of samples, by their places and lives; the present life of each also where it has none. And the
        places of forks."""
        of_life = (segment.c.sample_id == sample.c.id) & segment.c.incarnation.in_(wanted)
        found: dict[tuple[int, int], list[Any]] = {}
        forks: set[int] = set()
        for r in self.tx.rows(
            sa.select(
                sample.c.index.label("place"), sample.c.incarnation.label("now"), segment.c.incarnation.label("life"),
                segment.c.start, segment.c.n_tokens, segment.c.payload, sample.c.parent_id,
            )
            .select_from(sample.outerjoin(segment, of_life))
            .where(sample.c.group_id == group_id)
        ):  # fmt: skip
            for life in range(r.now + 1):
                found.setdefault((r.place, life), [])
            if r.life is not None:
                found[r.place, r.life].append(r)
            if r.parent_id is not None:
                forks.add(r.place)
        return found, forks

    def _rewards(self, group_id: int) -> dict[tuple[int, int, str], float | None]:
        """What stages of samples gave, by place, life and name. Those of group stages are judged anew with a sibling's
        new life, and tell nothing."""
        names = self.tx.settings.stages
        asked = (
            sa.select(sample.c.index.label("place"), stage.c.incarnation, stage.c.name, stage.c.value)
            .select_from(stage.join(sample, sample.c.id == stage.c.sample_id))
            .where(stage.c.group_id == group_id, stage.c.status == StageStatus.DONE.value, stage.c.name.in_(names))
        )
        return {(r.place, r.incarnation, r.name): r.value for r in self.tx.rows(asked)}

    def _unlike_rewards(self, s: Any, here: Mapping[tuple[int, int, str], float | None]) -> str | None:
        for told in s.rewards:
            if told.name not in self.tx.settings.stages or told.status != StageStatus.DONE:
                continue
            at = (s.sample, s.incarnation, told.name)
            if at not in here or here[at] != told.value:
                return ANOTHER if at in here else LESS
        return None


def _unlike_life(s: Any, lives: Mapping[tuple[int, int], Sequence[Any]]) -> str | None:
    """Why the run has not the tokens of an exported sample, in the life that it had then."""
    pieces = lives.get((s.sample, s.incarnation))
    n = s.own_ids.size
    if pieces is None:
        return LESS
    ids, probs = s.own_ids, s.own_log_probs
    for piece in pieces:
        if piece.payload == codec.PRUNED_PAYLOAD:
            continue
        at, kept = slice(piece.start, min(piece.start + piece.n_tokens, n)), max(n - piece.start, 0)
        mine, drawn = codec.decode(bytes(piece.payload))
        if not np.array_equal(mine[:kept], ids[at]):
            return ANOTHER
        if drawn is not None and s.rollout_log_probs is not None and not np.array_equal(drawn[:kept], probs[at]):
            return ANOTHER
    return LESS if sum(piece.n_tokens for piece in pieces) < n else None
