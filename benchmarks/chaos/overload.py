"""Row C6: more requests than the service can take, by the open-loop client of `benchmarks.service.online`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, alike
from benchmarks.harness.turns import last_object, run_module

_STEP_MS = 30.0
_NUM_TOKENS = 60
_SLOTS = 16  # of each replica
_FACTORS = "0.8,1,1.5,2,5"
_SECONDS = 8
_SHOWN = (
    "factor", "rate", "goodput_requests_per_s", "goodput_share", "refused_share", "refusal_p50_ms", "refusal_p99_ms",
    "ttft_p50_s", "ttft_p99_s", "itl_p99_s", "errors", "lateness_p99_ms",
)  # fmt: skip


async def overload(size: Size) -> list[dict[str, Any]]:
    """C6: 0.8 to 5 times what two replicas with sixteen slots each can do."""
    config = application(
        num_replicas=2, step_ms=_STEP_MS, end_probability=0, max_running=_SLOTS, max_waiting=_SLOTS // 2
    )
    capacity = 2 * _SLOTS / (_NUM_TOKENS * _STEP_MS / 1000)
    with stage(config) as running:
        found = await asyncio.to_thread(_sweep, running, capacity)
        rows = [{name: row.get(name) for name in _SHOWN} for row in found["rows"]]
        return [
            {"row": "C6", "fault": "open-loop load beyond capacity", "capacity_requests_per_s": round(capacity, 2)}
            | {"seconds_each": _SECONDS, "rows": rows, "left_over": await running.left_over()}
        ]


def _sweep(running: Stage, capacity: float) -> dict[str, Any]:
    target = running.target
    with tempfile.TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        workload = Path(folder) / "workload.jsonl"
        lines = [
            {"id": asked.name, "prompt_token_ids": asked.body["prompt"], "max_tokens": _NUM_TOKENS, "ignore_eos": True}
            for asked in alike(64, num_tokens=_NUM_TOKENS)
        ]
        workload.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        arguments = [
            "--base-url", f"http://{target.host}:{target.port}", "--model", MODEL_NAME, "--workload", str(workload),
            "--sweep", _FACTORS, "--capacity", f"{capacity:.3f}", "--duration", str(_SECONDS),
            "--slo-ttft-ms", "2500", "--slo-itl-ms", "100",
        ]  # fmt: skip
        return last_object(run_module("benchmarks.service.online", arguments))
