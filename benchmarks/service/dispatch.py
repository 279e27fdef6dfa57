"""What a dispatch policy is worth, in a simulated fleet: `python -m benchmarks.service.dispatch`.

Three questions, each at a share of what the fleet could do (`--load`, found by giving one replica much at once):

    equal          how much earlier than round_robin does least_loaded bring the first token, with equal replicas?
    slow           one replica is ten times slower: what share of the requests does it get? Fair: its share of speed
    conversations  turns over a shared system prompt: how much of the prompts is cached under prefix_affinity?

Lengths are those of `make_workload sharegpt`, arrivals are random (Poisson); pauses between turns outlast the arrivals,
so conversations stay below the load asked for. A client asks for 256 tokens; how long a reply is, the ingress learns
from those that have ended. The rules, the ledger and the measured speed are the service's own; replicas and their cost
are `benchmarks/service/simulated_fleet.py`. One line of JSON; times are simulated seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.fleet.dispatch import make_policy
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentile
from benchmarks.make_workload import make_workload
from benchmarks.service.simulated_fleet import Capability, Job, SimulatedFleet, SimulatedIngress, SimulatedReplica

_MAX_TOKENS = 256
_VOCAB_SIZE = 49152
_SLOWDOWN = 10
_KV_TOKENS = 65_536
_NUM_SYSTEM_PROMPTS = 8
_SYSTEM_TOKENS = 256
_CONTEXT_TOKENS = 4096
_MEAN_TURNS = 4
_MEAN_PAUSE_S = 5.0

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fleet and how much is asked of it."""

    num_replicas: int
    num_ingresses: int
    num_requests: int
    load: float
    seed: int
    capability: Capability
    num_slow: int = 0

    @property
    def speed(self) -> float:
        """Of the whole fleet, in replicas of the usual speed."""
        return self.num_replicas - self.num_slow + self.num_slow / _SLOWDOWN


def measure(trial: Trial) -> Figures:
    """The figures of all three questions."""
    return {
        "replicas": trial.num_replicas,
        "ingresses": trial.num_ingresses,
        "requests": trial.num_requests,
        "load": trial.load,
        "slots": trial.capability.max_running,
        "step_ms": round(1000 * trial.capability.base_s, 3),
        "token_ms": round(1000 * trial.capability.token_s, 3),
        "seed": trial.seed,
        "equal": _equal(trial),
        "slow": _slow(replace(trial, num_slow=1)),
        "conversations": _conversations(trial),
    }


def _equal(trial: Trial) -> Figures:
    robin, least = (_serve(trial, policy, _sharegpt(trial)) for policy in ("round_robin", "least_loaded"))
    return {
        "round_robin": _ttft(robin),
        "least_loaded": _ttft(least),
        "mean_ttft_ratio": round(_mean_ttft(least) / _mean_ttft(robin), 3),
    }


def _slow(trial: Trial) -> Figures:
    figures: Figures = {"fair_share": round(1 / _SLOWDOWN / trial.speed, 4)}
    for policy in ("round_robin", "least_loaded"):
        jobs = _serve(trial, policy, _sharegpt(trial))
        share = sum(job.replica_id == _replica_id(0) for job in jobs) / len(jobs)
        figures[policy] = {"slow_share": round(share, 4), **_ttft(jobs)}
    return figures


def _conversations(trial: Trial) -> Figures:
    figures: Figures = {}
    for name in ("round_robin", "least_loaded", "prefix_affinity"):
        jobs = _serve(trial, name, _turns(trial))
        num_cached = sum(job.num_cached for job in jobs)
        figures[name] = {"hit_rate": round(num_cached / sum(len(job.prompt) for job in jobs), 4), **_ttft(jobs)}
    return figures


def _serve(trial: Trial, policy: str, jobs: Sequence[Job]) -> list[Job]:
    tell(f"{trial.num_replicas} replicas, {trial.num_slow} slow, {policy} …")
    usual, slow = trial.capability, trial.capability.slowed(_SLOWDOWN)
    replicas = [
        SimulatedReplica(_replica_id(number), slow if number < trial.num_slow else usual, kv_tokens=_KV_TOKENS)
        for number in range(trial.num_replicas)
    ]
    replica_ids = [replica.replica_id for replica in replicas]
    ingresses = [
        SimulatedIngress(make_policy(policy, random.Random(trial.seed + n)), replica_ids, kv_tokens=_KV_TOKENS)
        for n in range(trial.num_ingresses)
    ]
    return SimulatedFleet(replicas, ingresses, random.Random(trial.seed)).run(jobs)


def _sharegpt(trial: Trial) -> list[Job]:
    """Independent requests at the trial's load."""
    rng = random.Random(trial.seed)
    jobs = [
        _job(line["id"], line["prompt_token_ids"], _tokens(rng, line["max_tokens"]))
        for line in make_workload("sharegpt", seed=trial.seed, num_requests=trial.num_requests)
    ]
    _set_arrivals(jobs, _num_per_s(trial, jobs), rng)
    return jobs


def _turns(trial: Trial) -> list[Job]:
    """The first turns of conversations, each with those that follow; the load is that of all turns, nothing cached."""
    rng = random.Random(trial.seed)
    systems = [_tokens(rng, _SYSTEM_TOKENS) for _ in range(_NUM_SYSTEM_PROMPTS)]
    lines = iter(make_workload("sharegpt", seed=trial.seed, num_requests=trial.num_requests))
    turns: list[Job] = []
    first: list[Job] = []
    last: Job | None = None
    for line in lines:
        history = (*last.prompt, *last.reply) if last is not None else rng.choice(systems)
        job = _job(line["id"], (*history, *line["prompt_token_ids"]), _tokens(rng, line["max_tokens"]))
        job.pause_s = rng.expovariate(1 / _MEAN_PAUSE_S)
        if last is None:
            first.append(job)
        else:
            last.next_turn = job
        turns.append(job)
        is_over = rng.random() < 1 / _MEAN_TURNS or len(job.prompt) + 2 * _MAX_TOKENS > _CONTEXT_TOKENS
        last = None if is_over else job
    _set_arrivals(first, _num_per_s(trial, turns) * len(first) / len(turns), rng)
    return first


def _num_per_s(trial: Trial, jobs: Sequence[Job]) -> float:
    """Requests a second that are the trial's load: what one replica does with all at once, times the fleet's speed."""
    sample = [_job(job.request_id, job.prompt, job.reply) for job in jobs[:500]]
    for number, job in enumerate(sample):
        job.prompt = [-number, *job.prompt[1:]]  # nothing is shared: the load is what it is without a cache
    replica = SimulatedReplica("alone", trial.capability, kv_tokens=_KV_TOKENS)
    for job in sample:
        replica.add(job)
    seconds = 0.0
    while step_s := replica.start_step():
        seconds += step_s
        replica.end_step(seconds)
    return trial.load * trial.speed * len(sample) / seconds


def _set_arrivals(jobs: Sequence[Job], num_per_s: float, rng: random.Random) -> None:
    now = 0.0
    for job in jobs:
        now += rng.expovariate(num_per_s)
        job.arrival_s = now


def _job(request_id: str, prompt: Sequence[int], reply: Sequence[int]) -> Job:
    return Job(request_id=request_id, prompt=prompt, reply=reply, max_tokens=_MAX_TOKENS, arrival_s=0.0)


def _tokens(rng: random.Random, number: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(_VOCAB_SIZE), k=number))


def _ttft(jobs: Sequence[Job]) -> Figures:
    times = [job.ttft_s for job in jobs]
    p50, p99 = percentile(times, 50) or 0.0, percentile(times, 99) or 0.0
    return {"ttft_mean_s": round(_mean_ttft(jobs), 4), "ttft_p50_s": round(p50, 4), "ttft_p99_s": round(p99, 4)}


def _mean_ttft(jobs: Sequence[Job]) -> float:
    return sum(job.ttft_s for job in jobs) / len(jobs)


def _replica_id(number: int) -> str:
    return f"replica-{number:02d}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.dispatch", __doc__)
    parser.add_argument("--replicas", type=positive, default=16, metavar="N")
    parser.add_argument("--ingresses", type=positive, default=1, metavar="N")
    parser.add_argument("--requests", type=positive, default=4000, metavar="N", help="for each question")
    parser.add_argument("--load", type=float, default=0.8, metavar="SHARE", help="of what the fleet could do")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="requests a replica computes at once")
    parser.add_argument("--step-ms", type=float, default=10.0, metavar="MS", help="of a step, whatever is in it")
    parser.add_argument("--token-ms", type=float, default=0.1, metavar="MS", help="of each token in a step")
    parser.add_argument("--seed", type=int, default=1)
    return run_command(parser, lambda given: measure(trial_of(given)), arguments)


def trial_of(given: argparse.Namespace) -> Trial:
    return Trial(
        num_replicas=given.replicas,
        num_ingresses=given.ingresses,
        num_requests=given.requests,
        load=given.load,
        seed=given.seed,
        capability=Capability(max_running=given.slots, base_s=given.step_ms / 1000, token_s=given.token_ms / 1000),
    )


if __name__ == "__main__":
    sys.exit(main())
