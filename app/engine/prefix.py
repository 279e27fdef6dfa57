"""Blocks of KV memory, the prefixes that they hold, and snapshots of the states after these prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(slots=True, eq=False)
class Prefix:
    """A sequence's tokens from the start to the end of a full block.

    Prefixes are compared by identity: a new `Prefix` object differs from an earlier one with the same tokens. While
    `block.prefix is prefix`, the block was not allocated again.
    """

    parent: Prefix | str  # the prefix without the last block, or the prefix salt if there is only one block
    token_ids: tuple[int, ...]  # the tokens of the last block
    block: Block  # the block that held the last tokens when this prefix was cached
    tenant: str = ""  # the tenant of the request that first computed the prefix
    name: bytes = b""  # the name in all processes, set when first needed (see `block_store`)
    last_used_minute: int = 0  # the minute since 1970 in which the store last recorded a use of this prefix
    snapshot: Snapshot | None = None  # the states after the prefix, for a model with recurrent layers (`StatePool`)

    num_blocks: int = field(init=False)  # blocks from the start
    # A 64-bit digest of the salt and all tokens, the same in every process. Different prefixes may have equal digests.
    digest: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.parent, Prefix):
            num_before, digest_before = self.parent.num_blocks, self.parent.digest
        else:
            num_before, digest_before = 0, root_digest(self.parent)
        self.num_blocks = num_before + 1
        self.digest = hash((digest_before, self.token_ids))

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start."""
        return self.num_blocks * len(self.token_ids)

    @property
    def is_held(self) -> bool:
        """Whether the block still holds this prefix. Thread-safe."""
        return self.block.prefix is self

    @property
    def key(self) -> tuple[Prefix | str, tuple[int, ...]]:
        """This prefix's key in the pool's cache."""
        return self.parent, self.token_ids


@dataclass(slots=True, eq=False)
class Block:
    """A fixed number of token slots.

    While the block is cached, `prefix` is set in the first group. In a window group, `window_of` is set: the prefix
    whose last tokens the block holds, and the group's number.
    """

    block_id: int
    num_owners: int = 0
    prefix: Prefix | None = None
    window_of: tuple[Prefix, int] | None = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """The states of all recurrent layers after a prefix, in a slot that is not written while the snapshot is held.

    Snapshots are compared by identity. While `prefix.snapshot is snapshot`, the slot was not reused.
    """

    prefix: Prefix
    slot: int

    @property
    def is_held(self) -> bool:
        """Whether the slot still holds this snapshot. Thread-safe."""
        return self.prefix.snapshot is self

    @property
    def label(self) -> tuple[int, ...]:
        """See `label_of_snapshot`."""
        return label_of_snapshot(self.prefix.num_tokens, self.prefix.token_ids)


def label_of_snapshot(num_tokens: int, last_block: Sequence[int]) -> tuple[int, ...]:
    """Return the label of a snapshot outside the slots: its number of tokens, then the last block's token ids.

    A state does not show which tokens it covers, so the label is compared whenever a snapshot is read.
    """
    return num_tokens, *last_block


def root_digest(salt: str) -> int:
    """Return the digest of the empty prefix. Unlike the hash of a string, it is the same in all processes."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "big", signed=True)


def digests_of(token_ids: Sequence[int], *, salt: str, block_size: int) -> list[int]:
    """Return `Prefix.digest` for each prefix that ends with a full block."""
    digests, digest = [], root_digest(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = hash((digest, tuple(token_ids[start : start + block_size])))
        digests.append(digest)
    return digests
