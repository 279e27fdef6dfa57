"""Tells ingresses which prefixes a replica has cached, by what its engine notes."""

from __future__ import annotations

from array import array
from collections import Counter
from threading import Lock

from app.engine.block_pool import Prefix
from app.engine.request import Address
from app.fleet.dispatch import PrefixChanges, is_indexed


class PrefixFeed:
    """The prefixes that an engine has cached. Its thread notes them, ingress sessions read what is new.

    The idea is that of KV events in vLLM and NVIDIA Dynamo.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.held: Counter[int] = Counter()  # by digest; two prefixes may share one
        self.address: Address | None = None  # from where other replicas may fetch them
        self._readers: set[PrefixReader] = set()

    def note(self, prefix: Prefix, is_held: bool) -> None:
        """A prefix has become findable, or its last block is handed out."""
        if not is_indexed(prefix.num_blocks):
            return
        digest = prefix.digest
        with self.lock:
            self.held[digest] += 1 if is_held else -1
            if not self.held[digest]:
                del self.held[digest]
            for reader in self._readers:
                reader.changed.add(digest)
                if len(reader.changed) > 2 * len(self.held) + 1024:  # all of them are less
                    reader.is_new = True
                    reader.changed.clear()

    def open(self) -> PrefixReader:
        """For one ingress."""
        with self.lock:
            reader = PrefixReader(self)
            self._readers.add(reader)
        return reader

    def close(self, reader: PrefixReader) -> None:
        """It reads no more."""
        with self.lock:
            self._readers.discard(reader)


class PrefixReader:
    """What one ingress was not told yet."""

    def __init__(self, feed: PrefixFeed) -> None:
        self._feed = feed
        self.changed: set[int] = set()  # digests
        self.is_new = True  # it needs all

    def take(self) -> PrefixChanges | None:
        """What is new since the last time, the first time all; None: nothing."""
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
        """Nothing is kept for it any more."""
        self._feed.close(self)
