"""The LoRA adapters that an engine has loaded: a bounded number, the least recently used goes first. No torch here."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from app.engine.request import Adapter
from app.errors import Overloaded

logger = logging.getLogger(__name__)


class AdapterStats(NamedTuple):
    """What a store has, and what it has done since its start."""

    loaded: tuple[str, ...] = ()  # digests
    num_loads: int = 0
    max_loaded: int = 0


class HeldAdapter:
    """A loaded adapter for one request, which keeps it from being unloaded until `release`."""

    def __init__(self, weights: object, release: Callable[[], None]) -> None:
        self.weights = weights  # as the model runner has loaded it
        self._release = release

    def release(self) -> None:
        """The request has ended. To be called once."""
        self._release()


class AdapterStore:
    """Loads adapters when requests need them. Any thread may call."""

    def __init__(self, load: Callable[[Adapter], object], *, unload: Callable[[object], None], max_loaded: int) -> None:
        """load: reads an adapter; may take seconds; raises UnsupportedAdapter. unload: takes what it gave."""
        self._load, self._unload = load, unload
        self._max_loaded = max_loaded
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # by digest, the least recently used first
        self._num_loads = 0
        self._lock = threading.Lock()  # of the fields
        self._loading = threading.Lock()  # one at a time: each may need the place that another would free

    def hold_if_loaded(self, adapter: Adapter) -> HeldAdapter | None:
        """As `hold`, of an adapter that is loaded; else None. Never waits for a load."""
        with self._lock:
            return self._take(adapter.digest) if adapter.digest in self._loaded else None

    def hold(self, adapter: Adapter) -> HeldAdapter:
        """An adapter for one request, loaded if it is not there.

        Raises:
            Overloaded: as many as there may be are in use by other requests.
            UnsupportedAdapter: it cannot be read, or it is not what the request means.
        """
        held = self.hold_if_loaded(adapter)
        if held is not None:
            return held
        with self._loading:
            held = self.hold_if_loaded(adapter)
            if held is not None:
                return held
            self._make_room()
            began_at = time.monotonic()
            weights = self._load(adapter)
            logger.info("adapter %s (%s) loaded in %.2f s", adapter.name, adapter.digest, time.monotonic() - began_at)
            with self._lock:
                self._num_loads += 1
                self._loaded[adapter.digest] = _Loaded(adapter.name, weights)
                return self._take(adapter.digest)

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
            return AdapterStats(tuple(self._loaded), self._num_loads, self._max_loaded)

    def _take(self, digest: str) -> HeldAdapter:
        loaded = self._loaded[digest]
        loaded.num_users += 1
        self._loaded.move_to_end(digest)
        return HeldAdapter(loaded.weights, lambda: self._released(digest))

    def _released(self, digest: str) -> None:
        with self._lock:
            self._loaded[digest].num_users -= 1
            self._loaded.move_to_end(digest)

    def _make_room(self) -> None:
        with self._lock:
            if len(self._loaded) < self._max_loaded:
                return
            unused = next((digest for digest, each in self._loaded.items() if not each.num_users), None)
            if unused is None:
                raise Overloaded(
                    f"{self._max_loaded} adapters are in use, and no more are loaded at once "
                    f"(engine.model.max_loaded_adapters); try again shortly"
                )
            logger.info("adapter %s (%s) unloaded for another", self._loaded[unused].name, unused)
            self._forget(unused)

    def _forget(self, digest: str) -> None:
        self._unload(self._loaded.pop(digest).weights)


class _Loaded:
    def __init__(self, name: str, weights: object) -> None:
        self.name = name
        self.weights = weights
        self.num_users = 0
