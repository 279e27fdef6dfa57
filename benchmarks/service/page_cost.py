"""What an open live page costs: CPU time of replicas and ingress for each token, with viewers and without, in turn.

    python -m benchmarks.service.page_cost --replicas 2 --streams 64 --tokens 200 --step-ms 20 --rounds 24 [--viewers 1]

Starts the service as `make serve` does, with simulated replicas. Each round is so many streams at once, twice: with
`--viewers` readers of `/admin/live`, as open pages are, and without, in the opposite order in every second round. A
viewer has watched for a while before its part of a round begins, and views have ended before a part without any does.
The last line of stdout is one JSON object; for replicas, ingress, and both together:

    without, with    microseconds of CPU for each token: median, mean, and the standard error of the mean
    change           of the means, and the standard error of it, from the differences within each round

`event_bytes` is the mean size of an event as a viewer gets it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.http_call import Target, call
from benchmarks.harness.processes import exact_cpu_s
from benchmarks.harness.service import Service, service
from benchmarks.harness.turns import turns
from benchmarks.service.fleet import WARM_UP_TOKENS, Load, Requests, add_load_options, application, play, uncollected

WITHOUT, WITH = "without", "with"
PARTS = {"replicas": ":replica-", "ingress": ":ingress"}  # by what titles of processes contain
_SETTLE_S = 3.0  # views go on for 2 s after the last viewer
_EVENT = re.compile(rb'data: \{"at":(\d+)')

Costs = dict[str, float]  # microseconds of CPU for each token, by part


class Viewer:
    """Reads the live view as an open page does: stream after stream, each from where the last one ended."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._status = 0
        self._at = 0
        self.num_events = 0
        self.num_bytes = 0

    async def watch(self) -> None:
        """Until it is cancelled. Raises BenchmarkError when it is refused."""
        while True:
            path = f"/admin/live?after={self._at}"
            head = f"GET {path} HTTP/1.1\r\nHost: {self._target.host}:{self._target.port}\r\nConnection: close\r\n\r\n"
            await call(self._target, head.encode(), self)
            if self._status != 200:
                raise BenchmarkError(f"a viewer got the status {self._status} from {path}")

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status

    def body(self, data: bytes, *, at_s: float) -> None:
        times = _EVENT.findall(data)
        self.num_events += len(times)
        self.num_bytes += len(data)
        if times:
            self._at = int(times[-1])


@asynccontextmanager
async def watching(target: Target, num_viewers: int) -> AsyncIterator[list[Viewer]]:
    """So many viewers, meanwhile. Raises BenchmarkError when one of them has ended by itself."""
    viewers = [Viewer(target) for _ in range(num_viewers)]
    tasks = [asyncio.create_task(viewer.watch()) for viewer in viewers]
    try:
        await asyncio.sleep(_SETTLE_S)
        yield viewers
        for task in tasks:
            if task.done():
                raise BenchmarkError(f"a viewer ended: {task.exception()}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start, warm up, measure in turn, stop."""
    load = Load(streams=given.streams, tokens=given.tokens, prompt_tokens=given.prompt_tokens, step_ms=given.step_ms)
    with service(application(given)) as running, uncollected():
        return asyncio.run(drive(running, load, num_viewers=given.viewers, num_rounds=given.rounds))


async def drive(running: Service, load: Load, *, num_viewers: int, num_rounds: int) -> dict[str, Any]:
    """Warm up twice, then the rounds."""
    requests = Requests(running.target, load)
    for _ in range(2):
        await play(running.target, requests, load, tokens=min(load.tokens, WARM_UP_TOKENS))
    costs: dict[str, list[Costs]] = {WITHOUT: [], WITH: []}
    num_events = num_bytes = 0
    for number, name in turns([WITHOUT, WITH], rounds=num_rounds):
        async with watching(running.target, num_viewers if name == WITH else 0) as viewers:
            costs[name].append(await _cost(running, requests, load))
        num_events += sum(viewer.num_events for viewer in viewers)
        num_bytes += sum(viewer.num_bytes for viewer in viewers)
        shown = ", ".join(f"{part} {us:.1f}" for part, us in costs[name][-1].items())
        tell(f"round {number} of {num_rounds}, {name}: {shown} µs of CPU a token")
    if not num_events:
        raise BenchmarkError("the viewers got no events")
    return figures_of(costs) | {"event_bytes": round(num_bytes / num_events)}


async def _cost(running: Service, requests: Requests, load: Load) -> Costs:
    before = _cpu_s(running)
    done = await play(running.target, requests, load, tokens=load.tokens)
    after = _cpu_s(running)
    of_parts = {part: (after[part] - before[part]) * 1e6 / done.num_tokens for part in PARTS}
    return of_parts | {"both": sum(of_parts.values())}


def _cpu_s(running: Service) -> dict[str, float]:
    processes = running.processes().values()
    return {
        part: sum(exact_cpu_s(process.pid) for process in processes if sign in process.title)
        for part, sign in PARTS.items()
    }


def figures_of(costs: Mapping[str, Sequence[Costs]]) -> dict[str, Any]:
    """Sum up the rounds, part by part."""
    return {
        part: _compared([each[part] for each in costs[WITHOUT]], [each[part] for each in costs[WITH]])
        for part in costs[WITHOUT][0]
    }


def _compared(without: Sequence[float], with_viewers: Sequence[float]) -> dict[str, Any]:
    more = [value - base for value, base in zip(with_viewers, without, strict=True)]
    mean = statistics.mean(without)
    return {
        WITHOUT: _summed_up(without),
        WITH: _summed_up(with_viewers),
        "change": round(statistics.mean(more) / mean, 4),
        "change_error": round(_error(more) / mean, 4),
        "change_of_medians": round(statistics.median(with_viewers) / statistics.median(without) - 1, 4),
    }


def _summed_up(values: Sequence[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "mean": statistics.mean(values), "error": _error(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def _error(values: Sequence[float]) -> float:
    """The standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.page_cost", __doc__)
    add_load_options(parser, replicas=2, tokens=200, rounds=24)
    parser.add_argument("--viewers", type=positive, default=1, metavar="N", help="at once, in the parts with viewers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
