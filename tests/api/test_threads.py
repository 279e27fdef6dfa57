from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from app.api.threads import MAX_SIZE_ON_THE_LOOP, MAX_SMALL_SIZE, MAX_WAITING, BodyThreads, FairThreads
from app.errors import Overloaded
from tests.waiting import PATIENCE_S


class Gate:
    """Work that waits until it is let through, and notes that it has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.has_begun = threading.Semaphore(0)
        self.open = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        self.has_begun.release()
        assert self.open.wait(PATIENCE_S)
        return name


def test_a_tenant_never_has_more_threads_than_its_share() -> None:
    threads, gate = FairThreads(3, max_per_tenant=2), Gate()
    futures = [threads.submit("alice", lambda: gate.work("alice")) for _ in range(4)]
    futures.append(threads.submit("bob", lambda: gate.work("bob")))
    for _ in range(3):
        assert gate.has_begun.acquire(timeout=PATIENCE_S)
    assert sorted(gate.begun) == ["alice", "alice", "bob"]
    gate.open.set()
    assert [future.result() for future in futures] == ["alice"] * 4 + ["bob"]


def test_work_that_was_given_up_does_not_begin_and_errors_go_to_their_caller() -> None:
    threads, gate = FairThreads(1, max_per_tenant=1), Gate()
    first = threads.submit("alice", lambda: gate.work("first"))
    assert gate.has_begun.acquire(timeout=PATIENCE_S)
    given_up = threads.submit("alice", lambda: gate.work("given up"))
    failing = threads.submit("alice", lambda: 1 // 0)
    assert given_up.cancel()
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert (first.result(), gate.begun) == ("first", ["first"])


def test_too_much_waiting_work_of_a_tenant_is_refused_and_that_of_others_is_not() -> None:
    threads, gate = FairThreads(1, max_per_tenant=1), Gate()
    threads.submit("alice", lambda: gate.work("first"))
    assert gate.has_begun.acquire(timeout=PATIENCE_S)
    for _ in range(MAX_WAITING):
        last = threads.submit("alice", lambda: 1)
    with pytest.raises(Overloaded, match="waiting to be checked"):
        threads.submit("alice", lambda: 1)
    other = threads.submit("bob", lambda: 2)
    gate.open.set()
    assert (last.result(), other.result()) == (1, 2)


async def test_the_size_of_a_body_says_where_its_work_is_done() -> None:
    threads, here = BodyThreads(), threading.get_ident()

    assert await threads.encode("", MAX_SIZE_ON_THE_LOOP, threading.get_ident) == here
    assert await threads.encode("", MAX_SIZE_ON_THE_LOOP + 1, threading.get_ident) != here
    assert await threads.read("", MAX_SMALL_SIZE, threading.get_ident) == here
    assert await threads.read("", MAX_SMALL_SIZE + 1, threading.get_ident) != here


async def test_small_bodies_do_not_wait_for_large_ones() -> None:
    threads, gate = BodyThreads(), Gate()

    large = [asyncio.create_task(threads.encode("", MAX_SMALL_SIZE + 1, lambda: gate.work("large"))) for _ in "123"]
    await asyncio.to_thread(gate.has_begun.acquire, timeout=PATIENCE_S)
    assert await threads.encode("", MAX_SMALL_SIZE, lambda: "small") == "small"
    assert threads.num_waiting >= 1, "one tenant's large ones leave a thread to others"
    gate.open.set()
    assert await asyncio.gather(*large) == ["large"] * 3


def test_the_body_of_work_that_fails_is_gone_without_a_collection_of_garbage() -> None:
    threads = FairThreads(1, max_per_tenant=1)

    class Body:
        pass

    def failing() -> weakref.ref[Body]:
        body = Body()

        def work() -> None:
            assert body is None, "it fails with the body in its frame"

        future = threads.submit("a", work)
        error = future.exception()
        assert isinstance(error, AssertionError)
        return weakref.ref(body)

    gc.collect()
    gc.disable()
    try:
        body = failing()
        threads.submit("a", lambda: None).result()  # the thread has left the frame of the first
        assert body() is None
    finally:
        gc.enable()
