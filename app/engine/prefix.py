"""Blocks of KV memory, the prefixes that they hold, and the snapshots of states after these prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(slots=True, eq=False)
class Prefix:
    """A sequence's tokens from the start to the end of a full block.

    Every `Prefix` object is unique, even if an earlier one had equal tokens. While `block.prefix is prefix`, the block
    has not been handed out again.
    """

    parent: Prefix | str  # the prefix without the last block; for the first block, the caller's salt
    token_ids: tuple[int, ...]  # the tokens of the last block
    block: Block  # the block that held the last tokens when this prefix was cached
    tenant: str = ""  # the tenant of the request that computed the prefix first
    name: bytes = b""  # the name in other processes, set when first needed; see `block_store`
    last_used_minute: int = 0  # the minute, since 1970, in which the store last recorded a use of this prefix
    snapshot: Snapshot | None = None  # the states after the prefix, for a model with recurrent layers; see `StatePool`

    num_blocks: int = field(init=False)  # blocks from the start
    # A 64-bit digest of the salt and all tokens, equal in every process. Digests of two prefixes may collide.
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
        """Tokens from the start."""
        return self.num_blocks * len(self.token_ids)

    @property
    def is_held(self) -> bool:
        """Whether the block still holds this prefix. Any thread may call."""
        return self.block.prefix is self

    @property
    def key(self) -> tuple[Prefix | str, tuple[int, ...]]:
        """The key of this prefix in the pool's cache."""
        return self.parent, self.token_ids


@dataclass(slots=True, eq=False)
class Block:
    """A fixed number of token slots.

    While the content can be found and shared, a block of the first group has `prefix`, and a block of a window group
    has `window_of`: the prefix whose last tokens the block holds, and the group.
    """

    block_id: int
    num_owners: int = 0
    prefix: Prefix | None = None
    window_of: tuple[Prefix, int] | None = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """The states of all recurrent layers after a prefix, in a slot that is not written while the snapshot is held.

    Every `Snapshot` object is unique. While `prefix.snapshot is snapshot`, the slot has not been reused.
    """

    prefix: Prefix
    slot: int

    @property
    def is_held(self) -> bool:
        """Whether the slot still contains this snapshot. Any thread may ask."""
        return self.prefix.snapshot is self

    @property
    def label(self) -> tuple[int, ...]:
        """See `label_of_snapshot`."""
        return label_of_snapshot(self.prefix.num_tokens, self.prefix.token_ids)


def label_of_snapshot(num_tokens: int, last_block: Sequence[int]) -> tuple[int, ...]:
    """Return the label of a snapshot stored outside the slots: its number of tokens, then the last block's token ids.

    A state does not show how many tokens it covers, so the label is compared whenever a snapshot is read.
    """
    return num_tokens, *last_block


def root_digest(salt: str) -> int:
    """Return the digest of the empty prefix. All processes compute the same digest, unlike the hash of a string."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "big", signed=True)


def digests_of(token_ids: Sequence[int], *, salt: str, block_size: int) -> list[int]:
    """Return the `Prefix.digest` of each prefix that ends at a full block."""
    digests, digest = [], root_digest(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = hash((digest, tuple(token_ids[start : start + block_size])))
        digests.append(digest)
    return digests
