"""The service under test: its processes by kind, and the requests and blocks that the service reports to hold."""

from __future__ import annotations

import asyncio
import http.client
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, mixed, with_reference
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import Process, family
from benchmarks.harness.service import Layout, Service, scraped, service, total
from benchmarks.harness.service import application as served

LENGTHS = (30, 120)  # range of output tokens
STEP_MS = 30.0
RECOVERY_TIMEOUT_S = 60.0
MODEL = "models/demo"
_POLL_S = 0.05
_REPLICA = f"ray::ServeReplica:carousel:replica-{MODEL_NAME}"
_INGRESS = "ray::ServeReplica:carousel:ingress"
_BATCHES = "ray::ServeReplica:carousel:batches"
_REPLICA_LABEL = re.compile(r'replica="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Holdings:
    """The requests and blocks that the answering replicas and ingresses hold."""

    replica_ids: frozenset[str]
    num_ingresses: int
    num_missing: int  # processes that did not answer
    held: Mapping[
        str, int
    ]  # requests `in_flight` in ingresses, `running` and `waiting` in replicas; KV `blocks` in use


@dataclass(frozen=True, slots=True)
class Stage:
    """A running service with simulated or real replicas."""

    running: Service
    num_replicas: int
    step_s: float
    nodes: list[int] = field(default_factory=list)  # pids of the nodes that have joined the service

    @classmethod
    def of(cls, application: Mapping[str, Any], running: Service, nodes: list[int] | None = None) -> Stage:
        """Return the stage of a running service; `application`: the `args` of the service."""
        [model] = application["models"]
        step_ms = model["engine"]["model"].get("simulated", {}).get("step_ms", 0.0)
        return cls(running, model["replicas"]["num_replicas"], step_ms / 1000, [] if nodes is None else nodes)

    @property
    def target(self) -> Target:
        return self.running.target

    def replicas(self) -> list[int]:
        """Return the pids of the replicas."""
        return self.named(_REPLICA)

    def ingresses(self) -> list[int]:
        return self.named(_INGRESS)

    def batches(self) -> list[int]:
        """Return the pid of the process that stores batches and responses."""
        return self.named(_BATCHES)

    def ranks(self) -> list[int]:
        """Return the pids of all ranks that run in a process of their own, outside the replica's process."""
        return self.named("app.rank")

    def controllers(self) -> list[int]:
        """Return the pid of Serve's controller, a single process."""
        return [pid for pid, each in self.processes().items() if "ServeController" in each.title]

    def named(self, title: str) -> list[int]:
        """Return the pids of the processes with exactly this title."""
        return sorted(pid for pid, each in self.processes().items() if each.title == title)

    def processes(self) -> dict[int, Process]:
        """Return all processes of the service, on all nodes."""
        found = self.running.processes()
        for node in self.nodes:
            found |= family(node)
        return found

    def holdings(self) -> Holdings:
        """Return the holdings from /metrics. Raises OSError if no ingress answers."""
        samples = scraped(self.target)
        ids = {match[1] for name, labels, _ in samples if name == "carousel_slots_used"
               and (match := _REPLICA_LABEL.search(labels))}  # fmt: skip
        return Holdings(
            frozenset(ids),
            total(samples, "carousel_ingresses"),
            total(samples, "carousel_scrape_missing"),
            {
                "in_flight": total(samples, "carousel_requests_in_flight"),
                "running": total(samples, "carousel_slots_used"),
                "waiting": total(samples, "carousel_queue_requests"),
                "blocks": total(samples, "carousel_kv_blocks") - total(samples, "carousel_kv_blocks_free"),
            },
        )

    async def is_whole(self) -> float:
        """Wait until all replicas run and answer; return the time at which they did, from `time.perf_counter`.

        Raises:
            BenchmarkError: a replica was still missing after a minute.
        """
        deadline = time.perf_counter() + RECOVERY_TIMEOUT_S
        while time.perf_counter() < deadline:
            if len(self.replicas()) == self.num_replicas and await self._all_answer():
                return time.perf_counter()
            await asyncio.sleep(_POLL_S)
        raise BenchmarkError(f"there were not {self.num_replicas} replicas again within {RECOVERY_TIMEOUT_S:.0f} s")

    async def _all_answer(self) -> bool:
        try:
            holdings = await asyncio.to_thread(self.holdings)
        except (OSError, http.client.HTTPException):  # an HTTPException if an answer breaks off
            return False
        return len(holdings.replica_ids) == self.num_replicas and not holdings.num_missing

    async def left_over(self, patience_s: float = 20.0) -> dict[str, int]:
        """Wait until the service holds nothing; return the rest. Call while no client sends requests."""
        deadline = time.perf_counter() + patience_s
        while True:
            held = (await asyncio.to_thread(self.holdings)).held
            if not any(held.values()) or time.perf_counter() > deadline:
                return dict(held)
            await asyncio.sleep(_POLL_S)


@contextmanager
def stage(
    application: Mapping[str, Any], *, with_dashboard: bool = False, layout: Layout | None = None
) -> Iterator[Stage]:
    """Run the service until the end of the block."""
    with service(application, with_dashboard=with_dashboard, layout=layout) as running:
        yield Stage.of(application, running)


@asynccontextmanager
async def under_traffic(
    size: Size,
    *,
    requests: Sequence[Asked] = (),
    lengths: tuple[int, int] = LENGTHS,
    with_dashboard: bool = False,
    layout: Layout | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Stage, Traffic]]:
    """Run a service with these settings of `application`, and get the reference answers to `requests`.

    The default requests are streams of each kind in turn.
    """
    states = {} if settings.get("weights") else {"num_state_slots": size.num_state_slots}
    with stage(
        application(**{"model": size.model} | states | settings), with_dashboard=with_dashboard, layout=layout
    ) as running:
        yield running, await with_reference(running.target, requests or mixed(size.streams, max_tokens=lengths))


def application(
    *,
    num_replicas: int = 3,
    step_ms: float = STEP_MS,
    per_token_ms: float = 0.0,
    end_probability: float = 0.004,
    crash_token_id: int | None = None,
    weights: bool = False,
    is_batch_invariant: bool = True,
    max_running: int = 96,
    max_waiting: int = 96,
    model: str = MODEL,
    num_state_slots: int = 0,
    adapters: Mapping[str, str] = MappingProxyType({}),
    pipelines: Sequence[Mapping[str, Any]] = (),
    batches: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] = MappingProxyType({}),
    **replicas: Any,
) -> dict[str, Any]:
    """Return the `args` of an application with simulated replicas, or with real `weights`, which adapters need.

    num_state_slots: of simulated replicas, as with recurrent layers; 0: no states. adapters: folders by name.
    is_batch_invariant: for real replicas with one rank. replicas: settings of the branch `replicas`.
    """
    costs = {
        "step_ms": step_ms, "per_token_ms": per_token_ms, "end_probability": end_probability,
        "crash_token_id": crash_token_id, "num_state_slots": num_state_slots,
    }  # fmt: skip
    # Ranks on CPUs run transformers' code, which does not guarantee equal bits, so float32 keeps rounding errors small.
    is_batch_invariant &= replicas.get("tensor_parallel", 1) == 1
    computed = {"batch_invariant": True} if is_batch_invariant else {"dtype": "float32"}
    engine = {
        "model": {"path": model} | (computed if weights else {"simulated": costs}),
        "cache": {"num_blocks": 4096, "block_size": 16} | dict(cache),
        "scheduler": {"max_running": max_running, "max_waiting": max_waiting},
    }
    replicas = {"num_replicas": num_replicas, "drain_timeout_s": 30} | replicas
    branches = {"pipelines": list(pipelines)} | ({} if batches is None else {"batches": dict(batches)})
    return served(MODEL_NAME, engine, replicas, {"adapters": dict(adapters)}, **branches)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a row: `runs` faults, `streams` concurrent clients, `minutes` of a row that runs for a time.

    `model` and `num_state_slots` are as in `application`, for the rows that use `under_traffic`.
    """

    runs: int
    streams: int
    seed: int = 0
    minutes: float = 10.0
    model: str = MODEL
    num_state_slots: int = 0

    def source(self, name: str) -> random.Random:
        """Return the random source for a name and this seed, which decides the times and the victims of faults."""
        return random.Random(f"{self.seed} {name}")
