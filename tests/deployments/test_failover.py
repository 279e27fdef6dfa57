"""Streams that survive what happens to their replicas, on a live cluster: smoke sizes of rows of `benchmarks.chaos`.

Structured outputs are among them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ray import serve

from benchmarks.chaos.stage import application
from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, alike, mixed, moment, with_reference
from benchmarks.harness.answer import Answer, follow
from benchmarks.harness.http_call import Target
from deployments.serve.application import build
from deployments.serve.settings import parse
from tests.deployments.strikes import (
    assert_nothing_is_wrong,
    has_begun,
    replica_pids,
    replica_states,
    struck,
)
from tests.waiting import PATIENCE_S, eventually

APPLICATION = "failover"
NUM_REPLICAS = 2
NUM_STREAMS = 12
SILENCE_S = 1.0
UPDATE_S = 120.0  # for all replicas and the ingress, one after the other, beside the traffic
PATTERN = "[a-z]{30,40}!"
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["owl", "wren"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "number"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}
# Behind each of three digits, which simulated replicas like to say, comes such an object; all else is free.
TAGS = {
    "structures": [{"begin": trigger, "schema": SCHEMA["items"], "end": "!"} for trigger in "135"],
    "triggers": list("135"),
}


def asking(name: str, **wanted: Any) -> Asked:
    body = {"model": MODEL_NAME, "prompt": [300, 301], "max_tokens": 1000, "stream": True, "seed": len(name)}
    return Asked(name, "seeded", body | {"stream_options": {"include_usage": True}} | wanted)


STRUCTURED = [
    *(asking("r" * n, structured_outputs={"regex": PATTERN}) for n in range(1, 5)),
    *(asking("s" * n, structured_outputs={"json": SCHEMA}) for n in range(1, 5)),
    *(
        asking("t" * n, structured_outputs={"structural_tag": TAGS}, max_tokens=90, ignore_eos=True)
        for n in range(1, 3)
    ),
]


def deploy(demo_path: Path, *, wait: bool = True, **replicas: Any) -> None:
    args = application(
        num_replicas=NUM_REPLICAS, step_ms=20, model=str(demo_path), step_timeout_s=20 * SILENCE_S, **replicas
    )
    target = serve.RunTarget(build(parse(args)), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    serve.run_many([target], wait_for_applications_running=wait)


@pytest.fixture(scope="module")
def traffic(cluster: str, demo_path: Path) -> Iterator[Traffic]:
    """Mixed requests, and what two simulated replicas answer while nothing is wrong."""
    # A replica that stops gets less time than most streams take: some of them have to go on elsewhere.
    deploy(demo_path, drain_timeout_s=1)
    target = Target.parse(f"{cluster}/{APPLICATION}")
    yield asyncio.run(with_reference(target, mixed(NUM_STREAMS, max_tokens=(20, 100))))
    serve.delete(APPLICATION, _blocking=False)


@pytest.fixture(scope="module")
def structured(traffic: Traffic) -> Traffic:
    """Requests for structured outputs to the same replicas."""
    return asyncio.run(with_reference(traffic.target, STRUCTURED))


@pytest.fixture
def fresh(traffic: Traffic) -> Traffic:
    """The same with all replicas there and no answers yet."""
    eventually(lambda: len(replicas()) == NUM_REPLICAS and len(stats()) == NUM_REPLICAS)
    return replace(traffic, answers=[], timeout_s=PATIENCE_S)


def replicas() -> list[int]:
    return replica_pids(APPLICATION, f"replica-{MODEL_NAME}")


def stats() -> list[Any]:
    """EngineStats of the replicas that answer; none while one of them does not."""
    handle = serve.get_deployment_handle(f"replica-{MODEL_NAME}", APPLICATION)
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    try:
        return list(handle.broadcast("stats").results(timeout_s=PATIENCE_S))
    except Exception:  # one of them has just died, and Serve does not know yet
        return []


def holds_nothing() -> bool:
    found = stats()
    held = [(each.num_running, each.num_waiting, each.num_blocks - each.num_free_blocks) for each in found]
    return held == [(0, 0, 0)] * NUM_REPLICAS


def test_killing_a_replica_changes_no_token(fresh: Traffic, structured: Traffic) -> None:
    requests = [*fresh.requests, *structured.requests]
    all_kinds = replace(fresh, requests=requests, reference=fresh.reference | structured.reference)
    struck(all_kinds, lambda: os.kill(replicas()[0], signal.SIGKILL))
    assert_nothing_is_wrong(all_kinds)
    eventually(holds_nothing)


def test_a_replica_that_stops_for_a_while_costs_its_streams_a_pause_and_says_nothing_afterwards(fresh: Traffic) -> None:
    victim = replicas()[0]

    async def main() -> None:
        async with fresh.flowing():
            await has_begun(fresh)
            running = [each for each in fresh.answers if not each.ended_s]
            stopped_s = time.perf_counter()
            os.kill(victim, signal.SIGSTOP)
            try:
                await moment(lambda: all(each.ended_s for each in running))  # they have gone on before it does
            finally:
                os.kill(victim, signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert max(each.longest_pause_s(stopped_s, each.ended_s) for each in running) > SILENCE_S / 2

    asyncio.run(main())
    assert_nothing_is_wrong(fresh)
    assert victim in replicas()
    eventually(holds_nothing)


def test_when_all_replicas_are_killed_the_streams_wait_for_new_ones(fresh: Traffic) -> None:
    struck(fresh, lambda: [os.kill(pid, signal.SIGKILL) for pid in replicas()] and None)
    assert_nothing_is_wrong(fresh)
    eventually(holds_nothing)


def test_a_client_that_leaves_frees_its_blocks_at_once(fresh: Traffic) -> None:
    [asked] = alike(1, num_tokens=1500)

    async def leave_after(num_arrivals: int) -> None:
        stream = Answer(time.perf_counter(), name=asked.name)
        request = fresh.target.request("completions", asked.body)
        client = asyncio.create_task(follow(stream, fresh.target, request, timeout_s=PATIENCE_S))
        await moment(lambda: len(stream.events_s) >= num_arrivals)
        assert not await asyncio.to_thread(holds_nothing)
        client.cancel()

    for num_arrivals in (1, 10):
        asyncio.run(leave_after(num_arrivals))
        eventually(holds_nothing, timeout_s=15.0)  # the whole answer takes twice as long


def test_structured_outputs_have_the_form_that_was_asked_for(structured: Traffic) -> None:
    for name, stream in structured.reference.items():
        if name.startswith("t"):
            assert re.match(r"[^135]*[135]\{\s*(\"|$)", stream.texts[0]), stream.texts
            continue
        assert stream.finish_reasons == {0: "stop"}
        if name.startswith("r"):
            assert re.fullmatch(PATTERN, stream.texts[0]), stream.texts
        else:
            jsonschema.validate(json.loads(stream.texts[0]), SCHEMA)


def test_a_grammar_that_cannot_be_compiled_is_refused_before_any_answer_begins(structured: Traffic) -> None:
    stream = asyncio.run(structured.ask(asking("refused", structured_outputs={"regex": "(("})))
    assert stream.status == 400
    assert stream.error is not None
    assert (stream.error["code"], stream.error["param"]) == ("invalid_grammar", "structured_outputs.regex")


def num_ingresses() -> int:
    """Those that Serve sends requests to."""
    return replica_states(APPLICATION, "ingress").get("RUNNING", 0)


def is_updated(old: set[int]) -> bool:
    """Whether an update has ended; an ingress is there as long as it goes on."""
    assert num_ingresses(), "a request would wait now for an ingress to start"
    return serve.status().applications[APPLICATION].status == "RUNNING" and not old & set(replicas())


def test_a_rolling_update_whose_drains_end_by_force_fails_no_request(fresh: Traffic, demo_path: Path) -> None:
    old = set(replicas())

    async def main() -> None:
        async with fresh.flowing():
            # Only then Serve's word: it makes router configs anew, as `build` does, and two threads must not at a time.
            await asyncio.to_thread(deploy, demo_path, wait=False, drain_timeout_s=1)
            await asyncio.to_thread(eventually, lambda: is_updated(old), timeout_s=UPDATE_S)

    asyncio.run(main())
    assert_nothing_is_wrong(fresh)
    eventually(holds_nothing)
