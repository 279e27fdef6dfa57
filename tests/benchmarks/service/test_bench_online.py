"""The open-loop client against servers with known behaviour."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from app.engine.request import FILTERS
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import read_workload
from benchmarks.service import online
from benchmarks.service.arrivals import bursts, poisson
from tests.benchmarks.conftest import Figures, write_workload
from tests.benchmarks.servers import serving, simulated_service, stream, told_server
from tests.waiting import until


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    lines = [{"prompt_token_ids": [300 + number] * 8, "max_tokens": 6, "tenant": "t"} for number in range(10)]
    return ["--model", "simulated", "--workload", str(write_workload(tmp_path / "workload.jsonl", *lines))]


def test_times_are_those_of_the_simulated_engine(demo_path: Path, common: list[str], figures: Figures) -> None:
    with simulated_service(demo_path, step_ms=20) as url:
        options = ["--rate", "40", "--requests", "20", "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"]
        found = figures(online.main, "--base-url", url, *common, *options)
    assert (found["num_requests"], found["num_answered"], found["errors"]) == (20, 20, {})
    assert found["num_output_tokens"] == 20 * 6
    assert found["ttft_p50_s"] > 0.02
    assert found["itl_p50_s"] > 0.018
    assert found["latency_p50_s"] > 0.02 * 6
    assert found["goodput_share"] == 1.0
    assert found["lateness_max_ms"] > 0


def test_slow_answers_delay_no_arrival(common: list[str], figures: Figures) -> None:
    """None is answered before all have come: a client that waited for an answer would wait for ever."""
    num_arrived = 0

    def answer(_: int) -> StreamingResponse:
        nonlocal num_arrived
        num_arrived += 1
        return StreamingResponse(once_all_have_come(), media_type="text/event-stream")

    async def once_all_have_come() -> AsyncIterator[Any]:
        await until(lambda: num_arrived == 10)
        await asyncio.sleep(0.5)
        async for event in stream(num_tokens=2, gap_s=0.1).body_iterator:
            yield event

    with serving(told_server(answer)) as url:
        options = ["--rate", "100", "--warm-up", "0", "--slo-ttft-ms", "400"]
        found = figures(online.main, "--base-url", url, *common, *options)
    assert (found["num_answered"], found["seconds"] < 6) == (10, True), "one after the other they take 6 s"
    assert found["ttft_p50_s"] > 0.5
    assert found["goodput_share"] == 0.0


def test_errors_are_counted_by_what_they_were(common: list[str], figures: Figures) -> None:
    def answer(number: int) -> Any:
        return (
            JSONResponse({"error": {}}, status_code=429) if number % 2 else stream(num_tokens=0 if number == 0 else 3)
        )

    with serving(told_server(answer)) as url:
        found = figures(online.main, "--base-url", url, *common, "--rate", "100", "--warm-up", "0")
    assert found["errors"] == {"status 429": 5, "no text": 1}
    assert found["refused_share"] == 0.5
    assert found["refusal_p50_ms"] > 0


def test_a_sweep_has_a_row_for_each_factor(
    demo_path: Path, common: list[str], figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "_PAUSE_S", 0.1)  # all requests of the first run have ended by then
    with simulated_service(demo_path, step_ms=20, max_running=2, max_waiting=2) as url:
        sweep = ["--sweep", "0.5,8", "--capacity", "14", "--duration", "0.7"]
        slow, fast = figures(online.main, "--base-url", url, *common, *sweep)["rows"]
    assert (slow["factor"], fast["factor"], slow["rate"], fast["rate"]) == (0.5, 8, 7, 112)
    assert slow["num_requests"] < 15 < fast["num_requests"]
    assert slow["refused_share"] < 0.3 < fast["refused_share"]
    assert fast["refusal_p50_ms"] > 0


def test_poisson_arrivals_come_at_the_asked_rate_and_bursts_at_once_with_the_same_mean() -> None:
    """Not at half of it, as when a fixed gap is added to the exponential one."""
    *_, last = islice(poisson(8.0, seed=7), 20_000)
    assert last / 20_000 == pytest.approx(1 / 8.0, rel=0.02)
    assert list(islice(bursts(3, 6.0), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


def test_the_clients_load_no_torch() -> None:
    program = "import sys, benchmarks.service.online, benchmarks.service.fleet; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_goes_from_the_workload_to_the_service(name: str, tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [5], "max_tokens": 6, "temperature": 1.0, name: FILTERS[name]}] * 2
    workload = read_workload(str(write_workload(tmp_path / "workload.jsonl", *lines)))
    request = workload.requests[0].request
    assert getattr(request.sampling, name) == FILTERS[name]
    call = online.completion_request(Target.parse("http://127.0.0.1:1"), "demo", request)
    assert json.loads(call.partition(b"\r\n\r\n")[2])[name] == FILTERS[name]
