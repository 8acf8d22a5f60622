"""Exports and their way back: exact, once, the same bytes again, and nothing half there."""

from __future__ import annotations

import base64
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import Store
from samplestore.errors import ImportConflict
from samplestore.portable import export_files, exports
from samplestore.portable import samples as portable
from samplestore.portable.exports import NothingToExport, Selection
from samplestore.portable.files import MANIFEST
from samplestore.portable.imports import InvalidImport
from samplestore.portable.replaced import ExportExists
from samplestore.promptfiles import PromptFileError
from samplestore.run import Run, advance
from samplestore.types import Claim
from samplestore.verbs import fanout, samples, stages
from samplestore.verbs.tx import Tx

from ..support import factory as f
from ..support.extras import library

library("pyarrow")
FORMATS = ("parquet", "jsonl", "jsonl.gz")
# What is another in another run, by its nature: who it is there, when it was stored, and what a trainer there did.
OF_THE_RUN = ("id", "run_uuid", "run", "group", "created_at", "finished_at", "consumed_step", "batch_position")


@pytest.fixture(scope="module")
def exported(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(uuid of a run that lived, the folder of its exports): "out" and "out.jsonl", to be copied before they change."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copyfile(sqlite_template, folder / "rollouts.db")
    with samplestore.open(str(folder / "rollouts.db")) as store:
        run = lived(store)
        run.export(folder / "out")
        run.export(folder / "out.jsonl", format="jsonl", arrays=["all"])
    return run.uuid, folder


def lived(store: Store, name: str = "lived", **settings: Any) -> Run:
    """A run with a bit of everything: versions, aborts, tools, forks, arrays, rewards, failures, two steps."""
    given = {"samples_per_prompt": 2, "groups_per_step": 2, "max_staleness": 3, "epochs": 1, "on_failed": "short"}
    given["stages"] = ["reward"]
    run = store.run(name, **{**given, **settings})
    run.add_prompts(
        [{"prompt_ids": [1, 2, 3 + i], "label": str(i), "metadata": {"n": i, "deep": [{"ö": None}]}} for i in range(7)]
        + [{"messages": [{"role": "user", "content": "hi\u2028"}], "prompt_ids": [9], "chat_template_kwargs": {"a": 1}}]
    )
    run.admit()
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 100)
    lengths = [3 + place % 4 for place in range(len(claims))]
    together(
        run, [(c, 0, f.ids_of(n), f.logprobs_of(n), 0, None, "generated") for c, n in zip(claims, lengths, strict=True)]
    )
    tools = claims[1::2]
    together(run, [(claim, 1, [5, 6], None, None, None, "environment") for claim in tools])
    run.publish_weights("/w/1", step=0)
    ended = [p for p in range(len(claims)) if p not in (12, 14)]
    rows = []
    for place in ended:
        version, reason = (0, 1) if place == 3 else 1, "length" if place == 5 else "stop"
        rows.append((claims[place], 1 + place % 2, f.ids_of(2), f.logprobs_of(2), version, reason, "generated"))
    together(run, rows)
    entropy = {place: run.prepare_array("entropy", np.full(2, 0.1 * place + 0.05, np.float32)) for place in ended}
    run.transact(lambda tx: [samples.attach(tx, claims[p], "entropy", entropy[p]) for p in ended])
    forked(run, claims[6])
    run.transact(lambda tx: [samples.finish(tx, claims[p]) for p in ended if p not in (6, 13)])
    run.release(claims[12], "late")
    failing = claims[14]
    while run.fail(failing, "broken", 0.0) != "failed":
        failing = next(c for c in run.claim(worker, 100) if c.sample_id == failing.sample_id)
    scored = run.claim_stages(worker, 100)
    run.transact(lambda tx: [stages.score(tx, c, 0.1 * c.index, {"why": ["ö", 0.1]}) for c in scored])
    for step in (0, 1):
        batch = f.lease(run, trainer, step, max_staleness=3)
        assert batch is not None
        f.commit(run, batch, trainer)
    return run


def together(run: Run, rows: list[tuple[Any, ...]]) -> None:
    """Appends in one transaction: (claim, seq, tokens, log-probs, version, finish reason, kind)."""
    run.transact(lambda tx: [samples.append(tx, *row, None, None, None) for row in rows])
    for claim, seq, tokens, _, _, reason, _ in rows:
        advance(claim, seq, len(tokens), reason)


def forked(run: Run, claim: Claim) -> None:
    """The sample ends as three: itself, one that shares two of its tokens, and one with a prompt of its own."""
    prompt = np.array([40, 41], np.int32)
    for number, (upto, own) in enumerate(((2, None), (None, prompt))):
        child = run.transact(partial(fanout.fork, claim=claim, number=number, key=f"k{number}", asked={"n": number},
                                     place=number, upto=upto, own_prompt=own))  # fmt: skip
        f.add(run, child, 2, 1, "stop")
        run.transact(partial(_end, child))
    run.transact(partial(_end, claim))


def _end(claim: Claim, tx: Tx) -> None:
    fanout.end(tx, claim, "completed", "stop", True, 0.25)


def told(run: Run, **wanted: Any) -> list[dict[str, Any]]:
    """All that an export says, without what is the run's own; arrays as bytes, so that they compare exactly."""
    selection = Selection(arrays=("all",), **wanted)
    rows = []
    for part in exports.parts(run, selection):
        for one in exports.samples(run, run.uuid, part, selection):
            row = portable.to_row(one)
            row["group_state"] = {"consumed": "ready", "leased": "ready"}.get(row["group_state"], row["group_state"])
            row["order"] = (one.group, one.sample)
            rows.append({k: _plain(v) for k, v in row.items() if k not in OF_THE_RUN})
    return sorted(rows, key=lambda row: row["order"])


def _plain(value: Any) -> Any:
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def place(tmp_path: Path, kind: str) -> Path:
    return tmp_path / ("out" if kind == "parquet" else f"out.{kind}")


def export(run: Run, to: Path, kind: str = "parquet", **options: Any) -> Any:
    return run.export(to, format=kind.partition(".")[0], **options)


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


def test_what_is_there_stays_there(store: Store, tmp_path: Path) -> None:
    run, path = lived(store), tmp_path / "out"
    run.export(path)
    with pytest.raises(ExportExists, match="--force"):
        run.export(path)
    run.export(path, force=True, steps=(0, 0))
    assert sorted(p.name for p in path.iterdir()) == [MANIFEST, "step=0"]
    mine = tmp_path / "mine"
    (mine / "kept").mkdir(parents=True)
    with pytest.raises(ExportExists, match="is no export"):
        run.export(mine, force=True)
    assert (mine / "kept").is_dir()
    (mine / "kept").rmdir()
    for name, text in ((MANIFEST, "{}"), ("kept", "mine")):
        shutil.rmtree(mine)
        shutil.copytree(path, mine)
        (mine / name).write_text(text)
        with pytest.raises(ExportExists):
            run.export(mine, force=True)
        assert (mine / name).read_text() == text


def test_a_file_that_no_export_made_stays_there(store: Store, tmp_path: Path) -> None:
    """With force too: rows, their manifest, and the database."""
    run, path = lived(store), tmp_path / "out.jsonl"
    beside = tmp_path / "out.jsonl.manifest.json"
    for one in (path, beside):
        for text in ("", "mine", '{"kind": "mine"}'):
            one.write_text(text)
            with pytest.raises(ExportExists, match="is no export"):
                run.export(path, format="jsonl", force=True)
            assert one.read_text() == text and len(list(tmp_path.glob("out*"))) == 1
        one.unlink()
    beside.mkdir()
    with pytest.raises(ExportExists, match="is no export"):
        run.export(path, format="jsonl")
    beside.rmdir()
    for compressed in ("", ".gz"):
        to = tmp_path / f"out.jsonl{compressed}"
        run.export(to, format="jsonl", statuses=["pending"])
        run.export(to, format="jsonl", force=True, steps=(0, 0))
        run.export(to, format="jsonl", force=True)
        to.unlink()
        with pytest.raises(ExportExists, match="--force"):
            run.export(to, format="jsonl")
    if not run.database.is_sqlite:
        return  # a server's files are none that a client could name
    database = run.database.path
    for place in (database, Path(f"{database}-wal"), Path(f"{database}.gate")):
        for kind in ("jsonl", "parquet"):
            with pytest.raises(ExportExists, match="is where the database is"):
                run.export(place, format=kind, force=True)
    f.sound(run)


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_a_replacement_that_is_stopped_at_the_last_moment_leaves_the_old_one(
    store: Store, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = lived(store), place(tmp_path, kind)
    export(run, path, kind, steps=(0, 0))
    before = {p: p.read_bytes() for p in path.parent.rglob("*out*") if p.is_file()}

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_files.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        export(run, path, kind, force=True)
    assert path.exists()
    assert {p: p.read_bytes() for p in path.parent.rglob("*out*") if p.is_file()} == before
    assert not list(tmp_path.glob(".*.partial"))


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


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_breaks_off_leaves_nothing(store: Store, tmp_path: Path, kind: str) -> None:
    run, path = lived(store), place(tmp_path, kind)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("pulled the plug")

    export(run, path, kind, steps=(0, 0))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "rollouts.db" not in p.name}
    with pytest.raises(RuntimeError, match="plug"):
        export(run, path, kind, progress=stop, force=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "rollouts.db" not in p.name} == before


def test_bad_rows_are_refused_with_their_place(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    path = tmp_path / "out.jsonl"
    shutil.copyfile(exported[1] / "out.jsonl", path)
    good = [json.loads(line) for line in path.read_text().splitlines()]
    again = store.run("again")
    before = f.snapshot(again)
    for change, field in (
        ({"id": "x"}, "id"),
        ({"response_ids": good[0]["response_ids"][:-1]}, "rollout_log_probs"),
        ({"response_ids": [-1]}, "response_ids"),
        ({"rollout_log_probs": good[0]["rollout_log_probs"][:-1]}, "rollout_log_probs"),
        ({"rollout_log_probs": None}, "rollout_log_probs"),
        ({"segments": good[0]["segments"][:-1]}, "segments"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"status": "done"}, "status"),
        ({"segments": [{"n_tokens": 0}]}, "segments[0].n_tokens"),
        ({"segments": [{**good[0]["segments"][0], "kind": "other"}]}, "segments[0].kind"),
        ({"finish_reason": "a\0b"}, "finish_reason"),
        ({"rewards": [{"name": "r", "status": "done", "value": float("nan")}]}, "rewards[0].value"),
        ({"parent": 77, "parent_upto": 0}, "parent"),
        ({"arrays": [{"seq": 0, "name": "x", "dtype": "float32", "shape": [3], "data": "AAAA"}]}, "arrays[0]"),
        ({"label": {"deep": "\ud800"}}, "label.deep"),
        ({"loss_mask": 5}, "loss_mask"),
        ({"weight_versions": 5}, "weight_versions"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": "x"}, "metadata"),
        ({"reward": 10**400}, "reward"),
        ({"segments": [{**good[0]["segments"][0], "version_min": 0, "version_max": 2**31}]}, "segments[0].version_max"),
        ({"images": [str(tmp_path / "out.jsonl")]}, "images[0]"),
        ({"images": [{"path": str(path)}]}, "images[0]"),
        ({"rewards": [{"name": "reward", "status": "pending"}]}, "rewards[0].status"),
        ({"rewards": [None]}, "rewards[0]"),
        ({"arrays": [{"seq": 0, "name": "x", "dtype": "float32", "shape": [0], "data": ""}] * 2}, "arrays"),
        ({"parent_upto": 1}, "parent_upto"),
        ({"response_ids": [], "segments": [], "arrays": [], "loss_mask": None, "weight_versions": None,
          "rollout_log_probs": None}, "response_ids"),
    ):  # fmt: skip
        path.write_text("".join(json.dumps(r) + "\n" for r in [{**good[0], **change}, *good[1:]]))
        with pytest.raises(InvalidImport) as error:
            again.import_samples(path)
        assert (error.value.rows[0].line, error.value.rows[0].field) == (1, field), error.value
    assert f.snapshot(again) == before


def test_a_fork_that_contradicts_its_parent_is_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    rows = [json.loads(line) for line in (exported[1] / "out.jsonl").read_text().splitlines()]
    fork = next(row for row in rows if row["parent_upto"])
    group = [row for row in rows if row["group"] == fork["group"]]
    again = store.run("again")
    before = f.snapshot(again)
    shared = fork["parent_upto"]
    longer = fork["response_ids"][:1] * 50
    for change, field in (
        ({"response_ids": [99, *fork["response_ids"][1:]]}, "response_ids"),
        ({"rollout_log_probs": [-9.0, *fork["rollout_log_probs"][1:]]}, "rollout_log_probs"),
        ({"prompt_ids": [5]}, "prompt_ids"),
        ({"parent_upto": 50, "response_ids": longer + fork["response_ids"][shared:], "loss_mask": None,
          "rollout_log_probs": [0.0] * 50 + fork["rollout_log_probs"][shared:],
          "weight_versions": None}, "parent_upto"),
    ):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({**row, **change} if row is fork else row) + "\n" for row in group)
        )
        with pytest.raises(InvalidImport) as error:
            again.import_samples(tmp_path / "rows.jsonl")
        assert error.value.rows[0].field == field, error.value
    assert f.snapshot(again) == before


def test_a_null_among_the_rewards_of_a_parquet_row_is_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    pa, pq = (library(name) for name in ("pyarrow", "pyarrow.parquet"))
    table = pq.read_table(exported[1] / "out" / "step=1" / "part-0.parquet")
    at = table.schema.get_field_index("rewards")
    nulls = pa.array([[None]] * table.num_rows, table.schema.field("rewards").type)
    pq.write_table(table.set_column(at, "rewards", nulls), tmp_path / "rows.parquet")
    with pytest.raises(InvalidImport, match=r"rows\.parquet:1: rewards\[0\]: is not an object"):
        store.run("again").import_samples(tmp_path / "rows.parquet")


def test_files_that_are_cut_short_are_refused(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    path = tmp_path / "out"
    shutil.copytree(exported[1] / "out", path)
    again = store.run("again")
    file = path / "step=1" / "part-0.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PromptFileError, match=r"step=1/part-0.parquet: is no readable Parquet file"):
        again.import_samples(path)
    file.unlink()
    with pytest.raises(PromptFileError, match=r"part-0\.parquet"):
        again.import_samples(path)
    about = json.loads((path / MANIFEST).read_text())
    about["files"][0]["path"] = "../../etc/passwd"
    (path / MANIFEST).write_text(json.dumps(about))
    with pytest.raises(PromptFileError, match="names files that an export does not have"):
        again.import_samples(path)
    (path / MANIFEST).write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(PromptFileError, match="has format 99"):
        again.import_samples(path)
    (path / MANIFEST).unlink()
    with pytest.raises(PromptFileError, match=MANIFEST):
        again.import_samples(path)
    assert again.check() == [] and f.states(again) == []


def test_rows_beside_the_manifest_of_others_are_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    """An export was replaced, and broke off between the rows and their manifest."""
    rows, beside = tmp_path / "out.jsonl", tmp_path / f"out.jsonl.{MANIFEST.lstrip('_')}"
    shutil.copyfile(exported[1] / rows.name, rows)
    told = json.loads((exported[1] / beside.name).read_text())
    again = store.run("again")
    before = f.snapshot(again)
    for key in ("samples", "tokens"):
        beside.write_text(json.dumps({**told, "counts": {**told["counts"], key: told["counts"][key] + 1}}))
        with pytest.raises(PromptFileError, match="of two exports"):
            again.import_samples(rows)
    beside.write_text(json.dumps({**told, "run_uuid": "0" * 36}))
    with pytest.raises(InvalidImport, match="run_uuid: is of another run"):
        again.import_samples(rows)
    assert f.snapshot(again) == before


def test_a_hostile_manifest_is_refused_with_its_field(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    rows, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"
    shutil.copyfile(exported[1] / rows.name, rows)
    told = json.loads((exported[1] / beside.name).read_text())
    first, last = told["weight_versions"]
    again = store.run("again")
    before = f.snapshot(again)

    def versions(*changed: dict[str, Any]) -> dict[str, Any]:
        return {"weight_versions": list(changed)}

    for change, field in (
        ({"current_version": None}, "current_version"),
        ({"current_version": [1]}, "current_version"),
        ({"current_version": 2}, "current_version"),
        ({"current_version": True}, "current_version"),
        ({"timelines": 5}, "timelines"),
        ({"timelines": [5]}, "timelines[0]"),
        ({"timelines": [{"number": 0, "parent": "x"}]}, "timelines[0].parent"),
        ({"timelines": [{"number": 0}, {"number": 0}]}, "timelines[1].number"),
        ({"timelines": [{"number": 0}, {"number": 1, "parent": 1}]}, "timelines[number 1].parent"),
        ({"timelines": [{"number": 0, "forked_at_step": "y"}]}, "timelines[0].forked_at_step"),
        ({"timeline": 9}, "timeline"),
        (versions(), "current_version"),
        (versions(first, 5), "weight_versions[1]"),
        (versions(first, {**last, "version": 2**30}), "weight_versions[1].version"),
        (versions(first, last, {**last, "label": "other"}), "weight_versions[2].version"),
        (versions(first, {**last, "label": first["label"]}), "weight_versions[version 1].label"),
        (versions(first, {**last, "label": "\ud800"}), "weight_versions[1].label"),
        (versions(first, {**last, "path": "a\0"}), "weight_versions[1].path"),
        (versions(first, {**last, "parent": 1}), "weight_versions[number 1].parent"),
        (versions({**first, "parent": 1}, last), "weight_versions[number 0].parent"),
        (versions(first, {**last, "parent": None}), "weight_versions[number 1].parent"),
        (versions(first, {**last, "timeline": 7}), "weight_versions[version 1].timeline"),
        (versions(first, {**last, "depth": 0}), "weight_versions[version 1].depth"),
        (versions(first, {**last, "depth": 2**29}), "weight_versions[version 1].depth"),
        ({"counts": None}, "counts"),
        ({"run_uuid": 5}, "run_uuid"),
    ):  # fmt: skip
        beside.write_text(json.dumps({**told, **change}))
        with pytest.raises(InvalidImport) as error:
            again.import_samples(rows)
        assert [(row.source, row.field) for row in error.value.rows] == [(str(beside), field)], error.value
    assert f.snapshot(again) == before
    beside.write_text(json.dumps({**told, **versions({**last, "common_depth": 77}, first)}))
    again.import_samples(rows)
    assert [v["common_depth"] for v in f.rows(again, "SELECT * FROM weight_version ORDER BY version")] == [0, 1]
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
