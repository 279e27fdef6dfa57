"""Batches on engines of their own: what an engine is told of its model, and a whole batch on a live cluster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import openai

from deployments.launcher.supervisor import session_members
from deployments.serve.batches import on_engines
from deployments.serve.settings import parse
from tests.deployments.conftest import Deployed, steps_of
from tests.deployments.strikes import kill_batches
from tests.waiting import eventually

MODEL = "jobs"
CHAT = "/v1/chat/completions"
NUM_LINES = 40
PATIENCE_S = 120.0


def line(number: int, **body: object) -> str:
    messages = [{"role": "user", "content": "Once"}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True} | body
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": fields})


def engine_pids() -> list[int]:
    """The engines of the tests' cluster that belong to no run of a process of its own."""
    return [pid for pid in session_members(os.getsid(0)) if b"ray::EngineActor" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_engines_have_their_models_own_settings_and_as_many_as_jobs_have() -> None:
    engine = {
        "model": {"path": "models/demo", "dtype": "bfloat16", "num_threads": 3},
        "scheduler": {"policy": {"name": "fair"}, "strategy": {"name": "dynamic"}, "max_running": 7},
    }
    model = {"name": "b", "engine": engine, "replicas": {"autoscaling": {}, "num_cpus": 3}}
    [asked] = parse({"models": [model]}).models
    served = on_engines(asked, "/b", 5)
    assert served.engine == asked.engine.model_copy(update={"model": served.engine.model})
    assert served.engine.model == asked.engine.model.model_copy(update={"path": "/b"})
    assert (served.name, served.replicas.num_replicas, served.replicas.num_cpus) == ("b", 5, 3)
    assert served.replicas.autoscaling is None


def test_every_line_ends_once_though_an_engine_and_then_the_process_of_batches_are_killed(
    deployed: Deployed, demo_path: Path, tmp_path: Path
) -> None:
    model = {
        "name": MODEL,
        # Slow, so that there is time to kill a process.
        "engine": {
            "model": {"path": str(demo_path), **steps_of(100)},
            "cache": {"num_blocks": 64},
            "scheduler": {"max_running": 8},
        },
        "replicas": {"num_replicas": 1, "num_cpus": 0.05, "drain_timeout_s": 1},
    }
    batches = {"path": str(tmp_path / "batches"), "engines": 1}
    args = {"models": [model], "batches": batches}
    with (
        deployed(MODEL, args) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10) as client,
    ):
        content = "\n".join([*map(line, range(NUM_LINES)), line(NUM_LINES, n=2)]).encode()
        file = client.files.create(file=("night.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

        def completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed

        num_completed = eventually(completed, timeout_s=PATIENCE_S)
        os.kill(engine_pids()[0], signal.SIGKILL)
        eventually(lambda: completed() > num_completed + 8, timeout_s=PATIENCE_S)
        kill_batches(MODEL)
        batch = eventually(
            lambda: client.batches.retrieve(batch.id), lambda batch: batch.status == "completed", PATIENCE_S
        )
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        lines = [json.loads(each) for each in client.files.content(batch.output_file_id).content.splitlines()]
        [refused] = [json.loads(each) for each in client.files.content(batch.error_file_id).content.splitlines()]
    assert sorted(each["custom_id"] for each in lines) == sorted(f"line-{n}" for n in range(NUM_LINES))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 8 for each in lines)
    assert refused["response"]["status_code"] == 400
    eventually(engine_pids, lambda pids: not pids, PATIENCE_S)
