"""Tells ingresses which prefixes a replica has cached, by what its engine notes."""

from __future__ import annotations

from array import array
from collections import Counter
from threading import Lock

from app.fleet.dispatch import PrefixChanges


class PrefixFeed:
    """The prefixes that an engine has cached. Its thread notes them, ingress sessions read what is new.

    The idea is that of KV events in vLLM and NVIDIA Dynamo.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: Counter[int] = Counter()  # by digest; two prefixes may share one
        self._readers: set[PrefixReader] = set()

    def note(self, digest: int, is_held: bool) -> None:
        """A prefix has become findable, or its last block is handed out."""
        with self._lock:
            self._held[digest] += 1 if is_held else -1
            if not self._held[digest]:
                del self._held[digest]
            for reader in self._readers:
                reader.changed.add(digest)
                if len(reader.changed) > 2 * len(self._held) + 1024:  # all of them are less
                    reader.is_new = True
                    reader.changed.clear()

    def open(self) -> PrefixReader:
        """For one ingress."""
        with self._lock:
            reader = PrefixReader(self)
            self._readers.add(reader)
        return reader

    def close(self, reader: PrefixReader) -> None:
        """It reads no more."""
        with self._lock:
            self._readers.discard(reader)

    def take(self, reader: PrefixReader) -> PrefixChanges | None:
        """What is new for a reader; None: nothing."""
        with self._lock:
            changed, is_all = reader.changed, reader.is_new
            reader.changed, reader.is_new = set(), False
            if is_all:
                return PrefixChanges(held=array("q", self._held).tobytes(), is_all=True)
            held = [digest for digest in changed if digest in self._held]
        if not changed:
            return None
        return PrefixChanges(held=array("q", held).tobytes(), gone=array("q", changed.difference(held)).tobytes())


class PrefixReader:
    """What one ingress was not told yet."""

    def __init__(self, feed: PrefixFeed) -> None:
        self._feed = feed
        self.changed: set[int] = set()  # digests
        self.is_new = True  # it needs all

    def take(self) -> PrefixChanges | None:
        """See `PrefixFeed.take`."""
        return self._feed.take(self)

    def close(self) -> None:
        """Nothing is kept for it any more."""
        self._feed.close(self)
