"""Bulk runs as processes of their own on the tests' cluster: bad rows, and what happens when things die.

`test_commands_in_docs.py` has the run of the bundled rows.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from pyarrow import parquet

from tests.waiting import PATIENCE_S, eventually

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "deployments" / "bulk" / "example.jsonl"
NUM_ROWS = 200
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def config(cluster: str, tmp_path: Path, demo_path: Path) -> Path:
    """Two engines whose steps take a time of their own on every machine, so that there is time to kill something.

    They reserve all CPUs, so nothing else of a run may need one.
    """
    cpus_of_one = math.floor(ray.available_resources()["CPU"] / 2 * 1000) / 1000
    slow = {"path": str(demo_path), "simulated": {"step_ms": 20, "end_probability": 0.05}}
    model = {
        "name": "demo",
        "engine": {"model": slow, "cache": {"memory_gib": 0.05}, "scheduler": {"max_running": 8}},
        "replicas": {"num_replicas": 2, "num_cpus": cpus_of_one},
    }
    application = {"name": "a", "import_path": "deployments.serve.application:build", "args": {"models": [model]}}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture
def start(cluster: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a run on the tests' cluster; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: object, program: tuple[str, ...] = ("-m", "deployments.bulk")) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *program, "--output", str(tmp_path / "out"), *map(str, arguments)],
            cwd=PROJECT,
            env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        with process:  # waits, and closes its output
            process.kill()


def engine_pids() -> list[int]:
    """The engines of the tests' cluster, whose processes descend from this one."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "EngineActor" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return pids


def wait_for_rows(out: Path, at_least: int, process: subprocess.Popen[str]) -> int:
    """How many records the journal has once it has so many."""
    journal = out / "journal"

    def num_rows() -> int:
        assert process.poll() is None, process.communicate()[0]
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    return eventually(num_rows, lambda number: number >= at_least, every_s=0.01)


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def test_a_killed_engine_and_a_killed_driver_cost_no_row(start: Start, tmp_path: Path, config: Path) -> None:
    out = tmp_path / "out"
    first = start("--input", EXAMPLE, "--config", config)
    num_rows = wait_for_rows(out, 10, first)
    os.kill(engine_pids()[0], signal.SIGKILL)
    num_rows = wait_for_rows(out, num_rows + 30, first)
    first.kill()
    first.wait()
    second = start("--input", EXAMPLE, "--config", config, "--resume")
    printed, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, printed
    assert sorted(result["row"] for result in results(out)) == list(range(NUM_ROWS))
    assert len({result["id"] for result in results(out)}) == NUM_ROWS
    told = summary(out)
    assert (told["rows"], told["ok"], told["runs"], told["engines_lost"]) == (NUM_ROWS, NUM_ROWS, 2, 1)
    # At most what three engines had: three times the 8 that each computes at once, also those that had ended and were
    # not fetched yet. How many of them had no token kept yet depends on how long the disk takes: tokens are kept as
    # often as that takes 2% of the time.
    assert told["continued_rows"] > 0
    assert told["continued_rows"] + told["recomputed_rows"] <= 3 * 3 * 8


def test_vectors_and_scores_are_resumed_and_each_wrong_row_says_why(start: Start, tmp_path: Path, config: Path) -> None:
    """Equal rows have equal results, whichever engine of whichever run computed them."""
    texts = [f"Once upon a time {number}" for number in range(5)]
    bodies: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/embeddings", {"input": text}) for text in texts),
        *(("/v1/rerank", {"query": text, "documents": texts, "top_n": 2}) for text in texts),
        *(("/v1/score", {"text_1": text, "text_2": texts}) for text in texts),
    ] * 12
    wrong = [("/v1/embeddings", {"input": texts}), ("/v1/rerank", {"query": "a"}), ("/v1/score", {"text_1": "a"})]
    lines = [
        json.dumps({"custom_id": f"{number}", "url": url, "body": body})
        for number, (url, body) in enumerate(bodies + wrong)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    settings = yaml.safe_load(config.read_text())
    settings["applications"][0]["args"]["models"][0]["engine"]["model"]["simulated"]["embedding_size"] = 4
    config.write_text(yaml.safe_dump(settings))
    first = start("--input", tmp_path / "lines.jsonl", "--config", config)
    wait_for_rows(tmp_path / "out", 30, first)
    first.kill()
    first.wait()
    second = start("--input", tmp_path / "lines.jsonl", "--config", config, "--resume")
    printed, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, printed
    told = {int(each["id"]): each for each in results(tmp_path / "out")}
    assert sorted(told) == list(range(len(lines)))
    found: dict[str, set[str]] = {}
    for number, (url, body) in enumerate(bodies):
        found.setdefault(json.dumps([url, body]), set()).add(told[number]["text"])
        assert (told[number]["error"], told[number]["finish_reason"]) == (None, "stop")
    assert [len(each) for each in found.values()] == [1] * 15
    [embedding], *_, [scores] = ([json.loads(text) for text in each] for each in found.values())
    assert (embedding["object"], embedding["index"], len(embedding["embedding"])) == ("embedding", 0, 4)
    assert [(each["index"], each["object"]) for each in scores] == [(at, "score") for at in range(5)]
    assert scores[4]["score"] == pytest.approx(1.0), "the cosine of a text with itself"
    errors = [told[number]["error"] for number in range(len(bodies), len(lines))]
    assert errors[0] == "`input` contains 5 texts, but an item may have only one; write one item per text"
    assert errors[1:] == ["documents is required", "text_2 is required"]
    assert (summary(tmp_path / "out")["runs"], summary(tmp_path / "out")["failed"]) == (2, 3)


CHOICE = {
    "type": "choice",
    "name": "which",
    "instructions": "Which?",
    "choices": [{"value": "a"}, {"value": "b"}],
}

POISONED = """
import os, sys
from deployments.bulk import pool
from deployments.bulk.__main__ import main

class Fragile(pool.EngineActor):
    def exchange(self, rows, at_least, within_s):
        if any(row.id == "deadly" for row in rows):
            os._exit(1)
        return super().exchange(rows, at_least, within_s)

pool.EngineActor = Fragile
sys.exit(main())
"""


def test_bad_rows_and_one_that_kills_every_engine_say_why_and_the_others_are_answered(
    start: Start, tmp_path: Path, config: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "What is 7 plus 15?"}], "temperature": 0}
    line = {"custom_id": "good", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [
        json.dumps(line),
        json.dumps(line | {"custom_id": "wrong-url", "url": "/v1/responses"}),
        json.dumps(line | {"custom_id": "hot", "body": body | {"temperature": 9}}),
        json.dumps(line | {"custom_id": "deadly"}),
        json.dumps({"custom_id": "decided", "url": "/v1/decisions", "body": {"input": "Once.", "questions": [CHOICE]}}),
        '{"custom_id": "torn", "met',
        *(json.dumps(line | {"custom_id": f"good-{number}"}) for number in range(10)),
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "in" / "table.csv").write_text('id,prompt,max_tokens\n007,"Once\nupon",4\n008,Once,\n009,Once,many\n')
    arguments = ["--input", tmp_path / "in", "--config", config, "--engines", 1]
    process = start(*arguments, "--format", "parquet", "--fail-on-row-errors", program=("-c", POISONED))
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, printed
    told = {row["id"]: row for row in parquet.read_table(tmp_path / "out" / "results.parquet").to_pylist()}
    failed = {row_id: row["error"] for row_id, row in told.items() if row["error"]}
    assert failed.keys() == {"wrong-url", "hot", "lines.jsonl:6", "deadly", "009"}
    assert "url should be one of" in failed["wrong-url"]
    assert "temperature" in failed["hot"]
    assert "not valid JSON" in failed["lines.jsonl:6"]
    assert "max_tokens is 'many'; it should be a number" in failed["009"]
    assert told["007"]["completion_tokens"] <= 4
    assert "the engine died 4 times while computing this item" in failed["deadly"]
    answered = {row_id: row["text"] for row_id, row in told.items() if row_id not in failed}
    decided = json.loads(answered.pop("decided"))
    assert (decided["name"], decided["choice"] in "ab", len(decided["probabilities"])) == ("which", True, 2)
    assert sum(each["probability"] for each in decided["probabilities"]) == pytest.approx(1.0)
    assert answered.keys() == {"good", "007", "008", *(f"good-{number}" for number in range(10))}
    assert None not in answered.values()
    assert summary(tmp_path / "out")["engines_lost"] == 4


def test_a_model_that_cannot_be_loaded_ends_the_run_in_words(start: Start, tmp_path: Path, demo_path: Path) -> None:
    model = shutil.copytree(demo_path, tmp_path / "model")
    os.truncate(model / "model.safetensors", 1000)
    process = start("--input", EXAMPLE, "--model", model, "--engines", 1)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, printed
    assert "the model cannot be loaded" in printed
    assert "Traceback" not in printed, printed
