"""What the soak makes of answers, of output files and of processes; a real service runs only in the benchmark."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.http_call import Target
from benchmarks.service.fuzz import Tally
from benchmarks.service.honest import Client, Reply, Tenant, requests_of, said_by
from benchmarks.service.soak import Sample, attack_figures, figures_of, is_bad, process_figures
from tests.benchmarks.servers import simulated_service

KINDS = ("stream", "logprobs", "schema")  # the demo model has no place for tools


def _client(target: Target) -> Client:
    return Client(target, Tenant("a", "key"), model="simulated")


def _figures(tenant: Tenant, **changes: Any) -> dict[str, Any]:
    processes: dict[str, Any] = {"growth": {}, "restarts": [], "left": {"running": 0}, "max_growth": 1.05}
    return figures_of([tenant], 0.0, 1.0) | attack_figures(Tally()) | processes | changes


def test_the_same_request_gets_the_same_answer_and_another_answer_is_wrong(demo_path: Path) -> None:
    async def run(client: Client) -> None:
        await client.learn(KINDS)
        for kind in KINDS:
            await client.ask(requests_of(kind, "simulated")[3])
        assert client.tenant.outcomes == {"right": len(KINDS)}
        client._reference["stream", 3]["0"]["text"] += "."
        await client.ask(requests_of("stream", "simulated")[3])
        assert client.tenant.outcomes["wrong"] == 1

    with simulated_service(demo_path, step_ms=1) as url:
        client = _client(Target.parse(url.replace("/v1", "")))
        asyncio.run(run(client))
    assert len(client.tenant.times_s) == len(KINDS)
    assert is_bad(_figures(client.tenant))


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]},
    ]
    assert said_by([whole]) == said_by(pieces)
    with pytest.raises(ValueError, match="no end"):
        said_by(pieces[:1])


@pytest.mark.parametrize("end", ["", "data: [DONE]\n\ndata: [DONE]\n\n"])
def test_a_stream_without_its_end_is_broken(end: str) -> None:
    reply = Reply()
    reply.head(200, {"content-type": "text/event-stream"})
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    reply.body(f"data: {json.dumps(chunk)}\n\n{end}".encode(), at_s=0.0)
    with pytest.raises(ValueError, match="DONE"):
        reply.said()


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (lambda lines: lines, "batch_right"),
        (lambda lines: lines[1:], "batch_wrong"),
        (lambda lines: [*lines, lines[0]], "batch_wrong"),
        (lambda lines: [lines[0].replace("yes", "no"), *lines[1:]], "batch_wrong"),
    ],
)
def test_a_line_that_is_lost_doubled_or_wrong_is_found(made: Any, outcome: str) -> None:
    client = _client(Target.parse("http://127.0.0.1:1"))
    body = {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}
    client._reference = {("schema", number): said_by([body]) for number in range(2)}
    lines = [json.dumps({"custom_id": f"0-{item}", "response": {"body": body}}) for item in range(2)]
    client._judge_batch({"status": "completed"}, "\n".join(made(lines)), ["0-0", "0-1"])
    assert client.tenant.outcomes[outcome] == 1
    assert is_bad(_figures(client.tenant)) == (outcome == "batch_wrong")


def test_memory_counts_by_quarters_and_new_processes_when_they_are_a_minute_old() -> None:
    title = "ray::ServeReplica:carousel:ingress"
    steady = [Sample(float(at), 1, title, 100.0 + at // 100, 10, 5) for at in range(0, 400, 5)]
    young = [Sample(float(at), 2, title, 900.0, 10, 5) for at in range(300, 355, 5)]
    figures = process_figures([*steady, *young], 0.0, 400.0)
    assert figures["memory_mib"][title] == [100.0, 101.0, 102.0, 103.0]
    assert figures["growth"][title] == pytest.approx(1.02, abs=0.001)
    assert not is_bad(_figures(Tenant("a", "key", Counter(right=1))) | figures)
    assert is_bad(_figures(Tenant("a", "key", Counter(right=1))) | figures | {"growth": {title: 1.06}})


@pytest.mark.parametrize("changes", [{"restarts": ["ingress"]}, {"left": {"running": 1}}])
def test_a_restart_and_what_is_held_at_the_end_are_bad(changes: dict[str, Any]) -> None:
    assert is_bad(_figures(Tenant("a", "key"), **changes))
