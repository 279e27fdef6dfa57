"""Fair shares: bounds, turns, and memory, whatever tenants do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fair import FairQueue, FairShares, RetryTimes, SharedPool

TENANTS = "abc"


def test_tenants_take_turns_and_one_that_comes_later_goes_behind_those_that_had_as_little() -> None:
    queue = FairQueue[int]()
    for number, tenant in enumerate("aaaabb"):
        queue.push(tenant, number)
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken)
        queue.end(taken[0])
        if len(order) == 2:
            queue.push("c", 6)
    assert order == [("a", 0), ("b", 4), ("a", 1), ("b", 5), ("c", 6), ("a", 2), ("a", 3)]


@given(
    st.lists(st.tuples(st.sampled_from(["push", "take", "end", "remove"]), st.sampled_from(TENANTS)), max_size=80),
    st.integers(1, 3),
)
def test_the_tenant_with_the_fewest_running_is_next_and_memory_is_of_tenants_with_work(
    steps: list[tuple[str, str]], max_running: int
) -> None:
    shares = FairShares()
    queue = FairQueue[int](shares, max_running=max_running)
    running, waiting = Counter[str](), {tenant: list[int]() for tenant in TENANTS}
    for number, (step, tenant) in enumerate(steps):
        if step == "push":
            queue.push(tenant, number)
            waiting[tenant].append(number)
        elif step == "remove" and waiting[tenant]:
            queue.remove(tenant, waiting[tenant].pop())
        elif step == "end" and running[tenant]:
            queue.end(tenant)
            running[tenant] -= 1
        elif step == "take":
            may_begin = [each for each in TENANTS if waiting[each] and running[each] < max_running]
            taken = queue.take()
            assert (taken is None) == (not may_begin)
            if taken is not None:
                winner, item = taken
                assert running[winner] == min(running[each] for each in may_begin)
                assert waiting[winner].pop(0) == item, "of one tenant the oldest"
                running[winner] += 1
        num_with_work = sum(bool(waiting[each]) for each in TENANTS)
        assert len(queue) == sum(map(len, waiting.values()))
        assert set(queue.lines) == {each for each in TENANTS if waiting[each]}
        assert len(shares._num_waiting) == len(shares._turns) == num_with_work
        assert len(shares) <= len(TENANTS)
        assert len(queue._order) <= 2 * len(TENANTS) + 9


@given(st.lists(st.integers(1, 9), min_size=30, max_size=100))
def test_shares_of_tenants_that_always_wait_differ_by_the_largest_piece_at_most(
    pieces: list[int],
) -> None:
    shares = FairShares()
    queue = FairQueue[tuple[str, int]](shares)
    for tenant in TENANTS:
        for piece in pieces:
            queue.push(tenant, (tenant, piece))
    served = Counter[str]()
    for _ in pieces:  # none runs out of work
        tenant, size = queue.pop()
        shares.serve(tenant, size)
        served[tenant] += size
        assert max(served.values()) - min(served[each] for each in TENANTS) <= max(pieces)


@given(st.integers(1, 6), st.integers(1, 5))
def test_no_tenant_starves_however_many_come_and_go(num_waiting: int, max_at_once: int) -> None:
    queue = FairQueue[str]()
    for number in range(num_waiting):
        queue.push(f"waits-{number}", "")
    for number in range(num_waiting + max_at_once + 2):
        for other in range(max_at_once):  # new ones, and ones that come back each time
            queue.push(f"new-{number}", "")
            queue.push(f"again-{other}", "")
        taken = queue.take()
        assert taken is not None
        queue.end(taken[0])
    assert not [tenant for tenant in queue.lines if tenant.startswith("waits")]


def test_idling_earns_nothing_and_what_was_served_beyond_others_is_remembered() -> None:
    shares = FairShares(max_idle=10)
    queue = FairQueue[int](shares)
    queue.push("a", 1)
    queue.pop()
    shares.serve("a", 100)
    for tenant in "bba":
        queue.push(tenant, 1)
    assert shares.served("b") == 0
    assert shares.served("a") == 100, "it does not lose what it was charged as it left"
    queue.pop()
    shares.serve("b", 200)
    queue.push("c", 1)
    assert shares.served("c") == 100, "as the least of those that wait"


def test_only_so_many_idle_tenants_are_remembered() -> None:
    shares = FairShares(max_idle=5)
    queue = FairQueue[int](shares)
    for number in range(100):
        queue.push(str(number), 1)
        queue.pop()
        shares.serve(str(number), 1)
    assert len(shares) <= 6
    assert len(shares._order) <= 2


def test_many_turns_of_one_tenant_leave_nothing() -> None:
    queue = FairQueue[int](max_running=2)
    for number in range(1000):
        queue.push("a", number)
        queue.push("a", number)
        for tenant in "ab":
            queue.push(tenant, number)
        while queue.take() is not None:
            queue.end("a") if queue.num_running("a") else queue.end("b")
    assert len(queue._order) <= 14


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-4, 9)), max_size=60), st.integers(1, 50))
def test_an_owner_holds_no_more_than_was_free_and_nothing_is_lost(steps: list[tuple[str, int]], size: int) -> None:
    pool, held = SharedPool[str](size), Counter[str]()
    for owner, amount in steps:
        if amount < 0:
            amount = -min(held[owner], -amount)
        elif not pool.allows(owner, amount):
            assert held[owner] + amount > size - held.total()
            continue
        pool.take(owner, amount)
        held[owner] += amount
        assert pool.held(owner) == held[owner] <= size
        assert pool.free == size - held.total() >= 0
        assert set(pool._held) == {each for each in held if held[each]}


@pytest.mark.parametrize(
    ("held", "room"), [({}, 50), ({"b": 40}, 30), ({"a": 20}, 30), ({"a": 50}, 0), ({"a": 80}, -30)]
)
def test_what_an_owner_may_still_take_leaves_as_much_for_others(held: dict[str, int], room: int) -> None:
    pool = SharedPool(100, held)
    assert pool.room_left("a") == room
    pool.take("a", room)
    assert pool.held("a") == pool.free


def test_refused_clients_come_back_one_after_the_other_as_places_become_free() -> None:
    retry = RetryTimes()
    waits = [retry.next_after(100.0, ended_per_s=4.0) for _ in range(4)]
    assert waits == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert retry.next_after(100.5, ended_per_s=4.0) == pytest.approx(0.75)
    assert retry.next_after(200.0, ended_per_s=4.0) == pytest.approx(0.25)


def test_a_tenant_that_floods_moves_only_its_own_times() -> None:
    retry = RetryTimes()
    flood = [retry.next_after(100.0, ended_per_s=4.0, tenant="flood") for _ in range(10_000)]
    assert max(flood) == pytest.approx(120.0)
    assert retry.next_after(100.0, ended_per_s=4.0, tenant="other") == pytest.approx(0.5)  # every second place
    assert retry.next_after(221.0, ended_per_s=4.0, tenant="flood") == pytest.approx(0.25)  # the flood is forgotten


def test_those_that_never_wait_for_a_place_put_no_other_off() -> None:
    retry = RetryTimes()
    assert retry.next_after(100.0, ended_per_s=4.0) == pytest.approx(0.25)
    for tenant, wait_s in (("", 0.5), ("other", 0.5)):
        flood = [retry.next_after(100.0, ended_per_s=4.0, tenant=tenant, delays_others=False) for _ in range(1_000)]
        assert flood == pytest.approx([wait_s] * 1_000)
    assert retry.next_after(100.0, ended_per_s=4.0) == pytest.approx(0.5)


def test_a_flood_of_tenants_takes_bounded_memory() -> None:
    retry = RetryTimes()
    for number in range(3_000):
        retry.next_after(100.0, ended_per_s=4.0, tenant=f"tenant-{number}")
    assert len(retry._last_at) <= 1_000


def test_without_a_pace_it_is_a_second() -> None:
    assert RetryTimes().next_after(5.0, ended_per_s=0.0) == 1.0
