from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.engine.async_engine import AsyncEngine
from app.engine.engine import Engine
from app.engine.request import FinishReason, Request
from app.errors import Overloaded
from tests.fakes import (
    FakeClock,
    GatedRunner,
    Outcome,
    TimedRunner,
    build_fake_engine,
    expected_tokens,
    make_request,
    run_to_end,
)

POLICIES = ("fcfs", "sjf", "priority", "fair", "deadline")


def background(prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> Request:
    return replace(make_request(prompt, **fields), is_background=True)


def engine_of(policy: str, **settings: Any) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    return build_fake_engine(runner=TimedRunner(clock), clock=clock, policy=policy, **settings), clock


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_gives_its_slots_back_at_the_next_step(policy: str) -> None:
    engine, clock = engine_of(policy, max_running=2, max_step_tokens=8)
    night = [background((5, n), max_tokens=20) for n in range(2, 5)]
    for request in night:
        engine.add(request)
    outcome = Outcome()
    for _ in range(4):
        outcome.book(engine.step())
    day = [make_request((9, n), max_tokens=6, tenant="day") for n in range(2, 4)]
    for request in day:
        engine.add(request)
    for _ in range(6):  # what they need when nobody is in their way
        outcome.book(engine.step())
    assert {request.request_id for request in day} <= outcome.reasons.keys()
    rest = run_to_end(engine, clock=clock)
    for request in (*day, *night):
        name = request.request_id
        tokens = outcome.token_ids.get(name, []) + rest.token_ids.get(name, [])
        assert tokens == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
    assert engine.stats().total_preemptions == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_joins_only_when_nobody_else_waits(policy: str) -> None:
    engine, clock = engine_of(policy, max_running=1, max_step_tokens=8)
    night = background(max_tokens=3)
    day = [make_request((9, n), max_tokens=3) for n in range(2, 6)]
    for request in (night, *day):
        engine.add(request)
    reasons = run_to_end(engine, clock=clock).reasons
    assert list(reasons)[-1] == night.request_id
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert engine.stats().total_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_is_what_goes_when_memory_runs_short(policy: str) -> None:
    engine, clock = engine_of(policy, num_blocks=8, max_running=4, max_step_tokens=16)
    day, night = make_request((5,) * 6, max_tokens=20), background((6,) * 6, max_tokens=20)
    engine.add(night)
    engine.step()
    engine.add(day)
    reasons = run_to_end(engine, clock=clock).reasons
    assert list(reasons) == [day.request_id, night.request_id]
    assert engine.stats().total_preemptions >= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_of_background_work_take_little_of_a_step_while_others_are_served(policy: str) -> None:
    clock = FakeClock()
    runner = TimedRunner(clock)
    settings = {"max_running": 4, "max_step_tokens": 64, "prefill_chunk_tokens": 64, "background_prefill_tokens": 5}
    engine = build_fake_engine(runner=runner, clock=clock, policy=policy, **settings)
    night = [background((5, n, *range(6, 26)), max_tokens=3) for n in range(2, 4)]
    engine.add(night[0])
    engine.step()
    for request in (night[1], make_request((9, 8, 7), max_tokens=8)):
        engine.add(request)
    outcome = run_to_end(engine, clock=clock)
    alone, first, *others = [batch.num_scheduled_tokens for batch in runner.batches]
    assert alone == 22
    assert first == 1 + 3 + 5  # whoever decodes, the prompt that somebody waits for, a part of the other
    assert max(others) <= 1 + 1 + 5
    assert len(outcome.reasons) == 3


def test_background_work_costs_its_tenant_no_share() -> None:
    engine, clock = engine_of("fair", max_running=2, max_step_tokens=8)
    for n in range(2, 6):
        engine.add(background((8, n), max_tokens=40, tenant="a"))
    for _ in range(30):
        engine.step()
    ends: list[str] = []
    for n in range(2, 10):
        for tenant in "ab":
            engine.add(make_request((9, n), request_id=f"{tenant}{n}", max_tokens=4, tenant=tenant))
    for _ in range(40):
        ends += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    first = [name[0] for name in ends[:8] if name[0] in "ab"]
    assert abs(first.count("a") - first.count("b")) <= 2
    run_to_end(engine, clock=clock)


def test_background_requests_come_when_there_is_a_slot_and_never_queue() -> None:
    async def main() -> None:
        runner = GatedRunner()
        engine = AsyncEngine(build_fake_engine(runner=runner, max_running=2, max_step_tokens=8), max_requests=10)
        try:
            streams = [engine.generate(make_request((5, n), max_tokens=200)) for n in range(2, 4)]
            beginnings = [asyncio.ensure_future(anext(stream)) for stream in streams]
            while not all(beginning.done() for beginning in beginnings):
                runner.gate.release()
                await asyncio.sleep(0.001)
            with pytest.raises(Overloaded, match="full"):
                await anext(engine.generate(background()))
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]
            runner.gate.release(1000)
            await anext(engine.generate(background()))
        finally:
            engine.shutdown()

    asyncio.run(main())
