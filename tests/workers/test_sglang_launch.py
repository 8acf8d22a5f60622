"""Installing and starting SGLang: the command lines, what the installer does again, and real servers and routers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.workers.sglang import install as installer
from samplestore.workers.sglang import machine
from samplestore.workers.sglang.launch import CPU_FLAGS, CPU_SHIM, engine_command, router_command, small_model_flags
from samplestore.workers.sglang.releases import NEWEST, OLDEST, RELEASES, incremental_flag, parse_releases
from tests.support.models import build_model
from tests.support.processes import HOST, Processes, free_port
from tests.support.sglang import answers, chosen_releases, start_sglang

SAMPLESTORE = [sys.executable, "-m", "samplestore.cli"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The command lines of a CPU machine, wherever the tests run."""
    if request.node.get_closest_marker("sglang") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What an installation of the newest and the oldest release leaves, without the packages."""
    folder = tmp_path / "sglang"
    for part in ("venv", f"releases/{NEWEST}", f"releases/{OLDEST}"):
        (folder / part).mkdir(parents=True)
        (folder / part / machine.STAMP).touch()
    return folder


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str = "GPU 0: NVIDIA H100") -> None:
    program(folder / "nvidia-smi", f'test "$1" = -L && echo "{listed}"')
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def value_of(argv: list[str], flag: str) -> str:
    """What the program sees: argparse takes the last of several."""
    return argv[len(argv) - 1 - argv[::-1].index(flag) + 1]


# -- releases


def test_releases_are_named_one_by_one_or_by_their_place_in_the_table() -> None:
    assert parse_releases("0.5.18, 0.5.9") == ["0.5.18", "0.5.9"]
    assert parse_releases("newest,oldest,0.5.9") == [NEWEST, OLDEST] == ["0.5.23", "0.5.9"]
    assert parse_releases("all") == list(RELEASES)
    with pytest.raises(InvalidSetting, match=r"0\.5\.99.*0\.5\.23 \| 0\.5\.21.* \| all"):
        parse_releases("0.5.23,0.5.99")


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.5.9", "--stream-output"),
        ("0.5.10", "--incremental-streaming-output"),
        ("0.5.12.post1", "--incremental-streaming-output"),
        ("0.6.0rc1", "--incremental-streaming-output"),
    ],
)
def test_the_flag_for_deltas_by_release(version: str, flag: str) -> None:
    assert incremental_flag(version) == flag


# -- the engine's command line


def test_an_engine_on_the_cpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    command = engine_command("/models/m", port=31000, weight_version="v7", home=home, extra=["--tp-size", "2"])
    argv = command.argv
    assert argv[:3] == [str(home / "venv/bin/python"), "-m", "sglang.launch_server"]
    assert "--incremental-streaming-output" in argv and "--enable-metrics" in argv
    assert [value_of(argv, f) for f in ("--model-path", "--port", "--weight-version", "--stream-interval")] == [
        "/models/m", "31000", "v7", "8",
    ]  # fmt: skip
    assert argv[-2:] == ["--tp-size", "2"]
    assert command.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == command.env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert command.env["PYTHONPATH"] == f"{CPU_SHIM}:{home}/releases/{NEWEST}:/mine"
    assert command.environment()["PATH"] == os.environ["PATH"]
    assert set(CPU_FLAGS) <= set(argv)
    assert small_model_flags() == []


def test_what_the_user_adds_overrules_what_we_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = engine_command("m", home=home, extra=["--stream-interval", "1", "--max-running-requests", "4"]).argv
    assert (value_of(argv, "--stream-interval"), value_of(argv, "--max-running-requests")) == ("1", "4")
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")  # somebody whose vision tower is frozen
    assert engine_command("m", home=home).environment()["SGLANG_VLM_CACHE_SIZE_MB"] == "100"


def test_an_older_release_gets_its_own_flag_and_packages(home: Path) -> None:
    command = engine_command("m", release=OLDEST, home=home)
    assert "--stream-output" in command.argv and "--incremental-streaming-output" not in command.argv
    assert f"{home}/releases/{OLDEST}" in command.env["PYTHONPATH"] and NEWEST not in command.env["PYTHONPATH"]


def test_an_engine_on_a_gpu_has_nothing_of_the_cpu(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(tmp_path / "bin", monkeypatch)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = program(home / f"releases/{NEWEST}/bin/python", "true")
    command = engine_command("m", home=home)
    assert command.argv[0] == str(python)
    assert not {"--device", "--attention-backend", "--dtype", "--max-total-tokens"} & set(command.argv)
    assert command.env == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
    assert value_of(small_model_flags(), "--attention-backend") == "triton"


def test_a_gpu_that_is_hidden_or_does_not_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(tmp_path / "bin", monkeypatch)
    assert machine.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not machine.has_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program(tmp_path / "bin/nvidia-smi", "echo 'GPU 0'; exit 9")
    assert not machine.has_gpu()


def test_a_release_that_is_not_there_or_not_complete_tells_what_to_type(home: Path) -> None:
    (home / f"releases/{OLDEST}" / machine.STAMP).unlink()
    with pytest.raises(SampleStoreError, match=rf"samplestore sglang install --release {OLDEST} --home {home}$"):
        engine_command("m", release=OLDEST, home=home)
    assert NEWEST in engine_command("m", home=home).env["PYTHONPATH"]
    (home / "venv" / machine.STAMP).unlink()
    with pytest.raises(SampleStoreError, match=rf"samplestore sglang install --home {home}$"):
        engine_command("m", home=home)


def test_the_home_folder_comes_from_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLESTORE_SGLANG_HOME", str(home))
    assert engine_command("m").argv[0] == str(home / "venv/bin/python")


def test_another_interpreter_is_asked_for_its_release(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo 0.5.9")
    assert "--stream-output" in engine_command("m", python=str(python)).argv
    with pytest.raises(SampleStoreError, match=r"has SGLang 0\.5\.9, not 0\.5\.23"):
        engine_command("m", python=str(python), release="0.5.23")
    with pytest.raises(SampleStoreError, match="-m pip install sglang"):
        engine_command("m", python=str(program(tmp_path / "empty", "exit 1")))
    with pytest.raises(SampleStoreError, match=r"nowhere cannot be run .* samplestore sglang install"):
        engine_command("m", python=str(tmp_path / "nowhere"))


def test_an_sglang_beside_samplestore_comes_first_unless_another_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "version", lambda name: {"sglang": "0.5.21"}[name])
    monkeypatch.setenv("SAMPLESTORE_SGLANG_HOME", str(home))
    for release in (None, "0.5.21"):
        assert engine_command("m", release=release).argv[0] == sys.executable
    assert engine_command("m", release=OLDEST).argv[0] == str(home / "venv/bin/python")
    assert engine_command("m", home=home).argv[0] == str(home / "venv/bin/python")


# -- the command group


def cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SAMPLESTORE, "sglang", *arguments], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **env},
    )  # fmt: skip


def test_engine_becomes_the_server_and_passes_unknown_options_on(tmp_path: Path) -> None:
    python = program(
        tmp_path / "python",
        'test "$1" = -c && echo 0.5.23 && exit 0\n'
        'echo "$@"; echo health=$SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION; exit 7',
    )
    ran = cli(
        "engine", "--model", "m", "--port", "31000", "--python", str(python), "--tp-size", "2", "--trust-remote-code"
    )
    assert ran.returncode == 7, ran.stderr
    assert "-m sglang.launch_server --model-path m" in ran.stdout and "health=0" in ran.stdout
    assert "--tp-size 2 --trust-remote-code" in ran.stdout
    assert f"{python} -m sglang.launch_server" in ran.stderr, "the command is shown before it runs"


def test_print_only_shows_the_command(home: Path) -> None:
    ran = cli("engine", "--model", "m", "--print", SAMPLESTORE_SGLANG_HOME=str(home))
    assert ran.returncode == 0 and ran.stderr == ""
    assert ran.stdout.startswith("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 SGLANG_VLM_CACHE_SIZE_MB=0 ")
    ran = cli("router", "--engine", "http://a", "--engine", "http://b", "--print", "--log-level", "debug")
    assert "--worker-urls http://a http://b " in ran.stdout and ran.stdout.endswith("--log-level debug\n")


def test_without_sglang_the_error_says_what_to_type(tmp_path: Path) -> None:
    ran = cli("engine", "--model", "m", SAMPLESTORE_SGLANG_HOME=str(tmp_path))
    assert ran.returncode == 1 and "Run: samplestore sglang install" in ran.stderr and ran.stdout == ""


# -- routers


@pytest.mark.parametrize("kind", ["sglang-router", "smg"])
def test_a_router_starts_with_our_flags_and_its_own_metrics_port(kind: str, processes: Processes) -> None:
    port, metrics_port = free_port(), free_port()
    command = router_command(["http://127.0.0.1:1"], port=port, metrics_port=metrics_port, kind=kind)
    assert "--disable-retries" in command.argv
    router = processes.start(command.argv, name=kind, env=command.env)
    router.wait_for(lambda: answers(f"http://{HOST}:{port}/liveness"), what="it is up", timeout=60)
    router.wait_for(lambda: answers(f"http://{HOST}:{metrics_port}/metrics"), what="its metrics", timeout=30)


def test_two_routers_of_a_machine_have_different_metrics_ports() -> None:
    assert "--worker-urls" not in router_command([]).argv
    ports = {value_of(router_command([], port=port).argv, "--prometheus-port") for port in (30000, 30100, 80)}
    assert ports == {"29000", "29100", "1080"}


def test_another_kind_of_router_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"sglang-router \| smg"):
        router_command([], kind="nginx")


# -- the installer


class Calls:
    """Stands in for the commands that the installer runs; does what is visible of them."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []
        self.die_at: str | None = None

    def __call__(self, command: list[str], otherwise: str) -> None:
        self.made.append(command)
        if self.die_at and self.die_at in " ".join(command):
            raise KeyboardInterrupt
        if "--target" in command:
            (Path(command[command.index("--target") + 1]) / "sglang").mkdir(parents=True)
        elif "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)

    def taken(self) -> str:
        text, self.made = "\n".join(" ".join(command) for command in self.made), []
        return text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(installer, "_run", made)
    return made


def test_installed_once_and_then_left_alone(tmp_path: Path, calls: Calls) -> None:
    installer.install(["0.5.23", "0.5.9"], tmp_path)
    text = calls.taken()
    assert "torch==2.13.0" in text and "--no-deps torchvision==" in text
    assert text.count("--no-deps --target") == 2 and "sglang==0.5.9 transformers==4.57.1" in text
    found = machine.find_sglang("0.5.9", tmp_path)
    assert found.path == (str(tmp_path / "releases/0.5.9"),)
    installer.install(["0.5.23", "0.5.9"], tmp_path)
    assert calls.taken() == ""


@pytest.mark.parametrize("where", ["torch==", "torchvision", "sglang==0.5.23"])
def test_a_killed_installation_is_not_used_and_is_finished_the_next_time(
    where: str, tmp_path: Path, calls: Calls
) -> None:
    calls.die_at = where
    with pytest.raises(KeyboardInterrupt):
        installer.install(["0.5.23"], tmp_path)
    with pytest.raises(SampleStoreError, match="sglang install"):
        machine.find_sglang("0.5.23", tmp_path)
    calls.die_at = None
    calls.taken()
    installer.install(["0.5.23"], tmp_path)
    assert where in calls.taken()
    assert machine.find_sglang("0.5.23", tmp_path).version == "0.5.23"


def test_other_pins_are_installed_anew(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    installer.install(["0.5.18"], tmp_path)
    calls.taken()
    release = RELEASES["0.5.18"]
    monkeypatch.setitem(installer.RELEASES, "0.5.18", type(release)("0.5.18", ("transformers==5.12.2",)))
    installer.install(["0.5.18"], tmp_path)
    assert "transformers==5.12.2" in calls.taken()


def test_with_a_gpu_each_release_is_an_ordinary_installation(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(tmp_path / "bin", monkeypatch)
    installer.install(["0.5.23"], tmp_path)
    lines = calls.taken().splitlines()
    assert lines[0].endswith(f"-m venv {tmp_path}/releases/0.5.23") and lines[1].endswith("sglang==0.5.23")
    assert len(lines) == 2 and "--no-deps" not in lines[1]


def test_a_pip_that_fails_ends_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installer.sys, "executable", str(program(tmp_path / "python", "exit 3")))
    assert installer.main(["--home", str(tmp_path / "home")]) == 1
    assert "python3-venv (exit status 3)" in capfd.readouterr().err
    assert installer.main(["--home", str(tmp_path / "home"), "--release", "9.9"]) == 1
    assert "9.9" in capfd.readouterr().err


# -- what makes SGLang importable without a GPU


def shimmed(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [CPU_SHIM, *path]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_kernel_can_be_imported_but_not_called() -> None:
    ran = shimmed(
        "import sgl_kernel, importlib.util\n"
        "from sgl_kernel.kvcacheio import transfer\n"
        "assert not hasattr(sgl_kernel, '__wrapped__')\n"
        "transfer.deep(1)"
    )
    assert ran.returncode == 1
    assert "NotImplementedError: sgl_kernel.kvcacheio.transfer.deep has no CPU build" in ran.stderr


def test_torchvision_finds_the_operators_that_it_describes(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("import torch\nprint(torch.ops.torchvision.nms.default)\n")
    ran = shimmed("import torchvision", tmp_path)
    assert "torchvision.nms.default" in ran.stdout, ran.stderr


# -- real servers


def call(url: str, body: Any = None, timeout: float = 60.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read().decode()


def generated_tokens(url: str) -> float:
    lines = call(f"{url}/metrics/").splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sglang:generation_tokens_total"))


@pytest.mark.sglang
@pytest.mark.parametrize("release", chosen_releases())
def test_what_the_flags_are_for(release: str, tmp_path: Path, processes: Processes) -> None:
    """Deltas in chunks of eight, token counters, a label, and a health check that a pause does not stop."""
    server = start_sglang(processes, build_model(tmp_path / "m", seed=1), release=release)
    url = server.url
    assert json.loads(call(f"{url}/model_info"))["weight_version"] == "v0"

    before = generated_tokens(url)
    sampling = {"max_new_tokens": 24, "ignore_eos": True}
    answer = call(f"{url}/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert sum(len(chunk["output_ids"]) for chunk in chunks) == 24, "ids are deltas"
    assert len(chunks) <= 6 and chunks[-1]["meta_info"]["completion_tokens"] == 24
    server.process.wait_for(lambda: generated_tokens(url) == before + 24, what="the tokens are counted", timeout=30)

    call(f"{url}/pause_generation", {"mode": "in_place"})
    assert answers(f"{url}/health", timeout=5)
    call(f"{url}/continue_generation", {})
    server.process.signal(signal.SIGTERM)
    assert server.process.wait(60) is not None
