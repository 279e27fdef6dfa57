"""The service's own code at the size of a large fleet: `python -m benchmarks.service.thousand`.

Seven parts, each for fleets of `--replicas`:

    dispatch   the registry of one ingress, with reports and cached prefixes of all replicas. Microseconds of one
               decision (p50, p99) by policy; of one report that comes with a frame; milliseconds when one replica is
               replaced; kilobytes of memory for each replica
    quality    conversations through `--ingresses` in simulated time (the service's own dispatch and engine, a model
               that only counts) at `--load` of what the fleet can compute. The mean and p99 time to the first token
               over those of a perfect dispatcher: one ingress that looks at all replicas for each request, and whose
               reports are never old. The share of prompt tokens that were found cached
    newcomer   the same with the first of `--ingresses`; at half of the time one more ingress starts. The time to the
               first token and the share of prompts that was expected to be cached, by seconds since then, of requests
               through it and through the others
    hot        as quality, and half of all conversations begin with the same 1,000 tokens
    adapters   as quality, and each conversation has one of 200 LoRA adapters, the n-th 1/n as often as the first. A
               replica has 8 loaded; a load takes 0.3 s. Loads a second, the share of requests whose adapter was there,
               the time to the first token over that of the same conversations without adapters
    sockets    ingresses with a connection to each replica, over real sockets; replicas are simulated engines in other
               processes. Seconds until all are connected, CPU of the idle ingress, bytes of each replica a second; then
               `--streams` at once and one `--event` after the other: all replicas stay; a tenth or a rack of 30% is
               killed; all are replaced, a tenth every 2.5 s; and, with `--ingresses` processes, half of the ingresses
               are killed. The longest pause of each stream, and the longest time in which the event loop of an ingress
               did nothing else
    metrics    one ingress with the same connections, which is asked for /metrics, without Serve. Milliseconds of its
               CPU for one exposition, and with its answer over HTTP; the longest time in which its event loop did
               nothing else, and the most CPU that its thread had meanwhile (other processes take no part in that);
               bytes of text; kilobytes that it keeps, and has at most

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

from app.engine.block_pool import digests_of
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
_PREFIXES_OF_ONE = 1_500  # that ingresses know of a replica with some 6,000 blocks
_NUM_DECISIONS = 2_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.thousand", __doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--replicas", type=positive, nargs="+", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--ingresses", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--load", type=float, default=0.8, help="of quality")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of quality, in simulated time")
    parser.add_argument(
        "--streams", type=positive, metavar="N", help="of sockets (20 for each replica; 5 with --event ingresses)"
    )
    parser.add_argument("--event", choices=(*EVENTS, "ingresses"), nargs="+", default=[*EVENTS, "ingresses"])
    parser.add_argument("--seed", type=int, default=1)
    return run_command(parser, measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of each part, by the number of replicas."""
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
    from benchmarks.service.thousand_metrics import metrics_figures  # imports Ray, which the other parts do without

    return metrics_figures(num_replicas, seed)


# ---------------------------------------------------------------------- dispatch


def dispatch_figures(num_replicas: int, seed: int) -> dict[str, Any]:
    """One registry for each policy; the memory is that of the last."""
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
    """A registry as an ingress has it after a while, and prompts that replicas have cached."""
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
    """Of a replica that has some work."""
    num_requests = rng.randrange(24)
    return ReplicaReport(
        group="", num_requests=num_requests, num_background=0, num_unpreemptible_background=0, max_requests=256,
        max_running=32, num_waiting_tokens=rng.randrange(500), num_kv_tokens=100_000, tokens_per_s=1_000.0,
        ended_per_s=2.0, step_age_s=0.01, num_own=0,
    )  # fmt: skip


def _decided(registry: ReplicaRegistry, prompts: Sequence[tuple[int, ...]], rng: random.Random) -> Iterator[float]:
    """Seconds of each decision. Half of the prompts are cached somewhere; a request ends when 500 others have come."""
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
    """Seconds of one, with eight new prefixes and eight that are gone."""
    reports = [(replica_id, report(rng)) for replica_id in rng.choices(registry.replica_ids, k=1_000)]
    held = [array("q", [rng.getrandbits(63) for _ in range(8)]).tobytes() for _ in reports]
    began = time.perf_counter()
    for (replica_id, each), digests in zip(reports, held, strict=True):
        registry.note(replica_id, each, PrefixChanges(held=digests, gone=digests))
    return (time.perf_counter() - began) / len(reports)


def _time_of_replacement(registry: ReplicaRegistry) -> float:
    """Seconds until the registry knows that one replica has gone and another has come."""
    number, began = 20, time.perf_counter()
    for new in range(number):
        registry.set_replicas([*registry.replica_ids[1:], f"replica-new-{new}"])
    return (time.perf_counter() - began) / number


if __name__ == "__main__":
    sys.exit(main())
