"""Sends bodies with one field filled to its limit to a live service, one by one, while an honest stream runs.

    python -m benchmarks.service.fields --only /v1/chat

Starts the service as `make serve` does and reads the fields from its OpenAPI document (`field_bodies.py`). Lists and
texts of embeddings and rankings also go to a simulated model with vectors of 4,096 numbers, those of prompts to nested
pipelines. The largest answer is also streamed to a client that does not read for some seconds. A body over a target is
sent again up to twice, unless it took long, and its lowest figures count: other processes cause pauses too. Progress
and a table of bodies over a target go to stderr. The last line of stdout is one JSON object. Its `stall_ms` to
`grown_mib` are the largest of all bodies:

    calm          the longest pause of the honest stream and the longest step while only ordinary long prompts run
    statuses      the number of answers by status
    stall_ms      how long the event loop of the ingress was blocked
    pause_ms      the time between two tokens of the honest stream
    step_ms       the upper bound, in the histogram of /metrics, of the longest step of the model
    cpu_s         the CPU time of all processes of the service
    grown_mib     the growth of the memory of one process over one body
    over          the bodies over a target, with their figures
    grown_at_end_mib   the growth of the memory of each process over all bodies

Targets: no stall (50 ms), pauses of 100 ms, steps of 1.5 times the calm ones, 100 MiB; a status of 500 or above fails.
Exits with 1 if a body is over a target.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import socket
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from app.api.prepared_request import RequestLimits
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.http_call import Target, call
from benchmarks.harness.processes import Process, cpu_between, resident_mib
from benchmarks.harness.service import Service, got, scraped, service, with_tools
from benchmarks.service.field_bodies import LARGEST_ANSWER, FieldBody, field_bodies
from benchmarks.service.hostile_requests import post

MODEL_NAME, VECTORS_NAME = "swept", "vectors"
EMBEDDING_SIZE = 4096
# The nested pipeline routes by length to an ensemble of two answers; the ranked one first ranks the documents.
_NESTED_NAME, _RANKED_NAME = "nested", "ranked"
_OF_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score")
_OF_PROMPTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/batch")
_UNREAD_S = 5.0
MAX_PAUSE_MS, MAX_STEP_RATIO, MAX_GROWN_MIB = 100.0, 1.5, 100.0
_TITLE = "ray::ServeReplica:carousel:"
_TIMEOUT_S = 60.0
_SETTLE_S = 0.1  # the service needs this time to notice a blocked loop, and the honest stream to show the pause
_CALM_S = 5.0
_NUM_TRIES, _LONG_S = 3, 2.0  # a body that takes this long is not slow by accident
_TELL_EVERY = 50
_BOUND = re.compile(r'le="([^"]+)"')
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The effects of one body on the service."""

    status: str
    seconds: float
    stall_ms: float
    pause_ms: float
    step_ms: float
    cpu_s: float
    grown_mib: float
    grown: str  # the process that grew most

    def over(self, calm: Cost) -> list[str]:
        """Return the names of the targets that this cost exceeds."""
        limits = {
            "stall_ms": 0.0, "pause_ms": MAX_PAUSE_MS, "grown_mib": MAX_GROWN_MIB,
            "step_ms": MAX_STEP_RATIO * calm.step_ms,
        }  # fmt: skip
        found = [name for name, limit in limits.items() if getattr(self, name) > limit]
        return [*found, *(["status"] if self.status >= "500" and self.status != "unread" else [])]


@dataclass(frozen=True, slots=True)
class SentBody:
    """A body encoded for an endpoint."""

    name: str
    path: str
    data: bytes
    is_read: bool = True  # whether the client reads the answer


@dataclass(slots=True)
class HonestStream:
    """Runs one stream after another and records the arrival times of all tokens."""

    target: Target
    max_tokens: int
    arrived_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    async def keep_streaming(self) -> None:
        """Stream until cancelled."""
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": [300, 301, 302], "max_tokens": self.max_tokens}
        request = self.target.request("completions", body | {"ignore_eos": True, "stream": True})
        while True:
            with suppress(OSError):
                await call(self.target, request, self)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Reader`."""
        self.statuses[status] += 1

    def body(self, data: bytes, *, at_s: float) -> None:
        """See `Reader`."""
        self.arrived_s.append(at_s)

    def longest_pause_s(self, from_s: float) -> float:
        """Return the longest time between two tokens since `from_s`, with the wait that is still going on."""
        first = max(0, bisect_left(self.arrived_s, from_s) - 1)
        times = [*self.arrived_s[first:], time.perf_counter()]
        return max((after - max(from_s, before) for before, after in pairwise(times)), default=0.0)


class Sweep:
    """Sends bodies one after another and measures the cost of each. Runs in one event loop."""

    def __init__(self, running: Service, honest: HonestStream) -> None:
        self._running = running
        self._honest = honest
        self.statuses: Counter[str] = Counter()

    async def cost(self, sent: SentBody) -> Cost:
        """Send one body, wait for its answer, and return its cost."""
        before, metrics = self._running.processes(), await asyncio.to_thread(scraped, self._running.target)
        memory = resident(before)
        await asyncio.sleep(_SETTLE_S / 2)
        began_s = time.perf_counter()
        send = _post if sent.is_read else _post_and_read_nothing
        status = await asyncio.to_thread(send, self._running.target, sent.path, sent.data)
        seconds = time.perf_counter() - began_s
        await asyncio.sleep(_SETTLE_S)
        pause_s = self._honest.longest_pause_s(began_s)
        spent = cpu_between(before, self._running.processes())
        grown = {title: mib - memory.get(title, mib) for title, mib in resident(self._running.processes()).items()}
        after = await asyncio.to_thread(scraped, self._running.target)
        self.statuses[status] += 1
        most = max(grown, key=grown.__getitem__)
        return Cost(
            status=status,
            seconds=round(seconds, 3),
            stall_ms=round(1000 * (_stalled_s(after) - _stalled_s(metrics)), 1),
            pause_ms=round(1000 * pause_s, 1),
            step_ms=1000 * longest_step_s(metrics, after),
            cpu_s=round(sum(spent.values()), 2),
            grown_mib=round(grown[most], 1),
            grown=most,
        )

    async def calm(self, max_model_len: int) -> Cost:
        """Return the highest figures of ordinary long prompts, sent for some seconds."""
        long: dict[str, Any] = {"model": MODEL_NAME, "prompt": [300] * (max_model_len // 2), "max_tokens": 8}
        costs, ends_s = list[Cost](), time.perf_counter() + _CALM_S
        while time.perf_counter() < ends_s:
            long["cache_salt"] = str(len(costs))
            costs.append(await self.cost(SentBody("calm", "/v1/completions", json.dumps(long).encode())))
        return _of_all(costs, max)

    async def least_cost(self, sent: SentBody, calm: Cost) -> Cost:
        """Return the lowest figures of several tries if the first exceeds a target; memory is that of the first try."""
        costs = [await self.cost(sent)]
        while (
            costs[-1].over(calm) not in ([], ["grown_mib"]) and len(costs) < _NUM_TRIES and costs[0].seconds < _LONG_S
        ):
            costs.append(await self.cost(sent))
        return costs[0] if len(costs) == 1 else _of_all(costs, min, grown_mib=costs[0].grown_mib)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments, is_bad=lambda figures: bool(figures["over"]))


def measured(given: argparse.Namespace) -> dict[str, Any]:
    with (
        with_tools(Path(given.model)) as model,
        tempfile.TemporaryDirectory() as folder,
        service(application(given, str(model), folder)) as running,
    ):
        return asyncio.run(sweep(running, given))


def application(given: argparse.Namespace, model: str, folder: str) -> dict[str, Any]:
    """The application's `args`."""
    simulated = {"simulated": {"step_ms": given.step_ms}} if given.step_ms else {}
    of_vectors = {"simulated": {"step_ms": 1, "embedding_size": EMBEDDING_SIZE}}
    together = {"kind": "ensemble", "models": [MODEL_NAME, MODEL_NAME]}
    short, long = {"model": "together", "max_prompt_tokens": 1}, {"model": "together"}
    return {
        "models": [
            {
                "name": MODEL_NAME,
                # A replica's memory grows when its KV blocks are first used; this bounds the growth.
                "engine": {"model": {"path": model, **simulated}, "cache": {"memory_gib": 0.05}},
                "replicas": {"num_replicas": 1, "num_cpus": 0.1, "drain_timeout_s": 5},
                "tool_parser": "hermes",
                "pooling": "mean",
            },
            {
                "name": VECTORS_NAME,
                "engine": {"model": {"path": model, **of_vectors}, "scheduler": {"max_running": 128}},
                "replicas": {"num_replicas": 1, "num_cpus": 0.1, "drain_timeout_s": 5},
                "pooling": "last",
            },
        ],
        "pipelines": [
            {"name": "together", "steps": [together]},
            {"name": _NESTED_NAME, "steps": [{"kind": "route", "cases": [short, long]}]},
            {
                "name": _RANKED_NAME,
                "steps": [
                    {"kind": "rerank", "model": VECTORS_NAME, "top_n": 1000},
                    {"kind": "generate", "model": _NESTED_NAME},
                ],
            },
        ],
        "batches": {"path": folder},
    }


async def sweep(running: Service, given: argparse.Namespace) -> dict[str, Any]:
    """Send all chosen bodies one after another and return the figures of the module docstring."""
    document, models = (json.loads(got(running.target, path)) for path in ("/openapi.json", "/v1/models"))
    [max_model_len] = [each["max_model_len"] for each in models["data"] if each["id"] == MODEL_NAME]
    honest = HonestStream(running.target, max_model_len // 2)
    streaming = asyncio.create_task(honest.keep_streaming())
    sends = Sweep(running, honest)
    calm = await sends.calm(max_model_len)
    memory = resident(running.processes())
    costs: dict[str, Cost] = {}
    ends_s = time.monotonic() + given.minutes * 60
    for sent in _chosen(document, given, max_model_len):
        if time.monotonic() > ends_s:
            tell(f"the time is over before {sent.name}")
            break
        costs[sent.name] = await sends.least_cost(sent, calm)
        if len(costs) % _TELL_EVERY == 0:
            tell(f"{len(costs):,} bodies, {sum(bool(cost.over(calm)) for cost in costs.values())} over a target")
    grown = {title: round(mib - memory.get(title, mib), 1) for title, mib in resident(running.processes()).items()}
    streaming.cancel()
    await asyncio.wait({streaming})
    tell(_table({name: cost for name, cost in costs.items() if cost.over(calm)}))
    return figures_of(costs, calm) | {"grown_at_end_mib": grown, "honest": dict(honest.statuses)}


def figures_of(costs: Mapping[str, Cost], calm: Cost) -> dict[str, Any]:
    """Return the largest figures, and the bodies over a target."""
    most = _of_all([*costs.values(), calm], max)
    names = ("stall_ms", "pause_ms", "step_ms", "cpu_s", "grown_mib")
    return {
        "bodies": len(costs),
        "statuses": dict(sorted(Counter(cost.status for cost in costs.values()).items())),
        "calm": {"pause_ms": calm.pause_ms, "step_ms": calm.step_ms},
        **{name: getattr(most, name) for name in names},
        "over": [
            {"body": body, "targets": cost.over(calm)} | {name: getattr(cost, name) for name in ("status", *names)}
            for body, cost in costs.items()
            if cost.over(calm)
        ],
    }


def resident(processes: Mapping[int, Process]) -> dict[str, float]:
    """Return the memory of each process of the application in MiB, by title and pid."""
    return {
        f"{process.title.removeprefix(_TITLE)} {pid}": resident_mib(pid)
        for pid, process in processes.items()
        if process.title.startswith(_TITLE)
    }


def _chosen(document: Mapping[str, Any], given: argparse.Namespace, length: int) -> Iterator[SentBody]:
    """Yield the bodies of all sizes; a body that is equal at two sizes comes once."""
    seen: set[bytes] = set()
    for size in given.sizes:
        for body in field_bodies(document, size=size, max_model_len=length):
            if not re.search(given.only, body.name):
                continue
            for sent in sent_bodies(body):
                if sent.data not in seen:
                    yield sent
                if len(sent.data) < min(given.sizes):
                    seen.add(sent.data)


def sent_bodies(body: FieldBody) -> Iterator[SentBody]:
    """Yield a body for the model, the vectors model or the pipelines, and for a client that does not read."""
    filled = body.value

    def sent(value: dict[str, Any], suffix: str = "", *, is_read: bool = True) -> SentBody:
        data = json.dumps({"model": MODEL_NAME} | value, ensure_ascii=False).encode()
        return SentBody(f"{body.name}{suffix}, {len(data):,} bytes", body.path, data, is_read)

    yield sent(filled)
    if "model" in filled:
        return
    if body.path in _OF_VECTORS and body.is_full:
        yield sent(filled | {"model": VECTORS_NAME}, " of long vectors")
    if body.path in _OF_PROMPTS and body.is_full:
        name = _RANKED_NAME if filled.get("documents") else _NESTED_NAME
        yield sent(filled | {"model": name}, " to pipelines")
    if body.name.endswith(LARGEST_ANSWER) and "max_tokens" in filled:
        plain = {name: value for name, value in filled.items() if "logprobs" not in name and name != "echo"}
        yield sent(plain | {"stream": True}, " unread", is_read=False)


def _of_all(costs: Sequence[Cost], choose: Callable[[Any], Any], **given: Any) -> Cost:
    """Combine several costs: `choose` picks each figure by itself."""
    names = ("seconds", "stall_ms", "pause_ms", "step_ms", "cpu_s", "grown_mib")
    chosen = {name: choose(getattr(cost, name) for cost in costs) for name in names}
    return Cost(**{**chosen, "status": costs[0].status, "grown": costs[0].grown, **given})


def _table(costs: Mapping[str, Cost]) -> str:
    names = ("status", "seconds", "stall_ms", "pause_ms", "step_ms", "cpu_s", "grown_mib")
    rows = [[body, *(str(getattr(cost, name)) for name in names)] for body, cost in costs.items()]
    return table(["field", *names], rows)


def _post(target: Target, path: str, data: bytes) -> str:
    """Return the status of the answer, "timeout" or "closed". Blocks: call it in a thread, beside the honest stream."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_TIMEOUT_S)
    try:
        with suppress(ConnectionError):  # the service may answer before all bytes are sent
            connection.request("POST", path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while answer.read(_MIB):
            pass
        return str(answer.status)
    except TimeoutError:
        return "timeout"
    except (OSError, http.client.HTTPException):
        return "closed"
    finally:
        connection.close()


def _post_and_read_nothing(target: Target, path: str, data: bytes) -> str:
    """Send a body, wait without reading the answer, then disconnect. Blocks: call it in a thread."""
    with suppress(OSError), socket.create_connection((target.host, target.port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(path, data))
        time.sleep(_UNREAD_S)
    return "unread"


Samples = Sequence[tuple[str, str, float]]


def _stalled_s(samples: Samples) -> float:
    """Return the seconds in which the event loops of all ingresses were blocked since their start."""
    name = "carousel_loop_stalled_seconds_total"
    return sum(value for found, labels, value in samples if found == name and 'process="ingress"' in labels)


def longest_step_s(before: Samples, after: Samples) -> float:
    """Return the upper histogram bound of the longest step of MODEL_NAME between two samples.

    Steps of the vectors model do not count: requests to MODEL_NAME do not wait for them.
    """
    steps: Counter[float] = Counter()
    for samples, sign in ((before, -1), (after, 1)):
        for name, labels, value in samples:
            is_step = name == "carousel_step_seconds_bucket" and f'model_name="{MODEL_NAME}"' in labels
            if is_step and (bound := _BOUND.search(labels)):
                steps[float(bound[1])] += sign * round(value)
    return min((bound for bound, count in steps.items() if count == max(steps.values())), default=0.0)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.fields", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, metavar="MS", help="replace steps by sleeps of this time; 0: compute them"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="bodies whose name (path, field, filling) matches")
    parser.add_argument(
        "--sizes",
        type=positive,
        nargs="+",
        default=[RequestLimits().max_body_bytes - 2**18, 8192],
        metavar="BYTES",
        help="sizes of a whole body",
    )
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="send no body after this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
