"""Row C3: a client that is gone without a word: its host lost its power or its network."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import Any

from benchmarks.chaos.networks import HERE, Host, own_network, set_tcp_retries, why_no_networks
from benchmarks.chaos.stage import Size, Stage, application, stage
from benchmarks.chaos.traffic import Asked, alike
from benchmarks.chaos.verdict import spread
from benchmarks.harness.command import tell
from benchmarks.harness.service import Layout

_STEP_S = 0.1
_NUM_TOKENS = 300  # half a minute
_HEARD_BYTES = 2_000  # some events, then it is gone
_RETRIES = (15, 5)  # the default, and what no wide network should have
_MAX_RUNS = 5  # they hardly differ: it is one timer of the kernel


async def vanish(size: Size) -> list[dict[str, Any]]:
    """C3: a client on another host vanishes in mid-stream; how long its request is worked on. Needs root."""
    reason = why_no_networks()
    if reason is not None:
        return [{"row": "C3", "fault": "a client vanishes without a word", "skipped": reason}]
    plain = application(num_replicas=1, step_ms=_STEP_S * 1000, end_probability=0)
    config = plain | {"api": {"allow_unauthenticated": True}}  # in a network without other hosts
    rows = []
    with own_network() as host, stage(config, layout=Layout(host="0.0.0.0")) as running:
        for retries in _RETRIES:
            set_tcp_retries(retries)
            rows.append(await _vanishing(running, host, min(size.runs, _MAX_RUNS), retries))
    return rows


async def _vanishing(running: Stage, host: Host, runs: int, retries: int) -> dict[str, Any]:
    [asked] = alike(1, num_tokens=_NUM_TOKENS)
    freed_s = []
    for run in range(runs):
        freed_s.append(await freed_after_s(running, host, asked))
        tell(f"C3: tcp_retries2 {retries}: run {run + 1} of {runs}: free after {freed_s[-1]:.1f} s")
    return (
        {"row": "C3", "fault": f"a client vanishes in mid-stream, tcp_retries2 {retries}", "runs": runs}
        | {"seconds_of_answer_left": round(_NUM_TOKENS * _STEP_S)}
        | spread("freed_after_s", freed_s)
        | {"left_over": await running.left_over()}
    )


async def freed_after_s(running: Stage, host: Host, asked: Asked) -> float:
    """Seconds from the moment when a client's host fell silent until no replica has anything of its request."""
    target = replace(running.target, host=HERE)
    with host.visited():
        client = socket.create_connection((target.host, target.port))
    with client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, target.request("completions", json.dumps(dict(asked.body)).encode()))
        heard = 0
        while heard < _HEARD_BYTES:
            heard += len(await loop.sock_recv(client, 1024))
        host.lose_what_it_sends()
        vanished_s = time.perf_counter()
        try:
            while (await asyncio.to_thread(running.holdings)).num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return time.perf_counter() - vanished_s
        finally:
            host.mend()
