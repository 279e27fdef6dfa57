from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.engine.async_engine import AsyncEngine
from app.engine.device_lease import DeviceLease
from app.engine.request import ALL_BLOCKS, Adapter, Address, Grammar, GrammarKind, PrefixSource, Request
from app.engine.sleep_controller import SleepController
from app.engine.stats import SleepState
from app.errors import (
    Cancelled,
    DeadlineMissed,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    ReplicasLost,
    Unavailable,
    UnsupportedAdapter,
)
from app.fleet.dispatch import DECODE, PREFILL, Group
from app.fleet.frames import DISPATCH_FIELDS, FIRST_REQUEST_FIELDS, REQUEST_FIELDS, used_fields
from app.fleet.replica_registry import MIN_FETCHED_TOKENS
from tests.engine.test_engine_logprobs import check as check_logprobs
from tests.kit.engine import FakeClock, build_fake_engine, make_full_request, make_request, next_token, tokens_of
from tests.kit.fleet import LocalFleet, LocalReplica, adapted_token, check
from tests.waiting import PATIENCE_S, until


def alike(num_requests: int, *, max_tokens: int = 50) -> list[Request]:
    return [make_request((5, 6, 7 + n), max_tokens=max_tokens) for n in range(num_requests)]


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


async def test_every_request_gets_its_tokens_and_its_end() -> None:
    requests = mixed(40, seed=1)
    async with LocalFleet(3) as local:
        await check(requests, local.start(requests))
        assert all(replica.served for replica in local.replicas)
        assert local.fleet.num_in_flight == 0


@pytest.mark.parametrize("seed", range(8))
async def test_killing_replicas_in_mid_stream_changes_no_token(seed: int) -> None:
    rng = random.Random(seed)
    requests = mixed(32, seed)
    async with LocalFleet(3) as local:
        doomed = rng.sample(local.replicas, 2)
        for replica in doomed:
            local.hold(replica, before=rng.randrange(20))
        answers = local.start(requests)
        for replica in doomed:
            await local.held(replica)
            replica.kill()
        await check(requests, answers)
        assert local.counts.resumes.total() >= 2


async def test_a_lost_replica_is_two_lines_of_the_log_however_many_requests_it_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = alike(40)
    async with LocalFleet(2) as local:
        doomed = local.replicas[0]
        local.hold(doomed)
        answers = local.start(requests)
        await local.held(doomed)
        num_lost = len(local.fleet._on_replica[doomed.replica_id])
        doomed.kill()
        await check(requests, answers)
    assert num_lost > 10
    with_it = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each for each in with_it if "resume on other replicas" in each] == [
        f"replica {doomed.replica_id}: its {num_lost} requests resume on other replicas"
    ]
    assert len([each for each in with_it if "resumes on another replica" in each]) == 0


async def test_nothing_is_kept_of_replicas_that_are_lost_with_requests_and_gone() -> None:
    requests = mixed(16, 1)
    async with LocalFleet(3) as local:
        doomed = local.replicas[0]
        local.hold(doomed)
        answers = local.start(requests)
        await local.held(doomed)
        local.transport.leave(doomed.replica_id)
        doomed.kill()
        await check(requests, answers)
        assert local.fleet._on_replica == {}


@pytest.mark.parametrize("dispatch", ["least_loaded", "round_robin"])
@pytest.mark.parametrize("num_others", [3, 8, 30])
async def test_the_beginning_of_a_call_is_computed_once(num_others: int, dispatch: str) -> None:
    begin = tuple(range(2, 42))
    first, *others = [
        replace(make_request((*begin, 2 + n), max_tokens=1), call="a call") for n in range(1 + num_others)
    ]
    async with LocalFleet(2, dispatch=dispatch) as local:
        busy = alike(6)  # of other clients
        answers = local.start(busy)
        await local.answer(first)
        outcomes = await asyncio.gather(*local.start(others))
        await check(busy, answers)
        assert sum(outcome.num_cached_tokens for outcome in outcomes) == num_others * len(begin)


async def test_a_prediction_goes_with_its_request_to_another_replica() -> None:
    request = make_request((5, 6, 7), max_tokens=80)
    request = replace(request, prediction_token_ids=tuple(tokens_of(request)))
    async with LocalFleet(2) as local:
        local.hold(*local.replicas, before=4)
        [answer] = local.start([request])
        [serving] = await until(lambda: [replica for replica in local.replicas if replica.served])
        await local.held(serving)
        serving.kill()
        local.go()
        outcome = await answer
        outcome.check(request)
        [other] = [replica for replica in local.replicas if replica is not serving]
        [resumed] = other.served
        assert resumed.prediction_token_ids == request.prediction_token_ids
        assert 0 < len(resumed.generated_token_ids) < 80
        num_accepted, _ = outcome.predicted[request.request_id]
        assert num_accepted > other.engine.stats().total_accepted_tokens > 0, "what the first one said counts, too"


ADAPTER = Adapter(name="support", path="/support", digest="3")


def with_adapter(number: int) -> Request:
    return make_request((5, 6, 7 + number), max_tokens=50, adapter=ADAPTER)


def expected_with_adapter(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(adapted_token(next_token(tokens), 3))
    return tokens[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_request_goes_on_with_its_adapter_whether_or_not_the_other_replica_has_it(is_loaded: bool) -> None:
    async with LocalFleet(2) as local:
        if is_loaded:
            for replica in local.replicas:
                await replica.engine.load_adapter(ADAPTER)
        requests = [with_adapter(0), *alike(4), with_adapter(1)]
        local.hold(*local.replicas)
        answers = local.start(requests[:1])  # alone, so that every step of its replica is one of its own
        first = await until(lambda: [each for each in local.replicas if each.served])
        await local.held(first[0])
        answers += local.start(requests[1:])
        await until(lambda: sum(len(each.served) for each in local.replicas) == len(requests))
        other = next(replica for replica in local.replicas if replica is not first[0])
        other_has_it = ADAPTER.digest in other.engine.adapters.stats().loaded  # type: ignore[union-attr]
        first[0].kill()
        local.go()
        for request, outcome in zip(requests, await asyncio.gather(*answers), strict=True):
            expected = expected_with_adapter(request) if request.adapter else tokens_of(request)
            assert outcome.token_ids[request.request_id] == expected
        resumed = [each for each in other.served if each.generated_token_ids and each.adapter]
        assert resumed, "it died in the middle of their streams"
        assert other_has_it == is_loaded


async def test_a_request_goes_on_nowhere_where_its_adapter_has_other_files() -> None:
    async with LocalFleet(2) as local:
        local.hold(*local.replicas)
        [answer] = local.start([with_adapter(0)])
        [serving] = await until(lambda: [replica for replica in local.replicas if replica.served])
        await local.held(serving)
        for replica in local.replicas:
            replica.has_other_files = True
        serving.kill()
        local.go()
        with pytest.raises(UnsupportedAdapter, match="the adapter support is another one here"):
            await answer


async def test_a_request_goes_on_only_with_the_weights_that_made_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    local = LocalFleet(4)
    for replica, weights in zip(local.replicas, (1, 1, 2, 2), strict=True):
        replica.weights = weights
    async with local:
        assert "so their answers differ" in caplog.text
        requests = alike(24)
        local.hold(*local.replicas)
        answers = local.start(requests)
        first, second, *_ = local.replicas
        await local.held(first)
        served = {request.request_id for request in first.served}
        first.kill()
        local.go()
        await check(requests, answers)
        resumed = [each for replica in local.replicas[1:] for each in replica.served if each.generated_token_ids]
        assert served
        assert len(resumed) == len(served)
        assert {each.request_id for each in resumed} <= {each.request_id for each in second.served}


async def test_a_request_is_not_continued_with_other_weights_where_there_are_no_more_of_its_own() -> None:
    local = LocalFleet(2, place_timeout_s=0.2)
    for weights, replica in enumerate(local.replicas, 1):
        replica.weights = weights
    async with local:
        local.hold(*local.replicas)
        [answer] = local.start(alike(1))
        [serving] = await until(lambda: [replica for replica in local.replicas if replica.served])
        await local.held(serving)
        serving.kill()
        local.go()
        with pytest.raises(Unavailable, match="the other replicas have different weights; send it again"):
            await answer
        (await local.answer(another := alike(1)[0])).check(another)  # a new request takes any replica


async def test_a_replica_whose_frames_have_another_version_breaks_no_stream_and_gets_no_request() -> None:
    requests = mixed(20, seed=3)
    async with LocalFleet(2) as local:
        answers = local.start(requests[:10])
        newer = local.join_another()
        newer.frame_version += 1
        await check(requests, answers + local.start(requests[10:]))
        assert not newer.served


async def test_a_request_goes_on_after_its_first_tokens_and_is_counted_once() -> None:
    request = make_request((5, 6, 7, 8, 9), max_tokens=40)
    async with LocalFleet(2) as local:
        local.hold(*local.replicas)
        tokens: list[int] = []
        cached: set[int] = set()
        async for delta in local.fleet.generate(request):
            tokens += delta.token_ids
            cached.add(delta.num_cached_tokens)
            if len(tokens) >= 3 and not any(replica.is_dead for replica in local.replicas):
                [serving] = [replica for replica in local.replicas if replica.served]
                serving.kill()
                local.go()
        assert tokens == tokens_of(request)
        assert cached == {0}, "what the second replica found cached is no saving of the caller's"
        assert local.counts.resumes == {"broken": 1}


@pytest.mark.parametrize("seed", range(4))
async def test_losing_replicas_loses_and_repeats_no_logprobs(seed: int) -> None:
    """While prompts are scored, and in mid-stream."""
    rng = random.Random(seed)
    requests = [
        make_request(
            tuple(rng.randrange(2, 50) for _ in range(rng.randrange(1, 90))),
            max_tokens=rng.randrange(0, 30),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, 0, 2)),
        )
        for _ in range(24)
    ]
    async with LocalFleet(3) as local:
        doomed = rng.sample(local.replicas, 2)
        for replica in doomed:
            local.hold(replica, before=rng.randrange(20))
        answers = local.start(requests)
        for replica in doomed:
            await local.held(replica)
            replica.kill()
        for request, outcome in zip(requests, await asyncio.gather(*answers), strict=True):
            check_logprobs(outcome, request)
        assert local.counts.resumes.total() >= 2


async def test_a_silent_replica_is_given_up_and_what_it_says_later_is_not_heard() -> None:
    requests = alike(8)
    async with LocalFleet(2, silence_s=0.3) as local:
        silent = local.replicas[0]
        local.hold(silent)
        answers = local.start(requests)
        await local.held(silent)
        silent.is_heard.clear()
        local.go()
        await until(lambda: local.registry.is_suspect("r0"))
        silent.is_heard.set()
        await check(requests, answers)
        assert set(local.counts.resumes) == {"silent"}
        await until(lambda: not local.suspects())  # it speaks again, and is trusted again
        (await local.answer(requests[0])).check(requests[0])


async def test_a_request_that_is_sent_to_a_replica_that_has_just_fallen_silent_goes_on_elsewhere() -> None:
    requests = alike(4, max_tokens=20)
    async with LocalFleet(2, dispatch="round_robin", silence_s=0.5) as local:
        silent, other = local.replicas
        silent.is_heard.clear()
        await check(requests, local.start(requests))
        assert local.counts.resumes == {"silent": 2}
        assert len(other.served) == 4
        silent.is_heard.set()
        await until(lambda: not local.suspects())
        await until(lambda: silent.engine.stats().num_running + silent.engine.stats().num_waiting == 0)


async def test_a_replica_whose_step_does_not_end_is_given_up_though_it_sends_heartbeats() -> None:
    request = make_request((5, 6, 7), max_tokens=30)
    async with LocalFleet(2, silence_s=2.0, stuck_s=1.0) as local:
        local.hold(*local.replicas)
        [answer] = local.start([request])
        await until(lambda: any(replica.runner.is_held for replica in local.replicas))
        [free] = [replica for replica in local.replicas if not replica.runner.is_held]
        free.runner.go()
        (await answer).check(request)
        assert [len(replica.served) for replica in local.replicas] == [1, 1]
        assert local.counts.resumes == {"stuck": 1}


async def test_a_request_waits_for_a_sleeping_replica_and_goes_on_elsewhere_when_that_is_lost(tmp_path: Path) -> None:
    """Waiting for memory is no step and no silence."""
    request = make_request((5, 6, 7), max_tokens=30)
    turns, others = (
        DeviceLease(tmp_path / "device.json", name=name, num_bytes=6, total_bytes=10) for name in ("own", "other")
    )
    turns.wait()
    local = LocalFleet(1, silence_s=2.0, stuck_s=0.2)
    [dozing] = local.replicas
    dozing.engine.shutdown()
    engine = build_fake_engine(runner=dozing.runner)
    sleeper = SleepController(engine, turns, after_s=0.0, startup_s=0.0)
    dozing.engine = AsyncEngine(engine, max_requests=10, sleeper=sleeper)
    await until(lambda: dozing.engine.sleep.state is SleepState.ASLEEP)
    assert others.ask()
    async with local:
        [answer] = local.start([request])
        await until(lambda: dozing.engine.sleep.state is SleepState.QUEUED)
        await asyncio.sleep(0.4)
        assert not local.counts.resumes
        local.join_another()
        dozing.kill()
        (await answer).check(request)
    others.close()


async def test_when_every_replica_is_lost_the_caller_hears_of_it() -> None:
    async with LocalFleet(3, max_resumes=2) as local:
        local.hold(*local.replicas)
        [answer] = local.start(alike(1))
        for _ in local.replicas:
            await until(lambda: any(each.runner.is_held and not each.is_dead for each in local.replicas))
            for replica in local.replicas:
                if replica.runner.is_held and not replica.is_dead:
                    replica.kill()
        with pytest.raises(ReplicasLost, match="3 replicas were lost"):
            await answer
        assert local.fleet.num_in_flight == 0


async def test_a_request_whose_last_replica_is_lost_waits_for_another_only_for_a_time() -> None:
    async with LocalFleet(1, place_timeout_s=0.6) as local:
        [replica] = local.replicas
        local.hold(replica)
        [answer] = local.start(alike(1))
        await local.held(replica)
        replica.kill()
        with pytest.raises(Unavailable, match=r"no replica became available within 0.6 s"):
            await answer
        assert local.fleet.num_in_flight == 0


async def test_a_request_that_kills_replicas_is_given_up_before_those_that_were_there_with_it() -> None:
    deadly = make_request((5, 0, 7), max_tokens=30)
    others = alike(6, max_tokens=250)
    async with LocalFleet(4, step_s=0.02, max_resumes=3) as local:  # the others take five seconds like this
        loop = asyncio.get_running_loop()
        for replica in local.replicas:
            replica.runner.deadly_token_id = 0
            replica.runner.on_deadly = lambda kill=replica.kill: loop.call_soon_threadsafe(kill)
        answers = local.start(others)
        await until(lambda: sum(len(replica.runner.batches) > 1 for replica in local.replicas) == 4)
        with pytest.raises(Unavailable, match="3 replicas were lost"):
            await local.answer(deadly)
        assert not any(answer.done() for answer in answers), "they are there at every loss"
        for replica in local.replicas:
            replica.runner.step_s = 0.0
        await check(others, answers)
        assert sum(replica.is_dead for replica in local.replicas) == 3


async def test_requests_outlive_the_loss_of_every_replica_when_another_comes_in_time() -> None:
    requests = alike(8)
    async with LocalFleet(4, max_resumes=3) as local:
        local.transport.leave("r3")
        *lost, _ = local.replicas
        local.hold(*lost)
        answers = local.start(requests)
        await local.held(*lost)
        for replica in lost:
            replica.kill()
        await asyncio.sleep(0.5)
        assert not any(answer.done() for answer in answers)
        local.transport.join("r3")
        await check(requests, answers)


async def test_a_request_waits_for_a_replica_only_for_a_time() -> None:
    async with LocalFleet(1, place_timeout_s=0.1) as local:
        local.transport.leave("r0")
        with pytest.raises(Unavailable, match=r"within 0.1 s"):
            await local.answer(make_request())
        await until(lambda: local.transport.num_waking == 0)


async def test_a_request_that_is_not_to_wait_is_served_by_a_replica_that_is_there_and_refused_where_none_is() -> None:
    requests = [replace(request, no_queue=True) for request in alike(2)]
    async with LocalFleet(1) as local:
        (await local.answer(requests[0])).check(requests[0])
        local.transport.leave("r0")
        with pytest.raises(Overloaded, match="no replica is available, and this request may not be queued"):
            await local.answer(requests[1])


async def test_a_model_without_replicas_is_woken_by_each_request_that_waits_for_one() -> None:
    requests = alike(3)
    async with LocalFleet(1) as local:
        local.transport.leave("r0")
        answers = local.start(requests)
        await until(lambda: local.transport.num_waking == 3)  # Serve starts as many replicas as that needs
        local.transport.join("r0")
        await check(requests, answers)
        assert not local.counts.resumes


async def test_a_replica_that_leaves_ends_what_it_has() -> None:
    requests = alike(6)
    async with LocalFleet(2) as local:
        local.hold(*local.replicas)
        answers = local.start(requests)
        await local.held(*local.replicas)
        local.transport.leave("r0")
        local.go()
        await check(requests, answers)
        assert not local.counts.resumes


@pytest.mark.parametrize("may_go_on", [True, False])
async def test_requests_leave_a_replica_that_ends_before_them_unless_no_other_has_its_weights(may_go_on: bool) -> None:
    requests = alike(6)
    local = LocalFleet(2, drain_s=0.01, max_resumes=0)
    for weights, replica in enumerate(local.replicas, 1):
        replica.weights = 1 if may_go_on else weights
    async with local:
        local.hold(*local.replicas)
        answers = local.start(requests)
        await local.held(*local.replicas)
        first, second = local.replicas
        served = {request.request_id for request in first.served}
        local.transport.leave("r0")
        await until(lambda: local.counts.resumes["ending"] == may_go_on * len(served))
        await asyncio.sleep(0.02)
        local.go()
        await check(requests, answers)
        assert served
        assert len(first.aborted) == may_go_on * len(served)
        resumed = [each for each in second.served if each.generated_token_ids]
        assert len(resumed) == may_go_on * len(served)


async def test_a_replica_that_stays_after_all_keeps_its_requests_until_it_leaves_again() -> None:
    requests = alike(6)
    async with LocalFleet(2, drain_s=0.2) as local:
        local.hold(*local.replicas)
        answers = local.start(requests)
        await local.held(*local.replicas)
        local.transport.leave("r0")
        local.transport.join("r0")
        await asyncio.sleep(0.2)
        assert not local.counts.resumes
        local.transport.leave("r0")
        await until(lambda: local.counts.resumes["ending"])
        local.go()
        await check(requests, answers)


@pytest.mark.parametrize(
    ("of_first", "of_second", "leaves"),
    [
        ({"is_short_of_memory": True}, {"num_free_kv_tokens": 10_000}, True),
        ({"is_short_of_memory": False}, {"num_free_kv_tokens": 10_000}, False),
        ({"is_short_of_memory": True}, {"num_free_kv_tokens": 10}, False),  # no room
        ({"is_short_of_memory": True}, {"num_free_kv_tokens": 10_000, "max_running": 0}, False),  # no slot
        ({"is_short_of_memory": True, "address": None}, {"num_free_kv_tokens": 10_000}, False),  # it would be computed
    ],
)
async def test_requests_leave_a_replica_that_is_short_of_memory_for_one_with_room(
    of_first: dict[str, Any], of_second: dict[str, Any], leaves: bool
) -> None:
    requests, address = alike(4), Address("127.0.0.1", 1, "secret")
    local = LocalFleet(2)
    first, second = local.replicas
    first.prefixes.address = of_first.get("address", address)
    second.reported = of_second
    async with local:
        local.hold(first, second)
        answers = local.start(requests)
        await local.held(first, second)
        first.reported = {"is_short_of_memory": of_first["is_short_of_memory"]}
        local.go()
        await check(requests, answers)
        resumed = [each for each in second.served if each.generated_token_ids]
        assert bool(local.counts.resumes["memory"]) == bool(resumed) == leaves
        assert all(each.prefix_at == PrefixSource(address, ALL_BLOCKS) for each in resumed)
        assert not any(each.generated_token_ids for each in first.served)


async def test_a_long_prompt_stays_at_the_replica_for_prompts_where_its_kv_memory_cannot_be_fetched() -> None:
    request = make_request((5, 6) * MIN_FETCHED_TOKENS, max_tokens=5)
    async with LocalFleet(2, groups=(Group(PREFILL, 1.0), Group(DECODE, 1.0))) as local:
        local.registry.has_roles = True
        (await local.answer(request)).check(request)
        assert [len(replica.served) for replica in local.replicas] == [1, 0]


async def test_a_full_replica_sends_its_requests_to_one_that_has_room() -> None:
    requests = alike(8, max_tokens=30)
    async with LocalFleet(2, dispatch="round_robin", max_requests=4) as local:
        await check(requests, local.start(requests))


async def test_when_all_are_full_the_caller_is_told_when_to_come_back() -> None:
    async with LocalFleet(2, max_requests=4) as local:
        local.hold(*local.replicas)
        answers = local.start(alike(12))
        await until(lambda: sum(answer.done() for answer in answers) == 4)
        local.go()
        found = await asyncio.gather(*answers, return_exceptions=True)
        refused = [answer for answer in found if isinstance(answer, BaseException)]
        assert len(refused) == 4
        assert all(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in refused)


async def test_background_work_on_every_slot_of_every_replica_refuses_no_other_request() -> None:
    num_slots = 2 * 8  # as many as two such replicas take at all
    night = [replace(request, is_background=True) for request in alike(num_slots + 1, max_tokens=40)]
    day = mixed(num_slots, seed=3)
    async with LocalFleet(2, max_requests=8) as local:
        local.hold(*local.replicas)
        answers = local.start(night[:num_slots])
        await local.held(*local.replicas)
        await until(lambda: sum(report.num_background for report in local.registry.reports.values()) == num_slots)
        with pytest.raises(Overloaded, match="all 2 replicas are full"):  # and no replica had to say so
            await local.answer(night[num_slots])
        assert sum(len(replica.served) for replica in local.replicas) == num_slots
        answers += local.start(day)
        await until(lambda: sum(len(replica.served) for replica in local.replicas) == 2 * num_slots)
        with pytest.raises(Overloaded):
            await local.answer(make_request())
        local.go()
        await check([*night[:num_slots], *day], answers)


async def test_closing_a_stream_aborts_the_request_where_it_runs() -> None:
    async with LocalFleet(1) as local:
        [replica] = local.replicas
        local.hold(replica)
        async with aclosing(local.fleet.generate(make_request(max_tokens=50))) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.token_ids:
                    break
        await until(lambda: bool(replica.aborted))
        local.go()
        await until(lambda: replica.engine.stats().total_aborted == 1)
        stats = replica.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert local.fleet.num_in_flight == 0


async def test_a_request_that_is_cancelled_by_its_id_ends_where_it_runs_and_no_other_does() -> None:
    async with LocalFleet(1) as local:
        [replica] = local.replicas
        local.hold(replica)
        ended, other = alike(2)
        answer, others_answer = local.start([ended, other])
        await local.held(replica)
        assert not local.fleet.cancel("nobody's")
        assert local.fleet.cancel(ended.request_id)
        with pytest.raises(Cancelled, match="this request was cancelled while it was running"):
            await answer
        local.go()
        (await others_answer).check(other)
        assert not local.fleet.cancel(ended.request_id)
        await until(lambda: len(replica.aborted) == 1)


async def test_how_long_outputs_are_is_not_learnt_from_requests_that_were_given_up() -> None:
    async with LocalFleet(1) as local:
        [replica] = local.replicas
        local.hold(replica)
        given_up = alike(5)
        answers = local.start(given_up)
        await local.held(replica)
        for request in given_up:
            local.fleet.cancel(request.request_id)
        await asyncio.gather(*answers, return_exceptions=True)
        local.go()
        await local.answer(make_request((5, 6, 7), max_tokens=50))
        assert local.registry.last_decision is not None
        assert local.registry.last_decision.scoring.num_request_tokens == 3 + 50


async def test_a_request_that_is_queued_is_told_where_and_why() -> None:
    async with LocalFleet(2) as local:
        deltas = local.fleet.generate(make_request())
        [queued] = [delta.queued async for delta in deltas if delta.queued is not None]
        [replica_id] = [each.replica_id for each in local.replicas if each.served]
        decision = local.registry.last_decision
        assert decision is not None
        assert (queued.replica_id, queued.group, queued.routing_reason) == (replica_id, "", decision.reason)
        assert queued.candidate_loads == decision.explain_loads()


async def test_the_place_of_a_request_that_was_given_up_is_free_at_once() -> None:
    async with LocalFleet(1, max_requests=1) as local:
        [replica] = local.replicas
        local.hold(replica)
        [given_up] = local.start([make_request(max_tokens=50)])
        await local.held(replica)
        given_up.cancel()
        await until(lambda: [each.num_requests for each in local.registry.reports.values()] == [0])
        request = make_request(request_id="next")
        [answer] = local.start([request])
        await until(lambda: len(replica.served) == 2)  # though the step with the first has not ended
        local.go()
        (await answer).check(request)


async def test_a_deadline_goes_on_counting_while_replicas_are_lost() -> None:
    clock = FakeClock()
    async with LocalFleet(2, clock=clock) as local:
        local.hold(*local.replicas)
        [answer] = local.start([make_request(max_tokens=40, deadline_s=100.0)])

        async def lose_after(seconds: float) -> LocalReplica:
            await until(lambda: any(each.runner.is_held and not each.is_dead for each in local.replicas))
            [replica] = [each for each in local.replicas if each.runner.is_held and not each.is_dead]
            clock.advance(seconds)
            replica.kill()
            return replica

        first, second = await lose_after(70.0), await lose_after(30.0)
        assert [request.deadline_s for request in (*first.served, *second.served)] == [100.0, 30.0]
        with pytest.raises(DeadlineMissed, match="deadline of 100 s passed"):
            await answer


async def test_a_deadline_that_the_replica_misses_is_missed() -> None:
    async with LocalFleet(1, step_s=0.01) as local:
        with pytest.raises(DeadlineMissed):
            await local.answer(make_request(max_tokens=400, deadline_s=0.1))
        assert not local.counts.resumes


async def test_a_slow_reader_receives_everything_and_delays_no_other_reader() -> None:
    slow, quick = make_request((9, 8), max_tokens=80), make_request((5, 6, 7), max_tokens=80)
    async with LocalFleet(1) as local, aclosing(local.fleet.generate(slow)) as deltas:  # type: ignore[type-var]
        heard = [await anext(deltas)]
        (await local.answer(quick)).check(quick)
        heard += [delta async for delta in deltas]
        assert [token for delta in heard for token in delta.token_ids] == tokens_of(slow)
        assert len(heard) == 2


async def test_requests_of_a_group_go_to_its_replicas() -> None:
    groups = (Group("a", 1.0), Group("b", 1.0))
    async with LocalFleet(2, groups=groups) as local:
        requests = [replace(make_request((5, n), max_tokens=3), group="b") for n in range(2, 12)]
        await asyncio.gather(*local.start(requests))
        assert [len(replica.served) for replica in local.replicas] == [0, 10]
        async with aclosing(local.fleet.generate(requests[0])) as deltas:  # type: ignore[type-var]
            first = await anext(deltas)
        assert first.queued is not None
        assert first.queued.group == "b", "metrics tell the groups apart by it"
        with pytest.raises(InvalidRequest, match="there is no group 'c'"):
            await local.answer(replace(make_request(), group="c"))


async def test_an_engine_that_stops_under_its_requests_loses_none_of_them() -> None:
    def is_stopping(replica: LocalReplica) -> bool:
        try:
            replica.engine.check_health()
        except EngineStopped:
            return True
        return False

    requests = alike(6)
    async with LocalFleet(2) as local:
        stopped = local.replicas[0]
        local.hold(stopped)
        answers = local.start(requests)
        await local.held(stopped)
        stopping = asyncio.create_task(asyncio.to_thread(stopped.engine.shutdown))
        await until(lambda: is_stopping(stopped))
        local.go()
        await stopping
        await check(requests, answers)
        assert local.counts.resumes["engine_failed"] > 0


async def test_a_device_that_fails_on_everything_loses_none_of_its_requests() -> None:
    requests = alike(12)
    async with LocalFleet(2) as local:
        broken = local.replicas[0]
        local.hold(broken)
        answers = local.start(requests)
        await local.held(broken)
        broken.runner.is_broken = True
        local.go()
        await check(requests, answers)
        assert local.counts.resumes["engine_failed"] > 0


async def test_views_come_while_they_are_wanted_from_replicas_that_understand() -> None:
    seen: list[tuple[str, int]] = []
    async with LocalFleet(2) as local:
        first, older = local.replicas
        older.sends_views = False
        await local.answer(make_request())  # reports come with frames
        await local.answer(make_request())
        await until(lambda: not local.registry.sends_views("r1"))
        local.fleet.watch(lambda replica_id, view: seen.append((replica_id, view.num_running)))
        await until(lambda: first.is_watched)
        assert older.is_watched is None
        assert first.stream is not None
        first.stream.show(await first.engine.snapshot())
        await until(lambda: seen == [("r0", 0)])
        local.fleet.watch(None)
        await until(lambda: first.is_watched is False)


async def test_a_replica_that_comes_back_or_joins_is_watched_too() -> None:
    async with LocalFleet(1) as local:
        local.fleet.watch(lambda replica_id, view: None)
        [first] = local.replicas
        await until(lambda: first.is_watched)
        first.is_watched = None
        assert first.stream is not None
        first.stream.break_off(RuntimeError("the network"))
        await until(lambda: first.is_watched)
        second = local.join_another()
        await until(lambda: second.is_watched)


async def test_replicas_are_described_with_their_state() -> None:
    async with LocalFleet(2) as local:
        first, second = local.replicas
        local.hold(*local.replicas)
        answers = local.start(alike(2))
        await local.held(first, second)
        local.transport.leave("r1")
        assert {each["replica"]: each["state"] for each in local.fleet.describe()} == {"r0": "serving", "r1": "leaving"}
        assert local.fleet.last_decision is not None
        first.kill()
        await until(lambda: local.fleet.describe()[0]["state"] == "lost")
        local.join_another()
        local.go()
        await asyncio.gather(*answers)
        await until(lambda: {each["replica"] for each in local.fleet.describe()} == {"r0", "r2"})


async def test_a_replica_that_dies_with_nothing_to_do_is_described_as_lost_and_a_suspect() -> None:
    async with LocalFleet(2) as local:
        local.replicas[0].kill()
        await until(lambda: local.suspects() == ["r0"])
        assert {each["replica"]: each["state"] for each in local.fleet.describe()} == {"r0": "lost", "r1": "serving"}


async def test_a_replica_that_dies_while_it_leaves_is_forgotten_though_a_client_does_not_read() -> None:
    request = make_request(max_tokens=50)
    async with LocalFleet(2) as local, aclosing(local.fleet.generate(request)) as deltas:  # type: ignore[type-var]
        local.hold(*local.replicas)
        heard = [await anext(deltas)]
        [serving] = [replica for replica in local.replicas if replica.served]
        local.transport.leave(serving.replica_id)
        assert [each["state"] for each in local.fleet.describe()] == ["serving", "leaving"]
        serving.kill()
        await until(lambda: [each["state"] for each in local.fleet.describe()] == ["serving"])
        local.go()
        heard += [delta async for delta in deltas]
        assert [token for delta in heard for token in delta.token_ids] == tokens_of(request)


async def test_a_fleet_that_is_closed_is_still_described() -> None:
    async with LocalFleet(2) as local:
        await local.answer(make_request())
        local.fleet.close()  # with the service, while viewers of the page are connected
        assert [each["state"] for each in local.fleet.describe()] == ["lost", "lost"]


OF_THE_VERSION_BEFORE = tuple(REQUEST_FIELDS - {"sampling.min_p", "sampling.grammar.kind=regex"})


async def test_a_request_never_goes_to_a_replica_that_would_ignore_a_field_of_it() -> None:
    async with LocalFleet(1) as local:
        newer = local.replicas[0]
        older = local.join_another()
        older.known_fields = OF_THE_VERSION_BEFORE
        await until(lambda: len(local.registry.reports) == 2)
        requests = [make_request(min_p=0.5) for _ in range(6)]
        plain = [make_request() for _ in range(6)]
        await check([*requests, *plain], local.start([*requests, *plain]))
        assert {each.request_id for each in requests} <= {each.request_id for each in newer.served}
        assert older.served, "it takes the others"


async def test_a_request_whose_field_no_replica_knows_is_refused_with_the_name_of_the_field() -> None:
    async with LocalFleet(1, place_timeout_s=0.01) as local:
        local.transport.leave("r0")
        older = local.join_another()
        older.known_fields = OF_THE_VERSION_BEFORE
        await local.answer(make_request())
        with pytest.raises(Unavailable, match=r"uses sampling\.min_p, which the running replicas do not support yet"):
            await local.answer(make_request(min_p=0.5))
        with pytest.raises(Unavailable, match=r"uses sampling\.grammar\.kind=regex"):
            await local.answer(make_request(grammar=Grammar(GrammarKind.REGEX, "a")))
        assert [each.sampling.min_p for each in older.served] == [0.0]


async def test_a_replica_that_names_no_fields_has_those_of_the_last_version_that_named_none() -> None:
    async with LocalFleet(1) as local:
        local.registry.note_fields("r0", ())
        request = make_full_request()
        newer = set(used_fields(request)) - FIRST_REQUEST_FIELDS - DISPATCH_FIELDS
        assert local.registry.unknown_field("r0", replace(make_request(), call="c", session="s")) is None
        unknown = local.registry.unknown_field("r0", request)
        assert unknown in newer if newer else unknown is None


async def test_replicas_that_take_requests_are_asked_for_their_metrics() -> None:
    async with LocalFleet(4) as local:
        answering, silent, older, leaving = local.replicas
        for each in local.replicas:
            each.metrics = [each.replica_id.encode(), b"again"]
        silent.metrics = []
        older.reported = {"sends_metrics": False}
        await local.answer(make_request())
        answers = local.start([make_request(max_tokens=5) for _ in range(8)])  # reports come with frames
        await asyncio.gather(*answers)
        await until(lambda: not local.registry.sends_metrics("r2"))
        local.transport.leave("r3")
        found = await local.fleet.ask_metrics(0.05)
        assert found == {"r0": b"r0", "r1": None, "r2": None}
        assert [each.num_asked for each in local.replicas] == [1, 1, 0, 0]
        assert answering.stream is not None
        assert leaving.num_asked == 0


async def test_the_loss_of_a_replica_ends_the_wait_for_its_metrics() -> None:
    async with LocalFleet(2) as local:
        silent, answering = local.replicas
        answering.metrics = [b"measured"]
        asking = [asyncio.create_task(local.fleet.ask_metrics(PATIENCE_S)) for _ in range(2)]
        await until(lambda: silent.num_asked == answering.num_asked == 2)
        assert not asking[0].done()
        silent.kill()
        for each in asking:
            assert await each == {"r0": None, "r1": b"measured"}


async def test_without_replicas_there_are_no_metrics() -> None:
    async with LocalFleet(0) as local:
        assert await local.fleet.ask_metrics(PATIENCE_S) == {}


async def test_metrics_that_nobody_asked_for_are_passed_over() -> None:
    async with LocalFleet(1) as local:
        [replica] = local.replicas
        assert replica.stream is not None
        replica.stream.send_metrics(b"unasked")
        request = make_request()
        (await local.answer(request)).check(request)
        replica.metrics = [b"asked"]
        assert await local.fleet.ask_metrics(PATIENCE_S) == {"r0": b"asked"}
