"""Finds the replicas that have cached a request's prefix or served its session."""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec


class PrefixChanges(msgspec.Struct, frozen=True, array_like=True):
    """The changes to a replica's cached prefixes, as digests of 8 bytes each.

    Fields are encoded by position. Add new fields at the end with a default.
    """

    held: bytes  # new prefixes
    gone: bytes = b""
    is_all: bool = False  # whether `held` lists all prefixes of the replica
    # Host, port and secret that other replicas use to fetch its prefixes. Only set if `is_all` is true.
    address: tuple[str, int, str] | None = None


_FEW_BLOCKS = 4
_FORGOTTEN_AT_ONCE = 64  # prefixes of lost replicas to remove per report; a lost rack may have cached half a million
_MIN_PREFIXES = 1_500  # prefixes that each replica may have in the index, even in a very large fleet


def is_indexed(num_blocks: int) -> bool:
    """Whether prefixes of this length are indexed: all lengths up to four blocks, and multiples of four blocks."""
    return num_blocks <= _FEW_BLOCKS or num_blocks % _FEW_BLOCKS == 0


@lru_cache(maxsize=256)
def _indexed_numbers(most: int) -> tuple[int, ...]:
    """Return the indexed prefix lengths from 1 to `most`, in blocks."""
    return tuple(filter(is_indexed, range(1, most + 1)))


class PrefixIndex:
    """Each replica's cached prefixes: the prefixes that it reports, and those of its in-flight requests.

    Replicas report changes to every ingress, so all ingresses soon have the same prefixes. A replica of an older
    version reports no prefixes, so only the prefixes of its requests are indexed. A collision of digests costs time but
    never returns wrong content, because the replica compares the tokens.

    A chain is a prompt as returned by `prefix.digests_of`: for each full block, the digest of all tokens up to the end
    of the block. To save memory, only the prefixes for which `is_indexed` is true are stored.
    """

    def __init__(self, *, block_size: int, max_matches: int = 32, max_prefixes: int = 2_000_000) -> None:
        """`max_matches` is an approximate limit on the number of replicas that `match` returns.

        `max_prefixes` is an approximate limit on the prefixes of all replicas, which use 100 bytes each. Once a replica
        has reached its share of the limit, its new prefixes are added only after old ones are evicted.
        """
        self._block_size = block_size
        self._max_matches = max_matches
        self._max_prefixes = max_prefixes
        self._random = random.Random()
        self._held = _Holders()
        self._of_replica: dict[str, _Noted] = {}
        self._gone: dict[str, array[int]] = {}  # digests of lost replicas that are still in `_held`
        self.addresses: dict[str, tuple[str, int, str]] = {}  # where replicas serve their prefixes, by replica id
        self._sent = _Holders()  # prefixes of in-flight requests
        self._under_way: dict[str, tuple[str, Sequence[int]]] = {}  # replica and indexed prefixes, by request id
        self._num_under_way: Counter[str] = Counter()  # number of in-flight requests by replica

    def note(self, replica_id: str, changes: PrefixChanges) -> None:
        """Record the changes that a replica has reported."""
        if self._gone:
            self._forget_some(replica_id)
        if changes.is_all:
            self._forget(replica_id)
            if changes.address is not None:
                self.addresses[replica_id] = changes.address
        noted = self._of_replica.setdefault(replica_id, _Noted())
        for digest in array("q", changes.gone):
            noted.number -= self._held.remove(digest, replica_id)
        share = max(_MIN_PREFIXES, self._max_prefixes // len(self._of_replica))
        for digest in array("q", changes.held):
            if noted.number >= share:
                break
            if not self._held.has(digest, replica_id):
                self._held.add(digest, replica_id)
                noted.number += 1
                noted.digests.append(digest)
        if len(noted.digests) > 2 * noted.number + _MIN_PREFIXES:
            noted.digests = array("q", {each for each in noted.digests if self._held.has(each, replica_id)})

    def add(self, request_id: str, replica_id: str, chain: Sequence[int]) -> None:
        """Add the prefixes of a request that is sent to a replica, because the replica will soon cache them."""
        if request_id in self._under_way:  # the request moves to this replica
            self.end(request_id)
        indexed = [chain[num_blocks - 1] for num_blocks in _indexed_numbers(len(chain))]
        self._under_way[request_id] = replica_id, indexed
        self._num_under_way[replica_id] += 1
        for digest in indexed:
            self._sent.add(digest, replica_id)

    def end(self, request_id: str) -> None:
        """Remove the prefixes of an ended request. Its replica has reported those that are still cached."""
        replica_id, indexed = self._under_way.pop(request_id, ("", ()))
        if not replica_id:
            return
        self._num_under_way[replica_id] -= 1
        if not self._num_under_way[replica_id]:
            del self._num_under_way[replica_id]
        for digest in indexed:
            self._sent.remove(digest, replica_id)

    def match(self, chain: Sequence[int]) -> dict[str, int]:
        """Return the number of prompt tokens that each replica should have cached, longest match first.

        Replicas with short matches may be missing. If many replicas match equally well, a random sample is returned.
        """
        most = len(self._of_replica) + len(self._num_under_way)
        if most <= self._max_matches:
            most = len(self._of_replica.keys() | self._num_under_way.keys())
        found: dict[str, int] = {}
        for num_blocks in reversed(_indexed_numbers(len(chain))):
            digest = chain[num_blocks - 1]
            held = self._held.of(digest)
            if self._gone:
                held = [each for each in held if each not in self._gone]
            for holders in (held, self._sent.of(digest)):
                if len(holders) > self._max_matches:
                    holders = self._random.sample(list(holders), self._max_matches)
                for replica_id in holders:
                    found.setdefault(replica_id, num_blocks * self._block_size)
            if len(found) >= most or len(found) >= self._max_matches:
                break
        return found

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget all other replicas. `match` ignores them immediately, but their memory is freed gradually."""
        gone = (self._of_replica.keys() | self._num_under_way.keys()).difference(replica_ids)
        for replica_id in gone & self._of_replica.keys():
            self._gone[replica_id] = self._of_replica.pop(replica_id).digests
        if not self._of_replica:  # no reports will arrive, so `note` would never free the memory
            self._held = _Holders()
            self._gone.clear()
        if gone & self._num_under_way.keys():
            for request_id in [each for each, (replica_id, _) in self._under_way.items() if replica_id in gone]:
                self.end(request_id)
        for replica_id in gone & self.addresses.keys():
            del self.addresses[replica_id]

    def _forget_some(self, replica_id: str) -> None:
        """Remove some prefixes of one lost replica, and all that this replica reported before it was last lost."""
        for digest in self._gone.pop(replica_id, ()):
            self._held.remove(digest, replica_id)
        if self._gone:
            gone_id, digests = next(iter(self._gone.items()))
            for _ in range(min(_FORGOTTEN_AT_ONCE, len(digests))):
                self._held.remove(digests.pop(), gone_id)
            if not digests:
                del self._gone[gone_id]

    def _forget(self, replica_id: str) -> None:
        """Remove all prefixes that a replica has reported."""
        noted = self._of_replica.get(replica_id, _Noted())
        for digest in noted.digests:
            self._held.remove(digest, replica_id)
        noted.digests, noted.number = array("q"), 0


@dataclass(slots=True)
class _Noted:
    digests: array[int] = field(
        default_factory=lambda: array("q")
    )  # digests of all cached prefixes, and of some that were evicted
    number: int = 0  # number of cached prefixes


class _Holders:
    """Counts each digest per replica. The usual case, one replica with count one, uses little memory."""

    def __init__(self) -> None:
        self._of: dict[int, str | dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, digest: int) -> Collection[str]:
        found = self._of.get(digest, ())
        return (found,) if isinstance(found, str) else found

    def has(self, digest: int, replica_id: str) -> bool:
        found = self._of.get(digest)
        return found == replica_id if isinstance(found, str) else found is not None and replica_id in found

    def add(self, digest: int, replica_id: str) -> None:
        found = self._of.get(digest)
        if found is None:
            self._of[digest] = replica_id
        elif isinstance(found, str):
            self._of[digest] = {found: 2} if found == replica_id else {found: 1, replica_id: 1}
        else:
            found[replica_id] = found.get(replica_id, 0) + 1

    def remove(self, digest: int, replica_id: str) -> bool:
        """Decrement a replica's count for a digest. Returns False if the count was already zero."""
        found = self._of.get(digest)
        if isinstance(found, str):
            if found == replica_id:
                del self._of[digest]
            return found == replica_id
        if found is None or replica_id not in found:
            return False
        found[replica_id] -= 1
        if not found[replica_id]:
            del found[replica_id]
        if len(found) == 1:
            [(last, times)] = found.items()
            if times == 1:
                self._of[digest] = last
        return True


class Sessions:
    """Remembers the replica of each session, in bounded memory. Forgets the least recently used sessions first."""

    def __init__(self, *, max_sessions: int = 100_000) -> None:
        self._max_sessions = max_sessions
        self._replica_ids: OrderedDict[str, str] = OrderedDict()

    def place(self, session: str, replica_id: str) -> None:
        """Record that this session's latest request was sent to this replica."""
        self._replica_ids[session] = replica_id
        self._replica_ids.move_to_end(session)
        if len(self._replica_ids) > self._max_sessions:
            self._replica_ids.popitem(last=False)

    def replica_of(self, session: str) -> str | None:
        """Return the replica of a session, or None if the session is unknown."""
        return self._replica_ids.get(session)
