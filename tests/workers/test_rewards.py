"""The reward runner: real child processes, real verifiers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.workers.reward_child import ChildFailed
from samplestore.workers.rewards import (
    MAX_REQUEST_BYTES,
    RewardPool,
    RewardPoolStopped,
    RewardResult,
    RewardSample,
    RewardSpecError,
    _read_reply,
)
from samplestore.workers.verifiers import reasoning_gym_prompts

HERE = Path(__file__).parent
FUNCTIONS = str(HERE / "reward_functions.py")
STEER = f"{FUNCTIONS}:steer"


def sample(response: str = "hello", *, label: Any = None, **metadata: Any) -> RewardSample:
    return RewardSample(7, 3, 1, "prompt", response, 2, [1, 2, 3], label=label, metadata=metadata)


def assert_no_reward(result: RewardResult, outcome: str = "verifier_error") -> str:
    assert (result.outcome, result.reward) == (outcome, None)
    assert result.error
    assert len(result.error) <= 4000
    result.error.encode()
    assert "\x00" not in result.error
    return result.error


async def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.01)
    return value


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def pid_in(path: Path) -> int:
    return int(await until(lambda: path.exists() and path.read_text(), "process id in the file"))


@pytest.fixture
async def steered() -> AsyncIterator[RewardPool]:
    async with RewardPool(STEER, timeout_s=10) as pool:
        yield pool


# ---- what a function returns


async def test_plain_function() -> None:
    async with RewardPool(f"{FUNCTIONS}:length") as pool:
        result = await pool.score(sample("12345"))
    assert (result.outcome, result.reward, result.details, result.error) == ("ok", 5.0, {}, None)
    assert 0 < result.elapsed_s < 10


async def test_async_function_keeps_one_event_loop() -> None:
    async with RewardPool(f"{FUNCTIONS}:later") as pool:
        first, second = [await pool.score(sample(label=["a", 1])) for _ in range(2)]
    assert first.reward == second.reward == 0.5
    assert first.details == second.details
    assert (first.details["label"], first.details["status"]) == (["a", 1], "completed")


@pytest.mark.parametrize(("do", "reward", "details"), [("true", 1.0, {}), ("both", 0.25, {"score": 9})])
async def test_accepted_returns(steered: RewardPool, do: str, reward: float, details: dict[str, Any]) -> None:
    result = await steered.score(sample(do=do))
    assert (result.outcome, result.reward, result.details) == ("ok", reward, details)


async def test_refused_returns_name_what_was_returned(steered: RewardPool) -> None:
    named = {"nan": "float nan", "inf": "float -inf", "none": "NoneType None", "str": "str '1.0'", "list": "list [1.0]"}
    named |= {"big": "not a finite float", "bigger": "not a finite float", "no_key": "'accuracy'"}
    named |= {"too_big": "from -1e25 to 1e25"}  # no float32, as which a batch has it
    for do, words in named.items():
        assert words in assert_no_reward(await steered.score(sample(do=do))), do
    good = await steered.score(sample())
    assert good.details["calls"] == len(named) + 1  # bad values cost no process


async def test_details_are_bounded_and_storable(steered: RewardPool) -> None:
    result = await steered.score(sample(do="huge_details"))
    assert result.reward == 2.0
    text = json.dumps(result.details, allow_nan=False)
    assert len(text) <= 16 * 2**10
    assert result.details["nan"] == "nan"
    assert result.details["text"] == "a\\ud800\\x00b"
    assert result.details["details_dropped"] > 900


# ---- failures


async def test_exception_is_recorded_with_its_last_lines(steered: RewardPool) -> None:
    error = assert_no_reward(await steered.score(sample(do="raise")))
    assert "reward_functions.py" in error
    assert error.splitlines()[-1] == "ZeroDivisionError: my verifier is broken \\ud800 \\x00"
    assert "_Unshowable" in assert_no_reward(await steered.score(sample(do="unshowable")))
    assert "SystemExit: 3" in assert_no_reward(await steered.score(sample(do="sys_exit")))
    assert (await steered.score(sample())).details["calls"] == 4  # the same process all along


@pytest.mark.parametrize(("do", "words"), [("os_exit", "code 7"), ("segfault", "SIGSEGV"), ("kill", "SIGTERM")])
async def test_dead_child_says_how_it_died(steered: RewardPool, do: str, words: str) -> None:
    error = assert_no_reward(await steered.score(sample(do=do)))
    assert words in error
    assert ("reward_functions.py" in error) == (do == "segfault")  # faulthandler's dump
    assert (await steered.score(sample())).details["calls"] == 1


async def test_infinite_loop_is_a_timeout_and_the_next_sample_is_served() -> None:
    async with RewardPool(STEER, timeout_s=0.5) as pool:
        before = await pool.score(sample())
        stuck = await pool.score(sample(do="loop"))
        after = await pool.score(sample())
    assert "0.5 s" in assert_no_reward(stuck, "verifier_timeout")
    assert 0.5 <= stuck.elapsed_s < 5
    assert after.outcome == "ok"
    assert after.details["calls"] == 1
    assert after.details["pid"] != before.details["pid"]
    assert not running(before.details["pid"])


@pytest.mark.parametrize(
    ("do", "outcome"), [("loop_with_helper", "verifier_timeout"), ("leave_helper", "verifier_error")]
)
async def test_what_the_function_started_dies_with_the_child(tmp_path: Path, do: str, outcome: str) -> None:
    async with RewardPool(STEER, timeout_s=2) as pool:
        assert_no_reward(await pool.score(sample(do=do, path=str(tmp_path / "pid"))), outcome)
        helper = await pid_in(tmp_path / "pid")
        await until(lambda: not running(helper), "end of the helper")
        assert (await pool.score(sample())).outcome == "ok"


async def test_memory_cap() -> None:
    async with RewardPool(STEER, memory_mb=512) as pool:
        pid = (await pool.score(sample())).details["pid"]
        assert "MemoryError" in assert_no_reward(await pool.score(sample(do="eat")))
        after = await pool.score(sample())
    assert after.details["pid"] != pid  # what filled the memory may still be in the old process
    assert after.details["calls"] == 1


async def test_prints_do_not_reach_the_protocol(steered: RewardPool) -> None:
    result = await steered.score(sample("text \ud800", do="print"))
    assert (result.outcome, result.reward) == ("ok", 1.0)
    assert (await steered.score(sample())).details["calls"] == 2


async def test_function_that_forks_answers_once(steered: RewardPool) -> None:
    assert (await steered.score(sample(do="fork"))).reward == 1.0
    assert [(await steered.score(sample())).details["calls"] for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize(
    "reply",
    [
        {"id": 6, "reward": 1.0, "details": {}},
        {"reward": 1.0, "details": {}},
        {"id": 7, "reward": math.nan, "details": {}},
        {"id": 7, "reward": 1e39, "details": {}},
        {"id": 7, "reward": "1.0", "details": {}},
        {"id": 7, "reward": 1.0},
        {"id": 7, "error": 1},
    ],
)
def test_stray_or_malformed_replies_are_no_results(reply: dict[str, Any]) -> None:
    with pytest.raises(ChildFailed):
        _read_reply(reply, 7, 0.1, RewardResult)


# ---- what is sent


async def test_lone_surrogates_and_long_responses(steered: RewardPool) -> None:
    odd = await steered.score(sample("\ud800\x00\U0001f600", do="echo"))
    assert odd.details == {"codes": [0xD800, 0, 0x1F600], "last": 3}
    long = "\u00e9" * 1_000_000
    big = replace(sample(long, do="echo"), tokens=list(range(200_000)), response_length=200_000)
    result = await steered.score(big)
    assert (result.reward, result.details["last"]) == (1_000_000.0, 199_999)


async def test_what_cannot_be_sent_is_refused(steered: RewardPool) -> None:
    assert str(MAX_REQUEST_BYTES) in assert_no_reward(await steered.score(sample("x" * MAX_REQUEST_BYTES)))
    assert "JSON" in assert_no_reward(await steered.score(sample(odd=object())))
    assert (await steered.score(sample())).details["calls"] == 1


def test_sample_and_result_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        sample().response = "other"  # type: ignore[misc]


# ---- specs


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("maths", "neither a built-in"),
        ("", "neither a built-in"),
        (":f", "neither a built-in"),
        ("no.such_module:f", "no module 'no.such_module'"),
        ("-no:f", "no module '-no'"),
        ("json:nothing", "no 'nothing'; it has: "),
        (f"{FUNCTIONS}:missing", "no 'missing'; it has: "),
        (f"{FUNCTIONS}:NOT_CALLABLE", "is int, not a function"),
        (f"{HERE / 'absent.py'}:f", "there is no file"),
        (f"{HERE / 'broken_reward.py'}:f", "RuntimeError: this module is broken on purpose"),
    ],
)
async def test_bad_spec_is_found_at_start(spec: str, words: str) -> None:
    pool = RewardPool(spec)
    with pytest.raises(RewardSpecError) as caught:
        await pool.start()
    await pool.stop()
    assert words in str(caught.value)
    assert "--reward MODULE:FUNCTION" in str(caught.value)
    assert isinstance(caught.value, SampleStoreError)


async def test_module_that_dies_or_hangs_while_loading(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nprint('last words')\nos._exit(9)\n")
    with pytest.raises(RewardSpecError, match=r"exited with code 9\s+last words"):
        await RewardPool(f"{tmp_path / 'dies.py'}:f").start()
    (tmp_path / "hangs.py").write_text("while True: pass\n")
    with pytest.raises(RewardSpecError, match=r"more than 1 s"):
        await RewardPool(f"{tmp_path / 'hangs.py'}:f", start_timeout_s=1).start()


async def test_module_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("class Deep:\n    @staticmethod\n    def f(sample): return 0.75\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('this file must not replace the library')\n")
    monkeypatch.chdir(tmp_path)
    async with RewardPool("mine:Deep.f") as pool:
        assert (await pool.score(sample())).reward == 0.75


async def test_verifier_that_cannot_be_loaded_again_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "vanishes.py"
    path.write_text("import os\ndef f(sample): os._exit(1)\n")
    async with RewardPool(f"{path}:f") as pool:
        path.unlink()
        assert "code 1" in assert_no_reward(await pool.score(sample()))
        assert "there is no file" in assert_no_reward(await pool.score(sample()))


@pytest.mark.parametrize("bad", [{"processes": 0}, {"timeout_s": 0}, {"timeout_s": math.nan}, {"memory_mb": -1}])
def test_bad_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        RewardPool("math", **bad)


# ---- the pool


async def test_samples_in_flight_share_the_children() -> None:
    async with RewardPool(STEER, processes=2) as pool:
        results = await asyncio.gather(*(pool.score(sample("x" * i, do="echo")) for i in range(40)))
        # Two children only: one that is stuck does not hold up the other.
        stuck = asyncio.create_task(pool.score(sample(do="loop")))
        pids = {(await pool.score(sample())).details["pid"] for _ in range(3)}
        assert not stuck.done()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
    assert [r.reward for r in results] == [float(i) for i in range(40)]
    assert len(pids) == 1


async def test_cancelled_score_kills_the_child_and_leaves_the_pool_usable(steered: RewardPool, tmp_path: Path) -> None:
    task = asyncio.create_task(steered.score(sample(do="loop", path=str(tmp_path / "pid"))))
    pid = await pid_in(tmp_path / "pid")
    waiting = asyncio.create_task(steered.score(sample()))  # behind it, for the only child
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await waiting).details["calls"] == 1
    await until(lambda: not running(pid), "end of the cancelled child")


async def test_child_that_died_while_idle_is_replaced_silently(steered: RewardPool) -> None:
    pid = (await steered.score(sample())).details["pid"]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(child.alive for child in steered._idle), "notice of the death")
    assert (await steered.score(sample())).details["calls"] == 1


async def test_stop_is_not_a_verifier_error(tmp_path: Path) -> None:
    pool = RewardPool(STEER)
    with pytest.raises(RewardPoolStopped):
        await pool.score(sample())
    await pool.start()
    scores = [asyncio.create_task(pool.score(sample(do="loop", path=str(tmp_path / "pid")))) for _ in range(2)]
    pid = await pid_in(tmp_path / "pid")
    await pool.stop()
    assert not running(pid)
    for result in await asyncio.gather(*scores, return_exceptions=True):
        assert isinstance(result, RewardPoolStopped)
    await pool.start()
    assert (await pool.score(sample())).outcome == "ok"
    await pool.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("do", ["loop", "hold_gil"])
async def test_killed_worker_leaves_no_child(tmp_path: Path, do: str) -> None:
    command = [sys.executable, str(HERE / "reward_parent.py"), STEER, str(tmp_path / "pid"), do]
    parent = await asyncio.create_subprocess_exec(*command)
    try:
        pid = await pid_in(tmp_path / "pid")
        assert running(pid)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not running(pid), "end of the orphan")


async def test_end_of_input_ends_a_busy_child_without_the_parent_dying(tmp_path: Path) -> None:
    """The way that works beyond Linux: the pipe's hang-up, noticed while the function loops."""
    pool = RewardPool(STEER)
    await pool.start()
    task = asyncio.create_task(pool.score(sample(do="loop", path=str(tmp_path / "pid"))))
    pid = await pid_in(tmp_path / "pid")
    next(iter(pool._busy)).stdin.close()
    await until(lambda: not running(pid), "end of the child")
    assert "SIGKILL" in assert_no_reward(await task)
    await pool.stop()


def test_importing_the_sample_class_is_light() -> None:
    code = "import sys, samplestore.workers.rewards; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "aiohttp", "sympy", "math_verify", "reasoning_gym", "pandas"} & set(loaded)


# ---- math-verify


@pytest.fixture(scope="module")
def math_results() -> dict[tuple[str, str], RewardResult]:
    pairs = [(response, label) for response, label, _ in MATH]

    async def score() -> list[RewardResult]:
        async with RewardPool("math") as pool:
            return [await pool.score(sample(r, label=json.loads(n))) for r, n in pairs]

    return dict(zip(pairs, asyncio.run(score()), strict=True))


MATH = [
    ("so it is \\boxed{\\frac12}", '"0.5"', 1.0),
    ("\\boxed{0.5}", '"\\\\frac{1}{2}"', 1.0),
    ("\\frac12", "0.5", 1.0),
    ("I think\n1/2", '"$\\\\frac{1}{2}$"', 1.0),
    ("The answer is 12.", "12", 1.0),
    ("The answer is 12.", '"13"', 0.0),
    ("\\boxed{x^2-1}", '"(x-1)(x+1)"', 1.0),
    ("First 12, then \\boxed{13}", "12", 0.0),
    ("\\boxed{12} and, in passing, 13", "12", 1.0),
    ("<think>maybe \\boxed{12}</think> \\boxed{13}", "12", 0.0),
    ("<think>maybe \\boxed{12}</think>", "12", 0.0),
    ("The total is $1,000$", '"so 400 + 600\\n#### 1000"', 1.0),
    ("\\boxed{1000}", '"1e3"', 1.0),
    ("\\boxed{0.00001}", "1e-05", 1.0),
    ("\\boxed{A}", '"A"', 1.0),
    ("\\boxed{B}", '"A"', 0.0),
    ("It is 12 apples", '"12 apples"', 1.0),
    ("colourless green ideas \ud800", "12", 0.0),
    ("", "12", 0.0),
    ("\\boxed{\\frac{}{}}}}", "12", 0.0),
]


@pytest.mark.parametrize(("response", "label", "reward"), MATH)
def test_math(math_results: dict[tuple[str, str], RewardResult], response: str, label: str, reward: float) -> None:
    result = math_results[response, label]
    assert (result.outcome, result.reward, result.error) == ("ok", reward, None)


async def test_unusable_math_labels_are_errors_not_zeros() -> None:
    async with RewardPool("math") as pool:
        for label in (None, True, ["12"], "", "Paris", "sqrt(2)", "\\frac{}{"):
            assert "label" in assert_no_reward(await pool.score(sample("\\boxed{12}", label=label))), label


async def test_math_that_never_ends_is_a_timeout() -> None:
    async with RewardPool("math", timeout_s=2) as pool:
        assert_no_reward(await pool.score(sample("it is 9**9**9**9", label=12)), "verifier_timeout")
        assert (await pool.score(sample("12", label=12))).reward == 1.0


# ---- reasoning-gym


async def test_reasoning_gym_round_trip() -> None:
    rows = reasoning_gym_prompts("chain_sum", 3, seed=5, min_terms=3, max_terms=3)
    assert rows == reasoning_gym_prompts("chain_sum", 3, seed=5, min_terms=3, max_terms=3)
    assert rows != reasoning_gym_prompts("chain_sum", 3, seed=6, min_terms=3, max_terms=3)
    rows += reasoning_gym_prompts("rearc", 1, seed=1)  # scores tuples, which JSON does not know
    rows = json.loads(json.dumps(rows))
    async with RewardPool("reasoning_gym") as pool:
        for row in rows[:3]:
            right = sample(f"<think>0</think>so <answer> {row['label']} </answer>.", **row["metadata"])
            wrong = sample("<answer>none</answer>", **row["metadata"])
            bare = sample(row["label"], **row["metadata"])
            assert [(await pool.score(s)).reward for s in (right, bare)] == [1.0, 1.0]
            assert (await pool.score(wrong)).reward == 0.0
            assert row["label"] not in row["prompt"][0]["content"].split("=")[0].split()
        assert (await pool.score(sample(rows[3]["label"], **rows[3]["metadata"]))).reward == 1.0


async def test_reasoning_gym_failures_are_errors() -> None:
    [row] = reasoning_gym_prompts("prime_factorization", 1, seed=1)
    async with RewardPool("reasoning_gym") as pool:
        assert "ValueError" in assert_no_reward(await pool.score(sample("<answer>9**9</answer>", **row["metadata"])))
        assert "reasoning_gym_prompts" in assert_no_reward(await pool.score(sample("1")))
        unknown = {"reasoning_gym": {"dataset": "no_such", "config": {}, "entry": {"answer": "1"}}}
        assert "no_such" in assert_no_reward(await pool.score(sample("1", **unknown)))
        assert (await pool.score(sample(row["label"], **row["metadata"]))).reward == 1.0


@pytest.mark.parametrize(("name", "config"), [("no_such", {}), ("composite", {}), ("chain_sum", {"typo": 1})])
def test_reasoning_gym_prompts_refuses(name: str, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        reasoning_gym_prompts(name, 1, seed=1, **config)
