"""Every command in the README and the guides runs against one live service, and prints what the page says.

tests/deployments/launcher/test_tutorial.py has those of the tutorial.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from tests.doc_pages import COMMANDS, GUIDES, PROJECT, TUTORIAL, Block, blocks

ADDRESS = "http://127.0.0.1:8000"  # of the service in the pages
DIFFERENT_EACH_TIME = frozenset({"id", "created"})
PAGES = [page for page in GUIDES if page != TUTORIAL]
RUN = [block for page in PAGES for block in blocks(page) if block.language in COMMANDS and block.is_run]
BULK = [block for block in RUN if block.text.startswith("carousel bulk ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: they see the project's folders, and write beside them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("app", "deployments", "models", "scripts", "benchmarks"):
        (folder / name).symlink_to(PROJECT / name)
    return folder


@pytest.mark.parametrize("block", [block for block in RUN if block not in BULK], ids=str)
def test_a_command_prints_what_its_page_says(block: Block, shared: str, folder: Path) -> None:
    assert_expected(block, run(block, shared, folder))


def test_a_bulk_run_answers_the_bundled_rows_and_once_is_enough(cluster: str, folder: Path) -> None:
    [block] = BULK
    assert "200 rows: 200 ok, 0 failed" in run(block, cluster, folder)
    rows = {each["id"]: each for each in lines_of(PROJECT / "deployments" / "bulk" / "example.jsonl")}
    answers = {each["id"]: each for each in lines_of(folder / "answers" / "results.jsonl")}
    assert answers.keys() == rows.keys()
    assert len(rows) == 200
    assert sum(answers[row_id]["text"] == row["answer"] for row_id, row in rows.items()) >= 0.98 * len(rows)
    assert all(answer["completion_tokens"] > 0 and answer["finish_reason"] == "stop" for answer in answers.values())
    assert json.loads((folder / "answers" / "summary.json").read_text())["ok"] == len(rows)
    again = replace(block, text=f"{block.text.rstrip()} --resume\n")
    assert "200 rows: 200 ok, 0 failed" in run(again, cluster, folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_commands_that_ask_really_ask(shared: str) -> None:
    """Else every curl of a page could fail quietly: without an expected output only its exit status is looked at."""
    assert httpx.get(f"{shared}/v1/models").json()["data"][0]["id"] == "demo"


def run(block: Block, url: str, folder: Path) -> str:
    text = block.text.replace(ADDRESS, url).replace("curl -s ", "curl -s --fail-with-body ")
    environment = os.environ | {
        "CAROUSEL_API_KEY": "none", "CAROUSEL_ADMIN_KEY": "none",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # a bulk run joins the tests' cluster
    }  # fmt: skip
    return output_of(replace(block, text=text), folder, environment)


def output_of(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints in a folder, with this project's Python and commands."""
    shell = [sys.executable] if block.language == "python" else ["bash", "-euo", "pipefail"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**environment, "PATH": path, "PYTHONPATH": str(PROJECT)}
    command = [*shell, "-c", block.text]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


def assert_expected(block: Block, printed: str) -> None:
    """The page shows this output behind the command, or none."""
    if block.expected is not None and block.expected.language == "json":
        assert masked(json.loads(printed)) == masked(json.loads(block.expected.text))
    elif block.expected is not None:
        assert printed.strip() == block.expected.text.strip()


def masked(value: Any) -> Any:
    """A JSON value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {name: masked(item) for name, item in value.items() if name not in DIFFERENT_EACH_TIME}
    return [masked(item) for item in value] if isinstance(value, list) else value
