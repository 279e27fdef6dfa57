"""`make serve` seen from outside: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import InvalidSetup
from deployments.launcher import rollout, supervisor
from deployments.launcher.checks import MISTAKES, checked
from deployments.launcher.supervisor import num_proxy_threads, session_members
from deployments.launcher.terminal import StatusLines
from deployments.serve.application import build
from deployments.serve.settings import ServeFile, parse
from tests.deployments.conftest import HTTP_PORT, PLAIN_ENVIRONMENT, free_port
from tests.model.gguf.files import tiny_model, write_gguf
from tests.waiting import PATIENCE_S

PROJECT = Path(__file__).parents[3]
Launch = Callable[..., "subprocess.Popen[str]"]


def config_at(serve_yaml: Path, folder: Path) -> dict[str, Any]:
    """Of this file, with a port of its own, its batches and prefixes in `folder`, and one replica."""
    loaded: dict[str, Any] = yaml.safe_load(serve_yaml.read_text())
    loaded["http_options"]["port"] = free_port()
    [model] = loaded["applications"][0]["args"]["models"]
    model["replicas"]["num_replicas"] = 1
    model["engine"]["cache"]["tiers"][0]["path"] = str(folder / "kv")
    loaded["applications"][0]["args"]["batches"]["path"] = str(folder / "batches")
    return loaded


@pytest.fixture
def config(demo_path: Path, tmp_path: Path) -> dict[str, Any]:
    loaded = config_at(PROJECT / "deployments" / "serve.yaml", tmp_path)
    loaded["applications"][0]["args"]["models"][0]["engine"]["model"]["path"] = str(demo_path)
    return loaded


# With time for a service to stop on a busy machine too: if it has to be killed then, it cannot stop by itself.
PATIENT = f"""
import sys
from deployments import cli
from deployments.launcher import supervisor
supervisor.STOP_TIMEOUT_S = {PATIENCE_S}
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


def start(config: dict[str, Any], folder: Path, **options: Any) -> subprocess.Popen[str]:
    """The launcher on a config. options: those of `start_command`."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return start_command(str(path), **options)


def start_command(
    *arguments: str,
    python: str | Path = sys.executable,
    at: Path = PROJECT,
    files: tuple[int, int] = resource.getrlimit(resource.RLIMIT_NOFILE),
    program: str = PATIENT,
    **variables: str,
) -> subprocess.Popen[str]:
    """`carousel serve` with these arguments, in a process group of its own as a shell would.

    files: soft and hard limit of them. variables: of the environment.
    """
    environment = {name: value for name, value in PLAIN_ENVIRONMENT.items() if name != "PYTHONPATH"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}
    environment |= {"RAY_REDIS_ADDRESS": "127.0.0.1:1"}  # of another cluster
    return subprocess.Popen(
        [python, "-c", program, *arguments],
        cwd=at,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
    )


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the launcher on a config."""
    started: list[subprocess.Popen[str]] = []

    def start_one(config: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
        started.append(start(config, tmp_path, **options))
        return started[-1]

    yield start_one
    for process in started:
        stop(process)


def output_until(process: subprocess.Popen[str], words: str) -> str:
    """What the process has printed up to the line with these words."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if words in line:
            return printed
    raise AssertionError(f"never said {words!r}, but:\n{printed}")


def child_of(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def test_the_proxy_has_more_threads_on_larger_machines() -> None:
    assert [num_proxy_threads(num_cores) for num_cores in (1, 2, 7, 8, 16, 128)] == [1, 1, 1, 2, 4, 4]


def test_a_mistake_in_the_config_is_told_within_two_seconds(launch: Launch, config: dict[str, Any]) -> None:
    config["applications"][0]["args"]["models"][0]["engine"]["scheduler"]["max_running"] = 0
    before = os.times()
    output, _ = launch(config).communicate(timeout=PATIENCE_S)
    after = os.times()
    assert "models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1" in output
    assert "Traceback" not in output
    # CPU time of its own: other processes may be at work on this machine.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


@pytest.mark.parametrize(("launcher", "ends"), [(1, True), (os.getpid(), False)], ids=["gone", "here"])
def test_a_service_whose_launcher_has_ended_does_not_start(launcher: int, ends: bool) -> None:
    """It may have the id 1, as in a container: so the launcher says its own."""
    code = f"""
from deployments.launcher import foreground
foreground._end_with_the_launcher({launcher})
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((1, "") if ends else (0, "goes on\n"))


def test_gpus_that_are_not_there_are_told_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.ray, "cluster_resources", lambda: {"GPU": 2})
    replicas = {"num_replicas": 1, "num_gpus": 1, "tensor_parallel": 4}
    config = ServeFile(
        host="127.0.0.1", port=8000, applications={"carousel": parse({"models": [{"replicas": replicas}]})}
    )
    with pytest.raises(InvalidSetup, match=r"need 4 GPUs, but this machine has 2; lower .* replicas\.tensor_parallel"):
        rollout.check_gpus(config)


def test_a_port_that_is_taken_is_told_with_the_way_out(launch: Launch, config: dict[str, Any]) -> None:
    port = config["http_options"]["port"]
    with socket.create_server(("127.0.0.1", port)):
        process = launch(config)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert f"sport = :{port}" in output
    assert process.returncode == MISTAKES


def test_so_is_a_port_that_is_taken_after_the_check(launch: Launch, config: dict[str, Any]) -> None:
    port = config["http_options"]["port"]
    process = launch(config, program=PATIENT.replace("sys.exit", TAKES_PORT.format(port=port) + "sys.exit"))
    output, _ = process.communicate(timeout=PATIENCE_S)
    shutil.rmtree(output.split("See the logs in ")[1].split("/session_latest")[0])
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "Traceback" not in output
    assert process.returncode == 1


TAKES_PORT = """
import socket
def take_port(allow_many_files=supervisor.allow_many_files):  # the launcher calls this after its checks
    global taken
    taken = socket.create_server(("127.0.0.1", {port}))
    return allow_many_files()
supervisor.allow_many_files = take_port
"""


def test_a_model_folder_that_is_not_there_is_told(launch: Launch, config: dict[str, Any]) -> None:
    config["applications"][0]["args"]["models"][0]["engine"]["model"]["path"] = "/nowhere/model"
    output, _ = launch(config).communicate(timeout=PATIENCE_S)
    assert "models[0].engine.model.path: got '/nowhere/model'; there is no such folder or file here" in output


def refusal(config: dict[str, Any], folder: Path) -> str:
    """What is said of a config whose paths cannot be."""
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    _, mistakes = checked(path)
    return "\n".join(mistakes)


def test_a_draft_model_that_is_not_there_is_told(config: dict[str, Any], tmp_path: Path) -> None:
    engine = config["applications"][0]["args"]["models"][0]["engine"]
    engine["speculation"] = {"method": "draft_model", "model": "/nowhere/draft"}
    expected = "models[0].engine.speculation.model: got '/nowhere/draft'; there is no"
    assert expected in refusal(config, tmp_path)


def test_a_batches_folder_that_cannot_be_is_told(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config["applications"][0]["args"]["batches"]["path"] = str(tmp_path / "file" / "batches")
    assert f"the folder cannot be created, because {tmp_path / 'file'} is not a folder" in refusal(config, tmp_path)


@pytest.mark.parametrize("name", ["models/other.gguf", "models/cut.gguf"])
def test_a_gguf_file_that_cannot_be_read_is_told(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Relative paths too, which could be hub ids."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    model = config["applications"][0]["args"]["models"][0]["engine"]["model"]
    model["path"] = name if "other" in name else str(tmp_path / name)
    assert re.search("there is no such folder or file here|cut short", refusal(config, tmp_path))


def test_a_model_that_cannot_be_loaded_fails_its_application_with_the_reason(
    cluster: str, demo_path: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(demo_path, tmp_path / "model")  # with a tokenizer: the ingress starts
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])  # what is looked at before a start does not show it
    engine = {"model": {"path": str(model)}}
    replicas = {"num_replicas": 1, "num_cpus": 0.1}
    application = parse({"models": [{"name": "odd", "engine": engine, "replicas": replicas}]})
    target = rollout.serve.RunTarget(build(application), name="odd", route_prefix="/odd")
    rollout.serve.run_many([target], wait_for_applications_running=False)
    file = ServeFile(host="127.0.0.1", port=HTTP_PORT, applications={"odd": application})
    with pytest.raises(InvalidSetup, match=r"^replica-odd: (?s:.*)cannot be loaded") as failed:
        rollout._wait_until_ready(file, StatusLines(), tmp_path)
    assert "Traceback" not in str(failed.value)
    rollout.serve.delete("odd", _blocking=False)


# The launcher. Its child is told that its application has failed where it would start Ray.
FAILED = f"""
import subprocess
from deployments.launcher import supervisor
popen = subprocess.Popen
supervisor.subprocess.Popen = lambda command, **options: popen([command[0], "-c", child, *command[3:]], **options)
child = '''
import sys
from app.errors import InvalidSetup
from deployments.launcher import foreground
def fail(**_):
    raise InvalidSetup("replica-demo: none-such")
foreground.start_own_cluster = fail
sys.exit(foreground.main())
'''
{PATIENT}"""


def test_an_application_that_fails_ends_it_with_the_reason(launch: Launch, config: dict[str, Any]) -> None:
    process = launch(config, program=FAILED)
    output, _ = process.communicate(timeout=PATIENCE_S)
    shutil.rmtree(output.split("See the logs in ")[1].split("/session_latest")[0])
    assert "The service did not start.\nreplica-demo: none-such\n" in output
    assert "Traceback" not in output
    assert process.returncode == 1


def assert_leaves_nothing_behind(process: subprocess.Popen[str], output: str, tell: Callable[[], None]) -> None:
    session = child_of(process)
    assert len(session_members(session)) > 5
    tell()
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert "Stopping." in said
    assert "Killing it" not in said
    assert process.returncode == 0
    assert session_members(session) == []
    assert not Path(output.split("logs in ")[1].split("/session_latest")[0]).exists()


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@pytest.fixture
def blocked_signals() -> Iterator[None]:
    """As in the launcher."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOP_SIGNALS | {signal.SIGCHLD})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


@pytest.mark.usefixtures("blocked_signals")
def test_a_child_that_ignores_signals_is_given_its_time_and_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child that ignores signals: it is the launcher's patience that ends, whatever the machine has to do."""
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervisor, "END_TIMEOUT_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"deaf\n"
        # To this thread, which blocks it: it waits until the launcher asks. Other threads would end this process.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert supervisor.supervise(child) == 0
    assert "The service did not stop within 0.2 s" in capsys.readouterr().err
    assert child.returncode == -signal.SIGKILL
    assert session_members(child.pid) == []


# What is killed at each start, and cannot start at the sixth.
DOOMED = """
import os, signal, sys
from pathlib import Path
starts = Path(sys.argv[1])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("." * (number + 1))
if number < 5:
    signal.raise_signal(signal.SIGKILL)
sys.exit(1)
"""


@pytest.mark.usefixtures("blocked_signals")
@pytest.mark.parametrize(("within_s", "num_starts"), [(600.0, 4), (0.0, 6)], ids=["close-together", "far-apart"])
def test_a_service_that_is_killed_again_and_again_is_given_up_unless_it_lived_long(
    within_s: float,
    num_starts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(supervisor, "RESTARTS_WITHIN_S", within_s)
    monkeypatch.setattr(supervisor, "_LONGER_WAIT_S", 0.01)
    starts = tmp_path / "starts"
    assert supervisor.keep_serving([sys.executable, "-c", DOOMED, str(starts)], os.environ) == 1
    assert len(starts.read_text()) == num_starts
    said = capsys.readouterr()
    assert said.out.count("The service was killed (SIGKILL). Restarting it") == num_starts - 1
    assert ("The service was killed (SIGKILL) 4 times within 10 minutes. Exiting." in said.err) == (within_s > 0)


def test_two_signals_end_a_start_with_a_gguf_file_cleanly(
    launch: Launch, config: dict[str, Any], tmp_path: Path
) -> None:
    """No thread, such as those of numpy, takes a signal that the launcher waits for."""
    path = write_gguf(tmp_path / "own.gguf", tiny_model())
    config["applications"][0]["args"]["models"][0]["engine"]["model"] = {"path": str(path), "device": "cpu"}
    process = launch(config)
    said = output_until(process, "Starting Ray and Serve")
    [folder] = re.findall(r"logs in (\S+)/session_latest", said)
    others = [each for each in Path(f"/proc/{process.pid}/task").iterdir() if each.name != str(process.pid)]
    masks = [(each / "status").read_text().partition("SigBlk:")[2].split()[0] for each in others]
    assert all(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in output
    assert process.returncode == 0
    assert not Path(folder).exists()
