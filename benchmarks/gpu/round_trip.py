"""Run the whole service with Ray on this card, from its start to answers over HTTP."""

from __future__ import annotations

import json
import statistics
import time
from importlib.util import find_spec

from benchmarks.gpu.bench import Bench, host_seconds
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.machine import PROJECT

_MESSAGES = [{"role": "user", "content": "Once upon a time"}]
_BODY = {"model": "demo", "messages": _MESSAGES, "max_tokens": 16, "temperature": 0}


def measure(bench: Bench) -> None:
    if find_spec("ray") is None:
        bench.skip("Ray is not installed")
        return
    from benchmarks.harness.service import application, got, service

    answers: list[str] = []

    def answer() -> None:
        found = json.loads(got(running.target, "/v1/chat/completions", body=_BODY, timeout_s=60))
        answers.append(found["choices"][0]["message"]["content"])

    model = {"path": str(PROJECT / "models" / "demo"), "device": bench.device.type}
    began_at = time.perf_counter()
    with service(application("demo", {"model": model}, {"num_gpus": bench.sized(1, 0)})) as running:
        bench.put(ready_s=round(time.perf_counter() - began_at, 1), first_request_s=round(host_seconds(answer), 3))
        request_s = statistics.median(host_seconds(answer) for _ in range(bench.sized(20, 2)))
    bench.put(request_ms=round(request_s * 1e3, 2))
    if len(set(answers)) != 1 or not answers[0]:
        raise BenchmarkError(f"one greedy request got {len(set(answers))} different answers, first {answers[0]!r}")
