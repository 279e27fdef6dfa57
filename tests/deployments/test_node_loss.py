"""A Ray node is lost in mid-stream, on a cluster of its own in processes of its own: smoke size of the row `node`."""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks.chaos.mix import mixed
from benchmarks.chaos.node_loss import LAYOUT, ON_EACH
from benchmarks.chaos.nodes import node
from benchmarks.chaos.stage import Stage, application, stage
from benchmarks.chaos.stream import Stream
from benchmarks.chaos.traffic import Traffic, with_reference

STEP_S = 0.02
NUM_STREAMS = 16


def assert_as_before(answers: list[Stream], traffic: Traffic) -> None:
    assert [each.outcome for each in answers] == ["completed"] * NUM_STREAMS
    assert [each.said for each in answers] == [traffic.reference[each.name].said for each in answers]


@pytest.fixture(autouse=True)
def _without_the_settings_of_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


def test_when_a_node_is_lost_its_streams_go_on_elsewhere_and_another_node_makes_the_service_whole() -> None:
    async def main(running: Stage) -> None:
        # On the first node alone: the replicas of the second have no place yet.
        traffic = await with_reference(running.target, mixed(NUM_STREAMS, max_tokens=(20, 60)))
        with node(running) as lost:
            await running.is_whole()
            assert len(lost.replicas()) == ON_EACH
            assert not set(lost.replicas()) & set(running.ingresses())
            answering = asyncio.ensure_future(traffic.once())
            await asyncio.sleep(0.4)
            lost.kill()
            assert not answering.done()
            assert_as_before(await answering, traffic)
            assert not lost.replicas()
        with node(running) as another:
            await running.is_whole()
            assert len(another.replicas()) == ON_EACH
            assert_as_before(await traffic.once(), traffic)
        assert (await running.left_over())["blocks"] == 0

    config = application(num_replicas=2 * ON_EACH, step_ms=STEP_S * 1000)
    with stage(config, step_s=STEP_S, layout=LAYOUT) as running:
        asyncio.run(main(running))
