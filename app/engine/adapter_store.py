"""A bounded store of loaded LoRA adapters, in which tenants take turns to load adapters. Does not use torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.request import Adapter
from app.errors import EngineStopped, Overloaded
from app.fair import FairQueue

logger = logging.getLogger(__name__)


class AdapterStats(NamedTuple):
    """The adapters that a store has loaded, and the number of loads so far."""

    loaded: tuple[str, ...] = ()  # digests of the loaded adapters
    num_loads: int = 0
    max_loaded: int = 0
    names: tuple[str, ...] = ()  # names of the loaded adapters
    waiting_names: tuple[str, ...] = ()  # names of the adapters that requests are waiting for


class HeldAdapter:
    """A loaded adapter in use by one request. It stays loaded until `release`."""

    def __init__(self, weights: object, release: Callable[[], None]) -> None:
        self.weights = weights  # the object that the model runner returned
        self._release = release

    def release(self) -> None:
        """Release the adapter. Call this method exactly once, when the request has ended."""
        self._release()


class AdapterStore:
    """Loads adapters when requests need them, one after another, in a dedicated thread. Thread-safe.

    Tenants take turns, even if one tenant requests many adapters. To make room, the store unloads the least recently
    used adapter of the tenant with the most adapters. An adapter belongs to the tenant that used it last.
    """

    def __init__(
        self,
        load: Callable[[Adapter, Callable[[], None]], object],
        *,
        unload: Callable[[object], None],
        max_loaded: int,
    ) -> None:
        """load: reads an adapter, then calls its second argument to make room, and only then allocates memory. It may
        take seconds, and may raise UnsupportedAdapter. unload: receives the object that `load` returned.
        """
        self._load, self._unload = load, unload
        self._max_loaded = max_loaded
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # by digest, the least recently used first
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._reading: Adapter | None = None  # the adapter being loaded; its first request has left the queue
        self._num_loads = 0
        self._is_closed = False
        self._lock = threading.Lock()  # guards the fields
        # A single worker, because concurrent loads could take the room that was made for another load.
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")

    def hold(self, adapter: Adapter, *, tenant: str = "") -> HeldAdapter:
        """Return an adapter for one request. Blocks until the adapter is loaded.

        Raises:
            Overloaded: other requests are using the maximum number of adapters.
            UnsupportedAdapter: the adapter cannot be read, or its files do not match the request's digest.
        """
        return self.hold_async(adapter, tenant=tenant).result()

    def hold_async(self, adapter: Adapter, *, tenant: str = "") -> Future[HeldAdapter]:
        """Return a future for the result or error of `hold`. If the adapter is already loaded, the future is done.

        The future can be cancelled until it is the tenant's turn. Raises EngineStopped after `close`.
        """
        held: Future[HeldAdapter] = Future()
        with self._lock:
            if self._is_closed:
                raise EngineStopped("the engine has stopped and loads no more adapters")
            loaded = self._take(adapter.digest, tenant) if adapter.digest in self._loaded else None
            if loaded is None:
                self._waiting.push(tenant, _Waiting(adapter, tenant, held))
                self._loader.submit(self._load_next)
        if loaded is not None:
            held.set_result(loaded)
        return held

    def close(self) -> None:
        """Stop loading. Requests that are waiting for an adapter fail with EngineStopped. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._loader.shutdown(wait=False, cancel_futures=True)
            left = list(iter(self._next, None))
        for waiting in left:
            waiting.held.set_exception(EngineStopped("the engine stopped before this adapter was loaded"))

    def _load_next(self) -> None:
        """Load the next waiting request's adapter, if any request is still waiting. Called once per waiting request."""
        with self._lock:
            first = self._next()
            self._reading = None if first is None else first.adapter
        if first is None:
            return
        try:
            weights = self._loaded_for(first)
        except BaseException as error:
            with self._lock:
                self._reading = None
                failed = [first, *self._others_for(first)]
            for each in failed:
                each.held.set_exception(error)
            return
        adapter = first.adapter
        with self._lock:
            self._reading = None
            self._num_loads += 1
            self._loaded[adapter.digest] = _Loaded(adapter.name, weights)
            served = [(each, self._take(adapter.digest, each.tenant)) for each in (first, *self._others_for(first))]
        for each, held in served:
            each.held.set_result(held)  # not under the lock, because a callback may release the adapter immediately

    def _loaded_for(self, first: _Waiting) -> object:
        adapter, began_at = first.adapter, time.monotonic()
        with self._lock:
            self._eviction_candidate(first.tenant)  # raises Overloaded if there is no room, before any file is read
        weights = self._load(adapter, lambda: self._make_room(first.tenant))
        logger.info("adapter %s (%s) loaded in %.2f s", adapter.name, adapter.digest, time.monotonic() - began_at)
        return weights

    def _next(self) -> _Waiting | None:
        """Take the next waiting request that was not cancelled. Its future can no longer be cancelled afterwards."""
        while (taken := self._waiting.take()) is not None:
            tenant, waiting = taken
            self._waiting.end(tenant)
            if waiting.held.set_running_or_notify_cancel():
                return waiting
        return None

    def _others_for(self, first: _Waiting) -> list[_Waiting]:
        """Take all other requests that are waiting for this adapter. Their futures can no longer be cancelled."""
        digest = first.adapter.digest
        found = [each for line in self._waiting.lines.values() for each in line if each.adapter.digest == digest]
        for each in found:
            self._waiting.remove(each.tenant, each)
        return [each for each in found if each.held.set_running_or_notify_cancel()]

    def unload(self, digest: str) -> None:
        """Unload an adapter unless a request is using it. In that case, it stays until its room is needed."""
        with self._lock:
            if digest in self._loaded and not self._loaded[digest].num_users:
                self._forget(digest)

    def unload_unused(self) -> None:
        """Unload every adapter that no request is using."""
        with self._lock:
            for digest in [digest for digest, each in self._loaded.items() if not each.num_users]:
                self._forget(digest)

    def stats(self) -> AdapterStats:
        with self._lock:
            names = tuple(each.name for each in self._loaded.values())
            waiting = {each.adapter.name for line in self._waiting.lines.values() for each in line}
            if self._reading is not None:
                waiting.add(self._reading.name)
            return AdapterStats(tuple(self._loaded), self._num_loads, self._max_loaded, names, tuple(sorted(waiting)))

    def _take(self, digest: str, tenant: str) -> HeldAdapter:
        loaded = self._loaded[digest]
        loaded.num_users += 1
        loaded.tenant = tenant
        self._loaded.move_to_end(digest)
        return HeldAdapter(loaded.weights, lambda: self._released(digest))

    def _released(self, digest: str) -> None:
        with self._lock:
            self._loaded[digest].num_users -= 1
            self._loaded.move_to_end(digest)

    def _make_room(self, tenant: str) -> None:
        with self._lock:
            digest = self._eviction_candidate(tenant)
            if digest is not None:
                logger.info("adapter %s (%s) unloaded to make room", self._loaded[digest].name, digest)
                self._forget(digest)

    def _eviction_candidate(self, tenant: str) -> str | None:
        """Return the adapter to unload for a new one of this tenant, or None if there is room.

        Raises Overloaded if all loaded adapters are in use.
        """
        if len(self._loaded) < self._max_loaded:
            return None
        num_loaded = Counter([tenant, *(each.tenant for each in self._loaded.values())])
        unused = [digest for digest, each in self._loaded.items() if not each.num_users]
        if not unused:
            raise Overloaded(
                f"{self._max_loaded} adapters are in use, the maximum on this replica "
                f"(engine.model.max_loaded_adapters); try again shortly"
            )
        return max(unused, key=lambda digest: num_loaded[self._loaded[digest].tenant])  # tie: least recently used

    def _forget(self, digest: str) -> None:
        self._unload(self._loaded.pop(digest).weights)


class _Loaded:
    def __init__(self, name: str, weights: object) -> None:
        self.name = name
        self.weights = weights
        self.tenant = ""  # the tenant that used the adapter last
        self.num_users = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for its adapter."""

    adapter: Adapter
    tenant: str
    held: Future[HeldAdapter]
