"""Measure the scheduler's time for a step when many requests run and wait, and the memory of a waiting request.

    python -m benchmarks.engine.scheduler_scale --running 1024 --waiting 20000 [--steps 200] [--policy fair]

The engine is the real engine around a model runner that draws random tokens: no torch, no weights. Requests finish and
join all the time: a new request arrives whenever one ends, so the number of waiting requests stays constant.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from app.build import assemble
from app.config import CacheConfig, EngineConfig, SchedulerConfig, StepLogConfig, names_of
from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.request import ModelInfo, Request, SamplingParams
from app.engine.trace.step_log import recorder_of
from benchmarks.harness.command import command_parser, run_command, tell
from benchmarks.harness.figures import percentile, rounded

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
EOS = 1
PROMPT_TOKENS = (64, 256)
OUTPUT_TOKENS = (64, 256)
SHARED_TOKENS = 48  # every other prompt starts with one of the shared prefixes
NUM_SHARED = 8
NUM_TENANTS = 50
SETTLING_STEPS = 20


class RandomRunner(ModelRunner):
    """Draws random tokens, and reads the clock when the scheduler calls the model and when the model returns."""

    def __init__(self, *, max_running: int) -> None:
        randomness = random.Random(0)
        self._tokens = [randomness.randrange(2, VOCAB_SIZE) for _ in range(64 * max_running)]
        self._next = 0
        self.started = 0.0
        self.ended = 0.0
        self.num_scheduled = 0

    def run(self, batch: StepBatch) -> StepResult:
        self.started = time.perf_counter()
        self.num_scheduled, num_sampled = len(batch.scheduled), len(batch.sampled)
        first = self._next if self._next + num_sampled <= len(self._tokens) else 0
        self._next = first + num_sampled
        token_ids = self._tokens[first : self._next]
        self.ended = time.perf_counter()
        return StepResult(token_ids)


class Workload:
    """An endless supply of requests with random prompts. Some prompts share a prefix."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._numbers = count()
        self._tenants = [f"tenant-{number}" for number in range(NUM_TENANTS)]
        self._shared = [self._draw_tokens(SHARED_TOKENS) for _ in range(NUM_SHARED)]

    def next(self) -> Request:
        number = next(self._numbers)
        num_tokens = self._random.randint(*PROMPT_TOKENS)
        prefix = self._random.choice(self._shared) if number % 2 else ()
        return Request(
            request_id=f"request-{number:032d}",  # the length of the API's ids
            prompt_token_ids=prefix + self._draw_tokens(num_tokens - len(prefix)),
            sampling=SamplingParams(max_tokens=self._random.randint(*OUTPUT_TOKENS), seed=number),
            priority=number % 3,
            tenant=self._tenants[number % NUM_TENANTS],
        )

    def _draw_tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(2, VOCAB_SIZE), k=num_tokens))


@dataclass(slots=True)
class Times:
    """Milliseconds of each measured step."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    num_joined: int = 0

    @property
    def total(self) -> list[float]:
        return [schedule + update for schedule, update in zip(self.schedule, self.update, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of waiting requests in turn, then the memory of one waiting request."""
    times: dict[int, Times] = {}
    for num_waiting in sorted({0, 1_000, options.waiting}):
        tell(f"{options.running:,} running, {num_waiting:,} waiting …")
        times[num_waiting] = measure_steps(
            num_running=options.running,
            num_waiting=num_waiting,
            num_steps=options.steps,
            policy=options.policy,
            step_log=options.step_log,
        )
        gc.collect()
    with_ids, without_ids = weigh_waiting(max(options.waiting, 1), max_running=options.running)
    largest = times[options.waiting]
    return {
        "schedule_ms": _summary(largest.schedule),
        "update_ms": _summary(largest.update),
        "sum_ms": _summary(largest.total),
        "sum_p50_ms_by_waiting": {waiting: _summary(each.total)["p50"] for waiting, each in times.items()},
        "joined_per_step": round(largest.num_joined / options.steps, 2),
        "bytes_per_waiting": round(without_ids),
        "bytes_per_waiting_with_ids": round(with_ids),
    }


def measure_steps(
    *, num_running: int, num_waiting: int, num_steps: int, policy: str = "fcfs", step_log: str | None = None
) -> Times:
    """Time the scheduler's two halves of a step, with a constant number of waiting requests."""
    runner = RandomRunner(max_running=num_running)
    engine = build_engine(runner, max_running=num_running, policy=policy, step_log=step_log)
    workload = Workload()
    _fill(engine, workload, num_running=num_running, num_waiting=num_waiting)
    times = Times()
    for step in range(-SETTLING_STEPS, num_steps):
        begin = time.perf_counter()
        deltas = engine.step()
        end = time.perf_counter()
        assert runner.num_scheduled == num_running, f"{runner.num_scheduled} of {num_running} run"
        num_ended = sum(delta.finish_reason is not None for delta in deltas)
        for _ in range(num_ended):
            engine.add(workload.next())
        if step >= 0:
            times.schedule.append((runner.started - begin) * 1e3)
            times.update.append((end - runner.ended) * 1e3)
            times.num_joined += num_ended
    engine.close()
    return times


def weigh_waiting(num_waiting: int, *, max_running: int) -> tuple[float, float]:
    """Return the bytes of a waiting request, with and without the token ids of its prompt and their tuple."""
    engine, workload = build_engine(RandomRunner(max_running=1), max_running=max_running), Workload()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    requests = [workload.next() for _ in range(num_waiting)]
    list_bytes = sys.getsizeof(requests)
    for request in requests:
        engine.add(request)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert engine.stats().num_waiting == num_waiting, "all of them wait"
    num_bytes = after - before - list_bytes
    own_ids = {id(token): sys.getsizeof(token) for request in requests for token in request.prompt_token_ids}
    id_bytes = sum(own_ids.values()) + sum(sys.getsizeof(request.prompt_token_ids) for request in requests)
    return num_bytes / num_waiting, (num_bytes - id_bytes) / num_waiting


def build_engine(
    runner: RandomRunner, *, max_running: int, policy: str = "fcfs", step_log: str | None = None
) -> Engine:
    most_blocks = -(-(PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]) // BLOCK_SIZE)
    limits = {"max_running": max_running, "max_step_tokens": max_running + 4096, "prefill_chunk_tokens": 512}
    config = EngineConfig(
        scheduler=SchedulerConfig.model_validate(limits | {"policy": policy}),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        step_log=StepLogConfig(path=step_log),
    )
    model_info = ModelInfo(max_model_len=8192, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    num_blocks = most_blocks * max_running
    recorder = recorder_of(config, runner=runner, model_info=model_info, num_blocks=num_blocks)
    return assemble(
        config.scheduler, config.cache, num_blocks=num_blocks, runner=runner, model_info=model_info, recorder=recorder
    )


def _fill(engine: Engine, workload: Workload, *, num_running: int, num_waiting: int) -> None:
    """Step until `num_running` requests run, then queue the other requests. Requests that end are replaced."""
    for _ in range(num_running):
        engine.add(workload.next())
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(num_running + num_waiting - engine.stats().num_running):
        engine.add(workload.next())


def _summary(milliseconds: list[float]) -> dict[str, float | None]:
    """Return the median, the 99th percentile and the maximum, which is usually a full garbage collection."""
    found = {"p50": percentile(milliseconds, 50), "p99": percentile(milliseconds, 99), "max": max(milliseconds)}
    return {name: rounded(value, 3) for name, value in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.scheduler_scale", __doc__)
    parser.add_argument("--running", type=int, default=1024, help="sequences in every step (1024)")
    parser.add_argument("--waiting", type=int, default=20_000, help="sequences in the queue (20000)")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per number of waiting requests (200)")
    policies = names_of(SchedulerConfig.model_fields["policy"])
    parser.add_argument("--policy", choices=policies, default="fcfs", help="scheduling policy (fcfs)")
    parser.add_argument("--step-log", metavar="DIR", help="record every step here, like engine.step_log.path")
    return parser


if __name__ == "__main__":
    sys.exit(main())
