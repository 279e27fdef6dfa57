"""Row R8: the network between the ingress and some of its replicas loses everything, in one direction or in both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.chaos.networks import THERE, Host, own_network, why_no_networks
from benchmarks.chaos.node_loss import LAYOUT, ON_EACH, node
from benchmarks.chaos.replica_kills import LENGTHS, STEP_MS, Row, pauses_after
from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.traffic import Traffic, mixed, with_reference
from benchmarks.chaos.verdict import judged, spread
from benchmarks.harness.command import tell

CUT_S = 8.0
_QUIET_S = (1.0, 2.0)


async def part_from_replicas(size: Size) -> list[Row]:
    """R8: two hosts with two replicas each; what goes between them is lost for eight seconds. Needs root."""
    reason = why_no_networks()
    if reason is not None:
        return [{"row": "R8", "fault": "a partition between ingress and replicas", "skipped": reason}]
    config = application(num_replicas=2 * ON_EACH, step_ms=STEP_MS)
    with ExitStack() as block:
        host = block.enter_context(own_network())
        running = block.enter_context(stage(config, step_s=STEP_MS / 1000, layout=LAYOUT))
        block.enter_context(node(running, within=host.command, address=THERE))
        await running.is_whole()
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        return [
            await _parting(running, host, traffic, size, "both ways", partial(cut_both_ways, host)),
            await _parting(running, host, traffic, size, "replica to ingress", host.lose_what_it_sends),
            await _parting(running, host, traffic, size, "ingress to replica", host.lose_what_is_sent_to_it),
        ]


def cut_both_ways(host: Host) -> None:
    host.lose_what_it_sends()
    host.lose_what_is_sent_to_it()


async def _parting(running: Stage, host: Host, traffic: Traffic, size: Size, way: str, cut: Callable[[], None]) -> Row:
    source = size.source(f"R8 {way}")
    fresh = replace(traffic, answers=[])
    struck_s, back_s = [], []
    async with fresh.flowing():
        for run in range(size.runs):
            await asyncio.sleep(source.uniform(*_QUIET_S))
            struck_s.append(time.perf_counter())
            cut()
            try:
                await asyncio.sleep(CUT_S)
            finally:
                host.mend()
            mended_s = time.perf_counter()
            back_s.append(await running.is_whole() - mended_s)
            tell(f"R8: {way}: run {run + 1} of {size.runs}: all answer again after {back_s[-1]:.1f} s")
    return (
        {"row": "R8", "fault": f"packets lost for {CUT_S:g} s between ingress and 2 of 4 replicas, {way}"}
        | {"runs": size.runs}
        | judged(fresh.answers, fresh.reference)
        | pauses_after(running, fresh, struck_s)
        | spread("answers_after_mending_s", back_s)
        | {"left_over": await running.left_over()}
    )
