"""What Ray's own boards get: the same counts, as differences, under vLLM's names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

from app.metrics import CallMetrics, RequestMetrics
from deployments.serve import ray_metrics
from deployments.serve.ray_metrics import (
    RayMetrics,
    ValueBucket,
    families_of_engine,
    families_of_requests,
    representatives,
)
from tests.kit.engine import FakeClock
from tests.metrics.test_exposition import report

Received = dict[str, list[tuple[float, Mapping[str, str]]]]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Received:
    """What was handed over, by the name of the metric."""
    got: Received = {}

    class Kept:
        def __init__(self, name: str, tag_keys: tuple[str, ...], **_: Any) -> None:
            self.name, self.tag_keys = name, tag_keys

        def put(self, value: float, tags: Mapping[str, str]) -> None:
            assert tuple(tags) == self.tag_keys
            got.setdefault(self.name, []).append((value, tags))

        set = inc = observe = put

    for kind in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(ray_metrics.ray_metrics, kind, Kept)
    return got


def test_an_ingress_hands_over_each_request_once(received: Received) -> None:
    clock = FakeClock()
    metrics = RequestMetrics(["demo"], clock=clock)
    to_ray = RayMetrics(lambda: families_of_requests(metrics.snapshot()))

    def answer(first_token_s: float) -> None:
        with CallMetrics(metrics.model("demo"), [7], arrived_at=metrics.clock()) as call:
            clock.advance(first_token_s)
            call.tokens(0, 2)
            call.finished(0, "stop")

    answer(0.25)
    asyncio.run(to_ray.hand_over())
    answer(4.0)
    asyncio.run(to_ray.hand_over())
    asyncio.run(to_ray.hand_over())
    assert [value for value, _ in received["vllm_time_to_first_token_seconds"]] == pytest.approx([0.25, 4.0])
    assert received["vllm_request_success"] == [(1.0, {"model_name": "demo", "finished_reason": "stop"})] * 2
    assert [value for value, _ in received["vllm_generation_tokens"]] == [2.0, 2.0]
    assert "vllm_num_requests_running" not in received, "that is what replicas measure"


def test_a_replica_hands_over_its_engine(received: Received) -> None:
    asyncio.run(RayMetrics(lambda: families_of_engine("demo", report("r1", 12))).hand_over())
    [(running, tags)] = received["vllm_num_requests_running"]
    assert (running, tags) == (8.0, {"model_name": "demo"})
    assert received["vllm_num_requests_waiting"][0][0] == 4.0
    assert len(received["vllm_request_queue_time_seconds"]) == 8
    assert "vllm_prompt_tokens" not in received


def test_values_keep_their_buckets_and_their_sum() -> None:
    buckets = [
        ValueBucket(0.0, 1.0, 3),
        ValueBucket(1.0, 2.0, 0),
        ValueBucket(2.0, 5.0, 2),
        ValueBucket(5.0, float("inf"), 0),
    ]
    values = representatives(buckets, 9.4)
    assert [count for _, count in values] == [3, 2]
    assert sum(value * count for value, count in values) == pytest.approx(9.4)
    assert all(low < value <= high for (value, _), (low, high) in zip(values, [(0, 1), (2, 5)], strict=True))
    assert representatives([ValueBucket(5.0, float("inf"), 1)], 7.0) == [(pytest.approx(7.0), 1)]
    assert representatives([ValueBucket(0.0, 1.0, 0)], 0.0) == []


def test_the_panels_of_rays_board_ask_for_what_is_handed_over_or_for_what_there_is_not() -> None:
    requests = families_of_requests(RequestMetrics(["demo"]).snapshot())
    handed = {
        f"ray_{family.name.replace(':', '_')}" for family in (*requests, *families_of_engine("demo", report("r1", 1)))
    }
    panels = [panel for row in serve_llm_dashboard_config.rows for panel in row.panels]
    empty = [panel.title for panel in panels if asked(panel) - handed]
    assert len(panels) > 2 * len(empty)
    assert all(title.startswith(("NIXL: ", "KV Offload: ")) or title == "Scheduler: Swapped" for title in empty), empty


def asked(panel: Any) -> set[str]:
    """The metrics under vLLM's names that a panel needs."""
    names = {name for target in panel.targets for name in re.findall(r"\bray_vllm_\w+", target.expr)}
    return {re.sub("_(bucket|count|sum|total)$", "", name) for name in names}
