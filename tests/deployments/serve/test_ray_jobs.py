"""Batches as Ray jobs: what a job is told of its model, who runs jobs, and a whole batch on a live cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from app.errors import InvalidSetup
from app.jobs.job_server import OUTPUT
from deployments.serve.ray_jobs import RayJobs
from deployments.serve.settings import parse, read_serve_file
from tests.deployments.conftest import Deployed, steps_of
from tests.deployments.strikes import kill_batches

MODEL = "jobs"
CHAT = "/v1/chat/completions"
NUM_LINES = 40
PATIENCE_S = 120.0


def line(number: int, **body: object) -> str:
    messages = [{"role": "user", "content": "Once"}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True} | body
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": fields})


def test_a_job_has_its_models_own_engine_and_as_many_as_jobs_have_and_no_keys(tmp_path: Path) -> None:
    engine = {
        "model": {"path": "models/demo", "dtype": "bfloat16", "num_threads": 3},
        "scheduler": {"policy": {"name": "fair"}, "strategy": {"name": "dynamic"}, "max_running": 7},
    }
    models = [{"name": "a"}, {"name": "b", "engine": engine, "replicas": {"autoscaling": {}, "num_cpus": 3}}]
    keys = [{"name": "ann", "sha256": "0" * 64}]
    batches = {"run_as": "ray_job", "jobs": {"engines": 5}}
    config = parse({"models": models, "api": {"keys": keys, "share_prefixes": True}, "batches": batches})
    jobs = RayJobs(None, config, {"a": "/a", "b": "/b"})  # type: ignore[arg-type]
    jobs._write_serve_file(tmp_path, "b")
    [told] = read_serve_file(tmp_path / "serve.json").applications.values()
    [served] = told.models
    asked = config.models[1]
    assert served.engine.model.path == "/b"
    assert served.engine == asked.engine.model_copy(update={"model": served.engine.model})
    assert served.engine.model == asked.engine.model.model_copy(update={"path": "/b"})
    assert (served.name, served.replicas.num_replicas, served.replicas.num_cpus) == ("b", 5, 3)
    assert served.replicas.autoscaling is None
    assert (told.api.keys, told.api.share_prefixes) == ((), True)
    assert "0" * 64 not in (tmp_path / "serve.json").read_text()


def test_a_run_begins_anew_when_its_model_is_another_now_and_goes_on_when_it_is_the_same(tmp_path: Path) -> None:
    config = parse({"models": [{"name": "a"}], "batches": {"run_as": "ray_job"}})
    (tmp_path / OUTPUT).mkdir()
    for engines in (1, 2):
        jobs = config.batches.jobs.model_copy(update={"engines": engines})  # type: ignore[union-attr]
        batches = config.batches.model_copy(update={"jobs": jobs})  # type: ignore[union-attr]
        RayJobs(None, config.model_copy(update={"batches": batches}), {"a": "/a"})._write_serve_file(tmp_path, "a")  # type: ignore[arg-type]
    assert (tmp_path / OUTPUT).exists()
    RayJobs(None, config, {"a": "/other"})._write_serve_file(tmp_path, "a")  # type: ignore[arg-type]
    assert not (tmp_path / OUTPUT).exists()


def test_nobody_who_runs_jobs_is_a_mistake_of_the_setup(cluster: str) -> None:
    config = parse({"batches": {"run_as": "ray_job", "jobs": {"server": "http://127.0.0.1:1"}}})
    with pytest.raises(InvalidSetup, match="ray_job needs Ray's job server, and none answers for http"):
        RayJobs.connect(config, {})


def test_every_line_ends_once_by_a_job_though_the_process_that_follows_it_is_killed(
    deployed: Deployed, demo_path: Path, tmp_path: Path
) -> None:
    model = {
        "name": MODEL,
        # Slow, so that there is time to kill somebody.
        "engine": {
            "model": {"path": str(demo_path), **steps_of(100)},
            "cache": {"num_blocks": 64},
            "scheduler": {"max_running": 8},
        },
        "replicas": {"num_replicas": 1, "num_cpus": 0.05, "drain_timeout_s": 1},
    }
    batches = {"path": str(tmp_path / "batches"), "num_cpus": 0.05, "run_as": "ray_job"}
    args = {"models": [model], "ingress": {"num_cpus": 0.05}, "batches": batches}
    with (
        deployed(MODEL, args) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10) as client,
    ):
        content = "\n".join([*map(line, range(NUM_LINES)), line(NUM_LINES, n=2)]).encode()
        file = client.files.create(file=("night.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        deadline = time.monotonic() + PATIENCE_S
        while (batch := client.batches.retrieve(batch.id)).request_counts.completed == 0:  # type: ignore[union-attr]
            assert time.monotonic() < deadline, (batch, _logs())
            time.sleep(0.05)
        kill_batches(MODEL)
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < deadline, (batch, _logs())
            time.sleep(0.05)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        lines = [json.loads(each) for each in client.files.content(batch.output_file_id).content.splitlines()]
        [refused] = [json.loads(each) for each in client.files.content(batch.error_file_id).content.splitlines()]
    # The batch has ended with its last record; the job's process may have a moment more.
    [job_id] = [str(job.submission_id) for job in _jobs().list_jobs() if str(job.submission_id).startswith(batch.id)]
    while not (status := _jobs().get_job_status(job_id)).is_terminal():
        assert time.monotonic() < deadline, _logs()
        time.sleep(0.05)
    assert status == JobStatus.SUCCEEDED, _logs()
    assert sorted(each["custom_id"] for each in lines) == sorted(f"line-{n}" for n in range(NUM_LINES))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 8 for each in lines)
    assert refused["response"]["status_code"] == 400


def _jobs() -> JobSubmissionClient:
    return JobSubmissionClient(ray.get_runtime_context().gcs_address)


def _logs() -> list[str]:
    """What all jobs have printed, for who wonders why nothing came."""
    client = _jobs()
    return [client.get_job_logs(job.submission_id) for job in client.list_jobs() if job.submission_id]
