"""The benchmark of large fleets, small: its registries and streams are the service's own."""

from __future__ import annotations

import asyncio
import random
import warnings
from functools import partial

import numpy as np
import pytest

from app.engine.async_engine import AsyncEngine
from app.fleet import FrameServer, replica_registry, report_of_engine
from benchmarks.service.prefixes import conversations
from benchmarks.service.thousand import POLICIES, dispatch_figures, filled_registry
from benchmarks.service.thousand_ingress import TOKENS, Played, Stream, figures_of
from benchmarks.service.thousand_quality import (
    CutFleet,
    Load,
    adapter_figures,
    fleet_fields,
    looking_at_all,
    newcomer_figures,
    quality_figures,
)
from benchmarks.service.thousand_replicas import metrics
from tests.kit.engine import build_fake_engine


@pytest.mark.parametrize("policy", POLICIES)
def test_a_registry_knows_reports_and_prefixes_of_all_replicas(policy: str) -> None:
    registry, prompts = filled_registry(policy, 30, random.Random(1))
    assert len(registry.reports) == len(prompts) == 30
    assert all(each["requests"] is not None for each in registry.describe())


def test_the_figures_of_dispatch_have_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.service.thousand._NUM_DECISIONS", 30)
    figures = dispatch_figures(40, seed=1)
    assert {"report_us", "replaced_ms", "kb_per_replica", *POLICIES} == figures.keys()


def test_quality_compares_with_a_dispatcher_that_looks_at_all() -> None:
    class Given:
        load, seconds, ingresses, seed = 0.8, 1.5, [2], 1

    figures = quality_figures(30, Given())  # type: ignore[arg-type]
    assert figures["perfect"]["refused"] == figures["2 ingresses"]["refused"] == 0
    assert figures["2 ingresses"]["ttft_mean_ms_over_perfect"] > 0
    before = replica_registry.SMALL_FLEET
    with looking_at_all():
        assert before < replica_registry.SMALL_FLEET
    assert before == replica_registry.SMALL_FLEET


def test_a_new_ingress_gets_its_part_of_the_requests_and_is_compared_with_the_others() -> None:
    class Given:
        load, seconds, ingresses, seed = 0.2, 4.0, [2], 1

    load = Load.of(30, Given())  # type: ignore[arg-type]
    figures = newcomer_figures(30, Given())  # type: ignore[arg-type]
    requests = {name: sum(each[name]["requests"] for each in figures.values()) for name in ("new", "others")}
    assert sum(requests.values()) == pytest.approx(load.turns_per_s * load.seconds / 2, rel=0.15), "the second half"
    assert 0.2 <= requests["new"] / sum(requests.values()) <= 0.5


def test_a_fleet_gets_the_part_of_what_it_can_compute_that_is_asked_for_from_the_first_second_on() -> None:
    class Given:
        load, seconds, ingresses, seed = 0.5, 12.0, [1], 1

    load = Load.of(4, Given())  # type: ignore[arg-type]
    busy = CutFleet(until_s=load.seconds, **fleet_fields(4, 1, 1)).run(load.conversations)
    arrivals = np.asarray(busy.arrivals_s)
    assert arrivals.max() < load.seconds
    by_third = np.histogram(arrivals, 3, (0.0, load.seconds))[0] / load.seconds * 3
    assert by_third == pytest.approx([load.turns_per_s] * 3, rel=0.2)

    class Twice(Given):
        load = 2.5

    load = Load.of(4, Twice())  # type: ignore[arg-type]
    flooded = CutFleet(until_s=load.seconds, **fleet_fields(4, 1, 1)).run(load.conversations)
    ended = np.asarray(flooded.last_tokens_s)
    ended_per_s = np.sum((ended > 6.0) & (ended <= 12.0)) / 6.0
    # In the first seconds more turns are first ones, which are short.
    assert 0.9 <= ended_per_s / (load.turns_per_s / 2.5) <= 1.4, "about all of what it can compute"
    assert busy.per_request_s("ttft").mean() < 0.1 < flooded.per_request_s("ttft").mean()


def test_the_load_of_replicas_is_even_though_conversations_begin_alike() -> None:
    class Given:
        load, seconds, ingresses, seed = 0.8, 6.0, [1], 1

    figures = quality_figures(12, Given())["1 ingresses"]  # type: ignore[arg-type]
    assert figures["busiest_over_mean"] < 1.5
    assert figures["idlest_over_mean"] > 0.4
    assert figures["found"] > 0.6


def test_adapters_are_loaded_where_they_are_used_and_cost_time() -> None:
    class Given:
        load, seconds, ingresses, seed = 0.2, 4.0, [2], 1

    figures = adapter_figures(30, Given())["2 ingresses"]  # type: ignore[arg-type]
    assert figures["loads_per_s"] > 0
    assert 0.5 < figures["found_loaded"] < 1, "many requests find the adapter that another has loaded"
    assert figures["ttft_p99_over_without"] > 1, "some wait for a load"


def test_half_of_all_conversations_begin_with_the_hot_prompt() -> None:
    trace = conversations(400, 10.0, random.Random(1), 1, hot_tokens=1_000)
    prompts = [each.prompt_token_ids or () for each in trace.requests]
    most = max(prompts, key=len)[:300]
    assert 0.4 <= sum(prompt[:300] == most for prompt in prompts) / len(prompts) <= 0.6


def test_streams_that_lack_tokens_or_have_others_are_counted() -> None:
    def stream(tokens: list[int], *, error: str = "") -> Stream:
        return Stream(0, tokens, [float(at) for at in range(len(tokens))], error)

    whole = list(range(TOKENS))
    streams = [stream(whole), stream(whole), stream(whole[:-1]), stream([*whole[:-1], 99]), stream([], error="Lost: x")]
    figures = figures_of([Played(streams=streams, longest_stall_s=0.1, cpu_s=1.0)])
    assert (figures["whole"], figures["not_whole"], figures["errors"]) == (3, 2, {"Lost: x": 1})
    assert figures["different"] == 2


async def test_metrics_are_those_of_all_replicas_with_and_without_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
        from benchmarks.service.thousand_metrics import _measured
    monkeypatch.setattr("benchmarks.service.thousand_metrics.PAUSE_S", 0.01)
    engines = [AsyncEngine(build_fake_engine(), max_requests=8) for _ in range(3)]
    servers = [
        FrameServer("127.0.0.1", engine, partial(report_of_engine, engine), partial(metrics, engine, f"r{number}"))
        for number, engine in enumerate(engines)
    ]
    try:
        figures = await _measured([await server.open() for server in servers], seed=1)
        assert figures["bytes"] > 2 * len(metrics(engines[0], "r0"))
        assert figures["exposition"].keys() == figures["with_http"].keys() == {
            "cpu_ms", "time_ms", "longest_stall_ms", "longest_hold_cpu_ms"
        }  # fmt: skip
        assert 0 < figures["kept_kb"] < figures["peak_kb"]
    finally:
        for server in servers:
            await server.close()
        for engine in engines:
            await asyncio.to_thread(engine.shutdown)
