"""New weights while samples are in flight, in every mode; and who tells the engines."""

from __future__ import annotations

from typing import Any

from tests.support import factory
from tests.support.processes import Process
from tests.support.scripted_engine import Script, ScriptedEngine, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench


def in_flight(bench: Bench, mode: str, script: Script, **options: Any) -> tuple[Process, ScriptedEngine]:
    """Four samples in flight under version 0, all their tokens stored; later requests are answered at once."""
    bench.make_run(samples_per_prompt=4, max_staleness=2, weight_update=mode, epochs=1)
    engine = bench.engine(lambda body, n: script if n < 4 else Script(), **options)
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 4)
    bench.wait_stored((script.stall_after or 0) // script.chunk * script.chunk)  # whole chunks have come
    return worker, engine


def versions(bench: Bench) -> list[list[tuple[int | None, int | None, int]]]:
    """Per sample its runs of tokens of one version: (min, max, tokens)."""
    told = []
    for row in bench.samples():
        runs: list[tuple[int | None, int | None, int]] = []
        for part in factory.segments(bench.run, row["id"]):
            key = (part["version_min"], part["version_max"])
            if runs and runs[-1][:2] == key:
                runs[-1] = (*key, runs[-1][2] + part["n_tokens"])
            else:
                runs.append((*key, part["n_tokens"]))
        told.append(runs)
    return told


def loads(engine: ScriptedEngine) -> list[dict[str, Any]]:
    return [body for name, body in engine.calls if name == "update_weights_from_disk"]


def test_mode_abort(any_bench: Bench) -> None:
    """In-flight requests are aborted by a pause, and resumed under the new weights. The cache is emptied while nothing
    runs: otherwise some engines change the weights and keep the label, and others die."""
    worker, engine = in_flight(any_bench, "abort", Script(stall_after=12))
    made = any_bench.run.publish_weights("/weights/1", step=1)
    assert worker.wait(40) == 0, worker.log()
    assert [(b["model_path"], b["weight_version"]) for b in loads(engine)] == [("/weights/1", made.label)]
    assert (loads(engine)[0]["abort_all_requests"], loads(engine)[0]["flush_cache"]) == (False, True)
    told = [(name, body.get("mode")) for name, body in engine.calls if name != "abort_request"]
    assert told == [
        ("pause_generation", "abort"), ("update_weights_from_disk", None), ("continue_generation", None),
    ]  # fmt: skip
    assert versions(any_bench) == [[(0, 0, 12), (1, 1, 20)]] * 4
    assert [len(b["input_ids"]) for b in engine.requests] == [PROMPT_TOKENS] * 4 + [PROMPT_TOKENS + 12] * 4
    assert {(r["n_aborts"], r["n_resumes"], r["failures"]) for r in any_bench.samples()} == {(1, 1, 0)}
    assert {e["reason"] for e in factory.events(any_bench.run, "abort")} == {"weight update"}
    any_bench.exact(32)
    any_bench.sound()


def test_mode_keep_with_spans(any_bench: Bench) -> None:
    """Nothing is aborted, and the spans of the last chunk are stored to the token, wherever chunks end."""
    worker, engine = in_flight(any_bench, "keep", Script(stall_after=14, chunk=5))
    any_bench.run.publish_weights("/weights/1", step=1)
    any_bench.wait(lambda: loads(engine) and not engine.paused, "the engine was updated and goes on")
    assert engine.most_running == len(engine.running) == 4
    engine.release()
    assert worker.wait(40) == 0, worker.log()
    names = [name for name, _ in engine.calls]
    first = names.index("pause_generation")
    assert names[first : first + 3] == ["pause_generation", "update_weights_from_disk", "continue_generation"]
    assert engine.calls[first][1] == {"mode": "in_place"}
    assert (loads(engine)[0]["abort_all_requests"], loads(engine)[0]["flush_cache"]) == (False, False)
    assert versions(any_bench) == [[(0, 0, 14), (1, 1, 18)]] * 4
    assert len(engine.requests) == 4 and engine.aborts == []
    assert {r["n_aborts"] for r in any_bench.samples()} == {0}
    any_bench.exact(32)
    any_bench.sound()


def test_mode_keep_of_an_engine_without_spans(bench: Bench) -> None:
    """Which weights made the chunk that straddles the change nobody can tell: a range is stored, never a guess."""
    worker, engine = in_flight(bench, "keep", Script(stall_after=14, chunk=5), spans=False)
    bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: loads(engine) and not engine.paused, "the engine was updated and goes on")
    engine.release()
    assert worker.wait(40) == 0, worker.log()
    for runs in versions(bench):
        assert runs[0][:2] == (0, 0) and runs[0][2] == 10
        assert runs[1][:2] == (0, 1) and runs[0][2] + sum(r[2] for r in runs[1:]) == 32
    bench.exact(32)
    bench.sound()


def test_mode_keep_never_shares_a_cache_between_versions(bench: Bench) -> None:
    """Without a flush, a prefix cache holds keys and values of older weights."""
    bench.make_run(samples_per_prompt=2, weight_update="keep", max_staleness=2, epochs=1)
    engine = bench.engine(lambda body, n: Script(stall_after=4) if n == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True, concurrency=1)
    wait_running([engine], 1)
    made = bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: loads(engine) and not engine.paused, "the engine was updated")
    engine.release()
    assert worker.wait(40) == 0, worker.log()
    assert [body["extra_key"] for body in engine.requests] == ["default", made.label]


def test_mode_drain(any_bench: Bench) -> None:
    worker, engine = in_flight(any_bench, "drain", Script(stall_after=12))
    any_bench.run.publish_weights("/weights/1", step=1)
    any_bench.wait(lambda: loads(engine), "the engine was told")
    assert engine.label == "default" and len(engine.running) == 4, "it waits for what is in flight"
    engine.release()
    assert worker.wait(40) == 0, worker.log()
    assert loads(engine)[0]["abort_all_requests"] is False
    assert versions(any_bench) == [[(0, 0, 32)]] * 4
    assert {r["n_aborts"] for r in any_bench.samples()} == {0}
    any_bench.exact(32)
    any_bench.sound()


def wait_served(bench: Bench, engine: ScriptedEngine, label: str) -> None:
    bench.wait(lambda: engine.label == label, f"it serves {label}")


def test_one_process_drives_the_update_of_an_engine(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=4, max_staleness=9)
    engine = any_bench.engine(Script(stall_after=4))
    workers = [any_bench.worker(engine, concurrency=2) for _ in range(3)]
    wait_running([engine], 4)
    for step in (1, 2, 3):
        made = any_bench.run.publish_weights(f"/weights/{step}", step=step)
        wait_served(any_bench, engine, made.label)
    served = "SELECT version FROM engine"
    any_bench.wait(lambda: factory.value(any_bench.run, served) == 3, "the store knows")
    assert [body["model_path"] for body in loads(engine)] == ["/weights/1", "/weights/2", "/weights/3"]
    engine.release()
    any_bench.wait_all()
    for worker in workers:
        assert worker.terminate() == 0
    any_bench.exact(32)
    any_bench.sound()


def test_an_update_that_fails_is_told_and_tried_again(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=2, max_staleness=2)
    engine = bench.engine()
    engine.load_fails = 2
    bench.run.publish_weights("/weights/1", step=1)
    bench.worker(engine)
    bench.wait(lambda: factory.events(bench.run, "weight_update"), "it was updated in the end")
    failed = factory.events(bench.run, "engine_failed")
    assert len(failed) == 2 and "no such checkpoint" in failed[0]["reason"]
    assert factory.rows(bench.run, "SELECT state, failures, version, owner FROM engine") == [
        {"state": "live", "failures": 0, "version": 1, "owner": None}
    ]


def test_an_engine_that_starts_with_old_weights_is_brought_up(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=2, max_staleness=2, epochs=1)
    made = bench.run.publish_weights("/weights/1", step=1)
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True)
    bench.wait(lambda: engine.label == made.label, "it was updated")
    assert worker.wait(40) == 0, worker.log()
    bench.exact(32)
    bench.sound()


def test_a_worker_that_is_told_not_to_update_engines(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=2, max_staleness=2, epochs=1)
    bench.run.publish_weights("/weights/1", step=1)
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True, update_engines=False)
    assert worker.wait(40) == 0, worker.log()
    assert engine.calls == []
    assert versions(bench) == [[(0, 0, 32)]] * 2


def test_a_label_that_nobody_published_stays_unknown(bench: Bench) -> None:
    """Never taken for version 0, nor for the current one."""
    bench.make_run(samples_per_prompt=2, epochs=1)

    def relabelled(body: dict[str, Any], n: int) -> Script:
        engine.label = "somebody-elses"  # between the look at the engine and the request
        return Script()

    engine = bench.engine(relabelled)
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert versions(bench) == [[(None, None, 32)]] * 2
    assert [r["version_unknown"] for r in bench.samples()] == [1, 1]
    bench.exact(32)
    bench.sound()


def test_an_engine_with_weights_of_nobody_gets_no_requests(bench: Bench) -> None:
    """Its tokens could never be trained on. Told how, the operator brings it to the run's weights, and it goes on."""
    bench.make_run(samples_per_prompt=2, epochs=1)
    engine = bench.engine(label="somebody-elses")
    worker = bench.worker(engine, exit_when_done=True)
    worker.wait_for_log("samplestore engines update")
    assert "has not published" in str(bench.run.why())
    assert engine.requests == []
    engine.label = "default"
    assert worker.wait(40) == 0, worker.log()
    assert versions(bench) == [[(0, 0, 32)]] * 2
    bench.sound()


def test_a_driver_dies_between_update_and_continue(bench: Bench) -> None:
    """Mode keep: the engine is frozen, serves the right label, nobody owes it anything - and is woken all the same."""
    bench.make_run(samples_per_prompt=2, max_staleness=2, weight_update="keep", heartbeat_ttl_s=1)
    engine = bench.engine(Script(stall_after=4))
    first = bench.worker(engine)
    wait_running([engine], 2)
    engine.load_blocks = True
    made = bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: engine.label == made.label, "the weights have changed")
    first.kill()
    assert engine.paused
    engine.release()
    second = bench.worker(engine)
    bench.wait_all()
    assert not engine.paused
    assert second.terminate() == 0
    bench.exact(32)
    bench.sound()
