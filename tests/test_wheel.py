"""The wheel in an empty environment elsewhere: it has every file, and serves the bundled model behind keys.

A start takes as much as a hundred other tests: one service answers for all of them, and the last stops it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.cli import make_key
from tests.api.odd_requests import answered
from tests.deployments.conftest import PLAIN_ENVIRONMENT
from tests.deployments.launcher.test_launcher import assert_leaves_nothing_behind, config_at, output_until, start, stop
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.serve
PROJECT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with our packages from a wheel, and all others from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("app", "deployments", "models"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, source / name)
    run([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder), str(source)], folder)
    shutil.rmtree(source)
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    # As a path alone: what this environment's own .pth files add, the project among it, is not there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    [wheel] = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], folder)
    yield python.parent
    shutil.rmtree(folder)


def run(command: list[str], folder: Path) -> str:
    plain = {name: value for name, value in PLAIN_ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_every_file_is_in_the_wheel(environment: Path) -> None:
    [packages] = environment.parent.glob("lib/python*/site-packages")
    listed = subprocess.run(
        ["git", "ls-files", "app", "deployments", "models"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.split() if not name.endswith(".md")]
    assert len(files) > 200
    assert [name for name in files if not (packages / name).is_file()] == []


@dataclass(frozen=True, slots=True)
class Guarded:
    """A running service that asks for a key and may have few files open."""

    process: subprocess.Popen[str]
    output: str
    url: str
    keys_file: Path
    key: str
    silent: socket.socket  # a connection that sends nothing
    slow: socket.socket  # a connection that sends only a part of a request's head


@pytest.fixture(scope="module")
def guarded(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    [packages] = environment.parent.glob("lib/python*/site-packages")
    folder = tmp_path_factory.mktemp("guarded")
    key, entry = make_key("team-a")
    keys_file = folder / "keys.yaml"
    keys_file.write_text(entry + "\n")
    config = config_at(packages / "deployments" / "serve.yaml", folder)
    config["applications"][0]["args"]["api"] = {"keys_file": str(keys_file)}
    process = start(config, folder, python=environment / "python", at=folder, files=(512, 1024))
    try:
        output = output_until(process, "Stop with Ctrl-C.")
        port = config["http_options"]["port"]
        # The service ends these connections after ten seconds. Other tests run in this time.
        silent, slow = (socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(2))
        with silent, slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-More: ")
            yield Guarded(process, output, f"http://127.0.0.1:{port}", keys_file, key, silent, slow)
    finally:
        stop(process)


def test_the_wheel_serves_the_bundled_model(guarded: Guarded) -> None:
    assert f"curl {guarded.url}/v1/chat/completions" in guarded.output
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}
    headers = {"Authorization": f"Bearer {guarded.key}"}
    answer = httpx.post(f"{guarded.url}/v1/chat/completions", json=chat, headers=headers, timeout=PATIENCE_S).json()
    assert answer["choices"][0]["message"]["content"] == "3 4 5 6 7 8 9."


def test_keys_hold_on_a_running_service_and_no_file_of_it_shows_them(guarded: Guarded) -> None:
    key, address = guarded.key, guarded.url
    other_key, other_entry = make_key("team-b", is_admin=True)
    assert "Authorization: Bearer <key>" in guarded.output

    def complete(bearer: str, prompt: Any = "the canary sings at dawn") -> int:
        headers = {"Authorization": f"Bearer {bearer}"}
        return httpx.post(f"{address}/v1/completions", headers=headers, json={"prompt": prompt}).status_code

    def status_of(path: str, bearer: str) -> int:
        return httpx.get(f"{address}{path}", headers={"Authorization": f"Bearer {bearer}"}).status_code

    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert httpx.get(f"{address}/metrics").status_code == 401
    health, serves_own = "GET http://x/health?/v1/models HTTP/1.1", "GET /-/routes HTTP/1.1"
    assert answered(address) <= {health, serves_own}, "HAProxy and our routes agree on what a path is"
    assert status_of("/admin/keys", key) == 403
    assert (complete(key), complete(other_key), complete(key, {"a": "the canary sings at dawn"})) == (200, 401, 400)

    guarded.keys_file.write_text(other_entry + "\n")
    eventually(lambda: complete(other_key) != 401, every_s=0.2)
    assert complete(key) == 401
    assert [status_of(path, other_key) for path in ("/admin/keys", "/admin/fleet")] == [200, 200]

    logs = Path(guarded.output.split("logs in ")[1].split("\n")[0])
    texts = [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    assert sum(map(len, texts)) > 10_000
    for secret in (key, other_key, "the canary sings"):
        assert not any(secret.encode() in text for text in texts)


def test_a_service_with_few_files_says_how_many_connections_it_can_have_and_ends_silent_ones(guarded: Guarded) -> None:
    assert (
        "Warning: a process may open 1,024 files here, enough for 307 connections; further clients wait"
        in guarded.output
    )
    for connection in (guarded.silent, guarded.slow):
        with connection.makefile("rb") as answer:
            said = answer.read()  # to its end
        assert said.startswith(b"HTTP/1.1 408 "), said


def test_nothing_of_a_service_for_this_machine_listens_elsewhere(guarded: Guarded) -> None:
    assert httpx.get(f"{guarded.url}/ready").status_code == 200
    found = [
        (process.name(), socket_.laddr)
        for process in psutil.Process(guarded.process.pid).children(recursive=True)
        for socket_ in process.net_connections()
        if socket_.status == psutil.CONN_LISTEN or (socket_.type == socket.SOCK_DGRAM and not socket_.raddr)
    ]
    assert {"haproxy", "raylet", "gcs_server"} <= {name for name, _ in found}
    assert [each for each in found if each[1].ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []


def test_when_ray_s_head_is_killed_the_service_starts_anew_and_a_batch_goes_on(guarded: Guarded) -> None:
    key, entry = make_key("team-c")
    guarded.keys_file.write_text(entry + "\n")
    headers = {"Authorization": f"Bearer {key}"}
    num_rows, num_tokens = 200, 300  # seconds of work for a fast machine too
    body = {
        "model": "demo",
        "prompts": ["Once"] * num_rows,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "async": True,
    }
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=PATIENCE_S) as client:
        eventually(lambda: client.get("/v1/models").status_code, lambda status: status == 200)
        job = f"/v1/batch/{client.post('/v1/batch', json=body).json()['id']}"
        begun = eventually(lambda: client.get(job).json()["progress"])
        assert begun < 1
        [head] = [each for each in psutil.Process(guarded.process.pid).children(True) if each.name() == "gcs_server"]
        head.kill()
        said = output_until(guarded.process, "Stop with Ctrl-C.")
        assert "Ray's head (GCS) has ended with signal 9.\n" in said
        assert "Restarting it now (1 of at most 3 restarts within 10 minutes)." in said
        assert client.get("/ready").status_code == 200
        ended = eventually(lambda: client.get(job).json(), lambda found: found["status"] == "completed")
        assert [each["index"] for each in ended["results"]] == list(range(num_rows))


def test_it_leaves_nothing_behind_when_its_group_is_told(guarded: Guarded) -> None:
    """As by Ctrl-C. Only the launcher is in the group, so it is the same when only the launcher is told."""
    assert [pid for pid in psutil.pids() if os.getpgid(pid) == guarded.process.pid] == [guarded.process.pid]
    assert httpx.get(f"{guarded.url}/ready").status_code == 200
    assert_leaves_nothing_behind(
        guarded.process, guarded.output, lambda: os.killpg(guarded.process.pid, signal.SIGTERM)
    )


def test_the_wheel_has_the_command(environment: Path, tmp_path: Path) -> None:
    assert "cannot be shown again" in run([str(environment / "carousel"), "key", "team-a"], tmp_path)
