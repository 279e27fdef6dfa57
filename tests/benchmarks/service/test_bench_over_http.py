"""A workload through a real API, and the settings that the service gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.config import ApplicationConfig, EngineConfig, ModelConfig, SchedulerConfig
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import TimedRequest, Workload
from benchmarks.service.over_http import application, serve
from tests.benchmarks.servers import simulated_service
from tests.fakes import make_request


def workload(*max_tokens: int) -> Workload:
    requests = [make_request((300, 301, 302), request_id=f"r{n}", max_tokens=each) for n, each in enumerate(max_tokens)]
    return Workload(tuple(TimedRequest(request=request, arrival_s=0.0) for request in requests))


def test_the_service_has_the_engines_settings_and_room_for_all_requests() -> None:
    config = EngineConfig(
        model=ModelConfig(path="models/demo", dtype="bfloat16", num_threads=2), scheduler=SchedulerConfig(max_running=5)
    )
    args = ApplicationConfig.model_validate(application(config, num_requests=1000))
    [model] = args.models
    assert model.engine == config.model_copy(
        update={"scheduler": config.scheduler.model_copy(update={"max_waiting": 1000})}
    )
    assert model.replicas.num_replicas == 1


def test_every_token_is_counted_over_the_time_of_all(demo_path: Path) -> None:
    with simulated_service(demo_path, step_ms=10) as url:
        target = Target.parse(url)
        figures = asyncio.run(serve(target, workload(3, 8, 5), model_name="simulated"))
        assert (figures["num_answered"], figures["num_output_tokens"]) == (3, 16)
        assert 0 < figures["output_tokens_per_s"] < 16 / (8 * 0.01)
        with pytest.raises(BenchmarkError, match=r"1 of 2 requests failed: .*400"):
            asyncio.run(serve(target, workload(3, 1_000_000), model_name="simulated"))
