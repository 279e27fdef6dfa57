"""Connects ingresses to many replicas over real sockets: measures the idle cost, and the streams during events."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import uvloop

from app.child_process import child_command, child_environment
from app.engine.request import Address
from benchmarks.harness import machine
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.processes import family, resident_mib
from benchmarks.service.thousand_ingress import DRAIN_S, STEP_MS, Ingress, figures_of
from deployments.open_files import allow_many_files
from deployments.serve.process import collect_in_pieces

NUM_PROCESSES = 10  # each has a tenth of the replicas
IDLE_S = 10.0
BEGIN_S, EVENT_S = 20.0, 24.0  # time in which the streams begin; time until the event
TOLD_AFTER_S = 2.0  # from a kill until Serve reports that the replicas are gone
UPDATE_FROM_S, UPDATE_EVERY_S = 12.0, 2.5  # when the first tenth is replaced; time between two tenths
STREAMS_OF_ONE = 20  # streams for each replica, with one ingress
STREAMS_OF_MANY = 5  # streams for each replica, with many ingresses: each sends its own frames, all on two cores
COUNT_AFTER_S = 4.0  # from the loss of ingresses until the requests of replicas are counted

_keep_collected = cache(collect_in_pieces)  # call it once in this process, for any number of events

Processes = Sequence["subprocess.Popen[str]"]
Event = Callable[[Ingress, Processes, Sequence[Sequence[str]]], Coroutine[Any, Any, None]]


def sockets_figures(
    num_replicas: int, events: Sequence[str], num_streams: int | None, num_ingresses: Sequence[int], seed: int
) -> dict[str, Any]:
    """Return the figures of each event. Each event has replicas of its own."""
    allow_many_files()
    figures: dict[str, Any] = {}
    for event in events:
        if event != "ingresses":
            streams = num_streams or STREAMS_OF_ONE * num_replicas
            with (
                replica_processes(num_replicas, streams, num_sets=2 if event == "update" else 1) as replicas,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                figures[event] = runner.run(_one_ingress(event, *replicas, streams, seed))
            tell(f"{num_replicas} replicas, {streams} streams, {event}: {figures[event]}")
            continue
        for number in num_ingresses:
            streams = num_streams or STREAMS_OF_MANY * num_replicas
            with replica_processes(num_replicas, streams) as replicas:
                figures[f"{number} ingresses"] = _many_ingresses(number, *replicas, streams)
            tell(f"{num_replicas} replicas, {streams} streams, {number} ingresses: {figures[f'{number} ingresses']}")
    return figures


@contextmanager
def replica_processes(
    num_replicas: int, num_streams: int, num_sets: int = 1
) -> Iterator[tuple[list[subprocess.Popen[str]], list[dict[str, Address]]]]:
    """Start replica processes; yield them, and the addresses by replica id of each. A set has `num_replicas`."""
    share, running = -(-num_replicas // NUM_PROCESSES), max(8, 2 * num_streams // num_replicas)
    command = child_command("benchmarks.service.thousand_replicas", "--number", str(share), "--step-ms", str(STEP_MS),
                            "--running", str(running))  # fmt: skip
    processes = [_child(command) for _ in range(num_sets * NUM_PROCESSES)]
    try:
        addresses = [[Address._make(address) for address in _said(each)] for each in processes]
        yield (
            processes,
            [
                {f"replica-{at:02d}-{number:04d}": address for number, address in enumerate(group)}
                for at, group in enumerate(addresses)
            ],
        )
    finally:
        _end(processes)


def _child(command: Sequence[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=child_environment(), text=True, **pipes)


def _said(child: subprocess.Popen[str]) -> Any:
    """Return the next line of a child, decoded from JSON. Raises BenchmarkError if the child has ended."""
    assert child.stdout is not None, "it is a pipe"
    line = child.stdout.readline()
    if not line:
        raise BenchmarkError("a process of replicas or of an ingress ended too early")
    return json.loads(line)


def _tell(children: Processes, line: str) -> None:
    for child in children:
        assert child.stdin is not None, "it is a pipe"
        child.stdin.write(line + "\n")
        child.stdin.flush()


def _end(processes: Processes) -> None:
    for each in processes:
        each.kill()
    for each in processes:
        each.communicate()


# ---------------------------------------------------------------------- one ingress


async def _one_ingress(
    event: str, processes: Processes, addresses: Sequence[dict[str, Address]], num_streams: int, seed: int
) -> dict[str, Any]:
    """Run an ingress over the first set of replicas in this process, and its streams during the event."""
    ingress = Ingress({key: each for group in addresses for key, each in group.items()}, name="0", seed=seed)
    groups = [list(each) for each in addresses]
    members = [each for group in groups[:NUM_PROCESSES] for each in group]
    memory_mib = resident_mib(os.getpid())
    figures: dict[str, Any] = {"connected_after_s": await ingress.connect(members)}
    memory_mib = resident_mib(os.getpid()) - memory_mib
    gc.collect()
    gc.freeze()  # as an ingress does
    _keep_collected()
    if event == "stay":
        figures["kb_per_replica"] = round(memory_mib * 2**20 / len(members) / 1e3, 1)
        num_bytes, cpu_s = ingress.transport.num_bytes, machine.own_cpu_s()
        await asyncio.sleep(IDLE_S)
        figures["idle_cpu_of_a_core"] = round((machine.own_cpu_s() - cpu_s) / IDLE_S, 4)
        figures["idle_bytes_per_replica_s"] = round(
            (ingress.transport.num_bytes - num_bytes) / len(members) / IDLE_S, 1
        )
    happening = asyncio.create_task(EVENTS[event](ingress, processes, groups))
    figures |= figures_of([await ingress.play(num_streams, BEGIN_S)])
    await happening
    ingress.fleet.close()
    return figures | {"moved": dict(ingress.moved)}


async def _stay(ingress: Ingress, processes: Processes, groups: Sequence[Sequence[str]]) -> None:
    """Do nothing: all replicas stay."""


def _lose(num_processes: int) -> Event:
    async def lose(ingress: Ingress, processes: Processes, groups: Sequence[Sequence[str]]) -> None:
        await asyncio.sleep(EVENT_S)
        for each in processes[:num_processes]:
            each.kill()
        await asyncio.sleep(TOLD_AFTER_S)
        ingress.registry.set_replicas([each for group in groups[num_processes:] for each in group])

    return lose


async def _update(ingress: Ingress, processes: Processes, groups: Sequence[Sequence[str]]) -> None:
    """Replace one tenth after the other. Old replicas leave at once, and are killed after their time to drain."""
    await asyncio.sleep(UPDATE_FROM_S)
    loop, current = asyncio.get_running_loop(), list(groups[:NUM_PROCESSES])
    for number in range(NUM_PROCESSES):
        current[number] = groups[NUM_PROCESSES + number]
        ingress.registry.set_replicas([each for group in current for each in group])
        loop.call_later(DRAIN_S, processes[number].kill)
        await asyncio.sleep(UPDATE_EVERY_S)
    await asyncio.sleep(DRAIN_S)


EVENTS: dict[str, Event] = {"stay": _stay, "tenth": _lose(1), "rack": _lose(3), "update": _update}


# ---------------------------------------------------------------------- many ingresses


def _many_ingresses(
    number: int, replicas: Processes, addresses: Sequence[dict[str, Address]], num_streams: int
) -> dict[str, Any]:
    """Start each ingress in a process; kill half of them, rounded down, during streams; return the figures."""
    known = json.dumps({key: each for group in addresses for key, each in group.items()})
    num_connections = number * sum(map(len, addresses))
    cpu_s = _cpu_s(replicas)
    time.sleep(IDLE_S)
    alone_cpu_s, alone_mib = _cpu_s(replicas) - cpu_s, _memory_mib(replicas)
    ingresses = [
        _child(child_command("benchmarks.service.thousand_ingress", "--name", str(at),
                             "--streams", str(-(-num_streams // number)), "--begin-s", str(BEGIN_S)))
        for at in range(number)
    ]  # fmt: skip
    try:
        _tell(ingresses, known)
        figures: dict[str, Any] = {"connected_after_s": max(_said(each)["connected_after_s"] for each in ingresses)}
        time.sleep(IDLE_S / 2)
        cpu_s, ingress_cpu_s = _cpu_s(replicas), _cpu_s(ingresses)
        time.sleep(IDLE_S)
        connected_cpu_s = _cpu_s(replicas) - cpu_s - alone_cpu_s
        figures |= {
            "idle_cpu_of_an_ingress": round((_cpu_s(ingresses) - ingress_cpu_s) / IDLE_S / number, 4),
            "idle_cpu_of_1000_connections_at_replicas": round(connected_cpu_s / IDLE_S / num_connections * 1000, 4),
            "replica_kb_per_connection": round((_memory_mib(replicas) - alone_mib) * 2**20 / num_connections / 1e3, 1),
        }
        _tell(ingresses, "play")
        time.sleep(EVENT_S)
        dying, living = ingresses[: number // 2], ingresses[number // 2 :]
        for each in dying:
            each.kill()
        time.sleep(COUNT_AFTER_S)
        _tell(living, "count")
        counts = [_said(each) for each in living]
        figures |= {
            "requests_after_the_loss": sum(each["own"] for each in counts),
            "requests_at_replicas": max(each["reported"] for each in counts),
        }
        played = [_said(each) for each in living]
        time.sleep(IDLE_S / 5)
        _tell(living, "count")
        figures["requests_that_stay"] = max(_said(each)["reported"] for each in living)
        for name in ("whole", "not_whole", "different"):
            figures[name] = sum(each[name] for each in played)
        for name in ("longest_pause_p99_s", "longest_stall_ms", "cpu_us_per_token"):
            figures[name] = max(each[name] for each in played)
        return figures
    finally:
        _end(ingresses)


def _cpu_s(processes: Processes) -> float:
    known = family(os.getpid())
    return sum(known[each.pid].cpu_s for each in processes)


def _memory_mib(processes: Processes) -> float:
    return sum(resident_mib(each.pid) for each in processes)
