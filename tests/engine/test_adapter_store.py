from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from app.engine.adapter_store import AdapterStore
from app.engine.request import Adapter
from app.errors import EngineStopped, Overloaded, UnsupportedAdapter
from tests.waiting import PATIENCE_S, eventually


def adapter(name: str) -> Adapter:
    return Adapter(name=name, path=f"/{name}", digest=name)


def store_of(max_loaded: int) -> tuple[AdapterStore, list[str]]:
    """The names of the adapters that it has read, too."""
    read: list[str] = []

    def load(each: Adapter, make_room: Callable[[], None]) -> object:
        if each.name == "broken":
            raise UnsupportedAdapter("it cannot be read")
        read.append(each.name)
        make_room()
        return object()

    return AdapterStore(load, unload=lambda weights: None, max_loaded=max_loaded), read


def gated_store(max_loaded: int) -> tuple[AdapterStore, list[str], threading.Semaphore]:
    """It reads one adapter for each release of the semaphore; the names are noted before."""
    read: list[str] = []
    gate = threading.Semaphore(0)

    def load(each: Adapter, make_room: Callable[[], None]) -> object:
        read.append(each.name)
        gate.acquire()
        make_room()
        return object()

    return AdapterStore(load, unload=lambda weights: None, max_loaded=max_loaded), read, gate


def test_the_least_recently_used_goes_first() -> None:
    store, read = store_of(2)
    for name in ("a", "b", "a", "c"):
        store.hold(adapter(name)).release()
    assert store.stats().loaded == ("a", "c")
    assert read == ["a", "b", "c"]


def test_one_that_a_request_uses_stays() -> None:
    store, _ = store_of(2)
    held = store.hold(adapter("a"))
    for name in ("b", "c", "d"):
        store.hold(adapter(name)).release()
    assert "a" in store.stats().loaded
    held.release()
    store.hold(adapter("e")).release()
    store.hold(adapter("f")).release()
    assert store.stats().loaded == ("e", "f")


def test_all_in_use_is_overload_and_nothing_is_read() -> None:
    store, read = store_of(1)
    held = store.hold(adapter("a"))
    with pytest.raises(Overloaded, match="1 adapters are in use"):
        store.hold(adapter("b"))
    assert read == ["a"]
    held.release()
    assert store.hold(adapter("b")).weights is not held.weights


def test_requests_share_what_is_loaded_and_each_releases_its_own() -> None:
    store, read = store_of(1)
    first, second = store.hold(adapter("a")), store.hold_async(adapter("a"))
    assert second.done(), "nothing waits for what is there"
    assert first.weights is second.result().weights
    assert read == ["a"]
    first.release()
    with pytest.raises(Overloaded):
        store.hold(adapter("b"))


def test_one_that_cannot_be_read_takes_no_place_and_none_of_another() -> None:
    store, _ = store_of(1)
    for loaded in ((), ("a",)):
        with pytest.raises(UnsupportedAdapter):
            store.hold(adapter("broken"))
        assert store.stats().loaded == loaded
        store.hold(adapter("a")).release()


def test_the_names_of_those_that_are_loaded_and_waited_for_are_told() -> None:
    store, read, gate = gated_store(2)
    gate.release()
    store.hold(adapter("a")).release()
    waiting = [store.hold_async(adapter(name)) for name in ("a", "b", "c", "c")]
    eventually(lambda: read == ["a", "b"])
    stats = store.stats()
    assert (stats.max_loaded, stats.names, stats.waiting_names) == (2, ("a",), ("b", "c"))
    gate.release(2)
    for each in waiting:
        each.result().release()
    assert (store.stats().names, store.stats().waiting_names) == (("b", "c"), ())


def test_threads_that_need_one_adapter_read_it_once() -> None:
    store, read, gate = gated_store(2)
    threads = [threading.Thread(target=store.hold, args=(adapter("a"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(store._waiting) == 7)  # all but the one for which it is being read
    gate.release(8)
    for thread in threads:
        thread.join()
    assert read == ["a"]
    assert store._loaded["a"].num_users == 8


def test_all_that_wait_for_one_that_cannot_be_read_hear_it_at_once() -> None:
    reading, gate = threading.Event(), threading.Event()
    num_tries = 0

    def load(each: Adapter, make_room: Callable[[], None]) -> object:
        nonlocal num_tries
        num_tries += 1
        reading.set()
        gate.wait()
        raise UnsupportedAdapter("it cannot be read")

    store = AdapterStore(load, unload=lambda weights: None, max_loaded=1)
    waiting = [store.hold_async(adapter("broken"), tenant=f"tenant-{n % 2}") for n in range(6)]
    assert reading.wait(PATIENCE_S)
    gate.set()
    assert all(isinstance(each.exception(), UnsupportedAdapter) for each in waiting)
    assert num_tries == 1


def test_the_adapters_of_one_tenant_do_not_push_out_those_of_another() -> None:
    store, _ = store_of(3)
    for tenant, name in (("first", "a"), ("second", "b"), *[("flood", f"flood-{n}") for n in range(9)]):
        store.hold(adapter(name), tenant=tenant).release()
    assert store.stats().loaded == ("a", "b", "flood-8")
    store.hold(adapter("flood-8"), tenant="first").release()  # it is of the first tenant now
    store.hold(adapter("c"), tenant="second").release()
    assert store.stats().loaded == ("b", "flood-8", "c")


def test_one_that_is_cancelled_before_its_turn_is_not_read() -> None:
    store, read, gate = gated_store(2)
    first, cancelled, last = (store.hold_async(adapter(name)) for name in "abc")
    eventually(lambda: read)
    assert not first.cancel()  # it is being read
    assert cancelled.cancel()
    gate.release(3)
    last.result()
    assert read == ["a", "c"]


def test_unload_leaves_what_is_in_use() -> None:
    store, _ = store_of(2)
    held = store.hold(adapter("a"))
    store.unload("a")
    assert store.stats().loaded == ("a",)
    held.release()
    store.unload("a")
    assert store.stats().loaded == ()


def test_all_that_no_request_uses_are_unloaded_for_sleep() -> None:
    store, read = store_of(3)
    held = store.hold(adapter("a"))
    store.hold(adapter("b")).release()
    store.unload_unused()
    assert store.stats().loaded == ("a",)
    held.release()
    store.hold(adapter("b")).release()
    assert read == ["a", "b", "b"]


def test_those_that_wait_when_it_is_closed_hear_of_it_and_its_thread_ends() -> None:
    store, read, gate = gated_store(2)
    loading, waiting = (store.hold_async(adapter(name)) for name in "ab")
    eventually(lambda: read, bool)
    store.close()
    with pytest.raises(EngineStopped):
        waiting.result(PATIENCE_S)
    with pytest.raises(EngineStopped):
        store.hold_async(adapter("c"))
    gate.release()
    loading.result(PATIENCE_S).release()
    [thread] = store._loader._threads
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert read == ["a"]
    store.close()
