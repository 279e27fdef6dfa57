"""The wheel in an empty environment elsewhere: it has every file, and serves the bundled model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deployments.conftest import PLAIN_ENVIRONMENT, free_port
from tests.deployments.launcher.test_launcher import assert_leaves_nothing_behind, output_until, start, stop
from tests.waiting import PATIENCE_S

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


def test_the_wheel_serves_the_bundled_model(environment: Path, tmp_path: Path) -> None:
    """And leaves nothing behind after a signal to the whole group, as Ctrl-C is one."""
    [packages] = environment.parent.glob("lib/python*/site-packages")
    config = yaml.safe_load((packages / "deployments" / "serve.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["batches"]["path"] = str(tmp_path / "batches")
    process = start(config, tmp_path, python=environment / "python", at=tmp_path)
    try:
        output = output_until(process, "Stop with Ctrl-C.")
        address = f"http://127.0.0.1:{config['http_options']['port']}"
        assert f"curl {address}/v1/chat/completions" in output
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}
        answer = httpx.post(f"{address}/v1/chat/completions", json=chat, timeout=PATIENCE_S).json()
        assert answer["choices"][0]["message"]["content"] == "3 4 5 6 7 8 9."
        assert_leaves_nothing_behind(process, output, lambda: os.killpg(process.pid, signal.SIGTERM))
    finally:
        stop(process)


def test_the_wheel_has_the_command(environment: Path, tmp_path: Path) -> None:
    assert "shown only now" in run([str(environment / "carousel"), "key", "team-a"], tmp_path)
