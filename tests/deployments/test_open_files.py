"""How many connections there are for so many open files. That a service starts with few: launcher/test_launcher.py."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from deployments.launcher.supervisor import environment
from deployments.open_files import MAXCONN, check_connections, max_connections
from deployments.serve.settings import ServeFile

PROJECT = Path(__file__).parents[2]
PROGRAM = """
import resource
from deployments.open_files import allow_many_files
print(allow_many_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(256, 1024, 1024), (1024, 1024, 1024), (300, 700, 700)])
def test_a_process_may_open_as_many_files_as_its_hard_limit_says(soft: int, hard: int, allowed: int) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=PROJECT, check=True, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    ).stdout  # fmt: skip
    assert said.split() == [str(allowed)] * 2


def test_haproxy_is_told_as_many_connections_as_it_has_files_for(tmp_path: Path) -> None:
    file = ServeFile(host="127.0.0.1", port=1, applications={})
    of = {files: int(environment(file, tmp_path, {}, max_files=files)[MAXCONN]) for files in (1024, 20_000, 65_536)}
    assert of == {1024: 307, 20_000: 7_897, 65_536: 10_000}
    # HAProxy's own account: each client and a connection to an ingress, a pipe for every fourth, and 25 of its own.
    assert all(2 * number + 2 * (number // 4) + 25 < files for files, number in of.items())
    assert environment(file, tmp_path, {MAXCONN: "50"}, max_files=1024)[MAXCONN] == "50"


def test_few_files_are_told_with_the_numbers() -> None:
    assert check_connections(20_000, None) is None
    assert check_connections(20_000, "7000") is None
    assert "may open 1,024 files here, enough for 307 connections" in str(check_connections(1024, None))
    with pytest.raises(InvalidSetup, match="may open 256 files here, enough for 0 connections"):
        check_connections(256, None)
    with pytest.raises(InvalidSetup, match=f"{MAXCONN}: got 8000, but .* or set it to 7897 or less"):
        check_connections(20_000, "8000")
    assert max_connections(2**20) == 10_000
