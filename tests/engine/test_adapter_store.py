from __future__ import annotations

import threading

import pytest

from app.engine.adapter_store import AdapterStore
from app.engine.request import Adapter
from app.errors import Overloaded, UnsupportedAdapter


def adapter(name: str) -> Adapter:
    return Adapter(name=name, path=f"/{name}", digest=name)


def store_of(max_loaded: int) -> tuple[AdapterStore, list[str]]:
    """The names of the adapters that it has read, too."""
    read: list[str] = []

    def load(each: Adapter) -> object:
        if each.name == "broken":
            raise UnsupportedAdapter("it cannot be read")
        read.append(each.name)
        return object()

    return AdapterStore(load, unload=lambda weights: None, max_loaded=max_loaded), read


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


def test_all_in_use_is_overload() -> None:
    store, _ = store_of(1)
    held = store.hold(adapter("a"))
    with pytest.raises(Overloaded, match="1 adapters are in use"):
        store.hold(adapter("b"))
    held.release()
    assert store.hold(adapter("b")).weights is not held.weights


def test_requests_share_what_is_loaded_and_each_releases_its_own() -> None:
    store, read = store_of(1)
    first, second = store.hold(adapter("a")), store.hold(adapter("a"))
    assert first.weights is second.weights
    assert read == ["a"]
    first.release()
    with pytest.raises(Overloaded):
        store.hold(adapter("b"))


def test_one_that_cannot_be_read_takes_no_place() -> None:
    store, _ = store_of(1)
    with pytest.raises(UnsupportedAdapter):
        store.hold(adapter("broken"))
    assert store.stats().loaded == ()
    store.hold(adapter("a"))


def test_threads_that_need_one_adapter_read_it_once() -> None:
    store, read = store_of(2)
    threads = [threading.Thread(target=store.hold, args=(adapter("a"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == ["a"]


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


def test_an_adapter_is_held_without_reading_it_only_where_it_is_loaded() -> None:
    store, read = store_of(1)
    assert store.hold_if_loaded(adapter("a")) is None
    assert read == []
    store.hold(adapter("a")).release()
    held = store.hold_if_loaded(adapter("a"))
    assert held is not None
    with pytest.raises(Overloaded):  # nothing evicts it from now on
        store.hold(adapter("b"))
    assert read == ["a"]
