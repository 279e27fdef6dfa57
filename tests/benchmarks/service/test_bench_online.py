"""The open-loop client against servers with known behaviour."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.harness.workload import Workload, read_workload
from benchmarks.service import online
from benchmarks.service.arrivals import Arrivals
from benchmarks.service.open_loop import Extent, completion_request, schedule
from tests.benchmarks.servers import serving, simulated_service, stream, told_server


@pytest.fixture
def workload_path(tmp_path: Path) -> Path:
    lines = [
        {"id": f"r{number}", "prompt_token_ids": [300 + number] * 8, "max_tokens": 6, "ignore_eos": True, "tenant": "t"}
        for number in range(10)
    ]
    path = tmp_path / "workload.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(url: str, workload: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    arguments = ["--base-url", url, "--model", "simulated", "--workload", str(workload), *options]
    assert online.main(arguments) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_times_are_those_of_the_simulated_engine(
    demo_path: Path, workload_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    with simulated_service(demo_path, step_ms=20) as url:
        options = ["--rate", "40", "--requests", "20", "--slo-ttft-ms", "1000", "--slo-itl-ms", "200"]
        found = run(url, workload_path, *options, "--json", str(out), capsys=capsys)
    assert json.loads(out.read_text()) == found
    assert (found["num_requests"], found["num_answered"], found["errors"]) == (20, 20, {})
    assert found["num_output_tokens"] == 20 * 6
    assert found["ttft_p50_s"] > 0.02
    assert 0.018 < found["itl_p50_s"] < 0.04
    assert found["latency_p50_s"] > 0.02 * 6
    assert found["goodput_share"] == 1.0
    assert 0 < found["lateness_max_ms"] < 200


def test_slow_answers_delay_no_arrival(workload_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = told_server(lambda _: stream(num_tokens=2, first_after_s=0.5, gap_s=0.1))
    with serving(app) as url:
        began = time.monotonic()
        options = ["--rate", "100", "--warm-up", "0", "--slo-ttft-ms", "400"]
        found = run(url, workload_path, *options, capsys=capsys)
        assert time.monotonic() - began < 3  # one after the other they would take 6 s
    assert found["num_answered"] == 10
    assert 0.5 < found["ttft_p50_s"] < 0.7
    assert found["goodput_share"] == 0.0
    assert found["lateness_max_ms"] < 300


def test_goodput_counts_the_pace_of_tokens_too(workload_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = told_server(lambda number: stream(num_tokens=4, gap_s=0.1 if number % 2 else 0.0))
    with serving(app) as url:
        options = ["--rate", "50", "--warm-up", "0", "--slo-itl-ms", "50"]
        found = run(url, workload_path, *options, capsys=capsys)
    assert (found["num_answered"], found["goodput_share"]) == (10, 0.5)


def test_errors_are_counted_by_what_they_were(workload_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(number: int) -> Any:
        return (
            JSONResponse({"error": {}}, status_code=429) if number % 2 else stream(num_tokens=0 if number == 0 else 3)
        )

    with serving(told_server(answer)) as url:
        found = run(url, workload_path, "--rate", "100", "--warm-up", "0", capsys=capsys)
    assert found["errors"] == {"429": 5, "no_text": 1}
    assert found["refused_share"] == 0.5
    assert 0 < found["refusal_p50_ms"] < 200


def test_a_sweep_has_a_row_for_each_factor(
    demo_path: Path, workload_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with simulated_service(demo_path, step_ms=20, max_running=2, max_waiting=2) as url:
        arguments = ["--base-url", url, "--model", "simulated", "--workload", str(workload_path)]
        sweep = ["--sweep", "0.5,8", "--capacity", "14", "--duration", "0.7"]
        assert online.main([*arguments, *sweep]) == 0
    out = capsys.readouterr().out
    slow, fast = json.loads(out.splitlines()[-1])["rows"]
    assert (slow["factor"], fast["factor"], slow["rate"], fast["rate"]) == (0.5, 8, 7, 112)
    assert slow["num_requests"] < 15 < fast["num_requests"]
    assert slow["refused_share"] < 0.3 < fast["refused_share"]
    assert fast["refusal_p50_ms"] < 1000
    assert len(out.splitlines()) == 2 + 2 + 1


def test_a_short_workload_is_repeated_with_other_salts(workload_path: Path) -> None:
    workload = read_workload(str(workload_path))
    played = schedule(workload, Arrivals.parse("poisson"), Extent(num_requests=23), rate=5, seed=1)
    assert [timed.request.request_id for timed in played.requests][9:12] == ["r9", "r0~1", "r1~1"]
    assert {timed.request.cache_salt for timed in played.requests} == {"", "~1", "~2"}
    lasting = schedule(workload, Arrivals.parse("burst:4"), Extent(duration_s=10), rate=8, seed=1)
    assert len(lasting.requests) == 80
    with pytest.raises(BenchmarkError, match="the workload has 10 requests, not 11"):
        schedule(workload, Arrivals.parse("trace"), Extent(num_requests=11), rate=None, seed=0)


def test_a_request_says_only_what_it_needs(workload_path: Path) -> None:
    workload: Workload = read_workload(str(workload_path))
    sent = completion_request(Target.parse("http://h"), "m", workload.requests[0].request)
    body = json.loads(sent.partition(b"\r\n\r\n")[2])
    assert body == {
        "model": "m", "prompt": [300] * 8, "max_tokens": 6, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "user": "t",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--rate R in requests a second"),
        (["--arrival", "poisson:3"], "the rate is said by --rate or --capacity here"),
        (["--sweep", "1,2"], "--sweep needs --capacity"),
        (["--sweep", "1,x", "--capacity", "3"], "write numbers above 0"),
        (["--sweep", "1", "--capacity", "3", "--arrival", "trace"], "a sweep needs poisson or burst:N"),
        (["--rate", "1"], "does not answer: no_connection"),
    ],
)
def test_mistakes_are_told(
    workload_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--model", "m", "--workload", str(workload_path)]
    assert online.main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_clients_load_no_torch() -> None:
    program = "import sys, benchmarks.service.online, benchmarks.service.fleet; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[3], timeout=60)
