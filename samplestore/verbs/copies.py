"""A run's rows into another run: integer ids are new, everything else stays. What was in flight comes at rest.

`Rows` are plain dicts as they stood in the source. Each function writes those that its transaction is given, and looks
up by what means the same in both: content keys, group numbers, places in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from samplestore import filters
from samplestore.arrays import Prepared
from samplestore.models import (
    BatchGroup,
    BatchRow,
    DatasetRow,
    EpisodeStep,
    EvaluationRow,
    Event,
    PromptImage,
    PromptRow,
    Request,
    Run,
    Sample,
    SampleGroup,
    Segment,
    SegmentArray,
    Stage,
    Timeline,
    WeightVersionRow,
    Worker,
)
from samplestore.queries import plans
from samplestore.states import COPIED_WORKER, TAKEN, BatchState, GroupState, SampleStatus, WorkerState
from samplestore.verbs import groups
from samplestore.verbs.arrays import row_of as array_row
from samplestore.verbs.tx import Tx, in_parts

run, timeline, version, dataset, evaluation, worker = (
    t.__table__ for t in (Run, Timeline, WeightVersionRow, DatasetRow, EvaluationRow, Worker)
)
prompt, image, group, sample, segment, array, stage, step, request, batch, batch_group, event = (
    t.__table__
    for t in (
        PromptRow, PromptImage, SampleGroup, Sample, Segment, SegmentArray, Stage, EpisodeStep, Request, BatchRow,
        BatchGroup, Event,
    )
)  # fmt: skip

LINE = (timeline, version)  # what training moves
COPIED = "copy"  # the event that a run was copied, and from where

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Sequence[Row]


def insert(tx: Tx, table: sa.Table, rows: Rows, **changes: Any) -> list[int]:
    """Insert rows without their ids, in their order; the new ids, where the table has some."""
    made = [{k: v for k, v in {**row, **changes}.items() if k != "id"} for row in rows]
    ids: list[int] = []
    for at in range(0, len(made), 500):
        part = made[at : at + 500]
        if "id" in table.c:
            ids += tx.execute(sa.insert(table).returning(table.c.id, sort_by_parameter_order=True), part).scalars()
        else:
            tx.execute(sa.insert(table), part)
    return ids


def begin(tx: Tx, about: Mapping[str, Rows], errors: bool) -> None:
    """What the rest refers to: timelines, versions, data sets, evaluations, and workers, none of whom is alive here or
    counted among those who work for the copy.
    errors: theirs too, of which a waiting trainer is told."""
    for table in (*LINE, dataset, evaluation):
        insert(tx, table, about[table.name], run_id=tx.run_id)
    gone = [
        {
            **row,
            "error": row["error"] if errors else None,
            "state": WorkerState.DEAD.value if row["state"] == WorkerState.LIVE else row["state"],
            "info": {**row["info"], COPIED_WORKER: True},
        }
        for row in about[worker.name]
    ]
    insert(tx, worker, gone, run_id=tx.run_id)


def count(connection: sa.Connection, table: sa.Table, run_id: int) -> int:
    return int(connection.execute(sa.select(sa.func.count()).where(table.c.run_id == run_id)).scalar_one())


def numbers(connection: sa.Connection, table: sa.Table, run_id: int) -> list[int]:
    """Ids of a run's rows of this table, in order: `begin` wrote them in the order of the source."""
    found = connection.execute(sa.select(table.c.id).where(table.c.run_id == run_id).order_by(table.c.id))
    return list(found.scalars())


def prompts(tx: Tx, rows: Rows, images: Rows) -> int:
    """Prompts that are not there yet; how many."""
    keys = [row["content_key"] for row in rows]
    mine = (prompt.c.run_id == tx.run_id) & prompt.c.content_key.in_(keys)
    there = set(tx.execute(sa.select(prompt.c.content_key).where(mine)).scalars())
    digests = [row["digest"] for row in images]
    shown = (image.c.run_id == tx.run_id) & image.c.digest.in_(digests)
    known = set(tx.execute(sa.select(image.c.digest).where(shown)).scalars())
    insert(tx, image, [row for row in images if row["digest"] not in known], run_id=tx.run_id)
    return len(insert(tx, prompt, [row for row in rows if row["content_key"] not in there], run_id=tx.run_id))


class Groups:
    """Some groups of a run with all that belongs to them, as they stood in one snapshot. `keys`: the content key of
    each prompt, by its id in the source."""

    def __init__(self, rows: Mapping[str, Rows], keys: Mapping[int, str]) -> None:
        self.rows, self.keys = rows, keys

    def numbers(self) -> list[int]:
        return [row["number"] for row in self.rows[group.name]]


def store(
    tx: Tx,
    given: Groups,
    *,
    consumed: Callable[[int], bool],
    workers: Mapping[int, int],
    evaluations: Mapping[int, int],
    read: Callable[[Row], bytes],
    keep: Callable[[Prepared], Prepared],
) -> tuple[int, int]:
    """Write groups that are not there yet: (how many, how many samples were in flight).

    consumed   whether a batch that comes too has consumed the group of this number
    read       the bytes of an array, which `keep` puts where this run keeps its own
    """
    mine = (group.c.run_id == tx.run_id) & group.c.number.in_(given.numbers())
    there = set(tx.execute(sa.select(group.c.number).where(mine)).scalars())
    new = [row for row in given.rows[group.name] if row["number"] not in there]
    if not new:
        return 0, 0
    ids = dict(zip([row["id"] for row in new], _groups(tx, given, new, consumed, evaluations), strict=True))
    samples = [row for row in given.rows[sample.name] if row["group_id"] in ids]
    owned = sum(row["owner"] is not None for row in samples)
    places = _samples(tx, samples, ids, workers)

    def of(table: sa.Table) -> list[Row]:
        return [row for row in given.rows[table.name] if row["sample_id"] in places]

    # Their tokens come into the ledger as what they are by now, whatever they were in the source.
    for part in in_parts(places.values()):
        here = set(part)
        with tx.moving(samples=part):
            insert(
                tx, segment,
                [
                    {**r, "sample_id": places[r["sample_id"]], "owner": workers.get(r["owner"], r["owner"])}
                    for r in of(segment) if places[r["sample_id"]] in here
                ],
            )  # fmt: skip
    for row in of(array):
        made = Prepared(row["name"], row["dtype"], list(row["shape"]), read(row))
        again = array_row(places[row["sample_id"]], row["incarnation"], row["seq"], keep(made))
        insert(tx, array, [{**again, "created_at": row["created_at"]}])
    _stages(tx, [r for r in given.rows[stage.name] if r["group_id"] in ids], ids, places)
    insert(tx, step, [_episode_step(row, places) for row in of(step)])
    calls = insert(tx, request, [_request(row, places, workers) for row in of(request)], run_id=tx.run_id)
    for part in in_parts(calls):
        tx.recount(requests=request.c.id.in_(part))
    for id in ids.values():
        groups.restale(tx, [id], once_rewound=True)
    return len(new), owned


def _groups(
    tx: Tx, given: Groups, rows: Rows, consumed: Callable[[int], bool], evaluations: Mapping[int, int]
) -> list[int]:
    wanted = {given.keys[row["prompt_id"]] for row in rows}
    mine = (prompt.c.run_id == tx.run_id) & prompt.c.content_key.in_(wanted)
    of = {r.content_key: r.id for r in tx.rows(sa.select(prompt.c.content_key, prompt.c.id).where(mine))}
    made = []
    for row in rows:
        changed = {**row, "prompt_id": of[given.keys[row["prompt_id"]]], "superseded_by": None}
        if row["evaluation_id"] is not None:
            changed["evaluation_id"] = evaluations[row["evaluation_id"]]
        if consumed(row["number"]):
            changed["state"] = GroupState.CONSUMED.value
        elif row["state"] in TAKEN:
            changed |= {"state": GroupState.READY.value, "settled_at": None}
        made.append(changed)
    return insert(tx, group, made, run_id=tx.run_id)


def _samples(tx: Tx, rows: Rows, ids: Mapping[int, int], workers: Mapping[int, int]) -> dict[int, int]:
    """New ids by old ones. Nobody owns them: whoever did works elsewhere."""
    made = []
    for row in rows:
        changed = {
            **row, "group_id": ids[row["group_id"]], "parent_id": None, "finished_by": workers.get(row["finished_by"])
        }  # fmt: skip
        if row["owner"] is not None:
            stopped = row["n_tokens"] > 0
            status = SampleStatus.ABORTED if stopped else SampleStatus.PENDING
            again = int(stopped and row["finish_reason"] != "abort")
            changed |= {
                "owner": None, "attempt": row["attempt"] + 1, "status": status.value,
                "n_aborts": row["n_aborts"] + again,
            }  # fmt: skip
        made.append(changed)
    places = dict(zip([row["id"] for row in rows], insert(tx, sample, made, run_id=tx.run_id), strict=True))
    for row in rows:
        if row["parent_id"] is not None:
            mine = sample.c.id == places[row["id"]]
            tx.execute(sa.update(sample).where(mine).values(parent_id=places[row["parent_id"]]))
    return places


def _stages(tx: Tx, rows: Rows, ids: Mapping[int, int], places: Mapping[int, int]) -> None:
    made = []
    for row in rows:
        owned = row["owner"] is not None
        of_sample = None if row["sample_id"] is None else places[row["sample_id"]]
        details = row["details"]
        if row["name"] == filters.STAGE and details and isinstance(details.get("removed"), Mapping):
            removed = {str(places[int(id)]): why for id, why in details["removed"].items() if int(id) in places}
            details = {**details, "removed": removed}
        made.append(
            {
                **row, "group_id": ids[row["group_id"]], "sample_id": of_sample, "details": details, "owner": None,
                "attempt": row["attempt"] + owned,
            }
        )  # fmt: skip
    insert(tx, stage, made, run_id=tx.run_id)


def _episode_step(row: Row, places: Mapping[int, int]) -> Row:
    result = row["result"]
    if row["kind"] == "fork" and isinstance(result, Mapping) and "child" in result:
        result = {**result, "child": places[result["child"]]}
    return {**row, "sample_id": places[row["sample_id"]], "result": result}


def _request(row: Row, places: Mapping[int, int], workers: Mapping[int, int]) -> Row:
    made = {
        **row, "sample_id": places[row["sample_id"]], "worker_id": workers.get(row["worker_id"], row["worker_id"])
    }  # fmt: skip
    if row["finished_at"] is None:  # nobody will hear its end here
        made |= {"finished_at": row["started_at"], "lost_reason": "worker dead"}
    return made


def batches(tx: Tx, rows: Rows, held: Rows, group_numbers: Mapping[int, int], workers: Mapping[int, int]) -> None:
    """Batches with their groups. held: rows of batch_group; group_numbers: of groups, by their ids in the source."""
    wanted = sorted({group_numbers[row["group_id"]] for row in held})
    ids: dict[int, int] = {}
    for part in in_parts(wanted):
        mine = (group.c.run_id == tx.run_id) & group.c.number.in_(part)
        ids |= {r.number: r.id for r in tx.rows(sa.select(group.c.number, group.c.id).where(mine))}
    leased = (BatchState.LEASED.value,)
    made = [
        {
            **row, "plan": None, "owner": workers.get(row["owner"], row["owner"]),
            **({"state": BatchState.RELEASED.value, "reason": "copied"} if row["state"] in leased else {}),
        }
        for row in rows
    ]  # fmt: skip
    new = dict(zip([row["id"] for row in rows], insert(tx, batch, made, run_id=tx.run_id), strict=True))
    insert(
        tx, batch_group,
        [
            {
                **row, "batch_id": new[row["batch_id"]], "group_id": ids[group_numbers[row["group_id"]]],
                "state": BatchState.RELEASED.value if row["state"] in leased else row["state"],
            }
            for row in held
        ],
    )  # fmt: skip
    for row in rows:
        if row["plan"] is not None:  # it names samples by their ids; the same lengths give the same plan
            plan = plans.of_batch(tx.connection, new[row["id"]], row["plan"]["world"])
            tx.execute(sa.update(batch).where(batch.c.id == new[row["id"]]).values(plan=plan))


def events(
    tx: Tx, rows: Rows, places: Mapping[int, tuple[int, int]], group_numbers: Mapping[int, int],
    workers: Mapping[int, int],
) -> None:  # fmt: skip
    """Events. places: (group number, index) of samples, by their ids in the source."""
    wanted = sorted({number for number, _ in places.values()} | set(group_numbers.values()))
    by_number: dict[int, int] = {}
    by_place: dict[tuple[int, int], int] = {}
    for part in in_parts(wanted):
        mine = (group.c.run_id == tx.run_id) & group.c.number.in_(part)
        by_number |= {r.number: r.id for r in tx.rows(sa.select(group.c.number, group.c.id).where(mine))}
        found = sa.select(sample.c.id, group.c.number, sample.c.index.label("place")).join(group).where(mine)
        by_place |= {(r.number, r.place): r.id for r in tx.rows(found)}
    made = [
        {
            **row, "worker_id": workers.get(row["worker_id"]),
            "group_id": by_number.get(group_numbers.get(row["group_id"], -1)),
            "sample_id": by_place.get(places.get(row["sample_id"], (-1, -1))),
        }
        for row in rows
    ]  # fmt: skip
    for part in in_parts(insert(tx, event, made, run_id=tx.run_id)):
        tx.recount(events=event.c.id.in_(part))


def is_taken(tx: Tx, name: str) -> bool:
    """Whether another run has this name."""
    mine = (run.c.name == name) & (run.c.id != tx.run_id)
    return tx.execute(sa.select(run.c.id).where(mine)).scalar() is not None


def renew_line(tx: Tx, now: Mapping[str, Rows]) -> None:
    """Timelines and weights as the source has them by now, in place of those that `begin` wrote."""
    for table in LINE:
        tx.execute(sa.delete(table).where(table.c.run_id == tx.run_id))
        insert(tx, table, now[table.name], run_id=tx.run_id)


def finish(tx: Tx, values: Mapping[str, Any], details: dict[str, Any]) -> None:
    """The run is whole: it gets its name, its counters and its state."""
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(**values))
    tx.event(COPIED, None, details=details)
