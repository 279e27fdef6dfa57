"""The LoRA adapters that an engine has loaded: a bounded number, tenants take turns to load. No torch here."""

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
    """What a store has, and what it has done since its start."""

    loaded: tuple[str, ...] = ()  # digests
    num_loads: int = 0
    max_loaded: int = 0
    names: tuple[str, ...] = ()  # of those that are loaded
    waiting_names: tuple[str, ...] = ()  # of those that requests wait for


class HeldAdapter:
    """A loaded adapter for one request, which keeps it from being unloaded until `release`."""

    def __init__(self, weights: object, release: Callable[[], None]) -> None:
        self.weights = weights  # as the model runner has loaded it
        self._release = release

    def release(self) -> None:
        """The request has ended. To be called once."""
        self._release()


class AdapterStore:
    """Loads adapters when requests need them, one at a time in a thread of its own. Any thread may call.

    Tenants take turns to load, whatever one of them asks for. An adapter that makes room is of the tenant that would
    have the most loaded, of these the least recently used; it belongs to the tenant that has used it last.
    """

    def __init__(
        self,
        load: Callable[[Adapter, Callable[[], None]], object],
        *,
        unload: Callable[[object], None],
        max_loaded: int,
    ) -> None:
        """load: reads an adapter, then calls what it is given, which makes room, and only then takes its memory.

        It may take seconds; it raises UnsupportedAdapter. unload: takes what it gave.
        """
        self._load, self._unload = load, unload
        self._max_loaded = max_loaded
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # by digest, the least recently used first
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._reading: Adapter | None = None  # what waits for it is not in the queue any more
        self._num_loads = 0
        self._is_closed = False
        self._lock = threading.Lock()  # of the fields
        # One at a time: each may need the place that another would free.
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")

    def hold(self, adapter: Adapter, *, tenant: str = "") -> HeldAdapter:
        """An adapter for one request, loaded if it is not there.

        Raises:
            Overloaded: as many as there may be are in use by other requests.
            UnsupportedAdapter: it cannot be read, or it is not what the request means.
        """
        return self.hold_soon(adapter, tenant=tenant).result()

    def hold_soon(self, adapter: Adapter, *, tenant: str = "") -> Future[HeldAdapter]:
        """What `hold` returns or raises, once the tenant has had its turn; at once of an adapter that is loaded.

        It may be cancelled until then. Raises EngineStopped after `close`.
        """
        held: Future[HeldAdapter] = Future()
        with self._lock:
            if self._is_closed:
                raise EngineStopped("the engine loads no more adapters, as it has stopped")
            loaded = self._take(adapter.digest, tenant) if adapter.digest in self._loaded else None
            if loaded is None:
                self._waiting.push(tenant, _Waiting(adapter, tenant, held))
                self._loader.submit(self._load_next)
        if loaded is not None:
            held.set_result(loaded)
        return held

    def close(self) -> None:
        """Load nothing more. Requests that wait for an adapter end with EngineStopped. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._loader.shutdown(wait=False, cancel_futures=True)
            left = list(iter(self._next, None))
        for waiting in left:
            waiting.held.set_exception(EngineStopped("the engine stopped before this adapter was loaded"))

    def _load_next(self) -> None:
        """Load what the next of all that wait needs, if any. Called as often as something began to wait."""
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
            each.held.set_result(held)  # not under the lock: one that has gone meanwhile releases it at once

    def _loaded_for(self, first: _Waiting) -> object:
        adapter, began_at = first.adapter, time.monotonic()
        with self._lock:
            self._to_unload(first.tenant)  # nothing is read for an adapter that would have no place
        weights = self._load(adapter, lambda: self._make_room(first.tenant))
        logger.info("adapter %s (%s) loaded in %.2f s", adapter.name, adapter.digest, time.monotonic() - began_at)
        return weights

    def _next(self) -> _Waiting | None:
        """The next that waits and is not cancelled; it cannot be cancelled any more."""
        while (taken := self._waiting.take()) is not None:
            tenant, waiting = taken
            self._waiting.end(tenant)
            if waiting.held.set_running_or_notify_cancel():
                return waiting
        return None

    def _others_for(self, first: _Waiting) -> list[_Waiting]:
        """All others that wait for its adapter; they wait no more, and cannot be cancelled any more."""
        digest = first.adapter.digest
        found = [each for line in self._waiting.lines.values() for each in line if each.adapter.digest == digest]
        for each in found:
            self._waiting.remove(each.tenant, each)
        return [each for each in found if each.held.set_running_or_notify_cancel()]

    def unload(self, digest: str) -> None:
        """Forget an adapter that no request uses; one that is in use goes when others need its place."""
        with self._lock:
            if digest in self._loaded and not self._loaded[digest].num_users:
                self._forget(digest)

    def unload_unused(self) -> None:
        """Forget every adapter that no request uses."""
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
            digest = self._to_unload(tenant)
            if digest is not None:
                logger.info("adapter %s (%s) unloaded for another", self._loaded[digest].name, digest)
                self._forget(digest)

    def _to_unload(self, tenant: str) -> str | None:
        """The adapter that makes room for one of this tenant; None while there is room. Raises Overloaded."""
        if len(self._loaded) < self._max_loaded:
            return None
        num_loaded = Counter([tenant, *(each.tenant for each in self._loaded.values())])
        unused = [digest for digest, each in self._loaded.items() if not each.num_users]
        if not unused:
            raise Overloaded(
                f"{self._max_loaded} adapters are in use, and no more are loaded at once "
                f"(engine.model.max_loaded_adapters); try again shortly"
            )
        return max(unused, key=lambda digest: num_loaded[self._loaded[digest].tenant])  # of equal ones the first

    def _forget(self, digest: str) -> None:
        self._unload(self._loaded.pop(digest).weights)


class _Loaded:
    def __init__(self, name: str, weights: object) -> None:
        self.name = name
        self.weights = weights
        self.tenant = ""  # that has used it last
        self.num_users = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for its adapter."""

    adapter: Adapter
    tenant: str
    held: Future[HeldAdapter]
