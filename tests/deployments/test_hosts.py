"""What happens between hosts, on a cluster of two nodes in processes of its own: smoke sizes of rows of the same names.

Where this machine allows networks of our own, the second node is in one, and packets on the way to it can be lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import pytest

from benchmarks.chaos.networks import HERE, Host, own_network, set_tcp_retries, why_no_networks
from benchmarks.chaos.node_loss import LAYOUT, Node, node
from benchmarks.chaos.stage import Stage, application, stage
from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, alike, mixed, with_reference
from benchmarks.harness.answer import Answer

ON_EACH = 1  # replicas
STEP_S = 0.03
HEARD_BYTES = 2_000  # some events of a stream
SILENCE_S = 1.0
NO_NETWORKS = why_no_networks()
needs_networks = pytest.mark.skipif(NO_NETWORKS is not None, reason=str(NO_NETWORKS))


@dataclass(frozen=True, slots=True)
class Hosts:
    running: Stage
    wire: Host | None  # to the second node, where there can be one
    second: Node
    traffic: Traffic

    def another_node(self) -> AbstractContextManager[Node]:
        """A node for the replicas for which there is no place on the first."""
        return node(self.running, on=self.wire)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    config = application(num_replicas=2 * ON_EACH, step_ms=STEP_S * 1000, step_timeout_s=20 * SILENCE_S)
    config |= {"api": {"allow_unauthenticated": True}}  # other machines of this network may reach it
    with ExitStack() as block:
        environment = block.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            environment.delenv(name)  # they are this session's
        wire = block.enter_context(own_network())[0] if NO_NETWORKS is None else None
        layout = replace(LAYOUT, max_replicas_per_node={f"replica-{MODEL_NAME}": ON_EACH})
        layout = layout if wire is None else replace(layout, host="0.0.0.0")
        running = block.enter_context(stage(config, layout=layout))
        second = block.enter_context(node(running, on=wire))
        # Meanwhile the first node answers alone.
        traffic = asyncio.run(with_reference(running.target, mixed(16, max_tokens=(20, 60))))
        asyncio.run(running.is_whole())
        yield Hosts(running, wire, second, traffic)


def struck(hosts: Hosts, strike: Callable[[], object], *, mend: Callable[[], object] = lambda: None) -> list[Answer]:
    """All requests once, and a fault while they run; mended when the lines to the other host have fallen silent."""

    async def main() -> list[Answer]:
        answering = asyncio.ensure_future(hosts.traffic.once())
        await asyncio.sleep(0.4)
        strike()
        try:
            await asyncio.sleep(SILENCE_S + 0.5)
        finally:
            mend()
        return await answering

    return asyncio.run(main())


def assert_as_before(answers: list[Answer], reference: Mapping[str, Answer]) -> None:
    assert [each.outcome for each in answers] == ["completed"] * len(reference)
    assert [each.said for each in answers] == [reference[each.name].said for each in answers]


@needs_networks
def test_streams_outlive_a_network_that_loses_everything_for_a_while(hosts: Hosts) -> None:
    assert hosts.wire is not None
    replicas = hosts.second.replicas()
    struck_s = time.perf_counter()
    answers = struck(hosts, hosts.wire.lose_both_ways, mend=hosts.wire.mend)
    assert_as_before(answers, hosts.traffic.reference)
    assert max(each.longest_pause_s(struck_s, struck_s + 5) for each in answers) > SILENCE_S / 2, "some were there"
    asyncio.run(hosts.running.is_whole())
    assert hosts.second.replicas() == replicas, "they are the same, and answer again"


@needs_networks
def test_a_client_that_vanishes_is_worked_for_until_the_kernel_gives_it_up(hosts: Hosts) -> None:
    assert hosts.wire is not None
    set_tcp_retries(1)
    num_tokens = 400
    [asked] = alike(1, num_tokens=num_tokens)
    assert asyncio.run(freed_after_s(hosts.running, hosts.wire, asked)) < num_tokens * STEP_S / 2
    assert (asyncio.run(hosts.running.left_over()))["in_flight"] == 0


async def freed_after_s(running: Stage, host: Host, asked: Asked) -> float:
    """Seconds from the moment when a client's host fell silent until no replica has anything of its request."""
    target = replace(running.target, host=HERE)
    with host.visited():
        client = socket.create_connection((target.host, target.port))
    with client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, target.request("completions", asked.body))
        heard = 0
        while heard < HEARD_BYTES:
            heard += len(await loop.sock_recv(client, 1024))
        host.lose_what_it_sends()
        vanished_s = time.perf_counter()
        try:
            while (await asyncio.to_thread(running.holdings)).held["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return time.perf_counter() - vanished_s
        finally:
            host.mend()


def test_when_a_node_is_lost_its_streams_go_on_elsewhere_and_another_node_makes_the_service_whole(hosts: Hosts) -> None:
    assert len(hosts.second.replicas()) == ON_EACH
    assert not set(hosts.second.replicas()) & set(hosts.running.ingresses())
    with hosts.another_node() as another:  # which is a while on its way
        assert_as_before(struck(hosts, hosts.second.kill), hosts.traffic.reference)
        assert not hosts.second.replicas()
        asyncio.run(hosts.running.is_whole())
        assert len(another.replicas()) == ON_EACH
        assert_as_before(asyncio.run(hosts.traffic.once()), hosts.traffic.reference)
    assert asyncio.run(hosts.running.left_over())["blocks"] == 0
