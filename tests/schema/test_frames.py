"""store.frame(): the rows that were asked for, of the right types, never more than the limit; and store.session()."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import selectinload

import samplestore
from samplestore import BatchRow, PromptRow, Sample, SampleGroup, Segment, Store, frames
from samplestore.errors import InvalidSetting, MissingExtra, RunNotFound, TokensPruned
from samplestore.run import Run
from tests.support import factory as f


@pytest.fixture
def run(store: Store) -> Run:
    """Four groups of two: the first is trained on at step 3, the last sample has two versions and a tool's answer."""
    run = f.make_run(store, prompts=4, stages=["reward"])
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 8)
    for claim in claims[:7]:
        f.answer(run, claim)
    for stage in run.claim_stages(worker, 7):
        run.score(stage, float(stage.index))
    f.commit(run, f.lease(run, trainer, 3, 1) or 0, trainer)
    run.publish_weights(path="/w", step=3)
    last = claims[7]
    f.add(run, last, 4, 0)
    run.append(last, [7, 8], None, None, kind="environment")
    f.add(run, last, 2, 1, "stop")
    return run


def test_tables_have_the_types_that_analysis_needs(store: Store, run: Run) -> None:
    samples = store.frame("samples")
    assert len(samples) == 8 and not samples.attrs["cut_off"]
    assert list(samples.sort_values("id")["n_tokens"]) == [3] * 7 + [8]
    assert str(samples["id"].dtype) == "int64", "there is one in every row"
    assert str(samples["version_max"].dtype) == "Int64" and samples["parent_id"].isna().all()
    assert str(samples["reward"].dtype) == "float64" and samples["reward"].sum() == 3.0
    assert isinstance(samples["created_at"].dtype, pd.DatetimeTZDtype) and str(samples["created_at"].dt.tz) == "UTC"
    assert abs(samples["created_at"].max() - pd.Timestamp.now("UTC")) < pd.Timedelta("1h")
    assert "payload" not in store.frame("segments") and "prompt_ids" not in store.frame("prompts")
    assert store.frame("prompts")["metadata"].iloc[0] == {}
    assert store.frame("runs")["settings"].iloc[0]["groups_per_step"] == 2


def test_every_name_gives_a_frame(store: Store, run: Run) -> None:
    f.make_run(store, "bare", prompts=0)
    for name in frames.NAMES:
        full, mine, bare = store.frame(name), store.frame(name, run="r"), store.frame(name, run="bare")
        assert len(full.columns) > 1 and len(mine) + len(bare) == len(full), name
        assert len(bare) <= 1, "a run that has nothing but itself"
        if name not in ("evaluations", "engines", "requests", "abort_causes"):
            assert len(mine) > 0, name
        assert list(bare.dtypes.astype(str)) == list(full.dtypes.astype(str)), f"{name}: types are those of full frames"


def test_times_are_told_from_other_numbers() -> None:
    """By their names: a new column of seconds or rewards must not become a date."""
    times, others = set(), set()
    for name in frames.NAMES:
        for column in frames._table(name).c:
            if isinstance(column.type, sa.Double):
                (times if frames.is_time(column) else others).add(column.name)
    assert {"at", "created_at", "heartbeat", "ready_at"} <= times
    assert others == {
        "logprob_sum", "reward", "reward_mean", "reward_std", "value", "elapsed_s", "ttl_s", "temperature", "queue_s",
        "e2e_s", "staleness", "staleness_mean", "waited_s", "truncated_ratio", "mean_tokens",
    }  # fmt: skip


def test_rows_can_be_asked_for(store: Store, run: Run) -> None:
    first, last = f.group_id(run, 0), f.group_id(run, 3)
    assert list(store.frame("groups", step=3)["number"]) == [0]
    assert set(store.frame("samples", step=3)["group_id"]) == {first}
    assert len(store.frame("segments", step=3)) == 2 and len(store.frame("tokens", step=3)) == 6
    assert list(store.frame("versions", step=3)["version"]) == [1]
    assert list(store.frame("batches", step=3)["state"]) == ["committed"] and store.frame("batches", step=4).empty
    assert set(store.frame("stages", group_ids=[first, last])["group_id"]) == {first, last}
    assert len(store.frame("segments", group_ids=[last])) == 4
    assert len(store.frame("samples", status="completed")) == 7 == len(store.frame("tokens", status="completed")) / 3
    assert len(store.frame("groups", status="ready")) == 2
    ids = list(store.frame("samples", sample_ids=[1, 2, 99])["id"])
    assert ids == [2, 1], "newest first; what is not there is left out"
    assert len(store.frame("segments", versions=[1])) == 1 and store.frame("samples", sample_ids=[]).empty
    assert list(store.frame("token_fate", versions=[1])["tokens"]) == [2]
    some = store.frame("samples", columns=["reward", "id"], limit=8)
    assert list(some.columns) == ["reward", "id"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("payloads", {}, "runs | prompts"),
    ("samples", {"limit": 0}, "whole number from 1"),
    ("samples", {"columns": ["rewards"]}, "reward"),
    ("segments", {"columns": ["payload"]}, "seq"),
    ("samples", {"columns": []}, "left out, or some of"),
    ("tokens", {"columns": []}, "left out, or some of"),
    ("samples", {"status": "done"}, "pending | aborted"),
    ("versions", {"status": "live"}, "left out"),
    ("runs", {"step": 1}, "left out"),
    ("workers", {"sample_ids": [1]}, "left out"),
    ("samples", {"sample_ids": ["1"]}, "whole number"),
    ("samples", {"sample_ids": 1}, "a list of whole numbers"),
    ("samples", {"versions": [1]}, "left out"),
]


def test_what_a_table_has_not_is_refused(store: Store) -> None:
    for name, asked, said in REFUSED:
        with pytest.raises(InvalidSetting) as refused:
            store.frame(name, **asked)
        assert said in str(refused.value)
    with pytest.raises(RunNotFound):
        store.frame("samples", run="nobody's")


def test_a_frame_that_is_cut_says_so(store: Store, run: Run) -> None:
    with pytest.warns(frames.CutOff, match="limit=3") as told:
        cut = store.frame("samples", limit=3)
    assert len(cut) == 3 and cut.attrs["cut_off"] and list(cut["id"]) == [8, 7, 6]
    assert told[0].filename == __file__, "it points at the caller"
    with pytest.warns(frames.CutOff):
        cut = store.frame("tokens", limit=4)
    assert list(cut["sample_id"]) == [1, 1, 1, 2] and cut.attrs["cut_off"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.frame("samples", limit=8).attrs["cut_off"]
        assert not store.frame("tokens", limit=29).attrs["cut_off"]
        assert len(store.frame("tokens", limit=29)) == 7 * 3 + 8


def test_no_more_segments_are_decoded_than_the_limit_needs(store: Store, run: Run, monkeypatch: Any) -> None:
    decoded: list[bytes] = []
    decode = frames.codec.decode
    monkeypatch.setattr(frames.codec, "decode", lambda payload: decoded.append(payload) or decode(payload))
    with pytest.warns(frames.CutOff):
        assert len(store.frame("tokens", limit=6)) == 6
    assert len(decoded) == 2, "two of three tokens; that there are more is seen without reading them"


def test_tokens_are_told_one_by_one(store: Store, run: Run) -> None:
    tokens = store.frame("tokens", sample_ids=[8])
    assert dict(tokens.dtypes.astype(str)) == {
        "run_id": "int64", "group": "int64", "index": "int32", "sample_id": "int64", "seq": "int32",
        "position": "int32", "token": "int32", "logprob": "float32", "loss": "int8", "kind": "category",
        "version": "Int64", "staleness": "Int64",
    }  # fmt: skip
    assert list(tokens["position"]) == list(range(8)) and list(tokens["seq"]) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert list(tokens["token"]) == [*f.ids_of(4), 7, 8, *f.ids_of(2)]
    assert list(tokens["loss"]) == [1, 1, 1, 1, 0, 0, 1, 1]
    assert list(tokens["version"].fillna(-1)) == [0, 0, 0, 0, -1, -1, 1, 1]
    assert list(tokens["staleness"].fillna(-1)) == [1, 1, 1, 1, -1, -1, 0, 0]
    assert list(tokens["kind"].unique()) == ["generated", "environment"]
    assert tokens["logprob"].isna().tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert list(tokens["logprob"].iloc[:4]) == f.logprobs_of(4)
    only = store.frame("tokens", sample_ids=[8], columns=["token", "position"])
    assert list(only.columns) == ["token", "position"] and len(only) == 8
    run.publish_weights(step=4)
    assert store.frame("tokens", sample_ids=[8])["staleness"].iloc[0] == 2, "it is that of now"


def test_former_lives_and_pruned_tokens_are_not_among_the_tokens(store: Store, run: Run) -> None:
    run.requeue([7], "again")
    assert store.frame("tokens", sample_ids=[7]).empty and len(store.frame("segments", sample_ids=[7])) == 1
    f.execute(run, "UPDATE segment SET payload = :p WHERE sample_id = 1", p=b"\x00")
    left = store.frame("tokens", sample_ids=[1, 2])
    assert list(left["sample_id"].unique()) == [2] and left.attrs["pruned_segments"] == 1


def test_without_pandas_the_extra_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"samplestore\[frames\]"):
        store.frame("samples")


# -- store.session()


def test_mapped_classes_lead_to_one_another(store: Store, run: Run) -> None:
    with store.session() as session:
        group = session.scalars(sa.select(SampleGroup).where(SampleGroup.number == 3)).one()
        assert group.run.name == "r" and group.prompt.tokens.tolist() == [1, 2, int(group.prompt.label)]
        assert [s.index for s in group.samples] == [0, 1]
        last = group.samples[1]
        assert [s.kind for s in last.segments] == ["generated", "environment", "generated"]
        assert last.tokens.dtype == np.int32 and last.tokens.tolist() == [*f.ids_of(4), 7, 8, *f.ids_of(2)]
        assert last.logprobs.dtype == np.float32 and np.isnan(last.logprobs).tolist() == [0] * 4 + [1] * 2 + [0] * 2
        assert last.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
        assert last.segments[1].logprobs is None and last.segments[0].sample is last and last.group is group
        assert group.prompt.groups == [group]
        batch = session.scalars(sa.select(BatchRow)).one()
        assert [m.group.number for m in batch.members] == [0] and batch.members[0].group.memberships[0].batch is batch
        assert batch.members[0].group.samples[0].stages[0].value == 0.0
        empty = session.scalars(sa.select(Sample).where(Sample.n_tokens == 0)).all()
        assert empty == []
        eager = sa.select(Sample).options(selectinload(Sample.segments)).where(Sample.run_id == run.id)
        assert sum(len(s.tokens) for s in session.scalars(eager)) == 29


def test_every_relationship_loads(store: Store, run: Run) -> None:
    from samplestore.models import Base

    with store.session() as session:
        for mapper in Base.registry.mappers:
            rows = session.scalars(sa.select(mapper.class_).limit(2)).all()
            for relation in mapper.relationships:
                assert relation.viewonly, relation
                for row in rows:
                    getattr(row, relation.key)


def test_lives_arrays_and_forks_of_a_sample(store: Store, run: Run) -> None:
    run.requeue([7], "again")
    (claim,) = run.claim(f.register(run), 1)
    f.add(run, claim, 2, 1)
    run.attach(claim, "top_k", np.zeros((2, 3), np.int32))
    f.execute(run, "UPDATE sample SET parent_id = 7 WHERE id = 1")
    with store.session() as session:
        sample = session.get_one(Sample, 7)
        assert (len(sample.segments), len(sample.all_segments)) == (1, 2)
        assert [s.incarnation for s in sample.all_segments] == [0, 1] and len(sample.tokens) == 2
        assert [a.name for a in sample.segments[0].arrays] == ["top_k"] and sample.all_segments[0].arrays == []
        assert [s.id for s in sample.forks] == [1] and sample.forks[0].parent is sample and sample.parent is None
    f.execute(run, "UPDATE segment SET payload = :p WHERE sample_id = 2", p=b"\x00")
    with store.session() as session, pytest.raises(TokensPruned):
        _ = session.get_one(Sample, 2).tokens


def test_a_session_writes_nothing(store: Store, run: Run) -> None:
    with pytest.raises(sa.exc.DBAPIError), store.session() as session:
        session.get_one(Sample, 1).reward = 9.0
        session.flush()
    assert f.sample(run, 1)["reward"] == 0.0


def test_names_of_mapped_classes_are_those_of_the_package() -> None:
    from samplestore.models import Base

    for mapper in Base.registry.mappers:
        name = mapper.class_.__name__
        assert getattr(samplestore, name) is mapper.class_ and name in samplestore.__all__
    assert samplestore.PromptRow is PromptRow and samplestore.Segment is Segment
