"""Reports a replica's cached prefixes to the ingresses."""

from __future__ import annotations

from array import array
from collections import Counter
from threading import Lock

from app.engine.prefix import Prefix
from app.engine.request import Address
from app.fleet.dispatch import PrefixChanges, is_indexed


class PrefixFeed:
    """The cached prefixes of an engine. The engine's thread records changes, and ingress sessions read them.

    The idea comes from the KV events of vLLM and NVIDIA Dynamo.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.held: Counter[int] = Counter()  # number of prefixes by digest; two prefixes may share a digest
        self.address: Address | None = None  # from which other replicas may fetch the prefixes
        self._readers: set[PrefixReader] = set()

    def note(self, prefix: Prefix, is_held: bool) -> None:
        """Record that a prefix was cached, or that its last block was evicted."""
        if not is_indexed(prefix.num_blocks):
            return
        digest = prefix.digest
        with self.lock:
            self.held[digest] += 1 if is_held else -1
            if not self.held[digest]:
                del self.held[digest]
            for reader in self._readers:
                reader.changed.add(digest)
                if len(reader.changed) > 2 * len(self.held) + 1024:  # listing all held prefixes is shorter
                    reader.is_new = True
                    reader.changed.clear()

    def open(self) -> PrefixReader:
        """Return a reader for one ingress."""
        with self.lock:
            reader = PrefixReader(self)
            self._readers.add(reader)
        return reader

    def close(self, reader: PrefixReader) -> None:
        """Stop collecting changes for a reader."""
        with self.lock:
            self._readers.discard(reader)


class PrefixReader:
    """Collects the changes that one ingress has not received yet."""

    def __init__(self, feed: PrefixFeed) -> None:
        self._feed = feed
        self.changed: set[int] = set()  # digests
        self.is_new = True  # whether the next `take` returns all prefixes

    def take(self) -> PrefixChanges | None:
        """Return the changes since the last call, or None. Returns all prefixes at first and after many changes."""
        if not (self.changed or self.is_new):
            return None
        with self._feed.lock:
            changed, is_all = self.changed, self.is_new
            self.changed, self.is_new = set(), False
            held = array("q", filter(self._feed.held.__contains__, self._feed.held if is_all else changed))
        if is_all:
            return PrefixChanges(held=held.tobytes(), is_all=True, address=self._feed.address)
        return PrefixChanges(held=held.tobytes(), gone=array("q", changed.difference(held)).tobytes())

    def close(self) -> None:
        """Stop collecting changes. The reader must not be used afterwards."""
        self._feed.close(self)
