"""The interface between an engine and a store of KV blocks outside KV memory. No torch here, no files, no threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from app.engine.prefix import Block, Prefix, label_of_snapshot
from app.engine.request import Address, Request
from app.engine.stats import StoreStats

# Returns the prefixes of these tokens with this salt that are in KV memory. Any thread may call.
Find = Callable[[Sequence[int], str], Sequence[Prefix]]


def root_name(namespace: bytes, salt: str) -> bytes:
    """Return the name of the empty prefix, for a namespace (model and KV layout) and a caller's salt. 20 bytes."""
    return _digest(namespace, salt.encode())


def name_after(parent_name: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name of a prefix from the name of its parent and the tokens of its last block. 20 bytes."""
    return _digest(parent_name, array("q", token_ids).tobytes())


def name_of_snapshot(name: bytes) -> bytes:
    """Return the name of the snapshot after a prefix from the name of the prefix. 20 bytes."""
    return _digest(name, b"snapshot")


def name_of(prefix: Prefix, namespace: bytes) -> bytes:
    """Return the name of a prefix and store the name in the prefix. Any thread may call."""
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
    """Blocks that a store fills in token order. The engine's thread owns the blocks until the fetch is done.

    For a model with recurrent layers, the store fills a slot with the snapshot after some of the blocks. Such a model
    cannot use the blocks without the snapshot.
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
        """request: the request that needs the blocks. before: the request's cached blocks before `blocks`.

        names, token_ids: one entry for each block. slot: receives the snapshot; None without recurrent layers.
        """
        self.request = request
        self.before = before
        self.blocks = blocks
        self.names = names
        self.token_ids = token_ids
        self.slot = slot
        self.num_filled = 0  # filled blocks, counted from the first block
        self.num_covered_by_snapshot = 0  # the number of blocks that the snapshot in the slot covers; 0 without one
        self.is_wanted = True  # the engine sets this to False when it no longer waits for the fetch
        self.is_done = False  # the store sets this to True when it will not write to the blocks or the slot again

    @property
    def num_usable(self) -> int:
        """The number of blocks that a sequence can share, counted from the first block."""
        if self.slot is None:
            return self.num_filled
        return self.num_covered_by_snapshot if self.num_covered_by_snapshot <= self.num_filled else 0

    def label_after(self, num_blocks: int) -> tuple[int, ...]:
        """Return the label of the snapshot after the first `num_blocks` blocks. `num_blocks` is at least 1."""
        last_block = self.token_ids[num_blocks - 1]
        return label_of_snapshot((len(self.before) + num_blocks) * len(last_block), last_block)


class BlockStore(ABC):
    """Stores blocks under names that are the same in every process. Only `settle` and `close` wait for disk or network.

    The engine's thread calls the methods. A store may fail, forget and be slow: the engine computes missing blocks.
    """

    namespace: bytes  # the model and KV layout; processes with equal namespaces can read each other's blocks
    min_tokens: int = 0  # a shorter prefix is not offered when it is computed for the first time

    @abstractmethod
    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        """Return how many of these blocks, from the first one on, the store can probably give. Does not block.

        For a model with recurrent layers, the store counts the blocks up to the last snapshot that it can give.

        num_before: the number of the request's blocks before these blocks.
        """

    @abstractmethod
    def expected_s(self, num_blocks: int, request: Request) -> float:
        """Return the expected duration of a fetch of `num_blocks` blocks that starts now; 0 before the first fetch."""

    @abstractmethod
    def begin(self, fetch: Fetch) -> None:
        """Start to fill a fetch's blocks, and its slot with the last snapshot after them, while the fetch is wanted."""

    @abstractmethod
    def offer(self, prefix: Prefix) -> None:
        """Store the blocks of a prefix that the store lacks, if KV memory still holds them when the store reads them.

        The store also stores the snapshot of the prefix, if the prefix has one.
        """

    def serve(self, host: str, find: Find) -> Address | None:
        """Serve the KV blocks that `find` finds to other processes. Returns the address, or None if not supported.

        Raises OSError if this machine does not have the address of `host`.
        """
        return None

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return statistics of the store. Any thread may call."""

    @abstractmethod
    def settle(self, timeout_s: float) -> None:
        """Block until all offered blocks are stored and no fetch is in progress, for at most `timeout_s` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading and writing blocks."""
