"""Named per-token arrays: refused at the door or put together right, in rows and in side-car files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import Store, arrayfiles, retention
from samplestore.backups.backup import backup, restore
from samplestore.engine import Database
from samplestore.errors import ArrayFileError, ArrayNotStored, BackupError, InvalidSegment, LeaseLost
from samplestore.run import Run
from samplestore.types import Claim

from ..support import factory as f

KB = 1024


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store, prompts=2, samples_per_prompt=1, groups_per_step=1)


@pytest.fixture
def filed(store: Store, tmp_path: Path) -> Run:
    """A run whose arrays of 64 bytes and more are files."""
    return f.make_run(
        store, prompts=4, samples_per_prompt=1, groups_per_step=1, max_staleness=8,
        array_url=str(tmp_path / "arrays"), array_file_bytes=64,
    )  # fmt: skip


def claimed(run: Run, tokens: int = 6) -> Claim:
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, tokens)
    return claim


BAD: list[tuple[str, Any, str]] = [
    ("Values", [0.5], "no name of an array"),
    ("../etc", [0.5], "no name of an array"),
    ("a" * 65, [0.5], "no name of an array"),
    ("loss_mask", [1.0], "what a batch calls its own tensor"),
    ("values", [], "0 rows, expected 1 to 6"),
    ("values", [0.0] * 7, "7 rows, expected 1 to 6"),
    ("values", [0.5, np.nan], "nan at [1]"),
    ("values", [[0.5]], "expected 1 dimensions"),
    ("values", [1, 2], "expected floats"),
    ("entropy", [0.1, -0.5], "-0.5 at [1]"),
    ("teacher_log_probs", [-0.1, -np.inf], "-inf at [1]"),
    ("topk_log_probs", [[-0.1, np.nan]], "nan at [0, 1]"),
    ("topk_log_probs", [[-0.1, np.inf]], "inf at [0, 1]"),
    ("topk_ids", [[1, -1]], "-1 at [0, 1]"),
    ("topk_ids", [[1.0]], "expected whole numbers"),
    ("mine", 3.0, "expected 1 to 4 dimensions"),
    ("mine", [["a"]], "are not stored"),
    ("mine", [[1, 2], [3]], "is no array"),
    ("mine", np.zeros((2, 0)), "nothing in it"),
    ("mine", np.zeros(2, np.complex64), "are not stored"),
]


@pytest.mark.parametrize(("name", "array", "said"), BAD)
def test_what_is_no_such_array_is_refused(run: Run, name: str, array: Any, said: str) -> None:
    claim = claimed(run)
    with pytest.raises(InvalidSegment) as caught:
        run.attach(claim, name, array)
    assert said in str(caught.value)
    assert f.value(run, "SELECT count(*) FROM segment_array") == 0


def test_rows_are_put_together_over_segments(run: Run) -> None:
    """Two requests: the first brings rows of its six tokens at once, the second of its last three of four."""
    claim = claimed(run, 4)
    f.add(run, claim, 2)
    first, second = np.arange(6, dtype=np.float32), np.arange(10, 13, dtype=np.float32)
    run.attach(claim, "entropy", first)
    f.add(run, claim, 4)
    run.attach(claim, "entropy", second)
    rows, present = run.array(claim.sample_id, "entropy")
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 0, 10, 11, 12]
    assert present.tolist() == [True] * 6 + [False] + [True] * 3
    assert [a.size for a in run.array(claim.sample_id, "values")] == [0, 0]
    with pytest.raises(InvalidSegment, match=r"float64 \[rows, -\], but an earlier segment has float32"):
        f.add(run, claim, 1)
        run.attach(claim, "entropy", [0.5])
    f.sound(run)


def test_a_batch_gives_them_where_their_tokens_stand(run: Run) -> None:
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    for claim, n in ((a, 3), (b, 2)):
        f.add(run, claim, n, finish_reason="stop")
    topk = np.array([[-0.1, -np.inf], [-0.2, -1.0], [-0.3, -2.0]], np.float16)
    run.attach(a, "topk_log_probs", topk)
    run.attach(b, "values", np.array([7.0], np.float32))
    experts = np.arange(4 * 2 * 2).reshape(4, 2, 2) % 8
    run.attach(b, "routed_experts", experts, n_experts=8)
    for claim in (a, b):
        run.finish(claim)
    with run.batch(step=0, groups=2, max_staleness=1) as batch:
        packed = batch.arrays(named=["topk_log_probs", "values", "routed_experts"])
        padded = batch.arrays(layout="padded", named=["topk_log_probs", "routed_experts"])
        tensors = batch.tensors(named=["values"])
        with pytest.raises(ArrayNotStored, match="stored: routed_experts, topk_log_probs, values"):
            batch.arrays(named=["entropy"])
    # prompts of three tokens: a is 0..5, b is 6..10
    assert packed["topk_log_probs"].shape == (11, 2) and packed["topk_log_probs"].dtype == np.float16
    assert np.array_equal(packed["topk_log_probs"][3:6], topk)
    assert packed["topk_log_probs_present"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert packed["values"].tolist() == [0] * 10 + [7.0]
    assert packed["routed_experts_present"].tolist() == [0] * 6 + [1, 1, 1, 1, 0]
    assert np.array_equal(packed["routed_experts"][6:10], experts)
    assert padded["topk_log_probs"].shape == (2, 6, 2)
    assert np.array_equal(padded["topk_log_probs"][0, 3:6], topk)
    assert np.array_equal(padded["routed_experts"][1, :4], experts) and not padded["routed_experts_present"][0].any()
    assert tensors["values"].tolist() == packed["values"].tolist()


def files_of(run: Run) -> list[Path]:
    folder = Path(str(run.settings.array_url)) / run.uuid
    return sorted(p for p in folder.glob("??/*")) if folder.exists() else []


def test_large_ones_are_files(filed: Run) -> None:
    claim = claimed(filed, 32)
    small, large = np.ones(8, np.float32), np.arange(32, dtype=np.float32)
    filed.attach(claim, "entropy", small)
    filed.attach(claim, "values", large)
    (path,) = files_of(filed)
    assert path.read_bytes() == large.tobytes()
    rows = f.rows(filed, "SELECT name, sidecar, n_bytes, data FROM segment_array ORDER BY name")
    assert [(r["name"], r["sidecar"], r["n_bytes"], r["data"] is None) for r in rows] == [
        ("entropy", None, 32, False), ("values", f"{path.parent.name}/{path.name}", 128, True),
    ]  # fmt: skip
    assert filed.array(claim.sample_id, "values")[0].tolist() == large.tolist()
    filed.attach(claim, "values", large)
    assert files_of(filed) == [path], "equal bytes are one file"
    f.sound(filed)


def test_the_file_is_there_before_its_row(filed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in between, as a lost lease does here, leaves a file that nobody names; never a row without one."""
    claim = claimed(filed, 32)
    f.kill(filed, claim.owner)
    with pytest.raises(LeaseLost):
        filed.attach(claim, "values", np.ones(32, np.float32))
    assert len(files_of(filed)) == 1
    assert retention.sweep_files(filed) == retention.Freed(), "young: its row may be about to come"
    freed = retention.sweep_files(filed, grace_s=0.0)
    assert (freed.files, freed.size, files_of(filed)) == (1, 128, [])
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(ArrayFileError, match="No space left on device"):
            filed.attach(claim, "values", np.ones(32, np.float32))
    assert files_of(filed) == [] and f.value(filed, "SELECT count(*) FROM segment_array") == 0


def test_check_sees_what_is_wrong_with_a_file(filed: Run) -> None:
    claim = claimed(filed, 32)
    filed.attach(claim, "values", np.arange(32, dtype=np.float32))
    (path,) = files_of(filed)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert [c.code for c in filed.check()] == ["array_file"]
    path.write_bytes(b"x" * len(good))
    with pytest.raises(ArrayFileError, match="is damaged"):
        filed.array(claim.sample_id, "values")
    path.unlink()
    (finding,) = filed.check()
    assert (finding.code, finding.examples[0]["there"]) == ("array_file", None)
    with pytest.raises(ArrayFileError, match="samplestore check"):
        filed.array(claim.sample_id, "values")
    path.write_bytes(good)
    f.execute(filed, "UPDATE segment_array SET n_bytes = 7")
    assert [c.code for c in filed.check()] == ["array_size"]


def trained(run: Run, steps: int, shared: bool = False) -> None:
    """One group a step; each sample has an array in a file."""
    worker = f.register(run)
    for step in range(steps):
        (claim,) = run.claim(worker, 1)
        f.add(run, claim, 32, finish_reason="stop")
        run.attach(claim, "values", np.full(32, 1.0 if shared else float(step), np.float32))
        run.finish(claim)
        with run.batch(step=step, groups=1, max_staleness=8):
            pass


def test_prune_takes_the_files_with_the_rows(filed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(filed, 3)
    monkeypatch.setattr(retention.sweep_files, "__defaults__", (0.0,))
    assert len(files_of(filed)) == 3
    done = filed.prune(keep_steps=1)
    assert (done.files, len(files_of(filed))) == (2, 1)
    assert done.freed_bytes >= 2 * 128
    f.sound(filed)


def test_prune_leaves_a_file_that_others_name(filed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(filed, 3, shared=True)
    monkeypatch.setattr(retention.sweep_files, "__defaults__", (0.0,))
    done = filed.prune(keep_steps=1)
    assert (done.files, len(files_of(filed))) == (0, 1)
    f.sound(filed)


def test_a_run_that_goes_takes_its_files(filed: Run, store: Store) -> None:
    trained(filed, 2)
    for heart in list(store.database.hearts.values()):
        heart.leave()
    for row in f.rows(filed, "SELECT id FROM worker WHERE state = 'live'"):
        filed.goodbye(row["id"])
    done = retention.remove(filed)
    assert (done.files, files_of(filed)) == (2, [])


def test_a_backup_carries_the_files(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url, copy = str(tmp_path / "arrays"), tmp_path / "copy"
    run = f.make_run(store, prompts=2, samples_per_prompt=1, groups_per_step=1, array_url=url, array_file_bytes=64)
    trained(run, 2)
    assert backup(store.database, copy).arrays == 2
    sample_id = f.value(run, "SELECT min(id) FROM sample")
    shutil.rmtree(url)
    kept = tmp_path / "copy.arrays"
    kept.rename(tmp_path / "away")
    sqlite = store.database.is_sqlite
    place = f"sqlite:///{tmp_path / 'restored.db'}" if sqlite else request.getfixturevalue("postgres_empty_url")
    target = Database(place)
    with pytest.raises(BackupError, match="A backup's files lie in"):
        restore(copy, target)
    (tmp_path / "away").rename(kept)
    assert restore(copy, target, overwrite=not sqlite).arrays == 2
    target.close()
    with samplestore.open(place) as restored:
        assert restored.existing_run("r").array(sample_id, "values")[0].tolist() == [0.0] * 32
        f.sound(restored.existing_run("r"))


def test_an_object_store_by_its_url(store: Store) -> None:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, array_url="memory://samplestore-arrays", array_file_bytes=64
    )  # fmt: skip
    claim = claimed(run, 32)
    run.attach(claim, "values", np.arange(32, dtype=np.float32))
    key = f.value(run, "SELECT sidecar FROM segment_array")
    assert run.array_files().size(key) == 128
    assert run.array(claim.sample_id, "values")[0].tolist() == list(range(32))
    f.sound(run)
    assert retention.sweep_files(run, grace_s=0.0).files == 0
    f.execute(run, "DELETE FROM segment_array")
    assert retention.sweep_files(run, grace_s=0.0).files == 1
    with pytest.raises(ArrayFileError, match="cannot read"):
        run.array_files().get(key)


@pytest.mark.parametrize("key", ["../../etc/passwd", "ab/abcd", "ab/" + "G" * 64, ""])
def test_a_name_is_a_hash_or_nothing(filed: Run, key: str) -> None:
    with pytest.raises(ArrayFileError, match="names no array file"):
        filed.array_files().get(key)


def test_status_tells_their_sizes(filed: Run) -> None:
    from samplestore.queries.status import status

    claim = claimed(filed, 32)
    filed.attach(claim, "entropy", np.ones(8, np.float32))
    filed.attach(claim, "values", np.ones(32, np.float32))
    assert status(filed.database, filed.id)["arrays"] == [
        {"name": "entropy", "arrays": 1, "bytes": 32}, {"name": "values", "arrays": 1, "bytes": 128},
    ]  # fmt: skip


def test_equal_names_in_two_runs_are_two_folders(store: Store, tmp_path: Path) -> None:
    url = str(tmp_path / "arrays")
    both = [f.make_run(store, name, prompts=1, array_url=url, array_file_bytes=8) for name in ("one", "two")]
    for run in both:
        run.attach(claimed(run, 4), "values", np.ones(4, np.float32))
    f.execute(
        both[0], "DELETE FROM segment_array WHERE sample_id IN (SELECT id FROM sample WHERE run_id = :r)", r=both[0].id
    )
    assert retention.sweep_files(both[0], grace_s=0.0).files == 1
    f.sound(both[1])
    assert arrayfiles.GRACE_S >= 3600
