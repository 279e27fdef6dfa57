"""What a dispatch policy is worth, in a simulated fleet: `python -m benchmarks.service.dispatch`.

Three questions, each at a share of what the fleet could do (`--load`, found by giving one replica much at once):

    equal          how much earlier than round_robin does least_loaded bring the first token, with equal replicas?
    slow           one replica is ten times slower: what share of the requests does it get? Fair: its share of speed
    conversations  turns over a shared system prompt: how much of the prompts is cached under prefix_affinity?

Lengths are those of `make_workload sharegpt`, arrivals are random (Poisson); pauses between turns outlast the arrivals,
so conversations stay below the load asked for. A client asks for 256 tokens; how long a reply is, the ingress learns
from those that have ended. The fleet is that of `deployments/plan/simulation.py`: the service's own dispatch and
engine, and a model that only counts. One line of JSON; times are simulated seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from app.config import CacheConfig, SchedulerConfig
from app.engine.request import ModelInfo
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentile
from benchmarks.make_workload import make_workload
from deployments.plan.planner import full_rate
from deployments.plan.simulation import TOKEN_ID, FleetSimulation
from deployments.plan.step_cost import MeasuredReplica, StepCost
from deployments.plan.traces import Trace, TracedRequest

_MAX_TOKENS = 256
_VOCAB_SIZE = 49152
_SLOWDOWN = 10
_KV_TOKENS = 65_536
_NUM_SYSTEM_PROMPTS = 8
_SYSTEM_TOKENS = 256
_CONTEXT_TOKENS = 4096
_MEAN_TURNS = 4
_MEAN_PAUSE_S = 5.0
_EOS = _VOCAB_SIZE  # ends a reply that is shorter than _MAX_TOKENS
_MAX_WAITING = 1_000_000  # a replica refuses none
_CACHE = CacheConfig()

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fleet and how much is asked of it."""

    num_replicas: int
    num_ingresses: int
    num_requests: int
    load: float
    seed: int
    max_running: int = 32
    step_s: float = 0.010
    token_s: float = 0.0001
    num_slow: int = 0

    @property
    def speed(self) -> float:
        """Of the whole fleet, in replicas of the usual speed."""
        return self.num_replicas - self.num_slow + self.num_slow / _SLOWDOWN

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(max_running=self.max_running, max_waiting=_MAX_WAITING)

    def replica(self, *, slowdown: float = 1.0) -> MeasuredReplica:
        return MeasuredReplica(
            model="made up",
            num_threads=None,
            num_blocks=_KV_TOKENS // _CACHE.block_size,
            block_size=_CACHE.block_size,
            facts=ModelInfo(max_model_len=_KV_TOKENS, vocab_size=_VOCAB_SIZE + 1, eos_token_ids=(_EOS,)),
            cost=StepCost.linear(self.step_s * slowdown, self.token_s * slowdown),
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a trial's requests."""

    ttft_s: Sequence[float]
    slow_share: float  # of the requests, on the first replica
    hit_rate: float  # of prompt tokens


def measure(trial: Trial) -> Figures:
    """The figures of all three questions."""
    return {
        "replicas": trial.num_replicas,
        "ingresses": trial.num_ingresses,
        "requests": trial.num_requests,
        "load": trial.load,
        "slots": trial.max_running,
        "step_ms": round(1000 * trial.step_s, 3),
        "token_ms": round(1000 * trial.token_s, 3),
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
        "mean_ttft_ratio": round(fmean(least.ttft_s) / fmean(robin.ttft_s), 3),
    }


def _slow(trial: Trial) -> Figures:
    figures: Figures = {"fair_share": round(1 / _SLOWDOWN / trial.speed, 4)}
    for policy in ("round_robin", "least_loaded"):
        served = _serve(trial, policy, _sharegpt(trial))
        figures[policy] = {"slow_share": round(served.slow_share, 4), **_ttft(served)}
    return figures


def _conversations(trial: Trial) -> Figures:
    figures: Figures = {}
    for policy in ("round_robin", "least_loaded", "prefix_affinity"):
        served = _serve(trial, policy, _turns(trial))
        figures[policy] = {"hit_rate": round(served.hit_rate, 4), **_ttft(served)}
    return figures


def _serve(trial: Trial, policy: str, requests: Sequence[TracedRequest]) -> Served:
    tell(f"{trial.num_replicas} replicas, {trial.num_slow} slow, {policy} …")
    usual, slow = trial.replica(), trial.replica(slowdown=_SLOWDOWN)
    replicas = [slow if number < trial.num_slow else usual for number in range(trial.num_replicas)]
    fleet = FleetSimulation(
        replicas, trial.scheduler, _CACHE, dispatch=policy, num_ingresses=trial.num_ingresses, seed=trial.seed
    )  # fmt: skip
    run = fleet.run(Trace("trial", tuple(requests)))
    stats = [engine.stats() for engine in fleet.engines]
    return Served(
        ttft_s=run.per_request_s("ttft").tolist(),
        slow_share=stats[0].total_finished / run.num_requests,
        hit_rate=sum(each.total_cached_tokens for each in stats) / sum(each.total_prompt_tokens for each in stats),
    )


def _sharegpt(trial: Trial) -> list[TracedRequest]:
    """Independent requests at the trial's load."""
    lines = make_workload("sharegpt", seed=trial.seed, num_requests=trial.num_requests)
    requests = [_request(tuple(line["prompt_token_ids"]), line["max_tokens"]) for line in lines]
    return _arriving(requests, _num_per_s(trial, requests), random.Random(trial.seed))


def _turns(trial: Trial) -> list[TracedRequest]:
    """The first turns of conversations, each with those that follow; the load is that of all turns, nothing cached."""
    rng = random.Random(trial.seed)
    systems = [tuple(rng.choices(range(1, _VOCAB_SIZE), k=_SYSTEM_TOKENS)) for _ in range(_NUM_SYSTEM_PROMPTS)]
    conversations: list[list[TracedRequest]] = []
    history: tuple[int, ...] = ()
    for line in make_workload("sharegpt", seed=trial.seed, num_requests=trial.num_requests):
        if not history:
            conversations.append([])
        prompt = (*(history or rng.choice(systems)), *line["prompt_token_ids"])
        turn = _request(prompt, line["max_tokens"]).at(rng.expovariate(1 / _MEAN_PAUSE_S))
        conversations[-1].append(turn)
        is_over = rng.random() < 1 / _MEAN_TURNS or len(prompt) + 2 * _MAX_TOKENS > _CONTEXT_TOKENS
        history = () if is_over else prompt + _reply(turn.num_output_tokens)
    turns = [turn for conversation in conversations for turn in conversation]
    firsts = [_linked(conversation) for conversation in conversations]
    return _arriving(firsts, _num_per_s(trial, turns) * len(firsts) / len(turns), rng)


def _linked(conversation: Sequence[TracedRequest]) -> TracedRequest:
    """The first turn, with the next in it, and so on."""
    *before, linked = conversation
    for turn in reversed(before):
        linked = replace(turn, next_turn=linked)
    return linked


def _num_per_s(trial: Trial, requests: Sequence[TracedRequest]) -> float:
    """Requests a second that are the trial's load: what one replica does with all at once, times the fleet's speed."""
    # Nothing is shared: the load is what it is without a cache.
    trace = Trace("alone", tuple(replace(each, prompt_token_ids=None) for each in requests))
    return trial.load * trial.speed * full_rate(trace, trial.replica(), trial.scheduler, _CACHE)


def _arriving(requests: Sequence[TracedRequest], num_per_s: float, rng: random.Random) -> list[TracedRequest]:
    times = accumulate(rng.expovariate(num_per_s) for _ in requests)
    return [each.at(at_s) for each, at_s in zip(requests, times, strict=True)]


def _request(prompt: tuple[int, ...], num_output_tokens: int) -> TracedRequest:
    return TracedRequest(
        arrival_s=0.0, num_prompt_tokens=len(prompt), num_output_tokens=num_output_tokens, max_tokens=_MAX_TOKENS,
        prompt_token_ids=prompt,
    )  # fmt: skip


def _reply(num_tokens: int) -> tuple[int, ...]:
    """As a simulated replica generates it."""
    return (*(TOKEN_ID,) * (num_tokens - 1), TOKEN_ID if num_tokens == _MAX_TOKENS else _EOS)


def _ttft(served: Served) -> Figures:
    p50, p99 = percentile(served.ttft_s, 50) or 0.0, percentile(served.ttft_s, 99) or 0.0
    return {"ttft_mean_s": round(fmean(served.ttft_s), 4), "ttft_p50_s": round(p50, 4), "ttft_p99_s": round(p99, 4)}


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
        max_running=given.slots,
        step_s=given.step_ms / 1000,
        token_s=given.token_ms / 1000,
    )


if __name__ == "__main__":
    sys.exit(main())
