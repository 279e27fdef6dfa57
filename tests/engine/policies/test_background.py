from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.async_engine import AsyncEngine
from app.engine.batch import StepLimits
from app.engine.request import FinishReason, Request, TokenDelta
from app.errors import Overloaded
from tests.kit.engine import POLICIES, GatedRunner, TimedEngine, async_engine, make_request, tokens_of
from tests.waiting import until


def background(prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> Request:
    return replace(make_request(prompt, **fields), is_background=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_gives_its_slots_back_at_the_next_step(policy: str) -> None:
    timed = TimedEngine(policy=policy, max_running=2, max_step_tokens=8)
    night = [background((5, n), max_tokens=20) for n in range(2, 5)]
    timed.add(*night)
    timed.step(4)
    day = [make_request((9, n), max_tokens=6, tenant="day") for n in range(2, 4)]
    timed.add(*day)
    timed.step(6)  # what they need when no other request runs
    assert {request.request_id for request in day} <= timed.outcome.reasons.keys()
    timed.finish().check(*day, *night)
    assert timed.stats.total_preemptions == 2
    assert timed.stats.total_memory_preemptions == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    num_night=st.integers(1, 8),
    num_day=st.integers(1, 6),
    limit=st.integers(1, 8),
)
def test_below_a_lowered_limit_each_arrival_takes_one_place_and_no_more(
    policy: str, num_night: int, num_day: int, limit: int
) -> None:
    timed = TimedEngine(policy=policy, max_running=8, max_step_tokens=64)
    night = [background((5, n), max_tokens=20) for n in range(2, 2 + num_night)]
    timed.add(*night)
    timed.step(2)
    timed.engine.limit(StepLimits(max_step_tokens=64, prefill_chunk_tokens=64, max_running=limit))
    day = [make_request((9, n), max_tokens=3) for n in range(2, 2 + num_day)]
    timed.add(*day)
    timed.step()
    num_places = max(limit, num_night)
    running = [each.request for each in timed.engine.running]
    assert len(running) == min(num_places, num_night + num_day)
    assert sum(not each.is_background for each in running) == min(num_day, num_places)
    assert timed.stats.total_preemptions == max(0, num_night + min(num_day, num_places) - num_places)
    timed.finish().check(*day, *night)


def test_by_priority_too_an_arrival_takes_one_place_below_a_lowered_limit() -> None:
    timed = TimedEngine(policy="priority", max_running=6, max_step_tokens=64)
    usual = [make_request((5, n), max_tokens=20) for n in range(2, 8)]
    timed.add(*usual)
    timed.step(2)
    timed.engine.limit(StepLimits(max_step_tokens=64, prefill_chunk_tokens=64, max_running=2))
    urgent = make_request((9,), priority=-9, max_tokens=3)
    timed.add(urgent)
    timed.step()
    assert urgent in [each.request for each in timed.engine.running]
    assert timed.stats.total_preemptions == 1
    timed.finish().check(urgent, *usual)


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_joins_only_when_no_other_request_waits(policy: str) -> None:
    timed = TimedEngine(policy=policy, max_running=1, max_step_tokens=8)
    night = background(max_tokens=3)
    day = [make_request((9, n), max_tokens=3) for n in range(2, 6)]
    reasons = timed.finish(night, *day).reasons
    assert list(reasons)[-1] == night.request_id
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert timed.stats.total_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_background_work_is_what_goes_when_memory_runs_short(policy: str) -> None:
    timed = TimedEngine(policy=policy, num_blocks=8, max_running=4, max_step_tokens=16)
    day, night = make_request((5,) * 6, max_tokens=20), background((6,) * 6, max_tokens=20)
    timed.add(night)
    timed.step()
    assert list(timed.finish(day).reasons) == [day.request_id, night.request_id]
    assert timed.stats.total_preemptions >= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_of_background_work_take_little_of_a_step_while_others_are_served(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.engine.scheduler.BACKGROUND_PREFILL_TOKENS", 5)
    timed = TimedEngine(policy=policy, max_running=4, max_step_tokens=64, prefill_chunk_tokens=64)
    night = [background((5, n, *range(6, 26)), max_tokens=3) for n in range(2, 4)]
    timed.add(night[0])
    timed.step()
    outcome = timed.finish(night[1], make_request((9, 8, 7), max_tokens=8))
    alone, first, *others = [batch.num_scheduled_tokens for batch in timed.runner.batches]
    assert alone == 22
    assert first == 1 + 3 + 5  # the decoding sequence, the foreground prompt, a part of the other
    assert max(others) <= 1 + 1 + 5
    assert len(outcome.reasons) == 3


def test_background_work_costs_its_tenant_no_share() -> None:
    timed = TimedEngine(policy="fair", max_running=2, max_step_tokens=8)
    timed.add(*(background((8, n), max_tokens=40, tenant="a") for n in range(2, 6)))
    timed.step(30)
    num_before = len(timed.outcome.reasons)
    for n in range(2, 10):
        timed.add(*(make_request((9, n), request_id=f"{each}{n}", max_tokens=4, tenant=each) for each in "ab"))
    timed.step(40)
    first = [name[0] for name in list(timed.outcome.reasons)[num_before:][:8] if name[0] in "ab"]
    assert abs(first.count("a") - first.count("b")) <= 2
    timed.finish()


async def test_background_requests_come_when_there_is_a_slot_and_never_queue() -> None:
    runner = GatedRunner()
    with async_engine(runner, max_requests=10, max_running=2, max_step_tokens=8) as engine:
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


class NoReader:
    def put_all(self, deltas: Sequence[TokenDelta]) -> None: ...


# The request that arrives ("day", "night") or ends ("-day", "-night").
MOVES = st.lists(st.sampled_from(["day", "day", "night", "night", "-day", "-night"]), max_size=40)


@settings(max_examples=60, deadline=None)
@given(moves=MOVES, max_running=st.integers(1, 4), max_waiting=st.integers(0, 3))
def test_requests_are_refused_only_for_those_that_do_not_make_way(
    moves: list[str], max_running: int, max_waiting: int
) -> None:
    async def main() -> None:
        runner = GatedRunner()  # in its first step, so all of them are as they came
        there: dict[str, list[str]] = {"day": [], "night": []}
        limits = {"max_running": max_running, "max_waiting": max_waiting}
        with async_engine(runner, max_requests=max_running + max_waiting, **limits) as engine:
            for move in moves:
                kind = move.removeprefix("-")
                if move != kind:
                    if there[kind]:
                        engine.abort(there[kind].pop())
                    continue
                request = background() if kind == "night" else make_request()
                num_day, num_all = len(there["day"]), sum(map(len, there.values()))
                has_room = num_all < max_running if kind == "night" else num_day < max_running + max_waiting
                try:
                    engine.submit(request, NoReader())
                except Overloaded:
                    assert not has_room
                else:
                    assert has_room
                    there[kind].append(request.request_id)

    asyncio.run(main())


async def test_background_requests_in_all_slots_refuse_no_other_request_and_lose_nothing() -> None:
    runner = GatedRunner()

    async def answer(engine: AsyncEngine, request: Request) -> list[int]:
        return [token async for delta in engine.generate(request) for token in delta.token_ids]

    with async_engine(runner, max_requests=4, max_running=4, max_step_tokens=16) as engine:
        night = [background((5, n), max_tokens=30) for n in range(2, 6)]
        day = [make_request((9, n), max_tokens=10) for n in range(2, 6)]
        answers = [asyncio.ensure_future(answer(engine, request)) for request in night]
        await asyncio.sleep(0)  # all of them are submitted now: the second step has them all
        runner.gate.release(2)
        await until(lambda: engine.stats().num_background == 4 and engine.stats().num_running == 4)
        answers += [asyncio.ensure_future(answer(engine, request)) for request in day]
        await asyncio.sleep(0)  # all of them are submitted now
        for another in (background((6,)), make_request((6,))):
            with pytest.raises(Overloaded, match="requests are being served"):
                engine.submit(another, NoReader())
        runner.gate.release(1000)
        assert await asyncio.gather(*answers) == [tokens_of(request) for request in (*night, *day)]


async def test_background_work_in_a_whole_batch_stays_and_takes_places() -> None:
    runner = GatedRunner()
    # No batch of one: the engine may see the first request before the second is there.
    strategy = {"name": "static", "max_wait_ms": 600_000}
    with async_engine(runner, max_requests=3, max_running=2, strategy=strategy) as engine:
        for n in range(2, 4):
            engine.submit(background((5, n), max_tokens=30), NoReader())
        runner.gate.release(4)
        await until(lambda: engine.stats().num_unpreemptible_background == 2)
        engine.submit(make_request(), NoReader())
        with pytest.raises(Overloaded, match="3 requests are being served"):
            engine.submit(make_request(), NoReader())


async def test_prompts_of_preempted_background_work_fill_no_queue() -> None:
    runner = GatedRunner()
    with async_engine(runner, max_requests=10, max_waiting_tokens=10, max_running=1, max_step_tokens=16) as engine:
        engine.submit(background((5,) * 9, max_tokens=30), NoReader())
        runner.gate.release(2)
        await until(lambda: engine.stats().num_running == 1)
        engine.submit(make_request((6,) * 4, max_tokens=30), NoReader())
        runner.gate.release(4)
        await until(lambda: engine.stats().num_waiting_tokens == 9)
        engine.submit(make_request((7,) * 5), NoReader())
        with pytest.raises(Overloaded, match="prompts of"):
            engine.submit(make_request((8,) * 6), NoReader())
