"""The commands of docs/guide/tutorial.md, read from the page and run in order, as in the two terminals of a reader."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.disk import cache_folder
from tests.deployments.conftest import PLAIN_ENVIRONMENT, free_port
from tests.deployments.launcher.test_launcher import PROJECT, output_until, start_command, stop
from tests.deployments.test_commands_in_docs import ADDRESS, assert_expected, output_of
from tests.doc_pages import COMMANDS, TUTORIAL, Block, blocks
from tests.waiting import PATIENCE_S

RUN = [block for block in blocks(TUTORIAL) if block.language in COMMANDS and block.is_run]
SERVES = "carousel serve"
EXPORTED = "exported.sh"  # variables of a terminal, from one command to the next


class Reader:
    """A reader has a folder, a terminal in which a service may run, and another terminal for all other commands."""

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
        """The output in the second terminal. A service runs on in the first terminal and has none."""
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
        if block.language == "bash":
            text = f". ./{EXPORTED}\n{text}\nexport -p > {EXPORTED}"
        return output_of(replace(block, text=text), self._folder, PLAIN_ENVIRONMENT | self._variables)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.leave()


@pytest.mark.parametrize("block", RUN, ids=str)
def test_each_command_of_the_tutorial_prints_what_the_page_says(block: Block, reader: Reader) -> None:
    assert_expected(block, reader.do(block))
