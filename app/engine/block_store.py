"""The interface between an engine and a store for KV blocks outside KV memory.

This module does not use torch, files or threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from app.engine.prefix import Block, Prefix, label_of_snapshot
from app.engine.request import Address, Request
from app.engine.stats import StoreStats

# Returns the prefixes of the given tokens and salt that are in KV memory. Thread-safe.
Find = Callable[[Sequence[int], str], Sequence[Prefix]]


def root_name(namespace: bytes, salt: str) -> bytes:
    """Return the 20-byte name of the empty prefix for a namespace (model and KV layout) and a prefix salt."""
    return _digest(namespace, salt.encode())


def name_after(parent_name: bytes, token_ids: Sequence[int]) -> bytes:
    """Return a prefix's 20-byte name, given its parent's name and the tokens of its last block."""
    return _digest(parent_name, array("q", token_ids).tobytes())


def name_of_snapshot(name: bytes) -> bytes:
    """Return the 20-byte name of a prefix's snapshot, given the prefix's name."""
    return _digest(name, b"snapshot")


def name_of(prefix: Prefix, namespace: bytes) -> bytes:
    """Return a prefix's name, which is stored in the prefix for later calls. Thread-safe."""
    unnamed: list[Prefix] = []
    at: Prefix | str = prefix
    while isinstance(at, Prefix) and not at.name:
        unnamed.append(at)
        at = at.parent
    name = at.name if isinstance(at, Prefix) else root_name(namespace, at)
    for each in reversed(unnamed):
        name = each.name = name_after(name, each.token_ids)
    return name


def _digest(*parts: bytes) -> bytes:
    what = blake2b(digest_size=20)
    for part in parts:
        what.update(part)
    return what.digest()


class Fetch:
    """Blocks that a store fills in token order. They stay allocated until the fetch is done.

    For a model with recurrent layers, the store also fills a slot with a snapshot that covers some of the blocks. Only
    these blocks are usable.
    """

    def __init__(
        self,
        request: Request,
        *,
        before: Sequence[Block] = (),
        blocks: Sequence[Block],
        names: Sequence[bytes],
        token_ids: Sequence[Sequence[int]],
        slot: int | None = None,
    ) -> None:
        """before: the request's cached blocks, which precede `blocks`. names, token_ids: one entry for each block.

        slot: the slot for the snapshot, or None without recurrent layers.
        """
        self.request = request
        self.before = before
        self.blocks = blocks
        self.names = names
        self.token_ids = token_ids
        self.slot = slot
        self.num_filled = 0  # number of leading blocks that are filled
        self.num_covered_by_snapshot = 0  # how many of the blocks the snapshot in the slot covers, or 0 without one
        self.is_wanted = True  # set to False by the engine when it no longer waits for the fetch
        self.is_done = False  # set to True by the store when it will no longer write to the blocks or the slot

    @property
    def num_usable(self) -> int:
        """Number of leading blocks that a sequence can share."""
        if self.slot is None:
            return self.num_filled
        return self.num_covered_by_snapshot if self.num_covered_by_snapshot <= self.num_filled else 0

    def label_after(self, num_blocks: int) -> tuple[int, ...]:
        """Return the label of the snapshot after the first `num_blocks` blocks, which must be at least 1."""
        last_block = self.token_ids[num_blocks - 1]
        return label_of_snapshot((len(self.before) + num_blocks) * len(last_block), last_block)


class BlockStore(ABC):
    """Stores blocks under names that are the same in every process. Only `settle` and `close` wait for disk or network.

    Used by the engine's thread. A store may fail, lose blocks and be slow, because the engine computes missing blocks.
    """

    namespace: bytes  # identifies the model and KV layout; processes with equal namespaces can share blocks
    min_tokens: int = 0  # a newly computed prefix is only offered if it is at least this long

    @abstractmethod
    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        """Return how many of these blocks, counted from the first, the store can probably provide. Does not block.

        For a model with recurrent layers, only the blocks up to the last available snapshot count.

        num_before: how many of the request's blocks precede these blocks.
        """

    @abstractmethod
    def expected_s(self, num_blocks: int, request: Request) -> float:
        """Return how many seconds a fetch of `num_blocks` blocks would take from now, or 0 if unknown."""

    @abstractmethod
    def begin(self, fetch: Fetch) -> None:
        """Start filling a fetch's blocks, and its slot with the last snapshot, while the fetch is wanted."""

    @abstractmethod
    def offer(self, prefix: Prefix) -> None:
        """Store a prefix's missing blocks, and its snapshot if it has one. Does not block.

        Blocks that KV memory has evicted before the store reads them are not stored.
        """

    def serve(self, host: str, find: Find) -> Address | None:
        """Serve the KV blocks that `find` returns to other processes. Returns the address, or None if not supported.

        Raises OSError if this machine does not have the address `host`.
        """
        return None

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's statistics. Thread-safe."""

    @abstractmethod
    def settle(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds until all offered blocks are stored and no fetch is in progress."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading and writing blocks."""
