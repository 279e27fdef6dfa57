"""Clients of several nodes: where a connection breaks they ask again at once, and a dead node is left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from benchmarks.chaos.node_loss import RovingTraffic, _figures, _Loss
from benchmarks.chaos.traffic import alike
from benchmarks.harness.http_call import Target
from deployments.launcher.supervisor import free_ports
from tests.benchmarks.servers import Cutting, listening, stream, told_server

NUM_TOKENS = 100
DEAD = "127.0.0.2"


def test_a_request_whose_connection_breaks_is_whole_at_another_node_and_a_dead_node_is_left_out() -> None:
    requests = alike(4, num_tokens=NUM_TOKENS)
    app = Cutting(told_server(lambda _: stream(num_tokens=NUM_TOKENS)), 1, num_bytes=600)

    async def main() -> RovingTraffic:
        async with listening(app) as url:
            target = Target.parse(url)
            traffic = RovingTraffic(target, requests, {})
            traffic.targets = [target, replace(target, host=DEAD, port=next(free_ports()))]
            for asked in requests:
                assert (await traffic.ask(asked)).is_complete
            assert traffic.targets == [target]
            return traffic

    traffic = asyncio.run(main())
    assert traffic.num_requests == len(requests)
    assert [answer.outcome for answer in traffic.answers] == [
        "cut off: CutOff", "no connection", *["completed"] * len(requests)
    ]  # fmt: skip
    assert traffic.tried == ["127.0.0.1", DEAD, *["127.0.0.1"] * len(requests)]
    assert len(traffic.again_s) == 1, "the first request, over three connections"
    struck_s = traffic.answers[0].ended_s
    found = _figures([_Loss("127.0.0.1", struck_s, 3.0, 2.0, 1.0)], traffic)
    assert found["tries_under_way"] == {"at_the_lost_node": {"cut off: CutOff": 1}, "at_other_nodes": {}}
    assert found["other_tries"] == {"no connection": 1, "completed": len(requests)}
    assert (found["replicas_back_max_s"], found["ingress_back_max_s"], found["proxy_back_max_s"]) == (3.0, 2.0, 1.0)


def test_a_request_that_no_node_answers_is_given_up_and_the_last_node_is_asked_again_later() -> None:
    target = Target.parse(f"http://127.0.0.1:{next(free_ports())}")
    [asked] = alike(1, num_tokens=NUM_TOKENS)
    traffic = RovingTraffic(target, [asked], {}, targets=[target])
    assert asyncio.run(traffic.ask(asked)).failure == "no connection"
    assert len(traffic.answers) < 10
    assert traffic.again_s == []
