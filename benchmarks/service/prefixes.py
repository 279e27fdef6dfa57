"""Measures the cache hits of `prefix_affinity` in conversations: `python -m benchmarks.service.prefixes`.

A simulated fleet (`deployments/plan/simulation.py`: the service's own dispatch and engine, a model that only counts)
serves conversations of several turns over shared system prompts, each turn through a random ingress. Lengths are those
of `make_workload sharegpt`. Prints one line of JSON, with these figures for each number of ingresses:

    found         share of prompt tokens that were cached
    restarted     share of cached prompt tokens if the first ingress restarts after half of the requests
    bytes_per_s   bytes that all replicas send to one ingress in a simulated second to report their cached prefixes
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from app.config import CacheConfig, SchedulerConfig
from app.engine.request import ModelInfo
from app.fleet.dispatch import PrefixChanges
from app.fleet.replica_registry import ReplicaRegistry
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.make_workload import make_workload
from deployments.plan.simulated_replica import TOKEN_ID
from deployments.plan.simulation import FleetSimulation
from deployments.plan.step_cost import MeasuredReplica, StepCost
from deployments.plan.traces import Trace, TracedRequest

_MAX_TOKENS = 256
_VOCAB_SIZE = 49_152
_EOS = _VOCAB_SIZE  # ends a reply that is shorter than _MAX_TOKENS
_KV_TOKENS = 65_536
_CONTEXT_TOKENS = 4_096
_NUM_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 8, 256
MEAN_TURNS, _MEAN_PAUSE_S = 4, 5.0
CACHE = CacheConfig()
MEASURED = MeasuredReplica(
    model="made up",
    num_threads=None,
    num_blocks=_KV_TOKENS // CACHE.block_size,
    block_size=CACHE.block_size,
    model_info=ModelInfo(max_model_len=_KV_TOKENS, vocab_size=_VOCAB_SIZE + 1, eos_token_ids=(_EOS,)),
    cost=StepCost.linear(0.010, 0.0001),
)


class _Fleet(FleetSimulation):
    """Counts the bytes of reported prefixes, and restarts its first ingress at request `restarts_at`."""

    def __init__(self, *, restarts_at: int | None, **more: Any) -> None:
        super().__init__(**more)
        self._restarts_at = restarts_at
        self.num_bytes = 0  # sent to the last ingress
        last = self._registries[-1]._prefixes
        setattr(last, "note", self._counted(last.note))  # noqa: B010

    def _counted(self, note: Callable[[str, PrefixChanges], None]) -> Callable[[str, PrefixChanges], None]:
        def counted(replica_id: str, changes: PrefixChanges) -> None:
            self.num_bytes += len(changes.held) + len(changes.gone)
            note(replica_id, changes)

        return counted

    def _arrive(self, traced: TracedRequest, at_s: float) -> None:
        if self._run.num_requests == self._restarts_at:
            self._restart()
        super()._arrive(traced, at_s)

    def _restart(self) -> None:
        before = self._registries[0]
        new = ReplicaRegistry(before._policy, before._groups, block_size=CACHE.block_size, clock=before._clock)
        new.set_replicas(list(self._replicas))
        self._registries[0] = new
        for each in self._replicas.values():
            each.forget(before)
            each.note_in(self._registries)


def measure(
    *, ingresses: Sequence[int], num_replicas: int, num_requests: int, num_slots: int, num_per_s: float, seed: int
) -> dict[str, Any]:
    """Return the figures for each number of ingresses."""
    turns = conversations(num_requests, num_per_s, random.Random(seed), seed)
    figures: dict[str, Any] = {
        "replicas": num_replicas, "requests": num_requests, "slots": num_slots, "first_turns_per_s": num_per_s,
        "seed": seed,
    }  # fmt: skip
    for number in ingresses:
        found = []
        for restarts_at in (None, num_requests // 2):
            fleet = _Fleet(
                replicas=[MEASURED] * num_replicas, cache=CACHE, dispatch="prefix_affinity", num_ingresses=number,
                scheduler=SchedulerConfig(max_running=num_slots, max_waiting=1_000_000), seed=seed,
                restarts_at=restarts_at,
            )  # fmt: skip
            run = fleet.run(turns)
            stats = [engine.stats() for engine in fleet.engines]
            cached, asked = (sum(each) for each in zip(*[(s.total_cached_tokens, s.total_prompt_tokens) for s in stats],
                                                       strict=True))  # fmt: skip
            found.append((round(cached / asked, 4), round(fleet.num_bytes / run.seconds)))
            tell(f"{number} ingresses, {'one restarts' if restarts_at else 'all stay'}: {found[-1][0]:.1%} found")
        figures[f"{number} ingresses"] = {
            "found": found[0][0], "restarted": found[1][0], "bytes_per_s": found[0][1],
        }  # fmt: skip
    return figures


def conversations(
    num_requests: int,
    num_per_s: float,
    rng: random.Random,
    seed: int,
    *,
    hot_tokens: int = 0,
    mean_pause_s: float = _MEAN_PAUSE_S,
) -> Trace:
    """Return the first turns, linked to their next turns. Half of them share a prefix of `hot_tokens` if not 0."""
    systems = [tuple(rng.choices(range(1, _VOCAB_SIZE), k=_SYSTEM_TOKENS)) for _ in range(_NUM_SYSTEM_PROMPTS)]
    hot = tuple(rng.choices(range(1, _VOCAB_SIZE), k=hot_tokens))
    conversations: list[list[TracedRequest]] = []
    history: tuple[int, ...] = ()
    for line in make_workload("sharegpt", seed=seed, num_requests=num_requests):
        if not history:
            conversations.append([])
        begins_hot = not history and hot and rng.random() < 0.5
        prompt = (*(hot if begins_hot else history or rng.choice(systems)), *line["prompt_token_ids"])
        num_tokens = line["max_tokens"]
        turn = TracedRequest(
            arrival_s=rng.expovariate(1 / mean_pause_s), num_prompt_tokens=len(prompt), num_output_tokens=num_tokens,
            max_tokens=_MAX_TOKENS, prompt_token_ids=prompt,
        )  # fmt: skip
        conversations[-1].append(turn)
        reply = (*(TOKEN_ID,) * (num_tokens - 1), TOKEN_ID if num_tokens == _MAX_TOKENS else _EOS)
        is_over = rng.random() < 1 / MEAN_TURNS or len(prompt) + 2 * _MAX_TOKENS > _CONTEXT_TOKENS
        history = () if is_over else prompt + reply
    times = accumulate(rng.expovariate(num_per_s) for _ in conversations)
    firsts = [replace(_linked(turns), arrival_s=at_s) for turns, at_s in zip(conversations, times, strict=True)]
    return Trace("conversations", tuple(firsts))


def _linked(conversation: Sequence[TracedRequest]) -> TracedRequest:
    """Return the first turn; each turn holds the next one in `next_turn`."""
    *before, linked = conversation
    for turn in reversed(before):
        linked = replace(turn, next_turn=linked)
    return linked


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.prefixes", __doc__)
    parser.add_argument("--ingresses", type=positive, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--replicas", type=positive, default=16, metavar="N")
    parser.add_argument("--requests", type=positive, default=4000, metavar="N", help="turns of conversations")
    parser.add_argument("--slots", type=positive, default=32, metavar="N", help="concurrent requests of a replica")
    parser.add_argument("--per-s", type=float, default=25.0, metavar="N", help="conversations that begin in a second")
    parser.add_argument("--seed", type=int, default=1)
    return run_command(
        parser,
        lambda given: measure(
            ingresses=given.ingresses,
            num_replicas=given.replicas,
            num_requests=given.requests,
            num_slots=given.slots,
            num_per_s=given.per_s,
            seed=given.seed,
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
