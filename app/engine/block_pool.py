"""KV memory as numbers: blocks of token slots, their owners, and which hold a prefix that others may share.

No tensors here. Paging follows PagedAttention (Kwon et al., 2023); sharing equal prefixes block by block follows
vLLM's automatic prefix caching, except that a prefix is looked up by its exact tokens, so no hash collision can ever
show one request the KV of another.

Where some layers look back a window of tokens only, a block has the KV of one group of layers: the first group looks
back to the start, each other one to the window, and gives back the blocks behind it. All groups take blocks from one
pool, as in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from app.config import SchedulerConfig
from app.engine.request import ModelInfo
from app.engine.state_pool import Snapshot, StatePool


def root_digest(salt: str) -> int:
    """Of the prefix of no tokens. The same in every process, unlike the hash of a string."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "big", signed=True)


def digests_of(token_ids: Sequence[int], *, salt: str, block_size: int) -> list[int]:
    """Of each whole block and all before it, as `Prefix.digest`."""
    digests, digest = [], root_digest(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = hash((digest, tuple(token_ids[start : start + block_size])))
        digests.append(digest)
    return digests


@dataclass(slots=True, eq=False)
class Prefix:
    """Full blocks of tokens from the start of a sequence: the prefix before it, or the caller's salt at the root, and
    the tokens of its last block.

    Each is another one, also where another had equal tokens before: a block that still has its prefix has not been
    handed out since.
    """

    parent: Prefix | str
    token_ids: tuple[int, ...]
    block: Block  # that holds the last of it, unless it was handed out since
    tenant: str = ""  # for which it was computed first
    name: bytes = b""  # what other processes call it; made when it is first asked for, see `block_store`
    noted_in: int = 0  # the minute, since 1970, in which its store last noted that it is used
    snapshot: Snapshot | None = None  # of the states behind it, of a model with recurrent layers; see `StatePool`

    num_blocks: int = field(init=False)  # from the start
    # Of all its tokens and the salt, 64 bits, the same in every process. For guesses: two prefixes may share one.
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
        """From the start."""
        return self.num_blocks * len(self.token_ids)

    @property
    def is_held(self) -> bool:
        """Whether its block still holds it. Any thread may ask."""
        return self.block.prefix is self

    @property
    def key(self) -> tuple[Prefix | str, tuple[int, ...]]:
        """What it is found by."""
        return self.parent, self.token_ids


@dataclass(slots=True, eq=False)
class Block:
    """A fixed number of token slots. `prefix` is set while its content can be found and shared.

    So is `window_of` of a block of a window group: the prefix whose last tokens it holds, and the group.
    """

    block_id: int
    num_owners: int = 0
    prefix: Prefix | None = None
    window_of: tuple[Prefix, int] | None = None


class BlockPool:
    """Owns every block: hands them out, takes them back, and finds those that already hold a wanted prefix.

    A block without owners is free. It keeps its content until it is handed out again, the longest unused first, so
    the order of the free blocks is also the order of eviction.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_window_groups: int = 0,
        window_tokens: int = 0,
        max_chunk_tokens: int = 0,
        states: StatePool | None = None,
    ) -> None:
        """window_tokens: the last tokens of a sequence that the window groups keep.

        states: the slots of a model with recurrent layers.

        max_chunk_tokens: of one sequence, that a step may add before they give anything back. For a model without them
        any number.
        """
        assert num_blocks >= 0, "a pool has blocks or none"
        assert block_size > 0, "a block needs at least one slot"
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_groups = 1 + num_window_groups
        self.max_chunk_tokens = max_chunk_tokens if num_window_groups else None
        self._window_tokens = window_tokens
        # Blocks of one group that a sequence has at once: it may get those of two steps before the first has ended, and
        # gives none back before a block is full.
        self._max_in_window = self.num_blocks_for(window_tokens + 2 * max_chunk_tokens) + 2
        self._blank = [Block(block_id) for block_id in reversed(range(num_blocks))]  # free, nothing to share
        self._evictable: OrderedDict[int, Block] = OrderedDict()  # free, by block id, content still shareable
        self._cached: dict[tuple[Prefix | str, tuple[int, ...]], Block] = {}
        self._in_windows: dict[tuple[Prefix, int], Block] = {}
        self.note_findable: Callable[[Prefix], None] | None = None  # called with each prefix that becomes findable
        self._note_held: Callable[[Prefix, bool], None] | None = None
        self.states = states
        if states is not None:
            states.note_resumable = self._note_resumable

    @classmethod
    def of(cls, facts: ModelInfo, limits: SchedulerConfig, *, num_blocks: int, block_size: int) -> BlockPool:
        """For a model with KV memory."""
        states = None
        if facts.num_state_slots:
            states = StatePool(facts.num_state_slots, interval_tokens=facts.state_interval_tokens)
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            num_window_groups=facts.num_window_groups,
            window_tokens=facts.window_tokens,
            max_chunk_tokens=min(limits.prefill_chunk_tokens, limits.max_step_tokens),
            states=states,
        )

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks with content that can still be shared."""
        return len(self._evictable)

    def on_prefixes(self, note_held: Callable[[Prefix, bool], None]) -> None:
        """Call this with each prefix that can be found now, becomes findable (true) or is gone (false).

        More than one prefix may have the same digest.
        """
        self._note_held = note_held
        if self.states is not None:
            for prefix in self.states.resumable():
                self._note_resumable(prefix, True)
            return
        for block in self._cached.values():
            assert block.prefix is not None, "a cached block has a prefix"
            note_held(block.prefix, True)

    def _note_resumable(self, prefix: Prefix, is_resumable: bool) -> None:
        """Of a model with recurrent layers, prefixes up to a snapshot count as held: no other can be resumed."""
        at: Prefix | str = prefix
        while self._note_held is not None and isinstance(at, Prefix):
            self._note_held(at, is_resumable)
            at = at.parent

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks of a group that keeps all hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_sequence_tokens(self) -> int:
        """Of a sequence that has all blocks."""
        num_window_groups, num_each = self.num_groups - 1, self.num_blocks // self.num_groups
        if num_window_groups and num_each > self._max_in_window:
            num_each = self.num_blocks - num_window_groups * self._max_in_window
        return num_each * self.block_size

    def num_blocks_behind(self, cached: Sequence[Block], num_tokens: int) -> int:
        """How many blocks of all groups the tokens behind cached blocks take at once, at most."""
        number = self.num_blocks_for(num_tokens) - len(cached)
        if self.num_groups == 1:
            return number
        num_in_window = len(cached) - self.first_in_window(len(cached) * self.block_size)
        return number + (self.num_groups - 1) * min(number, self._max_in_window - num_in_window)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hand out blocks with nothing in them. `can_allocate` must hold."""
        assert self.can_allocate(num_blocks), f"asked for {num_blocks} blocks, {self.num_free} are free"
        return [self._take() for _ in range(num_blocks)]

    def match(self, token_ids: Sequence[int], *, salt: str, known: Sequence[Block] = ()) -> list[Block]:
        """The cached blocks that hold the longest prefix of `token_ids`, leaving at least one token out.

        known: an earlier result for these tokens, of which every block is still cached with the same prefix.
        Changes nothing: `share` the result to own it.
        """
        parent = (known[-1].prefix if known else None) or salt
        # One token stays uncomputed: a full prefix hit would leave no logits to sample from.
        rest = self._cached_prefixes(parent, token_ids, begin=len(known) * self.block_size, end=len(token_ids) - 1)
        return [*known, *(prefix.block for prefix in rest)]

    def find(self, token_ids: Sequence[int], salt: str) -> list[Prefix]:
        """The prefixes of these tokens that were cached a moment ago, from the first block on. Any thread may call."""
        return list(self._cached_prefixes(salt, token_ids, begin=0, end=len(token_ids)))

    def _cached_prefixes(
        self, parent: Prefix | str, token_ids: Sequence[int], *, begin: int, end: int
    ) -> Iterator[Prefix]:
        """Behind the parent, which ends at `begin`, those that end at `end` or before, up to the first that is not."""
        for start in range(begin, end - self.block_size + 1, self.block_size):
            block = self._cached.get((parent, tuple(token_ids[start : start + self.block_size])))
            prefix = None if block is None else block.prefix  # in another thread, it may just be handed out
            if prefix is None:
                return
            yield prefix
            parent = prefix

    # ------------------------------------------------------------------ windows

    def first_in_window(self, num_tokens: int) -> int:
        """The first block that window groups keep for the token behind so many."""
        return max(0, num_tokens - self._window_tokens + 1) // self.block_size

    def with_windows(self, cached: list[Block]) -> list[Block]:
        """The longest beginning of these cached blocks of which the window groups can find all that they would keep."""
        if self.num_groups == 1:
            return cached
        num_cached = len(cached)
        missing: int | None = num_cached
        while missing is not None:
            looked_at = range(self.first_in_window(num_cached * self.block_size), num_cached)
            missing = next((at for at in reversed(looked_at) if None in self._windows_of(cached[at])), None)
            num_cached = num_cached if missing is None else missing  # what is longer looks back to that block, too
        return cached[:num_cached]

    def found_in_windows(self, cached: Sequence[Block]) -> list[list[Block]]:
        """By window group, what it keeps of these cached blocks. `with_windows` must have given them."""
        first = self.first_in_window(len(cached) * self.block_size)
        found: list[list[Block]] = [[] for _ in range(self.num_groups - 1)]
        for block in cached[first:]:
            for of_group, own in zip(found, self._windows_of(block), strict=True):
                assert own is not None, "found before"
                of_group.append(own)
        return found

    def _windows_of(self, block: Block) -> list[Block | None]:
        assert block.prefix is not None, "it is cached"
        return [self._in_windows.get((block.prefix, group)) for group in range(1, self.num_groups)]

    def cache_in_window(self, block: Block, prefix: Prefix, group: int) -> None:
        """Make a full, computed block of a window group findable, if no other holds the same."""
        key = prefix, group
        if self._in_windows.setdefault(key, block) is block:
            block.window_of = key

    # ------------------------------------------------------------------ states

    def with_states(self, cached: list[Block]) -> list[Block]:
        """The longest prefix in these cached blocks that can be resumed: of a model with recurrent layers, that has a
        snapshot and leaves slots for the sequence."""
        states = self.states
        if states is None:
            return cached
        number = len(cached)
        while number and not _is_resumable(cached[number - 1]):
            number -= 1
        return cached[:number] if number and states.has_room(cached[number - 1].prefix) else []

    # ------------------------------------------------------------------ owners

    def num_free_among(self, blocks: Iterable[Block]) -> int:
        """How many of these blocks have no owner, so that sharing them uses up free blocks."""
        return sum(block.num_owners == 0 for block in blocks)

    def share(self, blocks: Iterable[Block]) -> None:
        """Become one more owner of each block."""
        for block in blocks:
            if block.num_owners == 0:
                del self._evictable[block.block_id]
            block.num_owners += 1

    def cache_full_block(
        self, block: Block, token_ids: Sequence[int], *, parent: Prefix | str, tenant: str = ""
    ) -> Prefix:
        """Make a full, computed block findable; returns its prefix, the `parent` of the next block.

        If another block holds the same prefix already, that one stays the findable one.
        """
        assert len(token_ids) == self.block_size, "only full blocks are published"
        key = (parent, tuple(token_ids))
        holder = self._cached.setdefault(key, block)
        if holder is block:
            block.prefix = Prefix(*key, block, tenant)
            if self._note_held is not None and self.states is None:
                self._note_held(block.prefix, True)
            if self.note_findable is not None:
                self.note_findable(block.prefix)
        assert holder.prefix is not None, "a cached block has a prefix"
        return holder.prefix

    def free(self, blocks: Sequence[Block]) -> None:
        """Give up one ownership of each block, given in token order."""
        # In reverse: the end of a prefix is of use only after its beginning, so it is evicted first.
        for block in reversed(blocks):
            assert block.num_owners > 0, f"block {block.block_id} freed more often than it was owned"
            block.num_owners -= 1
            if block.num_owners:
                continue
            if block.prefix is None and block.window_of is None:
                self._blank.append(block)
            else:
                self._evictable[block.block_id] = block

    def clear_cache(self) -> None:
        """Forget every shared prefix. Blocks in use stay with their owners."""
        for block in (*self._cached.values(), *self._in_windows.values()):
            self._forget(block)
        self._cached.clear()
        self._in_windows.clear()
        self._blank.extend(self._evictable.values())
        self._evictable.clear()

    def _take(self) -> Block:
        if self._blank:
            block = self._blank.pop()
        else:
            _, block = self._evictable.popitem(last=False)
            if block.window_of is not None:
                del self._in_windows[block.window_of]
            else:
                assert block.prefix is not None, "an evictable block is findable"
                del self._cached[block.prefix.key]
            self._forget(block)
        block.num_owners = 1
        return block

    def _forget(self, block: Block) -> None:
        if block.prefix is not None:
            if self.states is not None:
                self.states.forget(block.prefix)
            elif self._note_held is not None:
                self._note_held(block.prefix, False)
        block.prefix = block.window_of = None


def _is_resumable(block: Block) -> bool:
    return block.prefix is not None and block.prefix.snapshot is not None


class NoBlocks(BlockPool):
    """The pool of a model without KV memory: no number of tokens takes a block, and nothing is shared."""

    def __init__(self, *, max_model_len: int) -> None:
        # No sequence fills a block of this size.
        super().__init__(num_blocks=0, block_size=max_model_len + 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return 0
