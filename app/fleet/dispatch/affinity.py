"""Where a request finds its beginning cached: the prefixes that each replica has, and the sessions that it was sent."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Sequence

import msgspec

_NONE: Container[int] = frozenset()


class PrefixChanges(msgspec.Struct, frozen=True, array_like=True):
    """What is new about the prefixes that a replica has cached: their digests, 8 bytes each.

    It crosses processes by position: new fields go to the end and need a default.
    """

    held: bytes
    gone: bytes = b""
    is_all: bool = False  # `held` is all that there is
    # With all: host, port and secret, from where other replicas may fetch them.
    address: tuple[str, int, str] | None = None


class PrefixIndex:
    """Which prefixes each replica has cached: those that it says, and those of the requests that it was sent.

    So every ingress knows the same, a moment later, whatever went through it. A replica that does not say anything, of
    an older version, has those of its requests. Two prompts with equal digests cost time and never content: the replica
    compares the tokens.

    A chain is a prompt as `block_pool.digests_of` says it: the digest of each whole block and all before it.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[str, set[int]] = {}  # by replica
        self.addresses: dict[str, tuple[str, int, str]] = {}  # of the replicas that give others what they have
        self._sent: dict[str, Counter[int]] = {}  # by replica: how many requests under way have each
        self._under_way: dict[str, tuple[str, Sequence[int]]] = {}  # by request: its replica, its chain

    def note(self, replica_id: str, changes: PrefixChanges) -> None:
        """A replica says what is new."""
        held = self._held.setdefault(replica_id, set())
        if changes.is_all:
            held.clear()
            if changes.address is not None:
                self.addresses[replica_id] = changes.address
        held.difference_update(array("q", changes.gone))
        held.update(array("q", changes.held))

    def add(self, request_id: str, replica_id: str, chain: Sequence[int]) -> None:
        """A request with this chain goes to a replica."""
        if request_id in self._under_way:  # it goes on elsewhere
            self.end(request_id)
        self._under_way[request_id] = replica_id, chain
        self._sent.setdefault(replica_id, Counter()).update(chain)

    def end(self, request_id: str) -> None:
        """What a request has left behind its replica has said by now."""
        replica_id, chain = self._under_way.pop(request_id, ("", ()))
        sent = self._sent.get(replica_id)
        if sent is None:
            return
        for digest in chain:
            sent[digest] -= 1
            if not sent[digest]:
                del sent[digest]

    def match(self, chain: Sequence[int]) -> dict[str, int]:
        """How many tokens of a prompt each replica should have cached; replicas without any are left out."""
        found = {}
        for replica_id in self._held.keys() | self._sent.keys():
            held, sent = self._held.get(replica_id, _NONE), self._sent.get(replica_id, _NONE)
            # They are its first, so halving finds where they end.
            number = bisect_left(chain, True, key=lambda digest: not (digest in held or digest in sent))
            if number:
                found[replica_id] = number * self._block_size
        return found

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the replicas that are gone."""
        for gone in self.addresses.keys() - set(replica_ids):
            del self.addresses[gone]
        self._held = {each: held for each, held in self._held.items() if each in replica_ids}
        self._sent = {each: sent for each, sent in self._sent.items() if each in replica_ids}


class Sessions:
    """The replica of each session, in bounded memory: the longest unused are forgotten first."""

    def __init__(self, *, max_sessions: int = 100_000) -> None:
        self._max_sessions = max_sessions
        self._replica_ids: OrderedDict[str, str] = OrderedDict()

    def place(self, session: str, replica_id: str) -> None:
        """A request of this session has gone to this replica."""
        self._replica_ids[session] = replica_id
        self._replica_ids.move_to_end(session)
        if len(self._replica_ids) > self._max_sessions:
            self._replica_ids.popitem(last=False)

    def replica_of(self, session: str) -> str | None:
        """The replica that has the session; None for an unknown one."""
        return self._replica_ids.get(session)

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget the sessions of replicas that are gone."""
        kept = ((session, replica_id) for session, replica_id in self._replica_ids.items() if replica_id in replica_ids)
        self._replica_ids = OrderedDict(kept)
