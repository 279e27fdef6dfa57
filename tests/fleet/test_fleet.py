from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from app.dispatch import Group
from app.engine.request import FinishReason, Request, TokenDelta
from app.errors import DeadlineMissed, InvalidRequest, Overloaded, Unavailable
from tests.fakes import expected_tokens, make_request
from tests.fleet.replicas import LocalFleet


async def collect(local: LocalFleet, request: Request) -> tuple[list[int], TokenDelta]:
    tokens: list[int] = []
    last = TokenDelta(request.request_id, ())
    async with aclosing(local.fleet.generate(request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            assert delta.request_id == request.request_id
            assert last.finish_reason is None, "nothing comes after the end"
            tokens += delta.token_ids
            last = delta
    return tokens, last


def expected(request: Request) -> list[int]:
    sampling = request.sampling
    return expected_tokens(request.prompt_token_ids, sampling.max_tokens, sampling.stop_token_ids)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that takes longer on a busy machine."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the condition may be anything)
            await asyncio.sleep(0.01)


def mixed(num_requests: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            tuple(rng.randrange(2, 50) for _ in range(rng.randrange(1, 30))),
            max_tokens=rng.randrange(1, 60),
            stop_token_ids=(rng.randrange(2, 50),) if rng.random() < 0.3 else (),
        )
        for _ in range(num_requests)
    ]


def test_every_request_gets_its_tokens_and_its_end() -> None:
    async def main() -> None:
        requests = mixed(40, seed=1)
        async with LocalFleet(3) as local:
            answers = await asyncio.gather(*(collect(local, request) for request in requests))
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]
            assert all(last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for _, last in answers)
            assert all(replica.num_served for replica in local.replicas)
            assert local.fleet.num_attempts == 0

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_killing_replicas_in_mid_stream_changes_no_token(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        requests = mixed(32, seed)
        async with LocalFleet(3) as local:

            async def kill() -> None:
                for replica in rng.sample(local.replicas, 2):
                    await asyncio.sleep(rng.uniform(0.0, 0.04))
                    replica.kill()

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), kill())
            for request, (tokens, last) in zip(requests, answers, strict=True):
                assert tokens == expected(request)
                assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    asyncio.run(main())


def test_a_request_goes_on_after_its_first_tokens_and_is_counted_once() -> None:
    async def main() -> None:
        request = make_request((5, 6, 7, 8, 9), max_tokens=40)
        async with LocalFleet(2, step_s=0.003) as local:
            tokens: list[int] = []
            cached: set[int] = set()
            async for delta in local.fleet.generate(request):
                tokens += delta.token_ids
                cached.add(delta.num_cached_tokens)
                if len(tokens) >= 3 and not any(replica.is_dead for replica in local.replicas):
                    next(replica for replica in local.replicas if replica.num_served).kill()
            assert tokens == expected(request)
            assert cached == {0}, "what the second replica found cached is no saving of the caller's"
            assert (local.fleet.totals.resumes, local.fleet.totals.restarts) == (1, 0)

    asyncio.run(main())


def test_a_silent_replica_is_given_up_and_what_it_says_later_is_not_heard() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=60) for n in range(8)]
        async with LocalFleet(2, step_s=0.005, silence_s=0.2) as local:

            async def hang() -> None:
                await asyncio.sleep(0.05)
                local.replicas[0].is_heard.clear()
                await until(lambda: local.board.suspects == {"r0"})
                local.replicas[0].is_heard.set()

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), hang())
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]
            assert local.fleet.totals.losses
            await until(lambda: not local.board.suspects)  # it speaks again, and is trusted again
            tokens, _ = await collect(local, requests[0])
            assert tokens == expected(requests[0])

    asyncio.run(main())


def test_a_replica_that_falls_silent_while_a_request_is_on_its_way_gets_it_in_vain_but_not_for_long() -> None:
    async def main() -> None:
        request = make_request((5, 6, 7), max_tokens=20)
        silence_s = 2.0
        async with LocalFleet(2, dispatch="round_robin", silence_s=silence_s) as local:
            local.calls.is_sent.clear()
            answer = asyncio.ensure_future(collect(local, request))
            await until(lambda: local.board.decision(request.request_id) is not None)
            decision = local.board.decision(request.request_id)
            assert decision is not None
            chosen = local.calls.replicas[decision.order[0]]
            chosen.is_heard.clear()
            await until(lambda: local.board.suspects == {chosen.replica_id})
            local.calls.is_sent.set()
            tokens, _ = await asyncio.wait_for(answer, silence_s / 2)
            assert tokens == expected(request)
            assert local.counts.resumes["late"] == 1

    asyncio.run(main())


def test_a_replica_whose_step_does_not_end_is_given_up_though_it_sends_heartbeats() -> None:
    async def main() -> None:
        request = make_request((5, 6, 7), max_tokens=30)
        async with LocalFleet(2, step_s=0.002) as local:
            answer = asyncio.ensure_future(collect(local, request))
            await asyncio.sleep(0.02)
            stuck = next(replica for replica in local.replicas if replica.num_served)
            stuck.runner.going.clear()
            tokens, _ = await asyncio.wait_for(answer, 10)
            assert tokens == expected(request)
            assert sum(replica.num_served for replica in local.replicas) == 2

    asyncio.run(main())


def test_when_every_replica_is_lost_the_caller_hears_of_it() -> None:
    async def main() -> None:
        request = make_request(max_tokens=60)
        async with LocalFleet(2, step_s=0.005, max_resumes=2, place_timeout_s=0.6) as local:

            async def kill() -> None:
                await asyncio.sleep(0.02)
                for replica in local.replicas:
                    replica.kill()

            with pytest.raises(Unavailable, match="3 replicas were lost"):
                await asyncio.gather(collect(local, request), kill())
            assert local.fleet.num_attempts == 0

    asyncio.run(main())


def test_a_request_that_kills_replicas_is_given_up_before_those_that_were_there_with_it() -> None:
    async def main() -> None:
        deadly = make_request((5, 0, 7), max_tokens=30)
        others = [make_request((5, 6, 7 + n), max_tokens=250) for n in range(6)]
        async with LocalFleet(4, step_s=0.004, max_resumes=3) as local:
            loop = asyncio.get_running_loop()
            for replica in local.replicas:
                replica.runner.deadly_token_id = 0
                replica.runner.on_deadly = lambda kill=replica.kill: loop.call_soon_threadsafe(kill)
            answers = [asyncio.ensure_future(collect(local, request)) for request in others]
            await asyncio.sleep(0.05)
            with pytest.raises(Unavailable, match="3 replicas were lost"):
                await collect(local, deadly)
            assert not any(answer.done() for answer in answers), "they are there at every loss"
            for request, (tokens, _) in zip(others, await asyncio.gather(*answers), strict=True):
                assert tokens == expected(request)
            assert sum(replica.is_dead for replica in local.replicas) == 3

    asyncio.run(main())


def test_requests_outlive_the_loss_of_every_replica_when_another_comes_in_time() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=60) for n in range(8)]
        async with LocalFleet(4, step_s=0.003, max_resumes=3) as local:
            local.calls.leave("r3")

            async def replace_all() -> None:
                await asyncio.sleep(0.03)
                for replica in local.replicas[:3]:
                    replica.kill()
                await asyncio.sleep(1.5)
                local.calls.join("r3")

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), replace_all())
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]

    asyncio.run(main())


def test_a_request_waits_for_a_replica_only_for_a_time() -> None:
    async def main() -> None:
        async with LocalFleet(1, place_timeout_s=0.1) as local:
            local.calls.leave("r0")
            with pytest.raises(Unavailable, match=r"for 0.1 s"):
                await collect(local, make_request())

    asyncio.run(main())


def test_a_replica_that_leaves_ends_what_it_has() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=50) for n in range(6)]
        async with LocalFleet(2, step_s=0.002) as local:

            async def leave() -> None:
                await asyncio.sleep(0.03)
                local.calls.leave("r0")

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), leave())
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]
            assert local.fleet.totals.losses == 0
            assert local.fleet.totals.resumes == local.fleet.totals.restarts == 0

    asyncio.run(main())


def test_a_full_replica_sends_its_requests_to_one_that_has_room() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=30) for n in range(8)]
        async with LocalFleet(2, dispatch="round_robin", step_s=0.002, max_requests=4) as local:
            answers = await asyncio.gather(*(collect(local, request) for request in requests))
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]

    asyncio.run(main())


def test_when_all_are_full_the_caller_is_told_when_to_come_back() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=100) for n in range(12)]
        async with LocalFleet(2, step_s=0.002, max_requests=4) as local:
            answers = await asyncio.gather(*(collect(local, request) for request in requests), return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert len(refused) == 4
            assert all(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in refused)

    asyncio.run(main())


def test_closing_a_stream_aborts_the_request_where_it_runs() -> None:
    async def main() -> None:
        async with LocalFleet(1, step_s=0.002) as local:
            async with aclosing(local.fleet.generate(make_request(max_tokens=500))) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.token_ids:
                        break
            for _ in range(200):
                stats = local.replicas[0].engine.stats()
                if stats.total_aborted:
                    break
                await asyncio.sleep(0.01)
            assert stats.total_aborted == 1
            assert stats.num_free_blocks == stats.num_blocks
            assert local.fleet.num_attempts == 0

    asyncio.run(main())


def test_a_deadline_goes_on_counting_while_replicas_are_lost() -> None:
    async def main() -> None:
        request = make_request(max_tokens=400, deadline_s=0.4)
        async with LocalFleet(2, step_s=0.01) as local:

            async def kill() -> None:
                await asyncio.sleep(0.1)
                next(replica for replica in local.replicas if replica.num_served).kill()

            with pytest.raises(DeadlineMissed):
                await asyncio.wait_for(asyncio.gather(collect(local, request), kill()), 1.0)

    asyncio.run(main())


def test_a_slow_reader_hears_everything_and_holds_up_nobody() -> None:
    async def main() -> None:
        slow, quick = make_request((9, 8), max_tokens=80), make_request((5, 6, 7), max_tokens=80)
        async with LocalFleet(1, step_s=0.001) as local:

            async def read_slowly() -> tuple[list[int], int]:
                tokens: list[int] = []
                num_deltas = 0
                async for delta in local.fleet.generate(slow):
                    tokens += delta.token_ids
                    num_deltas += 1
                    await asyncio.sleep(0.1)
                return tokens, num_deltas

            reading = asyncio.ensure_future(read_slowly())
            tokens, _ = await asyncio.wait_for(collect(local, quick), 2.0)
            assert tokens == expected(quick)
            tokens, num_deltas = await reading
            assert tokens == expected(slow)
            assert num_deltas < 12

    asyncio.run(main())


def test_requests_of_a_group_go_to_its_replicas() -> None:
    async def main() -> None:
        groups = (Group("a", 1.0), Group("b", 1.0))
        async with LocalFleet(2, groups=groups) as local:
            requests = [replace(make_request((5, n), max_tokens=3), group="b") for n in range(2, 12)]
            await asyncio.gather(*(collect(local, request) for request in requests))
            assert [replica.num_served for replica in local.replicas] == [0, 10]
            with pytest.raises(InvalidRequest, match="there is no group 'c'"):
                await collect(local, replace(make_request(), group="c"))

    asyncio.run(main())


def test_an_engine_that_stops_under_its_requests_loses_none_of_them() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=50) for n in range(6)]
        async with LocalFleet(2, step_s=0.002) as local:

            async def stop() -> None:
                await asyncio.sleep(0.03)
                await asyncio.to_thread(local.replicas[0].engine.shutdown)

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), stop())
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]
            assert local.counts.resumes["engine_failed"] > 0

    asyncio.run(main())


def test_a_device_that_fails_on_everything_loses_none_of_its_requests() -> None:
    async def main() -> None:
        requests = [make_request((5, 6, 7 + n), max_tokens=50) for n in range(12)]
        async with LocalFleet(2, step_s=0.002) as local:

            async def break_device() -> None:
                await asyncio.sleep(0.03)
                local.replicas[0].runner.is_broken = True

            *answers, _ = await asyncio.gather(*(collect(local, request) for request in requests), break_device())
            assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]

    asyncio.run(main())
