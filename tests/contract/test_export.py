"""Exports and their way back: exact, once, and the same bytes again."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import ImportConflict
from samplestore.portable import exports
from samplestore.portable import samples as portable
from samplestore.portable.exports import NothingToExport
from samplestore.run import Run

from ..support import factory as f
from ..support.extras import library
from .exporting import FORMATS, export, exported_in, lived, place, told

library("pyarrow")


@pytest.fixture(scope="module")
def exported(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return exported_in(sqlite_template, tmp_path_factory.mktemp("exported"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_comes_back_as_it_was(store: Store, tmp_path: Path, kind: str) -> None:
    run, path = lived(store), place(tmp_path, kind)
    done = export(run, path, kind, arrays=["all"])
    assert (done.groups, done.samples, done.steps) == (8, 18, [0, 1])
    again = store.run("again", samples_per_prompt=2, stages=["reward"], on_failed="short")
    assert (again.import_samples(path).added, again.import_samples(path).existing) == (8, 8)
    mine, back = told(run), told(again)
    # groups are numbered in the order of the export: steps first
    by_content = lambda rows: sorted(  # noqa: E731
        ({k: v for k, v in r.items() if k not in ("order", "rollout_id")} for r in rows),
        key=lambda r: (r["prompt_ids"], r["sample"]),
    )
    for one, other in zip(by_content(mine), by_content(back), strict=True):
        assert one == other
    assert len(mine) == len(back) == 18
    assert {r["status"] for r in back} == {"completed", "truncated", "failed", "aborted", "pending"}
    assert [(v.version, v.label, v.step, v.path) for v in again.weight_versions()] == [
        (v.version, v.label, v.step, v.path) for v in run.weight_versions()
    ]
    assert again.current_version == run.current_version == 1
    f.sound(run)
    f.sound(again)


def test_the_same_run_gives_the_same_bytes(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    for kind in FORMATS:
        for name in ("a", "b"):
            export(run, tmp_path / name / kind, kind, arrays=["all"])
    a, b = (
        {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "a", tmp_path / "b")
    )
    assert a == b and len(a) == 8
    assert not list(tmp_path.rglob("*.partial"))


def test_what_is_imported_goes_on(store: Store, exported: tuple[str, Path]) -> None:
    """An aborted sample is resumed where it was left, a batch is trained on, and the ledger closes."""
    again = store.run("again", samples_per_prompt=2, groups_per_step=2, max_staleness=0)
    again.import_samples(exported[1] / "out.jsonl")
    worker = f.register(again)
    (claim, other) = again.claim(worker, 100)
    assert claim.n_tokens == 3 and claim.response_ids.tolist() == f.ids_of(3)
    for one in (claim, other):
        f.answer(again, one, 2, 1)
    with again.batch(step=0, groups=6, max_staleness=0, timeout=5) as batch:
        assert sum(s.versions.max() for s in batch.samples) > 0
        assert batch.arrays(named=["entropy"])["entropy"].dtype == np.float32
    f.sound(again)


def test_a_changed_group_is_an_error_that_names_it(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    uuid, path = exported[0], tmp_path / "out.jsonl"
    shutil.copyfile(exported[1] / "out.jsonl", path)
    again = store.run("again")
    again.import_samples(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["response_ids"][0] += 1
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    before = f.snapshot(again)
    with pytest.raises(ImportConflict, match=f"{uuid}/{rows[0]['group']} was imported before") as error:
        again.import_samples(path)
    assert error.value.portable_id == f"{uuid}/{rows[0]['group']}"
    assert f.snapshot(again) == before


def test_a_run_with_weights_of_its_own_keeps_them(store: Store, exported: tuple[str, Path]) -> None:
    """Numbers mean nothing in another run: labels do, and what is not known is flagged and never 0."""
    other = store.run("other")
    other.publish_weights("/other", step=0, label="mine")
    other.import_samples(exported[1] / "out")
    assert [v.label for v in other.weight_versions()][1:] == ["mine"]
    found = f.rows(other, "SELECT DISTINCT s.version_min AS v FROM segment s JOIN sample a ON a.id = s.sample_id "
                          "WHERE a.run_id = :r AND kind = 'generated' ORDER BY 1", r=other.id)  # fmt: skip
    assert {row["v"] for row in found} == {0, None}
    unknown = f.value(other, "SELECT count(*) FROM sample WHERE run_id = :r AND version_unknown = 1", r=other.id)
    assert unknown > 0 and other.current_version == 1
    f.sound(other)


def test_tokens_of_several_versions_of_which_one_is_not_known(store: Store, tmp_path: Path) -> None:
    """Which token is whose nobody knows, so that their version is unknown."""
    run = f.make_run(store, prompts=1)
    run.publish_weights("/w/1", step=0)
    for claim, version in zip(run.claim(f.register(run), 2), ((0, 1), 1), strict=True):
        f.answer(run, claim, version=version)
    assert f.value(run, "SELECT count(*) FROM segment WHERE version_min < version_max") == 1
    run.export(tmp_path / "out")
    other = store.run("other", samples_per_prompt=2)
    other.publish_weights("/other", step=0, label="mine")
    other.import_samples(tmp_path / "out")
    f.sound(other)
    assert {v for r in told(other) for v in r["weight_versions"][1]} == {255}, "-1 of each token"


def test_two_exports_of_one_run_make_one(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.export(tmp_path / "first", steps=(0, 0))
    run.publish_weights("/w/2", step=2)
    run.export(tmp_path / "second")
    again = store.run("again")
    assert again.import_samples(tmp_path / "first").added == 2
    assert again.import_samples(tmp_path / "second").added == 6
    assert (again.current_version, len(again.weight_versions())) == (2, 3)
    f.sound(again)


def test_a_run_with_work_of_its_own_keeps_its_version(store: Store, exported: tuple[str, Path]) -> None:
    """Its own tokens would become stale by the updates of another run."""
    working, waiting, leased = (f.make_run(store, name, prompts=2, max_staleness=1) for name in ("a", "b", "c"))
    f.finish_all(working, f.register(working))
    f.execute(working, "UPDATE worker SET state = 'gone' WHERE run_id = :r", r=working.id)
    f.register(waiting)
    again = store.run("again")
    again.import_samples(exported[1] / "out.jsonl")
    trainer = f.register(leased, "trainer")
    leased.import_samples([{"prompt_ids": [9], "response_ids": [7], "log_probs": [-0.5]}])
    assert f.lease(leased, trainer, 0, 1) is not None
    f.execute(leased, "UPDATE worker SET state = 'gone' WHERE run_id = :r", r=leased.id)
    for run in (working, waiting, leased):
        run.import_samples(exported[1] / "out", dataset="brought")
        assert (run.current_version, len(run.weight_versions())) == (0, 1), run.name
        assert f.value(run, "SELECT max(version_unknown) FROM sample WHERE run_id = :r", r=run.id) == 1
        f.sound(run)
    assert {s for n, s in staleness_of(working) if n < 2} == {0}
    assert again.current_version == 1, "a run that was only imported into takes them over"


def test_an_export_in_its_own_run_adds_nothing(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.export(tmp_path / "out")
    before = f.snapshot(run)
    done = run.import_samples(tmp_path / "out", dataset="brought")
    assert (done.added, done.existing) == (0, 8) and f.snapshot(run) == before
    f.execute(run, "UPDATE run SET n_groups = 7")
    with pytest.raises(ImportConflict, match="older than the export"):
        run.import_samples(tmp_path / "out")


def staleness_of(run: Run) -> list[tuple[int, Any]]:
    """(group, staleness) of what is ready, by the view."""
    told = f.rows(run, "SELECT number, staleness FROM ready_groups WHERE run_id = :r ORDER BY number", r=run.id)
    return [(row["number"], row["staleness"]) for row in told]


def test_what_is_finished_here_grows_stale_like_all_others(store: Store, tmp_path: Path) -> None:
    """Imported pending and aborted samples are generated by this run's weights; what came finished is behind none."""
    run = f.make_run(store, prompts=3, stages=[])
    claims = run.claim(f.register(run), 6)
    for claim in claims[:3]:
        f.answer(run, claim)
    f.add(run, claims[3], 2)
    run.release(claims[3], "late")
    export(run, tmp_path / "out")
    again = store.run("again", samples_per_prompt=2, groups_per_step=2, max_staleness=1, stale="skip")
    assert again.import_samples(tmp_path / "out").added == 3
    worker = f.register(again)
    f.finish_all(again, worker)
    assert staleness_of(again) == [(0, 0), (1, 0), (2, 0)]
    assert again.import_samples(tmp_path / "out").existing == 3, "known by what it came from, whoever finished it"
    for step in range(3):
        again.publish_weights(step=step)
    assert staleness_of(again) == [(0, 0), (1, 3), (2, 3)]
    batch = f.lease(again, f.register(again, "trainer"), 3, 1)
    assert batch is not None and f.groups_of(again, batch) == [0]
    assert f.lease(again, f.register(again, "trainer"), 4, 1) is None
    f.sound(again)


def test_tokens_of_an_unknown_version_have_no_staleness(store: Store, tmp_path: Path) -> None:
    library("pandas")
    run = f.make_run(store, prompts=1)
    claims = run.claim(f.register(run), 2)
    f.answer(run, claims[0], version=None)
    f.answer(run, claims[1], version=0)
    f.execute(run, "UPDATE sample_group SET state = 'ready'")
    export(run, tmp_path / "out")
    again = store.run("again", stages=[])
    again.import_samples(tmp_path / "out")
    frame = store.frame("tokens", "again")
    assert frame.groupby("index")["staleness"].apply(lambda s: s.isna().all()).tolist() == [True, False]


def test_selections(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    one = run.export(tmp_path / "a.jsonl", format="jsonl", steps=(1, 1))
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert one.steps == [1] and {r["consumed_step"] for r in rows} == {1}
    assert [r["batch_position"] for r in rows] == sorted(r["batch_position"] for r in rows)
    assert all(r["arrays"] == [] for r in rows)
    run.export(tmp_path / "b.jsonl", format="jsonl", statuses=["failed", "aborted"])
    assert {json.loads(line)["status"] for line in (tmp_path / "b.jsonl").open()} == {"failed", "aborted"}
    with pytest.raises(NothingToExport, match="no committed step from 7 to 9"):
        run.export(tmp_path / "c", steps=(7, 9))
    assert not (tmp_path / "c").exists()


def test_the_parent_of_a_fork_comes_along(store: Store, tmp_path: Path) -> None:
    """A fork alone has not the tokens that it shares, and no import takes it."""
    run = lived(store)
    root = f.value(run, "SELECT DISTINCT parent_id FROM sample WHERE parent_id IS NOT NULL")
    f.execute(run, "UPDATE sample SET status = 'truncated' WHERE id = :i", i=root)
    run.export(tmp_path / "out.jsonl", format="jsonl", statuses=["completed"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    (parent,) = (row for row in rows if row["status"] == "truncated")
    assert [r["parent"] for r in rows if r["group"] == parent["group"]].count(parent["sample"]) == 2
    assert store.run("again").import_samples(tmp_path / "out.jsonl").added == len({row["group"] for row in rows})


@pytest.mark.parametrize("kind", [*FORMATS, "slime"])
@pytest.mark.parametrize("mine", [5, {}, {"0": 5}, {"0": {"more": {"samplestore.array": 1}}}])
def test_metadata_may_have_the_name_that_slime_files_use(store: Store, tmp_path: Path, kind: str, mine: Any) -> None:
    if kind == "slime":
        library("torch")
    run = store.run("r", samples_per_prompt=2, groups_per_step=1, epochs=1)
    run.add_prompts([{"prompt_ids": [1], "metadata": {"slime_sample": mine, "other": 1}}])
    run.admit()
    f.finish_all(run, f.register(run))
    f.commit(run, f.lease(run, trainer := f.register(run, "trainer"), 0, 1) or 0, trainer)
    path = tmp_path / "{rollout_id}.pt" if kind == "slime" else place(tmp_path, kind)
    export(run, path, kind)
    if kind == "slime":
        return  # slime has it as a key of its own; that it can be written is all
    again = store.run("again")
    again.import_samples(path)
    assert told(again)[0]["metadata"] == {"slime_sample": mine, "other": 1}


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_weights_that_are_published_meanwhile_are_in_the_manifest(store: Store, tmp_path: Path, kind: str) -> None:
    run, path = f.make_run(store, prompts=2, max_staleness=4), place(tmp_path, kind)
    held = run.claim(f.register(run), 4)
    f.answer(run, held[0])
    parts = exports.parts

    def while_it_runs(*args: Any) -> Any:
        found = parts(*args)
        run.publish_weights(step=0)
        for claim in held[1:]:
            f.answer(run, claim, version=1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "parts", while_it_runs)
        export(run, path, kind)
    again = store.run("again")
    again.import_samples(path)
    assert again.current_version == 1
    f.sound(again)


def test_versions_of_a_run_that_was_rewound_come_over_as_they_were(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.publish_weights(step=1)
    run.rewind(step=0)
    run.publish_weights(step=1)
    run.export(tmp_path / "out")
    again = store.run("again", max_staleness=9)
    again.import_samples(tmp_path / "out")
    place = "SELECT version, label, timeline, parent, step, depth, common_depth FROM weight_version WHERE run_id = :r"
    told = [f.rows(each, f"{place} ORDER BY version", r=each.id) for each in (run, again)]
    assert told[0] == told[1] and len({v["common_depth"] for v in told[0]}) > 1
    told = [
        f.rows(r, "SELECT number, parent, forked_at_step FROM timeline WHERE run_id = :r", r=r.id) for r in (run, again)
    ]
    assert told[0] == told[1] and len(told[0]) == 2


def test_others_read_the_files(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.export(tmp_path / "out")
    dataset = library("pyarrow.dataset").dataset
    datasets, duckdb, polars = (library(name) for name in ("datasets", "duckdb", "polars"))
    table = dataset(tmp_path / "out", partitioning="hive").to_table()
    assert table.num_rows == 18 and set(portable.COLUMNS) < set(table.column_names)
    assert set(table["step"].to_pylist()) == {"0", "1", "none"}
    files = [str(path) for path in sorted((tmp_path / "out").rglob("*.parquet"))]
    loaded = datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 18 and loaded[0]["response_ids"] == table["response_ids"][0].as_py()
    frame = polars.scan_parquet(f"{tmp_path}/out/**/*.parquet").select(polars.col("response_ids").list.len().sum())
    asked = f"SELECT sum(len(response_ids)), count(DISTINCT step) FROM read_parquet('{tmp_path}/out/*/*.parquet')"
    n = sum(len(r) for r in table["response_ids"].to_pylist())
    assert (n, 3) == duckdb.sql(asked).fetchall()[0] and frame.collect().item() == n


def test_pruned_groups_are_left_out_and_counted(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.prune(keep_steps=1)
    done = run.export(tmp_path / "out")
    assert done.pruned > 0 and done.groups + done.pruned == 8
    assert store.run("again").import_samples(tmp_path / "out").added == done.groups


def test_arrays_in_files_and_images_come_along(store: Store, tmp_path: Path) -> None:
    image = base64.b64decode("iVBORw0KGgo=") + b"pixels"
    given = {"samples_per_prompt": 1, "epochs": 1, "array_file_bytes": 1}
    run = store.run("r", array_url=str(tmp_path / "arrays"), **given)
    row = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]}
    run.add_prompts([{**row, "prompt_ids": [1, 2], "images": [image]}])
    run.admit()
    (claim,) = run.claim(f.register(run), 1)
    f.add(run, claim, 3, 0, "stop")
    run.attach(claim, "values", np.arange(3, dtype=np.float32))
    run.finish(claim)
    for kind in FORMATS[:2]:
        path = place(tmp_path, kind)
        export(run, path, kind, arrays=["all"])
        again = store.run(f"again-{kind}", array_url=str(tmp_path / "others"), array_file_bytes=1)
        again.import_samples(path)
        assert told(again) == told(run) and told(again)[0]["images"][0].startswith("data:image/png;base64,")
        assert f.value(again, "SELECT count(*) FROM segment_array WHERE sidecar IS NULL") == 0
        f.sound(again)


def test_memory_holds_a_few_groups(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = f.make_run(store, prompts=9, max_staleness=9), []
    f.finish_all(run, f.register(run))
    read = exports._read

    def counted(*args: Any, ids: Any, **more: Any) -> Any:
        asked.append(len(ids))
        return read(*args, ids=ids, **more)

    monkeypatch.setattr(exports, "CHUNK", 2)
    monkeypatch.setattr(exports, "_read", counted)
    passed: list[tuple[int, int]] = []
    run.export(tmp_path / "out", progress=lambda done, total: passed.append((done, total)))
    assert asked == [2, 2, 2, 2, 1] and passed == [(2, 9), (4, 9), (6, 9), (8, 9), (9, 9)]
