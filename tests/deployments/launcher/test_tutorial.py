"""The commands of docs/guide/tutorial.md, read from the page and run in its order, as in the two terminals of a reader."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.disk import cache_folder
from tests.deployments.conftest import PLAIN_ENVIRONMENT, free_port
from tests.deployments.launcher.test_launcher import PROJECT, output_until, start_command, stop
from tests.deployments.test_commands_in_docs import ADDRESS, masked
from tests.doc_pages import COMMANDS, TUTORIAL, Block, blocks
from tests.waiting import PATIENCE_S

RUN = [block for block in blocks(TUTORIAL) if block.language in COMMANDS and block.is_run]
SERVES = "carousel serve"
EXPORTED = "exported.sh"  # what a terminal keeps from one command to the next


class Reader:
    """Has a folder, a terminal in which a service may run, and another one for all other commands."""

    def __init__(self, folder: Path) -> None:
        """folder: it sees the project's folders."""
        self._folder = folder
        self._port = free_port()
        self._service: subprocess.Popen[str] | None = None
        self._variables = {"HOME": str(folder), "XDG_CACHE_HOME": str(cache_folder().parent)}
        (folder / EXPORTED).touch()
        for name in ("app", "deployments", "models"):
            (folder / name).symlink_to(PROJECT / name)

    def do(self, block: Block) -> str:
        """What the block prints in the second terminal; nothing for a service, which runs on in the first one."""
        if "after Ctrl-C" in block.comment:
            self.press_ctrl_c()
        if not block.text.startswith(SERVES):
            return self._run(block)
        arguments = shlex.split(block.text.removeprefix(SERVES))
        port = ("--port", str(self._port))
        self._service = start_command(*arguments, *port, at=self._folder, **self._variables)
        output_until(self._service, "Stop with Ctrl-C.")
        return ""

    def press_ctrl_c(self) -> None:
        assert self._service is not None
        os.killpg(self._service.pid, signal.SIGINT)
        self._service.communicate(timeout=PATIENCE_S)
        assert self._service.returncode == 0

    def leave(self) -> None:
        if self._service is not None:
            stop(self._service)

    def _run(self, block: Block) -> str:
        text = block.text.replace(ADDRESS, f"http://127.0.0.1:{self._port}")
        command = [sys.executable, "-c", text]
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", f". ./{EXPORTED}\n{text}\nexport -p > {EXPORTED}"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = PLAIN_ENVIRONMENT | self._variables | {"PATH": path, "PYTHONPATH": str(PROJECT)}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.leave()


@pytest.mark.parametrize("block", RUN, ids=str)
def test_each_command_of_the_tutorial_prints_what_the_page_says(block: Block, reader: Reader) -> None:
    printed = reader.do(block)
    if block.expected is not None and block.expected.language == "json":
        assert masked(json.loads(printed)) == masked(json.loads(block.expected.text))
    elif block.expected is not None:
        assert printed.strip() == block.expected.text.strip()
