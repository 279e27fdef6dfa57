"""The bookkeeping for KV memory: blocks of token slots, their owners, and the prefixes that can be shared.

Contains no tensors. Paging follows PagedAttention (Kwon et al., 2023). Sharing equal prefixes block by block follows
vLLM's automatic prefix caching, except that a prefix is looked up by its exact tokens. A hash collision can therefore
never expose one request's KV to another.

In a model with sliding-window layers, each block holds the KV of one group of layers. The first group has full
attention. The other groups have sliding windows and release the blocks before the window. All groups share one pool, as
in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from app.config import SchedulerConfig
from app.engine.prefix import Block, Prefix
from app.engine.request import ModelInfo
from app.engine.state_pool import StatePool


class BlockPool:
    """Owns all blocks: allocates and frees blocks, and finds the blocks that cache a prefix.

    A block without owners is free. A free block keeps its content until it is allocated again. Blocks without content
    are allocated first, and then the least recently used blocks, whose content is evicted.
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
        """window_tokens: how many of a sequence's last tokens the window groups keep.

        max_chunk_tokens: maximum tokens that a step adds to a sequence. Ignored without window groups.
        states: the state slots of a model with recurrent layers.
        """
        assert num_blocks >= 0, "the number of blocks cannot be negative"
        assert block_size > 0, "a block needs at least one slot"
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_groups = 1 + num_window_groups
        self.max_chunk_tokens = max_chunk_tokens if num_window_groups else None
        self._window_tokens = window_tokens
        # Maximum number of blocks that a sequence owns in one window group. A sequence may get the blocks for two steps
        # before the first step has finished, and it releases only whole blocks.
        self._max_in_window = self.num_blocks_for(window_tokens + 2 * max_chunk_tokens) + 2
        self._blank = [Block(block_id) for block_id in reversed(range(num_blocks))]  # free, without content
        self._evictable: OrderedDict[int, Block] = OrderedDict()  # free, with content; by block id, oldest first
        self._cached: dict[tuple[Prefix | str, tuple[int, ...]], Block] = {}
        self._in_windows: dict[tuple[Prefix, int], Block] = {}
        self.on_cached: Callable[[Prefix], None] | None = None  # called with each prefix when it is cached
        self._on_prefix_change: Callable[[Prefix, bool], None] | None = None
        self.states = states
        if states is not None:
            states.note_resumable = self._note_resumable

    @classmethod
    def of(cls, model_info: ModelInfo, limits: SchedulerConfig, *, num_blocks: int, block_size: int) -> BlockPool:
        """Return the pool for a model with KV memory."""
        states = None
        if model_info.num_state_slots:
            states = StatePool(model_info.num_state_slots, interval_tokens=model_info.state_interval_tokens)
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            num_window_groups=model_info.num_window_groups,
            window_tokens=model_info.window_tokens,
            max_chunk_tokens=min(limits.prefill_chunk_tokens, limits.max_step_tokens),
            states=states,
        )

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Number of free blocks with content that can still be shared."""
        return len(self._evictable)

    def on_prefixes(self, note_held: Callable[[Prefix, bool], None]) -> None:
        """Call `note_held` with True for each prefix, now or when it is cached, and with False when it is evicted.

        Several prefixes may have the same digest.
        """
        self._on_prefix_change = note_held
        if self.states is not None:
            for prefix in self.states.resumable():
                self._note_resumable(prefix, True)
            return
        for block in self._cached.values():
            assert block.prefix is not None, "a cached block has a prefix"
            note_held(block.prefix, True)

    def _note_resumable(self, prefix: Prefix, is_resumable: bool) -> None:
        """Report a prefix, which has gained or lost a snapshot at which a sequence can resume, and its ancestors."""
        at: Prefix | str = prefix
        while self._on_prefix_change is not None and isinstance(at, Prefix):
            self._on_prefix_change(at, is_resumable)
            at = at.parent

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens in a group without a window."""
        return -(-num_tokens // self.block_size)

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum number of tokens of a sequence that owns all blocks."""
        num_window_groups, num_each = self.num_groups - 1, self.num_blocks // self.num_groups
        if num_window_groups and num_each > self._max_in_window:
            num_each = self.num_blocks - num_window_groups * self._max_in_window
        return num_each * self.block_size

    def num_blocks_after(self, cached: Sequence[Block], num_tokens: int) -> int:
        """Return the maximum number of blocks, over all groups, that `num_tokens` tokens need beyond cached blocks."""
        number = self.num_blocks_for(num_tokens) - len(cached)
        if self.num_groups == 1:
            return number
        num_in_window = len(cached) - self.first_in_window(len(cached) * self.block_size)
        return number + (self.num_groups - 1) * min(number, self._max_in_window - num_in_window)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[Block]:
        """Return free blocks, now with one owner each. Evicts cached ones if needed. `can_allocate` must be true."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks requested, but only {self.num_free} are free"
        return [self._take() for _ in range(num_blocks)]

    def match(self, token_ids: Sequence[int], *, salt: str, known: Sequence[Block] = ()) -> list[Block]:
        """Return the blocks of the longest cached prefix of `token_ids` that excludes the last token.

        known: an earlier result for these tokens, if all of its blocks still cache the same prefixes. The returned
        blocks have no new owner until `share`.
        """
        parent = (known[-1].prefix if known else None) or salt
        # At least one token must be computed: a full prefix hit would leave no logits to sample from.
        rest = self._cached_prefixes(parent, token_ids, begin=len(known) * self.block_size, end=len(token_ids) - 1)
        return [*known, *(prefix.block for prefix in rest)]

    def find(self, token_ids: Sequence[int], salt: str) -> list[Prefix]:
        """Return the cached prefixes of these tokens, shortest first. Thread-safe, but the result may be outdated."""
        return list(self._cached_prefixes(salt, token_ids, begin=0, end=len(token_ids)))

    def _cached_prefixes(
        self, parent: Prefix | str, token_ids: Sequence[int], *, begin: int, end: int
    ) -> Iterator[Prefix]:
        """Yield the cached prefixes that follow the parent, up to the first missing one or `end`.

        The parent ends at token `begin`.
        """
        for start in range(begin, end - self.block_size + 1, self.block_size):
            block = self._cached.get((parent, tuple(token_ids[start : start + self.block_size])))
            prefix = None if block is None else block.prefix  # None if the engine's thread has just evicted it
            if prefix is None:
                return
            yield prefix
            parent = prefix

    # ------------------------------------------------------------------ windows

    def first_in_window(self, num_tokens: int) -> int:
        """Return the index of the first block that window groups still need after `num_tokens` computed tokens."""
        return max(0, num_tokens - self._window_tokens + 1) // self.block_size

    def with_windows(self, cached: list[Block]) -> list[Block]:
        """Return the longest prefix of these blocks for which every window group has its whole window cached."""
        if self.num_groups == 1:
            return cached
        num_cached = len(cached)
        missing: int | None = num_cached
        while missing is not None:
            looked_at = range(self.first_in_window(num_cached * self.block_size), num_cached)
            missing = next((at for at in reversed(looked_at) if None in self._windows_of(cached[at])), None)
            num_cached = num_cached if missing is None else missing  # longer prefixes also need the missing block
        return cached[:num_cached]

    def found_in_windows(self, cached: Sequence[Block]) -> list[list[Block]]:
        """Return, for each window group, the blocks inside the window. `cached` must be a result of `with_windows`."""
        first = self.first_in_window(len(cached) * self.block_size)
        found: list[list[Block]] = [[] for _ in range(self.num_groups - 1)]
        for block in cached[first:]:
            for of_group, own in zip(found, self._windows_of(block), strict=True):
                assert own is not None, "`with_windows` found this block"
                of_group.append(own)
        return found

    def _windows_of(self, block: Block) -> list[Block | None]:
        assert block.prefix is not None, "only cached blocks have window blocks"
        return [self._in_windows.get((block.prefix, group)) for group in range(1, self.num_groups)]

    def cache_in_windows(self, blocks: Iterable[Block | None], prefix: Prefix) -> None:
        """Cache full, computed blocks, one per window group, unless other blocks already cache the same prefix."""
        for group, block in enumerate(blocks, 1):
            if block is not None and self._in_windows.setdefault((prefix, group), block) is block:
                block.window_of = prefix, group

    # ------------------------------------------------------------------ states

    def with_states(self, cached: list[Block]) -> list[Block]:
        """Return the longest prefix of these blocks after which a sequence can resume.

        With recurrent layers, the prefix must have a snapshot, and enough state slots must be free.
        """
        states = self.states
        if states is None:
            return cached
        for number in range(len(cached), 0, -1):
            prefix = cached[number - 1].prefix
            if prefix is not None and prefix.snapshot is not None:
                return cached[:number] if states.has_room(prefix) else []
        return []

    # ------------------------------------------------------------------ owners

    def num_free_among(self, blocks: Iterable[Block]) -> int:
        """Return how many of these blocks have no owner. Sharing these blocks reduces the number of free blocks."""
        return sum(block.num_owners == 0 for block in blocks)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add one owner to each block."""
        for block in blocks:
            if block.num_owners == 0:
                del self._evictable[block.block_id]
            block.num_owners += 1

    def cache_full_block(
        self, block: Block, token_ids: Sequence[int], *, parent: Prefix | str, tenant: str = ""
    ) -> Prefix:
        """Cache a full, computed block. Returns the block's prefix, which is the `parent` of the next block.

        If another block already caches the same prefix, it remains the cached one.
        """
        assert len(token_ids) == self.block_size, "only full blocks are cached"
        key = (parent, tuple(token_ids))
        holder = self._cached.setdefault(key, block)
        if holder is block:
            block.prefix = Prefix(*key, block, tenant)
            if self._on_prefix_change is not None and self.states is None:
                self._on_prefix_change(block.prefix, True)
            if self.on_cached is not None:
                self.on_cached(block.prefix)
        assert holder.prefix is not None, "a cached block has a prefix"
        return holder.prefix

    def free(self, blocks: Sequence[Block]) -> None:
        """Remove one owner from each block. The blocks must be in token order."""
        # Reverse order, so that a prefix's last block is evicted first: it is useless without the blocks before it.
        for block in reversed(blocks):
            assert block.num_owners > 0, f"block {block.block_id} was freed more often than it was shared"
            block.num_owners -= 1
            if block.num_owners:
                continue
            if block.prefix is None and block.window_of is None:
                self._blank.append(block)
            else:
                self._evictable[block.block_id] = block

    def clear_cache(self) -> None:
        """Drop every cached prefix. Blocks in use stay with their owners."""
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
                assert block.prefix is not None, "an evictable block is cached"
                del self._cached[block.prefix.key]
            self._forget(block)
        block.num_owners = 1
        return block

    def _forget(self, block: Block) -> None:
        if block.prefix is not None:
            if self.states is not None:
                self.states.forget(block.prefix)
            elif self._on_prefix_change is not None:
                self._on_prefix_change(block.prefix, False)
        block.prefix = block.window_of = None


class NoBlocks(BlockPool):
    """The pool for a model without KV memory: no sequence needs a block, and no prefix is shared."""

    def __init__(self, *, max_model_len: int) -> None:
        # No sequence can fill a block of this size, so no block is ever cached.
        super().__init__(num_blocks=0, block_size=max_model_len + 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return 0
