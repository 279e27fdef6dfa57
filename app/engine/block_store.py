"""The border between an engine and what keeps blocks of KV beside its memory. No torch here, no files, no threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from hashlib import blake2b

from app.engine.block_pool import Block, Prefix
from app.engine.request import Address, Request
from app.engine.state_pool import label_of_snapshot
from app.engine.stats import StoreStats

# The prefixes of these tokens with this salt that are in the KV memory, from the first block on. Any thread may call.
Find = Callable[[Several[int], str], Several[Prefix]]


def root_name(namespace: bytes, salt: str) -> bytes:
    """What the prefix of no tokens is called: by the model and layout that KV memory is of, and the caller's salt."""
    return _digest(namespace, salt.encode())


def name_after(parent_name: bytes, token_ids: Several[int]) -> bytes:
    """What a prefix is called: by the name of the prefix before it, and the tokens of its last block. 20 bytes."""
    return _digest(parent_name, array("q", token_ids).tobytes())


def name_of_snapshot(name: bytes) -> bytes:
    """The name of the snapshot behind a prefix, by the name of the prefix. 20 bytes."""
    return _digest(name, b"snapshot")


def name_of(prefix: Prefix, namespace: bytes) -> bytes:
    """The prefix's name, which it keeps. Any thread may call."""
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
    """Blocks that a store fills, the first first. The engine's thread owns them until the fetch is done.

    Of a model with recurrent layers it has a slot, too, which the store fills with the snapshot behind some of the
    blocks. Without a snapshot the blocks are of no use.
    """

    def __init__(
        self,
        request: Request,
        *,
        before: Several[Block] = (),
        blocks: Several[Block],
        names: Several[bytes],
        token_ids: Several[Several[int]],
        slot: int | None = None,
    ) -> None:
        """request: that wants them. before: the blocks of the tokens before. names, token_ids: of each block.

        slot: for the snapshot; None: the model has no recurrent layers.
        """
        self.request = request
        self.before = before
        self.blocks = blocks
        self.names = names
        self.token_ids = token_ids
        self.slot = slot
        self.num_filled = 0  # of the first: they hold what they should
        self.num_with_snapshot = 0  # the slot holds the states behind so many of the blocks; 0: it holds nothing
        self.is_wanted = True  # the engine waits for it
        self.is_done = False  # nothing is written into its blocks any more; the store's last word

    @property
    def num_usable(self) -> int:
        """How many blocks a sequence can share, from the first on."""
        if self.slot is None:
            return self.num_filled
        return self.num_with_snapshot if self.num_with_snapshot <= self.num_filled else 0

    def label_behind(self, num_blocks: int) -> tuple[int, ...]:
        """The label of the snapshot behind so many of its blocks, at least one."""
        last_block = self.token_ids[num_blocks - 1]
        return label_of_snapshot((len(self.before) + num_blocks) * len(last_block), last_block)


class BlockStore(ABC):
    """Keeps blocks under names that every process understands. No method waits for what the store is on.

    The engine's thread calls. A store may fail, forget and be slow: what it does not give is computed.
    """

    namespace: bytes  # of the KV memory that blocks are of: its bytes mean the same in every process with this one
    min_tokens: int = 0  # of a prefix that is offered when it comes for the first time

    @abstractmethod
    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        """Return how many of these blocks, from the first one on, the store can probably give. It does not wait.

        For a model with recurrent layers, the store counts the blocks up to the last snapshot that it can give.

        num_before: blocks of the request before these.
        """

    @abstractmethod
    def expected_s(self, num_blocks: int, request: Request) -> float:
        """How long a fetch of so many blocks for a request that begins now probably takes; 0 before the first."""

    @abstractmethod
    def begin(self, fetch: Fetch) -> None:
        """Fill the blocks of a fetch while it is wanted, and its slot with the last snapshot behind filled blocks."""

    @abstractmethod
    def offer(self, prefix: Prefix) -> None:
        """Keep the blocks of a prefix, from the first on, that it lacks and that are still held when it reads them.

        Behind them it keeps the snapshot of the prefix, if there is one.
        """

    def serve(self, host: str, find: Find) -> Address | None:
        """Give other processes the blocks in the KV memory that `find` finds, at this address; None: it does not.

        Raises OSError when this machine does not have the address of `host`.
        """
        return None

    @abstractmethod
    def stats(self) -> StoreStats:
        """What it has done, as far as it knows. Any thread may call."""

    @abstractmethod
    def settle(self, timeout_s: float) -> None:
        """Wait until what was offered is kept and no fetch is under way, but no longer than this."""

    @abstractmethod
    def close(self) -> None:
        """Neither read nor write blocks any more."""
