"""Many running, many waiting: what a step does is counted, not timed, so these tests say the same on any machine."""

from __future__ import annotations

import inspect
import random
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from math import ceil, log2
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from app.engine.batch import StepBatch, StepResult
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.policies import SchedulingPolicy
from app.engine.request import Request
from app.engine.scheduler import Scheduler
from app.engine.sequence import EngineSequence
from tests.kit.engine import POLICIES, CountingRunner, FakeClock, build_fake_engine, make_request, run_to_end

NUM_RUNNING = 128
NUM_WAITING = 3_000
NUM_STEPS = 24
ENGINE_ROOM = str(Path(inspect.getfile(Scheduler)).parent)


@dataclass
class Work:
    """What the scheduler did in some steps."""

    num_instructions: int = 0  # bytecode of the engine's room
    num_keys: int = 0  # keys asked of the policy
    num_comparisons: int = 0  # of these keys
    num_joined: int = 0


class CountedNumber(float):
    """A part of a policy's key that counts how often it is compared."""

    num_comparisons = 0

    def __lt__(self, other: float) -> bool:
        CountedNumber.num_comparisons += 1
        return float(self) < float(other)


class CountingPolicy(SchedulingPolicy):
    def __init__(self) -> None:
        self.num_keys = 0

    def foreground_key(self, sequence: EngineSequence) -> tuple[float, ...]:
        self.num_keys += 1
        return (CountedNumber(sequence.arrival),)


class SevensRunner(ModelRunner):
    def run(self, batch: StepBatch) -> StepResult:
        return StepResult([7] * len(batch.sampled))


def build_engine(policy: SchedulingPolicy, *, max_running: int, runner: ModelRunner | None = None) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.engine.scheduler.make_policy", lambda _: policy)
        return build_fake_engine(
            runner=runner or SevensRunner(), num_blocks=16 * max_running, max_running=max_running,
            max_step_tokens=16 * max_running, prefill_chunk_tokens=16,
        )  # fmt: skip


def numbered_requests() -> Iterator[Request]:
    """The same each time; they end at different steps."""
    for number in count():
        prompt = tuple(2 + (number >> shift) % 32 for shift in (0, 5, 10)) * (1 + number % 5)
        yield make_request(prompt, request_id=f"request-{number}", max_tokens=5 + number % 23)


@contextmanager
def counted_instructions(work: Work) -> Iterator[None]:
    num_instructions = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE_ROOM):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return of_frame

    def of_frame(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_instructions
        num_instructions += event == "opcode"
        return of_frame

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        work.num_instructions += num_instructions


def work_of_steps(*, num_waiting: int) -> Work:
    """Run the same requests through the same steps, with `num_waiting` more behind them in the queue."""
    policy, requests, work = CountingPolicy(), numbered_requests(), Work()
    engine = build_engine(policy, max_running=NUM_RUNNING)
    for _ in range(NUM_RUNNING + num_waiting):
        engine.add(next(requests))
    for _ in range(NUM_STEPS):
        num_keys, num_comparisons = policy.num_keys, CountedNumber.num_comparisons
        with counted_instructions(work):
            deltas = engine.step()
        work.num_keys += policy.num_keys - num_keys
        work.num_comparisons += CountedNumber.num_comparisons - num_comparisons
        for delta in deltas:
            if delta.finish_reason is not None:  # a request that ends is replaced, so the queue keeps its length
                work.num_joined += 1
                engine.add(next(requests))
        assert engine.stats().num_waiting == num_waiting + NUM_RUNNING - engine.stats().num_running
    return work


def test_a_step_does_the_same_however_many_wait() -> None:
    alone, crowded = work_of_steps(num_waiting=0), work_of_steps(num_waiting=NUM_WAITING)
    assert alone.num_joined == crowded.num_joined > NUM_RUNNING // 2
    # A queue that runs empty in between takes a branch or two less.
    assert 0 < alone.num_instructions <= crowded.num_instructions < alone.num_instructions + 16 * NUM_STEPS
    assert alone.num_keys == crowded.num_keys
    # Taking the first out of the queue walks down a heap: the depth of the heap is all that may be added.
    allowed = (NUM_RUNNING + crowded.num_joined) * 2 * ceil(log2(NUM_WAITING))
    assert crowded.num_comparisons - alone.num_comparisons <= allowed


def instructions_of_steps(strategy: str, policy: str, *, num_waiting: int) -> int:
    """Bytecode of the engine's room for some steps in which as many leave as arrive, with `num_waiting` behind them."""
    work = Work()
    clock = FakeClock()
    engine = build_fake_engine(
        runner=SevensRunner(), clock=clock, strategy=strategy, policy=policy, num_blocks=16 * 16, max_running=16,
        max_waiting=100_000, max_step_tokens=256, prefill_chunk_tokens=16,
    )  # fmt: skip
    draw = random.Random(1)

    def arrive() -> None:
        clock.advance(0.001)
        prompt = tuple(draw.randrange(2, 50) for _ in range(8))
        engine.add(
            make_request(
                prompt, max_tokens=3, priority=draw.randint(-2, 2), tenant=f"tenant-{draw.randrange(20)}",
                deadline_s=draw.choice([None, 1000.0, 2000.0]),
            )
        )  # fmt: skip

    for _ in range(32 + num_waiting):
        arrive()
    for _ in range(10):  # the adaptive strategy starts with small batches
        for delta in engine.step():
            if delta.finish_reason is not None:
                arrive()
    clock.advance(1)
    for _ in range(30):
        with counted_instructions(work):
            deltas = engine.step()
        for delta in deltas:
            if delta.finish_reason is not None:
                arrive()
    assert engine.stats().num_waiting >= num_waiting
    return work.num_instructions


# Every strategy under one policy, and every policy under two strategies: a queue is a heap of its policy's keys,
# whatever asks it.
@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        *product(("static", "dynamic", "bucketed", "sorted", "adaptive", "continuous", "hybrid"), ("fcfs",)),
        *product(("sorted", "continuous"), POLICIES[1:]),
    ],
)
def test_under_no_strategy_and_policy_does_a_step_cost_more_because_more_wait(strategy: str, policy: str) -> None:
    few = instructions_of_steps(strategy, policy, num_waiting=100)
    many = instructions_of_steps(strategy, policy, num_waiting=NUM_WAITING)
    assert many < 1.3 * few  # other requests join, and the number of tokens differs in each step


def test_a_running_sequence_costs_a_step_a_few_instructions() -> None:
    """A bound far above what is needed and far below what a walk over all running sequences for each would take."""
    work = work_of_steps(num_waiting=0)
    assert work.num_instructions < NUM_STEPS * NUM_RUNNING * 1_000


def test_a_waiting_request_weighs_little_beside_its_ids() -> None:
    requests = [make_request((5,) * 900, max_tokens=4) for _ in range(200)]
    engine = build_fake_engine(num_blocks=1_000)
    engine.add(make_request())  # whatever is made once
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for request in requests:
        engine.add(request)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(requests) < 2_000  # a copy of the ids would take 7,200


class EqualRank(SchedulingPolicy):
    def foreground_key(self, sequence: EngineSequence) -> tuple[float, ...]:
        return (0.0,)


def test_sequences_of_equal_rank_leave_in_any_order() -> None:
    engine = build_engine(EqualRank(), max_running=6, runner=CountingRunner(block_size=4))
    requests = [make_request((5, 6, 7 + n), max_tokens=tokens) for n, tokens in enumerate((4, 2, 5, 1, 3, 2, 6))]
    run_to_end(engine, *requests).check(*requests)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
