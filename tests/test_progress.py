"""What a process tells while it starts, read as the launcher reads it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app import progress
from app.child_process import PROJECT, child_environment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(progress.FOLDER, str(tmp_path))
    monkeypatch.setattr(progress, "_name", None)
    monkeypatch.setattr(progress, "_step", "")
    return tmp_path


def test_the_last_that_was_told_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "app.progress")
    progress.report_step("nothing is started in this process")
    assert progress.reported_steps(folder) == {}
    progress.begin("demo")
    progress.report_step("loading the weights")
    progress.report_step("downloading 93 MB", so_far=", 10%")
    progress.report_step("downloading 93 MB", so_far=", 20%")
    assert progress.reported_steps(folder) == {"demo": ["downloading 93 MB, 20%"]}
    assert caplog.messages == ["starting demo: loading the weights", "starting demo: downloading 93 MB"]


def test_processes_that_have_ended_are_forgotten(folder: Path) -> None:
    code = "from app import progress; progress.begin('demo'); progress.report_step('loading the weights')"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=child_environment(), check=True)
    [left] = folder.iterdir()
    assert left.read_text() == "demo\nloading the weights"
    assert progress.reported_steps(folder) == {}
    progress.begin("demo")
    assert list(folder.iterdir()) == []


def test_a_step_within_another_gives_way_to_it_again(folder: Path) -> None:
    progress.begin("demo")
    progress.report_step("loading the weights")
    with progress.step_within("building native code"):
        assert progress.reported_steps(folder) == {"demo": ["building native code"]}
    assert progress.reported_steps(folder) == {"demo": ["loading the weights"]}


def test_a_folder_that_is_gone_stops_no_start(folder: Path) -> None:
    progress.begin("demo")
    folder.rmdir()
    progress.report_step("loading the weights")
    assert progress.reported_steps(folder) == {}


WEIGHTS = os.urandom(1_500_000)


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as one download asks for."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        is_file = "/resolve/" in self.path
        description = b'{"id": "some/model", "sha": "abc", "siblings": [{"rfilename": "model.safetensors"}]}'
        tree = f'[{{"type": "file", "path": "model.safetensors", "size": {len(WEIGHTS)}, "oid": "1"}}]'.encode()
        content = WEIGHTS if is_file else tree if "/tree/" in self.path else description
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "abc")
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download_tells_how_far_it_has_come(
    folder: Path, hub: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hub's own client, from a server of this process."""
    from huggingface_hub import constants, snapshot_download

    monkeypatch.setenv("TQDM_DISABLE", "1")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it asks this process alone

    told: list[str] = []

    class Noting(progress.download_bar()):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            told.extend(progress.reported_steps(folder).get("demo", ()))
            return shown

    progress.begin("demo")
    cache = tmp_path_factory.mktemp("hub")
    found = snapshot_download("some/model", endpoint=hub, cache_dir=cache, tqdm_class=Noting)
    assert (Path(found) / "model.safetensors").read_bytes() == WEIGHTS
    assert told[-1] == "downloading 2 MB, 100%"
