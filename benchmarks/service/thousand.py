"""Runs the service's own code at the size of a large fleet: `python -m benchmarks.service.thousand`.

Seven parts, each for fleets of `--replicas`:

    dispatch   the registry of one ingress with reports and cached prefixes of all replicas. Microseconds of one
               decision (p50, p99) by policy, and of one report that comes with a frame; milliseconds to replace one
               replica; kilobytes of memory for each replica
    quality    conversations through `--ingresses` in simulated time (the service's own dispatch and engine, a model
               that only counts), at the share `--load` of the fleet's capacity. Mean and p99 time to the first token
               over those of a perfect dispatcher: one ingress that considers all replicas for each request and has
               current reports. Share of prompt tokens that were cached
    newcomer   conversations as in quality through the first number of `--ingresses`; at half time one more ingress
               starts. Time to the first token and expected cached share of the prompts, by seconds since the start,
               for requests through the new ingress and through the other ingresses
    hot        like quality, but half of all conversations share a prefix of 1,000 tokens
    adapters   like quality, but each conversation has one of 200 LoRA adapters; the n-th is requested 1/n as often as
               the first. A replica holds 8 adapters; a load takes 0.3 s. Loads a second, share of requests with a
               loaded adapter, time to the first token over that of the same conversations without adapters
    sockets    ingresses with a connection to each replica over real sockets; replicas are simulated engines in other
               processes. Seconds until all are connected, CPU of the idle ingress, bytes a second from each replica.
               Then concurrent `--streams` during each `--event`: all replicas stay (stay); a tenth (tenth) or a rack of
               30% (rack) is killed; all are replaced, a tenth every 2.5 s (update); half of the `--ingresses`
               processes are killed (ingresses). Longest pause of each stream; longest stall of an event loop of an
               ingress
    metrics    one ingress with the same connections answers /metrics, without Serve. Milliseconds of CPU for one
               exposition, without and with the answer over HTTP; the longest stall of the event loop, and the most CPU
               that its thread used in a stall (independent of other processes); bytes of text; kilobytes stored, and
               at the peak

Progress goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from app.engine.prefix import digests_of
from app.engine.request import Request, SamplingParams
from app.fleet import ReplicaRegistry
from app.fleet.dispatch import GroupChooser, PrefixChanges, ReplicaReport, make_policy
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.processes import resident_mib
from benchmarks.service.thousand_quality import HOT_TOKENS, adapter_figures, newcomer_figures, quality_figures
from benchmarks.service.thousand_sockets import EVENTS, sockets_figures

POLICIES = ("round_robin", "least_loaded", "prefix_affinity")
PARTS = ("dispatch", "quality", "newcomer", "hot", "adapters", "sockets", "metrics")
_BLOCK = 16
_PROMPT_TOKENS = 512
_PREFIXES_OF_ONE = 1_500  # known prefixes of a replica with about 6,000 blocks
_NUM_DECISIONS = 2_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.thousand", __doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--replicas", type=positive, nargs="+", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--ingresses", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="simulated time")
    parser.add_argument(
        "--streams", type=positive, metavar="N", help="streams of sockets (20 a replica; 5 for ingresses)"
    )
    parser.add_argument("--event", choices=(*EVENTS, "ingresses"), nargs="+", default=[*EVENTS, "ingresses"])
    parser.add_argument("--seed", type=int, default=1)
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each part, by the number of replicas."""
    parts: dict[str, Callable[[int], dict[str, Any]]] = {
        "dispatch": lambda number: dispatch_figures(number, given.seed),
        "quality": lambda number: quality_figures(number, given),
        "newcomer": lambda number: newcomer_figures(number, given),
        "hot": lambda number: quality_figures(number, given, hot_tokens=HOT_TOKENS),
        "adapters": lambda number: adapter_figures(number, given),
        "sockets": lambda number: sockets_figures(number, given.event, given.streams, given.ingresses, given.seed),
        "metrics": lambda number: _metrics_figures(number, given.seed),
    }
    return {part: {f"{number} replicas": parts[part](number) for number in given.replicas} for part in given.part}


def _metrics_figures(num_replicas: int, seed: int) -> dict[str, Any]:
    from benchmarks.service.thousand_metrics import metrics_figures  # imports Ray; no other part needs Ray

    return metrics_figures(num_replicas, seed)


# ---------------------------------------------------------------------- dispatch


def dispatch_figures(num_replicas: int, seed: int) -> dict[str, Any]:
    """Measure one registry for each policy. All figures but the decision times are those of the last policy."""
    figures: dict[str, Any] = {}
    for policy in POLICIES:
        gc.collect()
        before_mib = resident_mib(os.getpid())
        rng = random.Random(seed)
        registry, chains = filled_registry(policy, num_replicas, rng)
        gc.collect()
        memory = (resident_mib(os.getpid()) - before_mib) * 2**20
        times = np.array(list(_decided(registry, chains, rng))) * 1e6
        figures[policy] = {
            "p50_us": round(float(np.median(times)), 1),
            "p99_us": round(float(np.percentile(times, 99)), 1),
        }
        figures["report_us"] = round(_time_of_reports(registry, rng) * 1e6, 1)
        figures["replaced_ms"] = round(_time_of_replacement(registry) * 1e3, 2)
        figures["kb_per_replica"] = round(memory / num_replicas / 1e3, 1)
        tell(f"{num_replicas} replicas, {policy}: {figures[policy]}, {figures['kb_per_replica']} kB for each replica")
        del registry, chains
    return figures


def filled_registry(
    policy: str, num_replicas: int, rng: random.Random
) -> tuple[ReplicaRegistry, list[tuple[int, ...]]]:
    """Return a registry as an ingress has it after a while, and the prompts that replicas have cached."""
    registry = ReplicaRegistry(make_policy(policy, rng), GroupChooser([]), block_size=_BLOCK, clock=time.monotonic)
    replica_ids = [f"replica-{number:04d}" for number in range(num_replicas)]
    registry.set_replicas(replica_ids)
    prompts = []
    for replica_id in replica_ids:
        prompt = tuple(rng.choices(range(1, 50_000), k=_PROMPT_TOKENS))
        prompts.append(prompt)
        chain = digests_of(prompt, salt="", block_size=_BLOCK)
        others = [rng.getrandbits(63) for _ in range(_PREFIXES_OF_ONE - len(chain))]
        registry.note(replica_id, report(rng), PrefixChanges(array("q", [*chain, *others]).tobytes(), is_all=True))
    return registry, prompts


def report(rng: random.Random) -> ReplicaReport:
    """Return the report of a replica with some work."""
    num_requests = rng.randrange(24)
    return ReplicaReport(
        group="", num_requests=num_requests, num_background=0, num_unpreemptible_background=0, max_requests=256,
        max_running=32, num_waiting_tokens=rng.randrange(500), num_kv_tokens=100_000, tokens_per_s=1_000.0,
        ended_per_s=2.0, step_age_s=0.01, num_own=0,
    )  # fmt: skip


def _decided(registry: ReplicaRegistry, prompts: Sequence[tuple[int, ...]], rng: random.Random) -> Iterator[float]:
    """Yield the seconds of each decision. Half of the prompts are cached; a request ends after 500 later arrivals."""
    running: list[str] = []
    for number in range(_NUM_DECISIONS):
        known = rng.random() < 0.5
        prompt = rng.choice(prompts) if known else tuple(rng.choices(range(1, 50_000), k=_PROMPT_TOKENS))
        request = Request(request_id=str(number), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=128))
        began = time.perf_counter()
        registry.place(request, registry.replica_ids)
        yield time.perf_counter() - began
        running.append(request.request_id)
        if len(running) > 500:
            registry.end(running.pop(0), max_tokens=128, num_generated=100)


def _time_of_reports(registry: ReplicaRegistry, rng: random.Random) -> float:
    """Return the mean seconds of one report with eight added and eight evicted prefixes."""
    reports = [(replica_id, report(rng)) for replica_id in rng.choices(registry.replica_ids, k=1_000)]
    held = [array("q", [rng.getrandbits(63) for _ in range(8)]).tobytes() for _ in reports]
    began = time.perf_counter()
    for (replica_id, each), digests in zip(reports, held, strict=True):
        registry.note(replica_id, each, PrefixChanges(held=digests, gone=digests))
    return (time.perf_counter() - began) / len(reports)


def _time_of_replacement(registry: ReplicaRegistry) -> float:
    """Return the mean seconds in which the registry replaces one replica by another."""
    number, began = 20, time.perf_counter()
    for new in range(number):
        registry.set_replicas([*registry.replica_ids[1:], f"replica-new-{new}"])
    return (time.perf_counter() - began) / number


if __name__ == "__main__":
    sys.exit(main())
